"""Judges how well a sub-agent carried out its subtask: by a model behind an endpoint, by a rule, or not at all.

A judge that fails says so (`score` None) and is counted; it never makes a 0 of it.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from verl_drmas.rewards.qa import golds_of, normalise
from verl_drmas.serving.settings import check_addresses, check_key_name


@dataclass(frozen=True)
class JudgeRequest:
    """What is to be judged.

    Attributes:
        question: What the whole team works on.
        subtask: What the main agent asked for.
        context: What the main agent said beside it.
        result: What the sub-agent sent back.
        gold: Golds of the question, whatever `golds_of` takes; None where there is none.
        facts: What a good result may rest on, where the data knows it.
    """

    question: str
    subtask: str
    context: str = ""
    result: str = ""
    gold: Any = None
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """What a judge says.

    Attributes:
        score: In 0..1; None if it failed.
        reason: In a line.
        seconds: That the caller waited.
        cached: Whether an earlier answer, or the one to the same question asked at the same time, served.
        outage: Whether it failed by a server that is away or refuses whatever it is asked, rather than by what was
            asked or replied.
    """

    score: float | None
    reason: str
    seconds: float = 0.0
    cached: bool = False
    outage: bool = False


class Judge(Protocol):
    """Judges results. One serves all sessions of a rollout process, from its one event loop."""

    async def score(self, request: JudgeRequest) -> Judgement:
        """Judge one result. A failure is a judgement without a score, not an exception."""

    def check(self) -> str:
        """Look once, before a run starts, whether it can work; returns one line on what was found.

        Raises:
            JudgeProblem: It can't.
        """

    async def close(self) -> None:
        """Let go of connections; judgements in flight are cancelled."""

    def report(self) -> dict[str, float]:
        """Since the last report: calls, cached, retries, failures (judgements without a score), and seconds of all
        calls together.
        """


class JudgeProblem(RuntimeError):
    """A judge that can't work as it is configured; one line that names key, value and fix."""


@dataclass
class JudgeSettings:
    """Who judges the sub-agents; the rest is for `kind: endpoint`.

    Attributes:
        kind: `none`, `contains` (the rule of `ContainsJudge`) or `endpoint`.
        urls: OpenAI-compatible servers, such as `http://127.0.0.1:8000/v1`; calls are spread over them.
        model: Its name there.
        api_key_env: Name of the environment variable that holds the key.
        max_tokens: Most tokens of a reply.
        timeout: Seconds one call may take.
        attempts: Calls until a judgement counts as failed; each goes to another server where there is one.
        deadline: Seconds until it counts as failed whatever the attempts, from its first call on.
        concurrency: Most judgements of one rollout process at a time; others wait for their turn.
        requests_per_minute: Most calls of one rollout process, evenly spaced; null for no limit.
        cache: Most judgements kept in a rollout process.
    """

    kind: Literal["none", "contains", "endpoint"] = "none"
    urls: list[str] = field(default_factory=list)
    model: str | None = None
    api_key_env: str | None = None
    max_tokens: int = 512
    timeout: float = 60.0
    attempts: int = 4
    deadline: float = 180.0
    concurrency: int = 32
    requests_per_minute: float | None = None
    cache: int = 16384

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        if self.kind not in ("none", "contains", "endpoint"):
            raise ValueError(f"kind is {self.kind!r}; choose none, contains or endpoint")
        for name in ("urls", "model"):
            if self.kind == "endpoint" and not getattr(self, name):
                raise ValueError(f"kind is endpoint and {name} is not set; set it, or set kind to none or contains")
            if self.kind != "endpoint" and getattr(self, name):
                raise ValueError(f"{name} is set and kind is {self.kind}; set kind to endpoint, or leave {name} out")
        check_addresses(self.urls)
        check_key_name(self.api_key_env)
        for name in ("max_tokens", "timeout", "attempts", "deadline", "concurrency", "requests_per_minute", "cache"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")


def open_judge(settings: JudgeSettings) -> Judge | None:
    """The judge that the settings name, None for `kind: none`; nothing is asked yet.

    Raises:
        ImportError: What an endpoint needs isn't installed.
    """
    if settings.kind == "endpoint":
        for module in ("aiohttp", "tenacity"):
            if importlib.util.find_spec(module) is None:
                raise ImportError(f"a judge of kind endpoint needs {module}: pip install 'verl-drmas[search]'")
        from verl_drmas.rewards.judge_endpoint import EndpointJudge

        return EndpointJudge(settings)
    return ContainsJudge() if settings.kind == "contains" else None


class ContainsJudge:
    """1 if the result contains one of the needed facts word for word (after SQuAD's normalisation), else 0.

    The facts are the request's, or else the question's golds. With neither there is nothing to look for: no score.
    """

    def __init__(self) -> None:
        self._counts = no_counts()

    async def score(self, request: JudgeRequest) -> Judgement:
        """See `Judge.score`."""
        start = time.monotonic()
        wanted = {normalise(fact) for fact in request.facts or golds_or_none(request.gold)} - {""}
        # Blanks at both ends, so that whole words are found.
        found = [fact for fact in sorted(wanted) if f" {fact} " in f" {normalise(request.result)} "]
        score = float(bool(found)) if wanted else None
        reason = f"contains {found[0]!r}" if found else "contains no fact" if wanted else "no fact to look for"
        seconds = time.monotonic() - start
        self._counts["calls"] += 1
        self._counts["failures"] += score is None
        self._counts["seconds"] += seconds
        return Judgement(score, reason, seconds)

    def check(self) -> str:
        """See `Judge.check`."""
        return "results are judged by the facts they contain"

    async def close(self) -> None:
        """Nothing to let go of."""

    def report(self) -> dict[str, float]:
        """See `Judge.report`."""
        counts, self._counts = self._counts, no_counts()
        return counts


def golds_or_none(gold: Any) -> list[str]:
    """What `golds_of` reads, an empty list where that is nothing."""
    try:
        return golds_of(gold)
    except ValueError:
        return []


def no_counts() -> dict[str, float]:
    """A judge's counters at their start."""
    return dict.fromkeys(("calls", "cached", "retries", "failures", "seconds"), 0.0)
