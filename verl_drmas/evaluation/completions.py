"""Asks a served model for chat completions: limited, patient, and plain about an outage."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, stop_before_delay

# Waits between attempts where no other server is fit: 0.5, 1.5, 4.5, 13.5 s, each with a random part on top.
FIRST_WAIT, WAIT_FACTOR, LONGEST_WAIT = 0.5, 3, 45.0
REST = 10.0  # seconds a server that failed is left alone while others are fit
MAX_REPLY_BYTES = 2**26
CHECK_SECONDS = 5.0
KEEP_ALIVE = 3.0  # seconds; servers commonly hang up after 5, and a call into a hang-up is a lost attempt
_FULL = re.compile(r"context.?length|max_model_len|max_tokens.{0,40}(too large|exceed)|too many tokens", re.IGNORECASE)


class Unanswered(RuntimeError):
    """A call without a completion, after every attempt."""


class ContextFull(RuntimeError):
    """The messages, or they and `max_tokens`, don't fit the model's context."""


@dataclass(frozen=True)
class ServedModel:
    """A model behind one or more servers.

    Attributes:
        urls: Base addresses, as `http://host:8000/v1`; calls are spread over them.
        model: Its name there.
        api_key_env: Environment variable that holds the key; None: none is sent.
        calls: Who reads an agent's tool calls: `server`, in its own parser; `text`, ourselves, as Hermes and Qwen write
            them (for a vLLM without `--enable-auto-tool-choice`; it still shows the tools to the model).
        concurrency: Most calls in flight.
        timeout: Seconds of one attempt.
        attempts: Attempts of a call.
        deadline: Seconds of a call with all its attempts.
    """

    urls: tuple[str, ...]
    model: str
    api_key_env: str | None = None
    calls: Literal["server", "text"] = "server"
    concurrency: int = 64
    timeout: float = 600.0
    attempts: int = 5
    deadline: float = 1800.0

    def __post_init__(self):
        if not self.urls:
            raise ValueError("urls is empty; give the address of a server, such as http://localhost:8000/v1")
        for url in self.urls:
            if not re.match(r"https?://[^/\s]", url):
                raise ValueError(f"urls: {url!r} is no address; write http://host:port/v1")
        if self.calls not in ("server", "text"):
            raise ValueError(f"calls is {self.calls!r}; choose server or text")
        for name in ("concurrency", "attempts", "timeout", "deadline"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")


class Completions:
    """Chat completions of one served model."""

    def __init__(self, served: ServedModel):
        self.served = served
        self._servers = [_Server(url.rstrip("/").removesuffix("/chat/completions")) for url in served.urls]
        self._open: dict[asyncio.AbstractEventLoop, _Open] = {}
        self._uses = 0
        self.retries = 0

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One completion.

        Args:
            body: Of the request, without `model`.

        Returns:
            The answer's JSON object; `choices[0].message` is an object.

        Raises:
            Unanswered: There is none within `attempts` and `deadline`, or asking again is no use.
            ContextFull: The messages don't fit.
        """
        served, tries, start = self.served, 0, time.monotonic()
        try:
            key = self._key()
            opened = self._opened()
            async with opened.slots:
                start = time.monotonic()  # the wait for a slot is ours, not the server's
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception(lambda error: isinstance(error, _Failed) and error.again),
                    stop=stop_after_attempt(served.attempts) | stop_before_delay(served.deadline),
                    wait=self._wait,
                    before_sleep=self._count_retry,
                    reraise=True,
                ):
                    with attempt:
                        tries += 1
                        left = served.deadline - (time.monotonic() - start)
                        return await self._attempt(opened.session, {"model": served.model, **body}, key, left)
        except _Failed as last:
            told = " ".join(str(last).split())
            if tries > 1:
                told = f"no completion after {tries} attempts in {time.monotonic() - start:.1f} s; last: {told}"
            raise Unanswered(told) from last
        raise AssertionError("unreachable: tenacity returns or raises")

    def check(self) -> str:
        """Ask every server for its models; a server without such a list is taken at its word.

        Raises:
            Unanswered: The key's variable isn't set, or a server doesn't answer, refuses the key, or lists models and
                not this one.
        """
        with ThreadPoolExecutor(1) as thread:  # a loop may run in the caller's
            found = thread.submit(asyncio.run, self._look()).result()
        told = "; ".join(what for _, what in found)
        if not all(fit for fit, _ in found):
            raise Unanswered(told)
        return told

    async def close(self) -> None:
        """Close this event loop's connections; a later call opens new ones."""
        opened = self._open.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened.session.close()

    async def _attempt(
        self, session: aiohttp.ClientSession, body: dict[str, Any], key: str, left: float
    ) -> dict[str, Any]:
        server, seconds = self._pick(), max(min(self.served.timeout, left), 0.001)
        server.in_flight += 1
        try:
            async with session.post(
                f"{server.url}/chat/completions",
                json=body,
                headers=_headers(key),
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=min(10.0, seconds)),
                allow_redirects=False,  # the key is for this server
            ) as response:
                status, waits = response.status, response.headers.get("retry-after", "")
                text = await _read(response, key)
        except asyncio.TimeoutError as error:
            server.rest()
            raise _Failed(f"{server.url}: no answer within {seconds:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            server.rest()
            raise _Failed(f"{server.url}: {type(error).__name__}: {error}") from error
        finally:
            server.in_flight -= 1
        if status != 200:
            raise _refusal(server, status, waits, text)
        try:
            answer = json.loads(text)
            if not isinstance(answer["choices"][0]["message"], dict):
                raise TypeError("the message is no object")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            server.rest()
            raise _Failed(f"{server.url}: no chat completion: {text[:100]!r}") from error
        server.works()
        return answer

    def _pick(self) -> _Server:
        """The server with the fewest calls in flight, in turn; one that rests only where all do."""
        now = time.monotonic()
        server = min(self._servers, key=lambda s: (max(s.rests_until - now, 0.0), s.in_flight, s.last_used))
        self._uses += 1
        server.last_used = self._uses
        return server

    def _wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: almost none where a server is fit, else the backoff; and not before some
        server is ready by its own word.
        """
        now = time.monotonic()
        if any(now >= server.rests_until for server in self._servers):
            return random.uniform(0, FIRST_WAIT / 10)
        backoff = min(FIRST_WAIT * WAIT_FACTOR ** (state.attempt_number - 1), LONGEST_WAIT)
        busy = min(server.busy_until for server in self._servers) - now
        return max(backoff, busy) + random.uniform(0, FIRST_WAIT)

    def _count_retry(self, state: RetryCallState) -> None:
        self.retries += 1

    def _key(self) -> str:
        """The key, blank without one; read anew each time, so that nothing keeps it."""
        name = self.served.api_key_env
        if name is None:
            return ""
        key = os.environ.get(name, "").strip()
        if not re.fullmatch(r"[!-~]+", key):
            state = "holds characters that no key has" if key else "is not set"
            raise _Failed(f"the environment variable {name} {state}; export the key in it", again=False)
        return key

    def _opened(self) -> _Open:
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            self._open = {old: kept for old, kept in self._open.items() if not old.is_closed()}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
            slots = asyncio.Semaphore(self.served.concurrency)
            self._open[loop] = _Open(aiohttp.ClientSession(connector=connector), slots)
        return self._open[loop]

    async def _look(self) -> list[tuple[bool, str]]:
        """Of each server whether it is fit, and a word on it."""
        try:
            key = self._key()
        except _Failed as error:
            return [(False, str(error))]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CHECK_SECONDS)) as session:
            return await asyncio.gather(*(self._look_at(session, server.url, key) for server in self._servers))

    async def _look_at(self, session: aiohttp.ClientSession, url: str, key: str) -> tuple[bool, str]:
        try:
            async with session.get(f"{url}/models", headers=_headers(key), allow_redirects=False) as response:
                status, text = response.status, await _read(response, key)
        except asyncio.TimeoutError:
            return False, f"{url}: no answer within {CHECK_SECONDS:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return False, f"{url}: {type(error).__name__}: {error}"
        if status in (401, 403):
            return False, f"{url}: status {status}, it refuses the key"
        try:
            models = [str(model["id"]) for model in json.loads(text)["data"]] if status == 200 else []
        except (ValueError, LookupError, TypeError, RecursionError):
            models = []
        if models and self.served.model not in models:
            return False, f"{url}: the model {self.served.model!r} is asked for, it has {', '.join(models[:8])}"
        return True, url if models else f"{url} (status {status} on /models)"


class _Failed(Exception):
    """An attempt without a completion; `again` says whether another may have one."""

    def __init__(self, told: str, again: bool = True):
        super().__init__(told)
        self.again = again


@dataclass(eq=False)
class _Server:
    """What is known of one url."""

    url: str
    in_flight: int = 0
    last_used: int = 0
    rests_until: float = 0.0
    busy_until: float = 0.0  # by its own word, in a Retry-After

    def rest(self, seconds: float = 0.0) -> None:
        now = time.monotonic()
        self.busy_until = now + seconds
        self.rests_until = now + max(seconds, REST)

    def works(self) -> None:
        self.rests_until = self.busy_until = 0.0


@dataclass(eq=False)
class _Open:
    """What belongs to one event loop."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


def _refusal(server: _Server, status: int, waits: str, text: str) -> Exception:
    """What a status other than 200 means."""
    told = f"{server.url}: status {status}: {' '.join(text.split())[:300] or '(empty)'}"
    if status in (400, 413, 422) and _FULL.search(text):
        return ContextFull(told)
    if status in (408, 429) or status >= 500:
        server.rest(float(waits) if waits.isdecimal() else 0.0)
        return _Failed(told)
    return _Failed(f"{told}; no case for another attempt", again=False)


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def _read(response: aiohttp.ClientResponse, key: str) -> str:
    """The body without the key, which some servers repeat when they refuse it. A word such as `EMPTY` is no secret."""
    body = b""
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise aiohttp.ClientPayloadError(f"a body of more than {MAX_REPLY_BYTES} bytes")
    text = body.decode("utf-8", "replace")
    return text.replace(key, "***") if len(key) >= 8 else text
