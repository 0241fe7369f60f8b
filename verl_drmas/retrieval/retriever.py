"""What a workflow asks: passages for a query, whatever stands behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from verl_drmas.retrieval.errors import IndexProblem
from verl_drmas.retrieval.passages import Hit
from verl_drmas.retrieval.settings import RetrievalSettings


class Retriever(ABC):
    """Finds passages. One serves all sessions of a rollout process, from its one event loop."""

    @abstractmethod
    async def search(self, query: str, k: int) -> list[Hit]:
        """The best passages for a query, best first; fewer than `k`, or none, where not more fit.

        Raises:
            QueryRejected: The query is at fault.
            RetrievalOutage: There is no answer, after every attempt.
        """

    def check(self, k: int = 1) -> str:
        """Look once, before a run starts, whether searches can work; returns one line on what was found.

        Args:
            k: Passages that the run will ask for.

        Raises:
            IndexProblem: The index can't be used.
            RetrievalOutage: No server answers a search.
        """
        return type(self).__name__

    async def close(self) -> None:
        """Let go of connections."""
        return None

    def report(self) -> dict[str, float]:
        """Calls, retries and outages since the last report."""
        return {}


def open_retriever(settings: RetrievalSettings) -> Retriever:
    """The retriever that the settings name; nothing is loaded or asked yet.

    Raises:
        IndexProblem: Libraries are missing.
    """
    if settings.local is not None:
        from verl_drmas.retrieval.local import LocalRetriever

        return LocalRetriever(Path(settings.local).expanduser())
    try:
        from verl_drmas.retrieval.client import RetrievalClient
    except ImportError as error:
        raise IndexProblem(f"retrieval.urls needs libraries ({error}); pip install 'verl-drmas[search]'") from error

    return RetrievalClient(settings)
