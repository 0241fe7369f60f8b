"""Asks search servers over HTTP: pooled, spread over several, patient with one that fails, plain about an outage."""

from __future__ import annotations

import asyncio
import http.client
import random
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import aiohttp
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, stop_before_delay
from tenacity.wait import wait_exponential, wait_random

from verl_drmas.retrieval.errors import QueryRejected, RetrievalOutage
from verl_drmas.retrieval.passages import Hit
from verl_drmas.retrieval.retriever import Retriever
from verl_drmas.retrieval.settings import RetrievalSettings
from verl_drmas.retrieval.wire import GarbageAnswer, read_answer, write_request

# Waits between attempts where no other server is fit: 0.5, 1.5, 4.5, 13.5, 40 s, each with a random part on top; six
# attempts outlast a server's restart.
FIRST_WAIT = 0.5
WAIT_FACTOR = 3
LONGEST_WAIT = 45.0
FIRST_REST, LONGEST_REST = 1.0, 60.0  # seconds a server that fails is left alone while others are fit
MAX_ANSWER_BYTES = 2**24
CHECK_SECONDS = 5.0
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
    failures: int = 0  # in a row
    rests_until: float = 0.0
    busy_until: float = 0.0  # by its own word, in a Retry-After

    def fit(self, now: float) -> bool:
        """Neither resting nor, after a failure, on trial by another call."""
        return now >= max(self.rests_until, self.busy_until) and not (self.failures and self.in_flight)

    def succeeded(self) -> None:
        self.answered, self.failures, self.rests_until, self.busy_until = True, 0, 0.0, 0.0

    def failed(self, now: float, retry_after: float | None = None) -> None:
        self.failures += 1
        self.rests_until = now + min(FIRST_REST * 2 ** min(self.failures - 1, 10), LONGEST_REST)
        if retry_after is not None:
            self.busy_until = now + retry_after


class RetrievalClient(Retriever):
    """Searches over the servers of `settings.urls`."""

    def __init__(self, settings: RetrievalSettings):
        self._settings = settings
        self._servers = [_Server(_base(url)) for url in settings.urls]
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._timeout = aiohttp.ClientTimeout(total=settings.timeout, sock_connect=min(10.0, settings.timeout))
        self._backoff = wait_exponential(FIRST_WAIT, LONGEST_WAIT, WAIT_FACTOR) + wait_random(0, FIRST_WAIT)
        self._uses = 0
        self._counts = _no_counts()

    def __reduce__(self):
        return RetrievalClient, (self._settings,)

    async def search(self, query: str, k: int) -> list[Hit]:
        """The best passages for a query; see `Retriever.search`.

        Raises:
            QueryRejected: It is blank or no proper Unicode, or a server calls it too long or malformed.
            RetrievalOutage: No answer within `attempts` and `deadline`, or a server refuses for good.
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

    def check(self) -> str:
        """Ask every server for its /health; any HTTP answer is a sign of life, as other makes have no such page.

        Raises:
            RetrievalOutage: None answers.
        """
        with ThreadPoolExecutor(min(len(self._servers), 16)) as threads:
            found = list(threads.map(_health, [server.url for server in self._servers]))
        alive = [what for lives, what in found if lives]
        told = "; ".join(what for _, what in found)
        if not alive:
            raise RetrievalOutage(
                f"retrieval.urls: no server answers ({told}); start one with `verl-drmas retriever serve INDEX --port "
                "PORT`, or set retrieval.local to an index"
            )
        return f"{len(alive)} of {len(found)} search servers answer: {told}"

    async def close(self) -> None:
        """Close this event loop's connections; a later search opens new ones."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def report(self) -> dict[str, float]:
        """Since the last report: calls, retries, outages, rejected (queries), and seconds of all calls together."""
        counts, self._counts = self._counts, _no_counts()
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
                    tries += 1
                    return await self._attempt(body, k, settings.deadline - (time.monotonic() - start))
        except _Failed as last:
            urls = ", ".join(server.url for server in self._servers)
            seconds = time.monotonic() - start
            raise RetrievalOutage(
                f"no answer from {urls} after {tries} of {settings.attempts} attempts in {seconds:.1f} of "
                f"{settings.deadline:g} s; last: {' '.join(str(last).split())}"
            ) from last
        raise AssertionError("unreachable: tenacity returns or raises")

    async def _attempt(self, body: bytes, k: int, left: float) -> list[Hit]:
        """One call to one server.

        Raises:
            _Failed: It is worth another attempt.
            QueryRejected, RetrievalOutage: It isn't.
        """
        server = self._pick()
        timeout = self._timeout
        if left < self._settings.timeout:
            timeout = aiohttp.ClientTimeout(total=max(left, 0.001), sock_connect=timeout.sock_connect)
        server.in_flight += 1
        try:
            async with self._session().post(
                f"{server.url}/retrieve", data=body, headers=HEADERS, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await _read(response)
                if response.status != 200:
                    self._judge(server, response, answer)
                hits = read_answer(answer, k)
        except asyncio.TimeoutError as error:
            server.failed(time.monotonic())
            raise _Failed(f"{server.url}: no answer within {timeout.total:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            server.failed(time.monotonic())
            raise _Failed(f"{server.url}: {type(error).__name__}: {error}") from error
        except GarbageAnswer as error:
            server.failed(time.monotonic())
            raise _Failed(f"{server.url}: garbage: {error}") from error
        finally:
            server.in_flight -= 1
        server.succeeded()
        return hits

    def _judge(self, server: _Server, response: aiohttp.ClientResponse, answer: bytes) -> None:
        """Raise what a status other than 200 means."""
        told = f"{server.url}: status {response.status}: {_detail(answer)}"
        if response.status == 429 or response.status >= 500:
            server.failed(time.monotonic(), _retry_after(response))
            raise _Failed(told)
        if response.status < 300:
            raise GarbageAnswer(f"status {response.status}")
        if response.status == 413 or (response.status == 422 and server.answered):
            raise QueryRejected(told)
        if response.status == 422:  # a server that answers no query at all calls none of them malformed
            dialect = self._settings.dialect
            raise RetrievalOutage(f"{told}; it has answered nothing yet: is retrieval.dialect: {dialect} its own?")
        raise RetrievalOutage(f"{told}; no case for another attempt, check retrieval.urls")

    def _pick(self) -> _Server:
        """The fit server with the fewest calls in flight, in turn; where none is fit, the one that rests least."""
        if len(self._servers) == 1:
            return self._servers[0]
        now = time.monotonic()
        fit = [server for server in self._servers if server.fit(now)]
        if fit:
            server = min(fit, key=lambda server: (server.in_flight, server.last_used))
        else:
            server = min(self._servers, key=lambda s: (s.busy_until > now and s.busy_until, s.rests_until, s.last_used))
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
        busy = min(server.busy_until for server in self._servers) - now
        if busy <= 0:
            return self._backoff(state)
        return busy + random.uniform(0, min(busy, 1.0))  # not all at once

    def _count_retry(self, state: RetryCallState) -> None:
        self._counts["retries"] += 1

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            self._sessions = {old: kept for old, kept in self._sessions.items() if not old.is_closed()}
            connector = aiohttp.TCPConnector(limit=self._settings.connections, keepalive_timeout=KEEP_ALIVE)
            session = self._sessions[loop] = aiohttp.ClientSession(connector=connector)
        return session


def _no_counts() -> dict[str, float]:
    return dict.fromkeys(("calls", "retries", "outages", "rejected", "seconds"), 0.0)


def _base(url: str) -> str:
    """Without the path, which some write and some don't."""
    return url.rstrip("/").removesuffix("/retrieve")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise GarbageAnswer(f"a body of more than {MAX_ANSWER_BYTES} bytes")
    return b"".join(chunks)


def _detail(answer: bytes) -> str:
    """What the server says of its refusal: `detail` as FastAPI has it, or the body's beginning."""
    try:
        told = orjson.loads(answer)["detail"]
    except (ValueError, TypeError, KeyError, IndexError):
        told = answer.decode("utf-8", "replace")
    return " ".join(str(told).split())[:200] or "(empty)"


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds of a Retry-After; None without one, or where it is a date."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None


def _health(url: str) -> tuple[bool, str]:
    """Whether a server lives, and a word on it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the searches: no proxy
    try:
        with opener.open(f"{url}/health", timeout=CHECK_SECONDS) as response:
            told = orjson.loads(response.read(2**16))
        return True, f"{url} ({told['kind']}, {told['passages']:,} passages)"
    except urllib.error.HTTPError as error:
        return True, f"{url} (status {error.code} on /health)"
    except (OSError, http.client.HTTPException) as error:
        return False, f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}"
    except (ValueError, KeyError, TypeError):
        return True, url
