"""Search without a server: an index of words in the rollout process."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_drmas.retrieval.counts import no_counts
from verl_drmas.retrieval.errors import IndexProblem, QueryRejected
from verl_drmas.retrieval.index import SearchIndex, open_index
from verl_drmas.retrieval.manifest import Manifest
from verl_drmas.retrieval.passages import Hit
from verl_drmas.retrieval.retriever import Retriever

MAX_QUERY_CHARS = 4096


class LocalRetriever(Retriever):
    """Searches an index of words. Nothing is read before the first search; all instances of a process share it."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._place: Path | None = None
        self._counts = no_counts()

    async def search(self, query: str, k: int) -> list[Hit]:
        """The best passages for a query, best first.

        Raises:
            QueryRejected: The query is empty or longer than 4,096 characters.
            IndexProblem: The index can't be used.
        """
        started = time.perf_counter()
        self._counts["calls"] += 1
        try:
            _check_query(query)
        except QueryRejected:
            self._counts["rejected"] += 1
            raise
        shared = self._shared()
        found = await asyncio.get_running_loop().run_in_executor(shared.thread, shared.search, query, k)
        self._counts["seconds"] += time.perf_counter() - started
        return found

    def check(self, k: int = 1) -> str:
        """Open the index and search it once; says how many passages it has.

        Args:
            k: Passages the run will ask for.

        Raises:
            IndexProblem: The index can't be used.
        """
        shared = self._shared()
        index = shared.thread.submit(shared.index).result()
        shared.thread.submit(shared.search, "the capital of a country", k).result()
        return f"{self._folder}: {len(index):,} passages, searched by words in this process"

    def report(self) -> dict[str, float]:
        """Since the last report, under the names that the client of a server uses."""
        counts, self._counts = self._counts, no_counts()
        return counts

    def _shared(self) -> _Shared:
        if self._place is None:  # once: it asks the disk, and searches come from an event loop
            self._place = self._folder.resolve()
        return _shared(self._place)


class _Shared:
    """One index of this process, opened and searched in a thread of its own, one search at a time."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._index: SearchIndex | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="local-retriever")

    def index(self) -> SearchIndex:
        if self._index is None:
            kind = Manifest.load(self._folder).kind
            if kind != "words":
                raise IndexProblem(
                    f"{self._folder}: is an index of kind {kind}, which needs an encoder; serve it with "
                    "`verl-drmas retriever serve` and set retrieval.urls in place of retrieval.local"
                )
            self._index = open_index(self._folder)
        return self._index

    def search(self, query: str, k: int) -> list[Hit]:
        return self.index().search([query], k)[0]


_open: dict[Path, _Shared] = {}
_opening = threading.Lock()


def _shared(place: Path) -> _Shared:
    with _opening:
        if place not in _open:
            _open[place] = _Shared(place)
        return _open[place]


def _check_query(query: str) -> None:
    if not query.strip():
        raise QueryRejected("the query is empty; write what to search for")
    if len(query) > MAX_QUERY_CHARS:
        raise QueryRejected(f"the query has {len(query)} characters; write at most {MAX_QUERY_CHARS}")
