"""Asking another model, as a tool: one question in, its text out, by any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, stop_before_delay
from tenacity.wait import wait_exponential, wait_random

from verl_drmas.rewards.thinking import after_thinking
from verl_drmas.workflows.toolbox.arguments import GAP, check_positive, clip, refuse_unknown, text_argument
from verl_drmas.workflows.tools import Tool, ToolError, ToolOutage

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts
MAX_ANSWER_BYTES = 2**22
CHECK_SECONDS = 5.0
SYSTEM = "Solve the problem you are given. Think it through, then state the result plainly, with the reasons in brief."


@dataclass
class ReasonSettings:
    """Which model is asked, and how.

    Attributes:
        urls: OpenAI-compatible servers, such as `http://127.0.0.1:8000/v1`; calls are spread over them.
        model: Its name there.
        api_key_env: Name of the environment variable that holds the key.
        system: What it is told before the question; empty for nothing.
        temperature: It samples at; null: the server's.
        max_tokens: Most tokens of its answer.
        question_characters: Longest question.
        characters: Most characters of its answer that the agent reads.
        timeout: Seconds one call may take.
        attempts: Calls until there is an outage; each goes to another server where there is one.
        deadline: Seconds until there is one whatever the attempts.
        concurrency: Most calls of one rollout process at a time; others wait for their turn.
    """

    urls: list[str]
    model: str
    api_key_env: str | None = None
    system: str = SYSTEM
    temperature: float | None = 0.0
    max_tokens: int = 2048
    question_characters: int = 8000
    characters: int = 8000
    timeout: float = 120.0
    attempts: int = 4
    deadline: float = 400.0
    concurrency: int = 32

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        if not self.urls:
            raise ValueError("urls is empty; list servers, such as http://host:port/v1")
        for url in self.urls:
            parts = urlsplit(url)
            if "@" in parts.netloc:
                raise ValueError("urls: one holds a user or password; leave it out and name the key's api_key_env")
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ValueError(f"urls: {url!r} is no address; write http://host:port/v1")
        if not self.model:
            raise ValueError("model is empty; write the model's name on the servers")
        # The value isn't repeated: who errs here may have written the key itself.
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env, re.ASCII):
            raise ValueError("api_key_env: no name of an environment variable (capitals); write the name, not the key")
        check_positive(
            self, "max_tokens", "question_characters", "characters", "timeout", "attempts", "deadline", "concurrency"
        )
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or above")


class _Failed(Exception):
    """One attempt that another may make good."""

    def __init__(self, told: str, retry_after: float = 0.0):
        super().__init__(told)
        self.retry_after = retry_after


class Reason(Tool):
    """Asks the model one question at a time; it sees nothing else of the session."""

    Settings: ClassVar = ReasonSettings

    def __init__(self, settings: ReasonSettings, name: str = "reason"):
        self.settings, self.name = settings, name
        self.description = "Ask a careful reasoner. It sees only what you write here, and returns its answer as text."
        self.parameters = {
            "type": "object",
            "properties": {"question": {"type": "string", "description": "The whole problem, with all it rests on."}},
            "required": ["question"],
        }
        self._urls = [url.rstrip("/").removesuffix("/chat/completions") for url in settings.urls]
        self._turn = 0
        self._answered = False  # a server has taken some question
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._backoff = wait_exponential(FIRST_WAIT, LONGEST_WAIT, 3) + wait_random(0, FIRST_WAIT)
        self._counts = _no_counts()

    async def call(self, arguments: dict[str, Any]) -> str:
        """The model's answer to `question`, without its thinking.

        Raises:
            ToolError: There is no proper question, or the model can't take or end this one.
            ToolOutage: No server answers.
        """
        self._counts["calls"] += 1
        start = time.monotonic()
        try:
            refuse_unknown(arguments, self.parameters["properties"])
            question = text_argument(arguments, "question", characters=self.settings.question_characters)
            answer, left_out = clip(await self._ask(question), self.settings.characters)
            self._counts["cut_characters"] += left_out
            return answer
        except ToolError:
            self._counts["errors"] += 1
            raise
        except ToolOutage:
            self._counts["outages"] += 1
            raise
        finally:
            self._counts["seconds"] += time.monotonic() - start

    def check(self) -> str:
        """Ask every server for its models.

        Raises:
            ValueError: The key isn't set, a server refuses it or doesn't have the model, or none answers.
        """
        self._key()
        found = [self._models(url) for url in self._urls]
        if not any(lives for lives, _ in found):
            told = "; ".join(what for _, what in found)
            raise ValueError(f"{self.name}.urls: no server answers ({told}); start one, or correct the address")
        return f"{self.name}: {self.settings.model} at {'; '.join(what for _, what in found)}"

    async def close(self) -> None:
        """Let go of connections; a later call opens new ones."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    def report(self) -> dict[str, float]:
        """Since the last report: calls, errors (of the agent), outages, retries, cut_characters, tokens (of answers)
        and seconds of all calls together.
        """
        counts, self._counts = self._counts, _no_counts()
        return counts

    async def _ask(self, question: str) -> str:
        settings = self.settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [*system, {"role": "user", "content": question}],
            "max_tokens": settings.max_tokens,
        }
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Failed),
            stop=stop_after_attempt(settings.attempts) | stop_before_delay(settings.deadline),
            wait=self._wait,
            before_sleep=self._count_retry,
            reraise=True,
        )
        session = self._open()
        async with self._slots:
            start = time.monotonic()  # the wait for a turn is ours, not the server's
            try:
                async for attempt in retrying:
                    with attempt:
                        left = settings.deadline - (time.monotonic() - start)
                        return await self._attempt(session, body, min(settings.timeout, max(left, 0.001)))
            except _Failed as last:
                raise ToolOutage(self.name, f"no answer after {settings.attempts} attempts; last: {last}") from last
        raise AssertionError("unreachable: tenacity returns or raises")

    async def _attempt(self, session: aiohttp.ClientSession, body: dict[str, Any], seconds: float) -> str:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(10.0, seconds))
        url = self._urls[self._turn % len(self._urls)]
        self._turn += 1
        try:
            async with session.post(
                f"{url}/chat/completions",
                json=body,
                headers=self._headers(),
                timeout=timeout,
                allow_redirects=False,  # the key is for this server
            ) as response:
                answer = await _read(response)
                if response.status != 200:
                    self._judge(url, response, answer)
        except asyncio.TimeoutError as error:
            raise _Failed(f"{url}: no answer within {seconds:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(f"{url}: {type(error).__name__}: {error}") from error
        try:
            told = json.loads(answer)
            choice = told["choices"][0]
            text, ended = choice["message"]["content"], choice.get("finish_reason")
            text = (after_thinking(text or "") or "").strip()
            text.encode()
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise _Failed(f"{url}: an answer that is no chat completion") from error
        self._answered = True
        if not text:
            if ended == "length":
                raise ToolError("the reasoner came to no end; ask a smaller question")
            raise _Failed(f"{url}: an empty answer")
        usage = told.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        self._counts["tokens"] += tokens if isinstance(tokens, int) else 0
        return text + GAP if ended == "length" else text

    def _judge(self, url: str, response: aiohttp.ClientResponse, answer: bytes) -> None:
        """Raise what a status other than 200 means."""
        status, told = response.status, self._detail(answer)
        if status in (408, 425, 429) or status >= 500:
            wait = response.headers.get("retry-after", "")
            raise _Failed(f"{url}: status {status}: {told}", float(wait) if wait.isdecimal() else 0.0)
        if status in (400, 413, 422) and self._answered:  # a server that takes no question at all refuses none of them
            raise ToolError(f"the reasoner can't take this question ({told})")
        raise ToolOutage(self.name, f"{url}: status {status}: {told}; no case for another attempt, check its settings")

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after if isinstance(error, _Failed) else 0.0
        return max(self._backoff(state), min(asked, LONGEST_WAIT))

    def _count_retry(self, state: RetryCallState) -> None:
        self._counts["retries"] += 1

    def _key(self) -> str | None:
        name = self.settings.api_key_env
        if name is None:
            return None
        key = os.environ.get(name, "").strip()
        if not re.fullmatch(r"[!-~]+", key):
            state = "holds characters that no key has" if key else "isn't set"
            raise ValueError(f"{self.name}.api_key_env: the environment variable {name} {state}; export the key")
        return key

    def _headers(self) -> dict[str, str]:
        try:
            key = self._key()
        except ValueError as error:
            raise ToolOutage(self.name, str(error)) from error
        return {"authorization": f"Bearer {key}"} if key else {}

    def _detail(self, answer: bytes) -> str:
        """What a server says of its refusal, without the key, which some repeat."""
        text = answer.decode("utf-8", "replace")
        try:
            told = json.loads(text)
            text = str(told["error"]["message"] if isinstance(told["error"], dict) else told["error"])
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        key = os.environ.get(self.settings.api_key_env or "", "").strip()
        text = " ".join((text.replace(key, "***") if len(key) >= 8 else text).split())  # `EMPTY` is no secret
        return text.encode("utf-8", "replace").decode()[:200] or "(empty)"

    def _models(self, url: str) -> tuple[bool, str]:
        """Whether a server lives, and a word on it."""
        request = urllib.request.Request(f"{url}/models", headers=self._headers())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the calls: no proxy
        try:
            with opener.open(request, timeout=CHECK_SECONDS) as response:
                models = [str(model["id"]) for model in json.loads(response.read(MAX_ANSWER_BYTES))["data"]]
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise ValueError(
                    f"{self.name}.api_key_env: {url} refuses the key (status {error.code}); set the right one"
                ) from None
            return True, f"{url} (status {error.code} on /models)"
        except OSError as error:
            return False, f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}"
        except (ValueError, KeyError, TypeError):
            return True, url
        if models and self.settings.model not in models:
            near = get_close_matches(self.settings.model, models, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(models[:6])}"
            raise ValueError(f"{self.name}.model: {url} has no {self.settings.model!r}; {hint}")
        return True, url

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
            self._session = aiohttp.ClientSession(connector=connector)
            self._loop, self._slots = loop, asyncio.Semaphore(self.settings.concurrency)
        return self._session


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise _Failed(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return b"".join(chunks)


def _no_counts() -> dict[str, float]:
    return dict.fromkeys(("calls", "errors", "outages", "retries", "cut_characters", "tokens", "seconds"), 0.0)
