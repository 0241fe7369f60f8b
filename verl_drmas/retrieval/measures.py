"""What a search server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Measures:
    """The counters of one server, in a registry of their own: several servers may live in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        within = {"registry": self.registry, "namespace": "retriever"}
        self.requests = Counter("requests", "Requests to /retrieve by HTTP status.", ["status"], **within)
        self.rejected = Counter("rejected", "Requests turned away, by reason.", ["reason"], **within)
        self.queries = Counter("queries", "Queries taken.", **within)
        self.cache_hits = Counter("cache_hits", "Queries answered from the cache.", **within)
        self.shared = Counter("shared", "Queries that joined the same query, waiting or running.", **within)
        self.dropped = Counter("dropped", "Queries dropped before their turn: the caller had gone.", **within)
        self.batch_size = Histogram("batch_size", "Queries of a batch.", buckets=SIZES, **within)
        self.wait = Histogram("wait_seconds", "From a query's arrival to its batch's start.", buckets=SECONDS, **within)
        self.search = Histogram("search_seconds", "The index's time for a batch.", buckets=SECONDS, **within)
        self._depth = Gauge("queue_depth", "Queries that wait.", **within)

    def watch_queue(self, depth: Callable[[], int]) -> None:
        """Read the queue's depth when someone asks for the metrics."""
        self._depth.set_function(depth)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
