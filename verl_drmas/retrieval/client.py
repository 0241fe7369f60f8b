"""Asks search servers over HTTP: pooled, spread over several, patient with one that fails, plain about an outage."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, stop_before_delay
from tenacity.wait import wait_exponential, wait_random

from verl_drmas.retrieval.answers import AtFault, Passing, Refusal, read_body, verdict
from verl_drmas.retrieval.counts import no_counts
from verl_drmas.retrieval.errors import QueryRejected, RetrievalOutage
from verl_drmas.retrieval.passages import Hit
from verl_drmas.retrieval.preflight import look_at
from verl_drmas.retrieval.retriever import Retriever
from verl_drmas.retrieval.settings import RetrievalSettings
from verl_drmas.retrieval.wire import GarbageAnswer, read_answer, write_request

# Waits between attempts where no other server is fit: 0.5, 1.5, 4.5, 13.5, 40 s, each with a random part on top; six
# attempts outlast a server's restart.
FIRST_WAIT = 0.5
WAIT_FACTOR = 3
LONGEST_WAIT = 45.0
FIRST_REST, LONGEST_REST = 1.0, 60.0  # seconds a server that fails is left alone while others are fit
KEEP_ALIVE = 3.0  # seconds; servers commonly hang up after 5, and a call into a hang-up is a lost attempt
HEADERS = {"content-type": "application/json"}


class _Failed(Exception):
    """One attempt that another may make good."""


@dataclass(eq=False)
class _Server:
    """What is known of one url."""

    url: str
    in_flight: int = 0
    last_used: int = 0
    answered: bool = False
    failures: int = 0  # in a row, one for each rest
    rests_until: float = 0.0
    busy_until: float = 0.0  # by its own word, in a Retry-After
    refusal: str = ""  # what it said last, where asking it again is no use

    def fit(self, now: float) -> bool:
        """Neither resting nor, after a failure, on trial by another call."""
        return now >= max(self.rests_until, self.busy_until) and not (self.failures and self.in_flight)

    def succeeded(self) -> None:
        self.answered, self.failures, self.rests_until, self.busy_until, self.refusal = True, 0, 0.0, 0.0, ""

    def failed(self, started: float, retry_after: float | None = None, refusal: str = "") -> None:
        """A call that was made then; calls made before the last rest has ended tell nothing new."""
        now = time.monotonic()
        if started >= self.rests_until:
            self.failures += 1
            self.rests_until = now + min(FIRST_REST * 2 ** min(self.failures - 1, 10), LONGEST_REST)
        if retry_after is not None:
            self.busy_until = now + retry_after
        self.refusal = refusal


@dataclass(frozen=True)
class _Pool:
    """The connections of one event loop; `slots` counts those that are free."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


class RetrievalClient(Retriever):
    """Searches over the servers of `settings.urls`."""

    def __init__(self, settings: RetrievalSettings):
        self._settings = settings
        self._servers = [_Server(_base(url)) for url in settings.urls]
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
        self._timeout = aiohttp.ClientTimeout(total=settings.timeout, sock_connect=min(10.0, settings.timeout))
        self._backoff = wait_exponential(FIRST_WAIT, LONGEST_WAIT, WAIT_FACTOR) + wait_random(0, FIRST_WAIT)
        self._uses = 0
        self._counts = no_counts()

    def __reduce__(self):
        return RetrievalClient, (self._settings,)

    async def search(self, query: str, k: int) -> list[Hit]:
        """The best passages for a query; see `Retriever.search`.

        Raises:
            QueryRejected: It is blank or no proper Unicode, or a server calls it too long or malformed.
            RetrievalOutage: No answer within `attempts` and `deadline`, or every server refuses for good.
        """
        self._counts["calls"] += 1
        start = time.monotonic()
        try:
            return await self._search(query, k, start)
        except QueryRejected:
            self._counts["rejected"] += 1
            raise
        except RetrievalOutage:
            self._counts["outages"] += 1
            raise
        finally:
            self._counts["seconds"] += time.monotonic() - start

    def check(self, k: int = 1) -> str:
        """Send every server one search, all at once; takes 5 seconds at most.

        Args:
            k: Passages the run will ask for.

        Raises:
            RetrievalOutage: None answers it.
        """
        looks = look_at([server.url for server in self._servers], self._settings, k)
        told = "; ".join(map(str, looks))
        working = sum(look.works for look in looks)
        if not any(look.there for look in looks):
            raise RetrievalOutage(
                f"retrieval.urls: no server answers ({told}); start one with `verl-drmas retriever serve INDEX --port "
                "PORT`, or set retrieval.local to an index"
            )
        if not working:
            raise RetrievalOutage(f"retrieval.urls: no server answers a search ({told})")
        return f"{working} of {len(looks)} search servers answer: {told}"

    async def close(self) -> None:
        """Close this event loop's connections; a later search opens new ones."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.session.close()

    def report(self) -> dict[str, float]:
        """Since the last report: calls, retries, outages, rejected (queries), and seconds of all calls together."""
        counts, self._counts = self._counts, no_counts()
        return counts

    async def _search(self, query: str, k: int, start: float) -> list[Hit]:
        if not query.strip():
            raise QueryRejected("the query is blank; write what to search for")
        try:
            body = write_request(query, k, self._settings.dialect)
        except TypeError as error:
            raise QueryRejected(f"the query is no proper Unicode text ({error})") from error
        settings, tries = self._settings, 0
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Failed),
            stop=stop_after_attempt(settings.attempts) | stop_before_delay(settings.deadline),
            wait=self._wait,
            before_sleep=self._count_retry,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    pool = await self._free(start + settings.deadline)
                    try:
                        tries += 1
                        return await self._attempt(pool.session, body, k, start + settings.deadline)
                    finally:
                        pool.slots.release()
        except _Failed as last:
            urls = ", ".join(server.url for server in self._servers)
            seconds = time.monotonic() - start
            raise RetrievalOutage(
                f"no answer from {urls} after {tries} of {settings.attempts} attempts in {seconds:.1f} of "
                f"{settings.deadline:g} s; last: {' '.join(str(last).split())}"
            ) from last
        raise AssertionError("unreachable: tenacity returns or raises")

    async def _free(self, end: float) -> _Pool:
        """Wait for one of the connections, so that no call's time runs before it is sent; release its slot after.

        Raises:
            _Failed: All were taken until the end.
        """
        pool = self._pool()
        if not pool.slots.locked():
            await pool.slots.acquire()
            return pool
        try:
            await asyncio.wait_for(pool.slots.acquire(), max(end - time.monotonic(), 0.001))
        except asyncio.TimeoutError as error:
            number = self._settings.connections
            raise _Failed(
                f"all {number} connections were taken; add servers to retrieval.urls, or raise retrieval.connections"
            ) from error
        return pool

    async def _attempt(self, session: aiohttp.ClientSession, body: bytes, k: int, end: float) -> list[Hit]:
        """One call to one server.

        Raises:
            _Failed: It is worth another attempt.
            QueryRejected, RetrievalOutage: It isn't.
        """
        server, started = self._pick(), time.monotonic()
        timeout = self._timeout
        if end - started < self._settings.timeout:
            timeout = aiohttp.ClientTimeout(total=max(end - started, 0.001), sock_connect=timeout.sock_connect)
        server.in_flight += 1
        try:
            async with session.post(
                f"{server.url}/retrieve", data=body, headers=HEADERS, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await read_body(response)
                if response.status != 200:
                    raise verdict(
                        response.status, answer, dialect=self._settings.dialect, k=k, answered=server.answered
                    )
                hits = read_answer(answer, k)
        except asyncio.TimeoutError as error:
            server.failed(started)
            raise _Failed(f"{server.url}: no answer within {timeout.total:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            server.failed(started)
            raise _Failed(f"{server.url}: {type(error).__name__}: {error}") from error
        except GarbageAnswer as error:
            server.failed(started)
            raise _Failed(f"{server.url}: garbage: {error}") from error
        except Passing as passing:
            server.failed(started, _retry_after(response))
            raise _Failed(f"{server.url}: {passing}") from passing
        except AtFault as fault:
            raise QueryRejected(f"{server.url}: {fault}") from fault
        except Refusal as refusal:
            server.failed(started, refusal=f"{server.url}: {refusal}")
            if all(server.refusal for server in self._servers):
                raise RetrievalOutage("; ".join(server.refusal for server in self._servers)) from refusal
            raise _Failed(server.refusal) from refusal
        finally:
            server.in_flight -= 1
        server.succeeded()
        return hits

    def _pick(self) -> _Server:
        """The fit server with the fewest calls in flight, in turn; where none is fit, the one that rests least, and
        none that refuses.
        """
        if len(self._servers) == 1:
            return self._servers[0]
        now = time.monotonic()
        fit = [server for server in self._servers if server.fit(now)]
        if fit:
            server = min(fit, key=lambda server: (server.in_flight, server.last_used))
        else:
            server = min(
                self._servers,
                key=lambda s: (bool(s.refusal), s.busy_until > now and s.busy_until, s.rests_until, s.last_used),
            )
        self._uses += 1
        server.last_used = self._uses
        return server

    def _wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: almost none where another server is fit, else the backoff; and not before
        some server is ready by its own word.
        """
        now = time.monotonic()
        if any(server.fit(now) for server in self._servers):
            return random.uniform(0, FIRST_WAIT / 10)
        willing = [server for server in self._servers if not server.refusal] or self._servers
        busy = min(server.busy_until for server in willing) - now
        if busy <= 0:
            return self._backoff(state)
        return busy + random.uniform(0, min(busy, 1.0))  # not all at once

    def _count_retry(self, state: RetryCallState) -> None:
        self._counts["retries"] += 1

    def _pool(self) -> _Pool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None or pool.session.closed:
            self._pools = {old: kept for old, kept in self._pools.items() if not old.is_closed()}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
            session = aiohttp.ClientSession(connector=connector)
            pool = self._pools[loop] = _Pool(session, asyncio.Semaphore(self._settings.connections))
        return pool


def _base(url: str) -> str:
    """Without the path, which some write and some don't."""
    return url.rstrip("/").removesuffix("/retrieve")


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds of a Retry-After; None without one, or where it is a date."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None
