"""Batches of queries, formed from whatever waits while the index is at work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Protocol

from verl_drmas.body import Refused
from verl_drmas.retrieval.limits import ServerSettings
from verl_drmas.retrieval.measures import Measures
from verl_drmas.retrieval.passages import Hit

log = logging.getLogger(__name__)

LONGEST_RETRY_AFTER = 60  # seconds

Key = tuple[str, int]  # query, k
Answers = list[list[Hit]]


class Searcher(Protocol):
    """What is batched for: an index, asked by one caller at a time."""

    def search(self, queries: Sequence[str], k: int) -> Answers: ...


class Overloaded(Refused):
    """The queue is full."""

    def __init__(self, waiting: int, limit: int, retry_after: int):
        text = f"{waiting} queries wait, the limit is {limit}; come again in {retry_after} s"
        super().__init__(429, "queue", text, retry_after)


class Stopping(Refused):
    """The server is about to end."""

    def __init__(self) -> None:
        super().__init__(503, "stopping", "the server is stopping")


class SearchFailed(Refused):
    """The index raised an error."""

    def __init__(self, error: BaseException):
        super().__init__(500, "index", f"the search failed: {type(error).__name__}: {error}"[:300].replace("\n", " "))


@dataclass(eq=False, slots=True)
class _Call:
    """A request's queries, answered together."""

    future: asyncio.Future[Answers]
    answers: list[list[Hit] | None]
    left: int = 0


@dataclass(eq=False, slots=True)
class _Query:
    """One query that is waiting or running, and who wants to know."""

    key: Key
    arrived: float
    askers: list[tuple[_Call, int]] = field(default_factory=list)


class Batcher:
    """Takes queries from many callers and asks the index for a batch at a time, in one thread.

    A batch has queries with one `k` only, so that no answer depends on what else is in its batch. An idle batcher waits
    a moment after the first query; one that has just ended a batch takes what waits. Must be made, used and closed in
    one running event loop.
    """

    def __init__(self, index: Searcher, settings: ServerSettings, measures: Measures):
        self.stopping = False
        self._index, self._settings, self._measures = index, settings, measures
        self._loop = asyncio.get_running_loop()
        self._thread = _Thread()
        self._waiting: dict[Key, _Query] = {}
        self._running: dict[Key, _Query] = {}
        self._cache: OrderedDict[Key, list[Hit]] = OrderedDict()
        self._rate: float | None = None  # queries a second, while the index works
        self._arrived, self._full, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._worker = self._loop.create_task(self._work())
        measures.watch_queue(lambda: len(self._waiting))

    def submit(self, queries: Sequence[str], k: int) -> asyncio.Future[Answers]:
        """Queue a request's queries.

        Returns:
            The hits of each query, in the queries' order. Cancelling it takes those queries out of the queue that
            nobody else waits for. It raises `SearchFailed` where the index does, and `Stopping` where the server ends
            before their turn.

        Raises:
            Overloaded: The queue has no room for all of them.
            Stopping: The server is about to end.
        """
        if self.stopping:
            raise Stopping
        answers = [self._cached((query, k)) for query in queries]
        missing = [(place, (queries[place], k)) for place, hits in enumerate(answers) if hits is None]
        new = {key for _, key in missing if key not in self._waiting and key not in self._running}
        if len(self._waiting) + len(new) > self._settings.max_queue:
            raise Overloaded(len(self._waiting), self._settings.max_queue, self._seconds_of_work())
        self._measures.queries.inc(len(queries))
        self._measures.cache_hits.inc(len(queries) - len(missing))
        self._measures.shared.inc(len(missing) - len(new))
        call = _Call(self._loop.create_future(), answers, len(missing))
        if not missing:
            call.future.set_result(answers)
            return call.future
        now = time.perf_counter()
        for place, key in missing:
            query = self._running.get(key) or self._waiting.get(key)
            if query is None:
                query = self._waiting[key] = _Query(key, now)
            query.askers.append((call, place))
        call.future.add_done_callback(partial(self._forget, call, [key for _, key in missing]))
        self._idle.clear()
        self._arrived.set()
        if len(self._waiting) >= self._settings.max_batch:
            self._full.set()
        return call.future

    async def close(self, seconds: float) -> None:
        """Take no more, finish what is queued, and stop; what isn't done after so many seconds is given up."""
        self.stopping = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        self._worker.cancel()
        await asyncio.wait([self._worker])
        for query in [*self._running.values(), *self._waiting.values()]:
            self._fail(query, Stopping())
        self._waiting, self._running = {}, {}
        self._idle.set()
        self._thread.end()

    async def _work(self) -> None:
        while True:
            if not self._waiting:
                self._idle.set()
                self._arrived.clear()
                await self._arrived.wait()
            await self._wait_for_more()
            while batch := self._take():  # a batch has just ended: what has come meanwhile is the next
                await self._ask(batch)

    async def _wait_for_more(self) -> None:
        self._full.clear()
        if self._settings.max_wait_ms and len(self._waiting) < self._settings.max_batch:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._full.wait(), self._settings.max_wait_ms / 1000)

    def _take(self) -> list[_Query]:
        """The oldest query, and those after it with the same `k`; none where all callers have gone."""
        k = next(iter(self._waiting), ("", 0))[1]
        keys = list(islice((key for key in self._waiting if key[1] == k), self._settings.max_batch))
        return [self._waiting.pop(key) for key in keys]

    async def _ask(self, batch: list[_Query]) -> None:
        start = time.perf_counter()
        self._measures.batch_size.observe(len(batch))
        for query in batch:
            self._measures.wait.observe(start - query.arrived)
        self._running = {query.key: query for query in batch}
        await self._ask_parts(batch)
        seconds = time.perf_counter() - start
        self._measures.search.observe(seconds)
        rate = len(batch) / max(seconds, 1e-6)
        self._rate = rate if self._rate is None else 0.8 * self._rate + 0.2 * rate

    async def _ask_parts(self, batch: list[_Query]) -> None:
        """Ask for a batch, and where that fails for its halves, so that only queries that fail alone do."""
        search = self._thread.run(partial(self._search, [query.key[0] for query in batch], batch[0].key[1]))
        await asyncio.wait([search])
        error = search.exception()
        if error and len(batch) > 1:
            middle = len(batch) // 2
            await self._ask_parts(batch[:middle])
            await self._ask_parts(batch[middle:])
            return
        for query in batch:  # whoever asks from now on must not join what is done
            del self._running[query.key]
        if error:
            log.error("a search failed; the requests for it get status 500", exc_info=error)
            self._fail(batch[0], SearchFailed(error))
            return
        for query, hits in zip(batch, search.result(), strict=True):
            self._answer(query, hits)

    def _search(self, queries: list[str], k: int) -> Answers:
        """In the index's thread."""
        answers = self._index.search(queries, k)
        if len(answers) != len(queries):
            raise RuntimeError(f"the index gave {len(answers)} answers to {len(queries)} queries")
        return answers

    def _answer(self, query: _Query, hits: list[Hit]) -> None:
        if self._settings.cache:
            self._cache[query.key] = hits
            if len(self._cache) > self._settings.cache:
                self._cache.popitem(last=False)
        for call, place in query.askers:
            call.answers[place] = hits
            call.left -= 1
            if not call.left and not call.future.done():
                call.future.set_result(call.answers)

    def _fail(self, query: _Query, error: Refused) -> None:
        for call, _ in query.askers:
            if not call.future.done():
                call.future.set_exception(error)

    def _forget(self, call: _Call, keys: list[Key], future: asyncio.Future[Answers]) -> None:
        if not future.cancelled() and future.exception() is None:
            return
        for key in keys:
            query = self._waiting.get(key)
            if query is None:
                continue
            query.askers = [(other, place) for other, place in query.askers if other is not call]
            if not query.askers:
                del self._waiting[key]
                self._measures.dropped.inc()

    def _cached(self, key: Key) -> list[Hit] | None:
        hits = self._cache.get(key)
        if hits is not None:
            self._cache.move_to_end(key)
        return hits

    def _seconds_of_work(self) -> int:
        """Until what waits and runs now is done, in whole seconds."""
        if not self._rate:
            return 1
        seconds = math.ceil((len(self._waiting) + len(self._running)) / self._rate)
        return min(max(seconds, 1), LONGEST_RETRY_AFTER)


class _Thread:
    """One thread for the index, for encoders' thread pools belong to the thread that calls them. A daemon, unlike an
    executor's threads: a search that hangs must not keep the process from ending.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], Answers]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="index", daemon=True).start()

    def run(self, job: Callable[[], Answers]) -> asyncio.Future[Answers]:
        done: Future[Answers] = Future()
        self._jobs.put((done, job))
        return asyncio.wrap_future(done)

    def end(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            done, job = item
            if not done.set_running_or_notify_cancel():
                continue
            try:
                answers = job()
            except Exception as error:
                log.debug("a batch failed", exc_info=True)  # told in full where a query of it fails alone
                done.set_exception(error)
            else:
                done.set_result(answers)
