"""What the search server lets through, and how it batches: the settings of `verl-drmas retriever serve`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        topk: Passages a query gets where the request names no number.
        max_topk: Most passages a request may ask for.
        max_batch: Most queries the index is asked at once.
        max_wait_ms: Milliseconds an idle server waits for more queries after the first one.
        max_queue: Queries that may wait; more are turned away with 429.
        max_queries: Queries of one request.
        max_query_chars: Characters of one query.
        cache: Answers kept for queries that come again; 0 keeps none.
    """

    topk: int = 3
    max_topk: int = 100
    max_batch: int = 64
    max_wait_ms: float = 2.0
    max_queue: int = 4096
    max_queries: int = 1024
    max_query_chars: int = 2048
    cache: int = 10_000

    def __post_init__(self):
        for name in ("topk", "max_topk", "max_batch", "max_queue", "max_queries", "max_query_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_option(name)} is {getattr(self, name)}: give at least 1")
        for name in ("max_wait_ms", "cache"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{_option(name)} is {getattr(self, name)}: give 0 or more")
        if self.topk > self.max_topk:
            raise ValueError(f"--topk is {self.topk}: a request may ask for {self.max_topk} at most")
        if self.max_queries > self.max_queue:
            raise ValueError(
                f"--max-queries is {self.max_queries}, more than --max-queue ({self.max_queue}): such a request could "
                "never be taken; raise --max-queue or lower --max-queries"
            )

    @property
    def max_body_bytes(self) -> int:
        """Bytes of a request's body; no request within the other limits is longer (12 bytes is a character outside
        the basic plane, escaped).
        """
        return 2**16 + self.max_queries * (12 * self.max_query_chars + 8)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
