"""Asks a model behind OpenAI-compatible chat completions for its judgement: limited, patient, and never twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, stop_before_delay

from verl_drmas.rewards.judge import Judgement, JudgeProblem, JudgeRequest, JudgeSettings, no_counts
from verl_drmas.rewards.judge_cache import AskOnce
from verl_drmas.rewards.judge_rubric import NoScore, read_reply, write_messages

logger = logging.getLogger(__name__)

# Waits between attempts where no other server is fit: 0.5, 1.5, 4.5 s, each with a random part on top.
FIRST_WAIT, WAIT_FACTOR, LONGEST_WAIT = 0.5, 3, 45.0
REST = 10.0  # seconds a server that failed is left alone while others are fit
MAX_REPLY_BYTES = 2**22
CHECK_SECONDS = 5.0
KEEP_ALIVE = 3.0  # seconds; servers commonly hang up after 5, and a call into a hang-up is a lost attempt


class EndpointJudge:
    """Judges by a model behind OpenAI-compatible chat completions, at temperature 0."""

    def __init__(self, settings: JudgeSettings):
        self._settings = settings
        self._servers = [_Server(url.rstrip("/").removesuffix("/chat/completions")) for url in settings.urls]
        self._open: dict[asyncio.AbstractEventLoop, _Open] = {}
        self._asked: AskOnce[Judgement] = AskOnce(settings.cache, lambda judgement: judgement.score is not None)
        self._next_turn = 0.0
        self._uses = 0
        self._told: set[str] = set()
        self._counts = no_counts()

    def __reduce__(self):
        return EndpointJudge, (self._settings,)

    async def score(self, request: JudgeRequest) -> Judgement:
        """See `Judge.score`."""
        self._counts["calls"] += 1
        start = time.monotonic()
        try:
            messages = write_messages(request)
            key = hashlib.sha256(json.dumps([self._settings.model, messages]).encode()).digest()
            judgement, spared = await self._asked.get(key, lambda: self._judge(messages))
        finally:
            seconds = time.monotonic() - start
            self._counts["seconds"] += seconds
        judged = judgement.score is not None
        self._counts["failures"] += not judged
        self._counts["cached"] += spared and judged
        return replace(judgement, seconds=seconds, cached=spared and judged)

    def check(self) -> str:
        """Ask every server for its models; a server without such a list is taken at its word.

        Raises:
            JudgeProblem: The key's variable isn't set, or no server is fit: it doesn't answer, refuses the key, or
                lists models and not this one.
        """
        with ThreadPoolExecutor(1) as thread:  # a loop may run in the caller's
            found = thread.submit(asyncio.run, self._look()).result()
        told = "; ".join(what for _, what in found)
        fit = sum(is_fit for is_fit, _ in found)
        if not fit:
            raise JudgeProblem(f"judge.urls: no server can judge ({told}); start one, or set judge.kind to none")
        return f"{fit} of {len(found)} judge servers answer: {told}"

    async def close(self) -> None:
        """Close this event loop's connections, cancel what is in flight; a later judgement opens new ones."""
        await self._asked.close()
        opened = self._open.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened.session.close()

    def report(self) -> dict[str, float]:
        """See `Judge.report`."""
        counts, self._counts = self._counts, no_counts()
        return counts

    async def _judge(self, messages: list[dict[str, str]]) -> Judgement:
        """Ask until there is a score, in this judgement's turn."""
        settings, tries = self._settings, 0
        start = time.monotonic()
        try:
            key = self._key()
            opened = self._opened()
            async with opened.slots:
                await self._turn()
                start = time.monotonic()  # the wait for a turn is ours, not the server's
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception(lambda error: isinstance(error, _Failed) and error.again),
                    stop=stop_after_attempt(settings.attempts) | stop_before_delay(settings.deadline),
                    wait=self._wait,
                    before_sleep=self._count_retry,
                    reraise=True,
                ):
                    with attempt:
                        if tries:
                            await self._turn()
                        tries += 1
                        left = settings.deadline - (time.monotonic() - start)
                        return Judgement(*await self._attempt(opened.session, messages, key, left))
        except _Failed as last:
            reason = " ".join(str(last).split())
            if tries:
                reason = (
                    f"no judgement after {tries} of {settings.attempts} attempts in {time.monotonic() - start:.1f} of "
                    f"{settings.deadline:g} s; last: {reason}"
                )
            if last.kind not in self._told:
                self._told.add(last.kind)
                logger.warning("judge: %s (further ones of this kind are only counted)", reason)
            return Judgement(None, reason)
        raise AssertionError("unreachable: tenacity returns or raises")

    async def _attempt(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], key: str, left: float
    ) -> tuple[float, str]:
        """One call to one server: the score and what was said with it.

        Raises:
            _Failed: There is none.
        """
        settings, server = self._settings, self._pick()
        seconds = min(settings.timeout, left)
        if seconds <= 0:
            raise _Failed("deadline", "it passed while waiting for a turn (requests_per_minute)", again=False)
        body = {
            "model": settings.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": settings.max_tokens,
        }
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
            raise _Failed("timeout", f"{server.url}: no answer within {seconds:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            server.rest()
            kind = type(error).__name__
            raise _Failed(kind, f"{server.url}: {kind}: {error}") from error
        finally:
            server.in_flight -= 1
        if status != 200:
            raise _refusal(server, status, waits, text)
        try:
            reply, end = _read_completion(text)
        except ValueError as error:
            server.rest()
            raise _Failed("garbage", f"{server.url}: no chat completion: {text[:100]!r}") from error
        server.works()
        try:
            return read_reply(reply)
        except NoScore as error:
            cut = f", cut at max_tokens {settings.max_tokens}" if end == "length" else ""
            raise _Failed(f"no score: {error}", f"{server.url}: no score in the reply ({error}{cut})") from error

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
        self._counts["retries"] += 1

    async def _turn(self) -> None:
        """Wait for this call's place in the minute."""
        if self._settings.requests_per_minute is not None:
            now = time.monotonic()
            turn = max(now, self._next_turn)
            self._next_turn = turn + 60 / self._settings.requests_per_minute
            await asyncio.sleep(turn - now)

    def _key(self) -> str:
        """The key, blank without one; read anew each time, so that nothing keeps it."""
        name = self._settings.api_key_env
        if name is None:
            return ""
        key = os.environ.get(name, "").strip()
        if not re.fullmatch(r"[!-~]+", key):
            state = "holds characters that no key has" if key else "is not set"
            raise _Failed("key", f"judge.api_key_env: the environment variable {name} {state}; export it", again=False)
        return key

    def _opened(self) -> _Open:
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            self._open = {old: kept for old, kept in self._open.items() if not old.is_closed()}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
            slots = asyncio.Semaphore(self._settings.concurrency)
            self._open[loop] = _Open(aiohttp.ClientSession(connector=connector), slots)
        return self._open[loop]

    async def _look(self) -> list[tuple[bool, str]]:
        """Of each server whether it is fit, and a word on it."""
        try:
            key = self._key()
        except _Failed as error:
            raise JudgeProblem(str(error)) from None
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
            return False, f"{url}: status {status}, it refuses the key; check judge.api_key_env"
        try:
            models = [str(model["id"]) for model in json.loads(text)["data"]] if status == 200 else []
        except (ValueError, LookupError, TypeError, RecursionError):
            models = []
        if models and self._settings.model not in models:
            return False, f"{url}: judge.model is {self._settings.model!r}, it has {', '.join(models[:8])}"
        return True, url if models else f"{url} (status {status} on /models)"


class _Failed(Exception):
    """No judgement.

    Args:
        kind: What failures are told apart by in the log.
        told: The whole of it.
        again: Whether another attempt may make it good.
    """

    def __init__(self, kind: str, told: str, again: bool = True):
        super().__init__(told)
        self.kind, self.again = kind, again


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


def _refusal(server: _Server, status: int, waits: str, text: str) -> _Failed:
    """What a status other than 200 means."""
    told = f"{server.url}: status {status}: {' '.join(text.split())[:200] or '(empty)'}"
    if status in (408, 429) or status >= 500:
        server.rest(float(waits) if waits.isdecimal() else 0.0)
        return _Failed(f"status {status}", told)
    look = {401: "judge.api_key_env", 403: "judge.api_key_env", 404: "judge.model, and judge.urls (.../v1)"}
    advice = f", check {look[status]}" if status in look else ""
    return _Failed(f"status {status}", f"{told}; no case for another attempt{advice}", again=False)


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


def _read_completion(text: str) -> tuple[str, str | None]:
    """What the model said, and why it stopped.

    Raises:
        ValueError: This is no chat completion.
    """
    try:
        choice = json.loads(text)["choices"][0]
        reply, end = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(reply, str | None):
        raise ValueError(f"the content is {type(reply).__name__}")
    return reply or "", end
