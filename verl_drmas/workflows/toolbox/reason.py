"""Asking another model, as a tool: one question in, its text out, by any OpenAI-compatible endpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from verl_drmas.rewards.thinking import after_thinking
from verl_drmas.serving.client import ChatClient, Unanswered, Unfit
from verl_drmas.serving.look import look_at
from verl_drmas.serving.settings import Endpoint, check_addresses, check_key_name
from verl_drmas.workflows.toolbox.arguments import GAP, check_positive, clip, refuse_unknown, text_argument
from verl_drmas.workflows.tools import Tool, ToolError, ToolOutage

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
        check_addresses(self.urls)
        if not self.model:
            raise ValueError("model is empty; write the model's name on the servers")
        check_key_name(self.api_key_env)
        check_positive(
            self, "max_tokens", "question_characters", "characters", "timeout", "attempts", "deadline", "concurrency"
        )
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or above")


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
        self._client = ChatClient(Endpoint.of(settings))
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
        try:
            looks = look_at(self._client)
        except Unanswered as error:
            raise ValueError(f"{self.name}.api_key_env: {error}") from None
        for look in looks:
            if look.state == "refused":
                raise ValueError(f"{self.name}.api_key_env: {look.said}; set the right one")
            if look.state == "other":
                near = get_close_matches(self.settings.model, look.models, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(look.models[:6])}"
                raise ValueError(f"{self.name}.model: {look.url} has no {self.settings.model!r}; {hint}")
        told = "; ".join(look.said for look in looks)
        if not any(look.state == "fit" for look in looks):
            raise ValueError(f"{self.name}.urls: no server answers ({told}); start one, or correct the address")
        return f"{self.name}: {self.settings.model} at {told}"

    async def close(self) -> None:
        """Let go of connections; a later call opens new ones."""
        await self._client.close()

    def report(self) -> dict[str, float]:
        """Since the last report: calls, errors (of the agent), outages, retries, cut_characters, tokens (of answers)
        and seconds of all calls together.
        """
        counts, self._counts = self._counts, _no_counts()
        counts["retries"], self._client.retries = float(self._client.retries), 0
        return counts

    async def _ask(self, question: str) -> str:
        settings = self.settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        body: dict[str, Any] = {
            "messages": [*system, {"role": "user", "content": question}],
            "max_tokens": settings.max_tokens,
        }
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        try:
            return (await self._client.ask(body, self._read)).value
        except Unanswered as error:
            # A server that takes no question at all refuses none of them.
            if error.status in (400, 413, 422) and self._client.answered:
                raise ToolError(f"the reasoner can't take this question ({error.said})") from error
            many = f"no answer after {error.tries} attempts; last: " if error.again else ""
            hint = "" if error.again else ", check its settings"
            raise ToolOutage(self.name, f"{many}{error.last}{hint}") from error

    def _read(self, answer: dict[str, Any]) -> str:
        """The model's answer.

        Raises:
            Unfit: It is empty or no proper Unicode text.
            ToolError: It was cut before it began.
        """
        choice = answer["choices"][0]
        cut = choice.get("finish_reason") == "length"
        text = (after_thinking(choice["message"].get("content") or "") or "").strip()
        if not text:
            if cut:
                raise ToolError("the reasoner came to no end; ask a smaller question")
            raise Unfit("an empty answer")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unfit("an answer that is no proper Unicode text") from error
        usage = answer.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        self._counts["tokens"] += tokens if isinstance(tokens, int) else 0
        return text + GAP if cut else text


def _no_counts() -> dict[str, float]:
    return dict.fromkeys(("calls", "errors", "outages", "retries", "cut_characters", "tokens", "seconds"), 0.0)
