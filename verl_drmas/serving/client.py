"""Asks a served model for chat completions: limited, patient, and plain about an outage."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, stop_before_delay

from verl_drmas.serving.settings import Endpoint

# Waits between attempts where no other server is fit: 0.5, 1.5, 4.5, 13.5 s, each with a random part on top.
FIRST_WAIT, WAIT_FACTOR, LONGEST_WAIT = 0.5, 3, 45.0
REST = 10.0  # seconds a server that failed is left alone while others are fit
MAX_REPLY_BYTES = 2**24
KEEP_ALIVE = 3.0  # seconds; servers commonly hang up after 5, and a call into a hang-up is a lost attempt
_FULL = re.compile(r"context.?length|max_model_len|max_tokens.{0,40}(too large|exceed)|too many tokens", re.IGNORECASE)

T = TypeVar("T")


class Unanswered(RuntimeError):
    """A call without an answer, after every attempt that was worth making.

    Attributes:
        last: What came of the last attempt, in a line.
        kind: What such failures are told apart by: `timeout`, `status 503`, `ClientConnectorError`, `garbage`, `key`,
            `deadline`, or what `Unfit` says.
        status: HTTP status of the last attempt; None: none came, or 200.
        said: The server's own words where it refused, in a line.
        again: Whether a later call may be answered.
        tries: Attempts that were made.
        seconds: They took.
    """

    def __init__(
        self,
        last: str,
        kind: str,
        *,
        status: int | None = None,
        said: str = "",
        again: bool = False,
        tries: int = 0,
        seconds: float = 0.0,
    ):
        many = f"no completion after {tries} attempts in {seconds:.1f} s; last: " if tries > 1 else ""
        super().__init__(many + last)
        self.last, self.kind, self.status, self.said, self.again = last, kind, status, said, again
        self.tries, self.seconds = tries, seconds


class ContextFull(Unanswered):
    """The messages, or they and `max_tokens`, don't fit the model's context."""


class Unfit(Exception):
    """A completion that won't do and that another attempt may better.

    Args:
        told: Why, in a line.
        kind: What such failures are told apart by.
    """

    def __init__(self, told: str, kind: str = "unfit"):
        super().__init__(told)
        self.kind = kind


@dataclass(frozen=True)
class Answered(Generic[T]):
    """A call that was answered.

    Attributes:
        value: What was read from the answer.
        seconds: Of the attempt that was answered; waits and failed attempts before it are not in.
        tries: Attempts, with it.
    """

    value: T
    seconds: float
    tries: int


class ChatClient:
    """Chat completions of one served model. One serves all sessions of a process, from any event loop.

    Attributes:
        endpoint: The model.
        servers: What is known of each of its servers.
        answered: Whether a server has ever given a completion.
        retries: Attempts after a call's first, over all calls.
    """

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.servers = [Server(url.rstrip("/").removesuffix("/chat/completions")) for url in endpoint.urls]
        self.answered = False
        self.retries = 0
        self._open: dict[asyncio.AbstractEventLoop, _Open] = {}
        self._next_turn = 0.0
        self._uses = 0

    async def ask(
        self, body: dict[str, Any], read: Callable[[dict[str, Any]], T] = lambda answer: answer
    ) -> Answered[T]:
        """One completion.

        Args:
            body: Of the request, without `model`.
            read: Makes something of the answer's JSON object, whose `choices[0].message` is an object with a text or
                null as its `content`. An `Unfit` from it makes another attempt; any other exception is the caller's.

        Raises:
            ContextFull: The messages don't fit.
            Unanswered: There is no completion within `attempts` and `deadline`, or asking again is no use.
        """
        endpoint, tries, start = self.endpoint, 0, time.monotonic()
        try:
            key = self.key()
            opened = self._opened()
            async with opened.slots:
                await self._turn()
                start = time.monotonic()  # the wait for a turn is ours, not the server's
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception(lambda error: isinstance(error, _Failed) and error.again),
                    stop=stop_after_attempt(endpoint.attempts) | stop_before_delay(endpoint.deadline),
                    wait=self._wait,
                    reraise=True,
                ):
                    with attempt:
                        if tries:
                            await self._turn()
                        began = time.monotonic()
                        left = endpoint.deadline - (began - start)
                        if left <= 0:  # and no attempt is made, nor counted
                            told = "the deadline passed while waiting for a turn (requests_per_minute)"
                            raise _Failed(told, "deadline", again=False)
                        self.retries += tries > 0
                        tries += 1
                        value = await self._attempt(opened.session, {"model": endpoint.model, **body}, key, left, read)
                        return Answered(value, time.monotonic() - began, tries)
        except _Failed as last:
            raise (ContextFull if last.full else Unanswered)(
                " ".join(str(last).split()),
                last.kind,
                status=last.status,
                said=last.said,
                again=last.again,
                tries=tries,
                seconds=time.monotonic() - start,
            ) from last
        raise AssertionError("unreachable: tenacity returns or raises")

    async def close(self) -> None:
        """Close this event loop's connections; a later call opens new ones."""
        opened = self._open.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened.session.close()

    def key(self) -> str:
        """The key, blank without one; read anew each time, so that nothing keeps it.

        Raises:
            Unanswered: Its variable isn't set or holds no key (kind `key`).
        """
        name = self.endpoint.api_key_env
        if name is None:
            return ""
        key = os.environ.get(name, "").strip()
        if not re.fullmatch(r"[!-~]+", key):
            state = "holds characters that no key has" if key else "is not set"
            raise Unanswered(f"the environment variable {name} {state}; export it", "key")
        return key

    async def _attempt(
        self,
        session: aiohttp.ClientSession,
        body: dict[str, Any],
        key: str,
        left: float,
        read: Callable[[dict[str, Any]], T],
    ) -> T:
        """One call to one server.

        Raises:
            _Failed: It gave no completion, or none that will do.
        """
        server, seconds = self._pick(), min(self.endpoint.timeout, left)
        server.in_flight += 1
        try:
            async with session.post(
                f"{server.url}/chat/completions",
                json=body,
                headers=headers_of(key),
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=min(10.0, seconds)),
                allow_redirects=False,  # the key is for this server
            ) as response:
                status, waits = response.status, response.headers.get("retry-after", "")
                text = await read_text(response, key)
        except asyncio.TimeoutError as error:
            server.rest()
            raise _Failed(f"{server.url}: no answer within {seconds:.3g} s", "timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            server.rest()
            kind = type(error).__name__
            raise _Failed(f"{server.url}: {kind}: {error}", kind) from error
        finally:
            server.in_flight -= 1
        if status != 200:
            raise _refusal(server, status, waits, text)
        try:
            answer = read_completion(text)
        except ValueError as error:
            server.rest()
            raise _Failed(f"{server.url}: no chat completion: {text[:100]!r}", "garbage") from error
        server.works()
        self.answered = True
        try:
            return read(answer)
        except Unfit as error:
            raise _Failed(f"{server.url}: {error}", error.kind) from error

    def _pick(self) -> Server:
        """The server with the fewest calls in flight, in turn; one that rests only where all do."""
        now = time.monotonic()
        server = min(self.servers, key=lambda s: (max(s.rests_until - now, 0.0), s.in_flight, s.last_used))
        self._uses += 1
        server.last_used = self._uses
        return server

    def _wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: almost none where a server is fit, else the backoff; and not before some
        server is ready by its own word.
        """
        now = time.monotonic()
        if any(now >= server.rests_until for server in self.servers):
            return random.uniform(0, FIRST_WAIT / 10)
        backoff = min(FIRST_WAIT * WAIT_FACTOR ** (state.attempt_number - 1), LONGEST_WAIT)
        busy = min(server.busy_until for server in self.servers) - now
        return max(backoff, busy) + random.uniform(0, FIRST_WAIT)

    async def _turn(self) -> None:
        """Wait for this attempt's place in the minute."""
        if self.endpoint.requests_per_minute is not None:
            now = time.monotonic()
            turn = max(now, self._next_turn)
            self._next_turn = turn + 60 / self.endpoint.requests_per_minute
            await asyncio.sleep(turn - now)

    def _opened(self) -> _Open:
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            self._open = {old: kept for old, kept in self._open.items() if not old.is_closed()}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
            slots = asyncio.Semaphore(self.endpoint.concurrency)
            self._open[loop] = _Open(aiohttp.ClientSession(connector=connector), slots)
        return self._open[loop]


class _Failed(Exception):
    """An attempt without a completion that will do; `again` says whether another may have one."""

    def __init__(
        self,
        told: str,
        kind: str,
        *,
        again: bool = True,
        status: int | None = None,
        said: str = "",
        full: bool = False,
    ):
        super().__init__(told)
        self.kind, self.again, self.status, self.said, self.full = kind, again, status, said, full


@dataclass(eq=False)
class Server:
    """What is known of one url.

    Attributes:
        url: Without the path of chat completions.
        in_flight: Calls that wait for it.
        last_used: Number of the last call that it was picked for.
        rests_until: It failed: others are asked before it until then.
        busy_until: The same by its own word, in a Retry-After.
    """

    url: str
    in_flight: int = 0
    last_used: int = 0
    rests_until: float = 0.0
    busy_until: float = 0.0

    def rest(self, seconds: float = 0.0) -> None:
        """Leave it alone; `seconds` is what it asked for."""
        now = time.monotonic()
        self.busy_until = now + seconds
        self.rests_until = now + max(seconds, REST)

    def works(self) -> None:
        """It has answered."""
        self.rests_until = self.busy_until = 0.0


@dataclass(eq=False)
class _Open:
    """What belongs to one event loop."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


def _refusal(server: Server, status: int, waits: str, text: str) -> _Failed:
    """What a status other than 200 means."""
    said, kind = told_of(text), f"status {status}"
    told = f"{server.url}: status {status}: {said}"
    if status in (400, 413, 422) and _FULL.search(text):
        return _Failed(told, kind, again=False, status=status, said=said, full=True)
    if status in (408, 425, 429) or status >= 500:
        server.rest(float(waits) if waits.isdecimal() else 0.0)
        return _Failed(told, kind, status=status, said=said)
    return _Failed(f"{told}; no case for another attempt", kind, again=False, status=status, said=said)


def told_of(text: str) -> str:
    """What a server says of its refusal, in a line of at most 300 characters."""
    try:
        said = json.loads(text)["error"]
        text = str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return " ".join(text.split()).encode("utf-8", "replace").decode()[:300] or "(empty)"


def headers_of(key: str) -> dict[str, str]:
    """The headers of a request."""
    return {"authorization": f"Bearer {key}"} if key else {}


async def read_text(response: aiohttp.ClientResponse, key: str) -> str:
    """The body without the key, which some servers repeat when they refuse it. A word such as `EMPTY` is no secret.

    Raises:
        aiohttp.ClientPayloadError: It is longer than `MAX_REPLY_BYTES`.
    """
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            raise aiohttp.ClientPayloadError(f"a body of more than {MAX_REPLY_BYTES} bytes")
    text = b"".join(chunks).decode("utf-8", "replace")
    return text.replace(key, "***") if len(key) >= 8 else text


def read_completion(text: str) -> dict[str, Any]:
    """A chat completion's JSON object.

    Raises:
        ValueError: It is none.
    """
    try:
        answer = json.loads(text)
        choice = answer["choices"][0]
        choice.get("finish_reason")
        content = choice["message"].get("content")
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(content, str | None):
        raise ValueError(f"the content is {type(content).__name__}")
    return answer
