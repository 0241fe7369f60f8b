"""Asks a model behind OpenAI-compatible chat completions for its judgement, and never twice for the same."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import replace
from typing import Any, NamedTuple

from verl_drmas.rewards.judge import Judgement, JudgeProblem, JudgeRequest, JudgeSettings, no_counts
from verl_drmas.rewards.judge_cache import AskOnce
from verl_drmas.rewards.judge_rubric import SUBTASK, NoScore, Rubric
from verl_drmas.serving.client import ChatClient, Unanswered, Unfit
from verl_drmas.serving.look import Look, look_at
from verl_drmas.serving.settings import Endpoint

logger = logging.getLogger(__name__)


class Names(NamedTuple):
    """What the user set, by the name it was set by: for messages.

    Attributes:
        urls: Of the servers' addresses.
        model: Of the model's name.
        api_key_env: Of the key's variable.
        fix: What to do where no server is fit.
    """

    urls: str = "judge.urls"
    model: str = "judge.model"
    api_key_env: str = "judge.api_key_env"
    fix: str = "start one, or set judge.kind to none"

    def look_at(self, status: int | None) -> str:
        """What to look at where a server refuses for good; blank where that isn't known."""
        return {401: self.api_key_env, 403: self.api_key_env, 404: f"{self.model}, and {self.urls} (.../v1)"}.get(
            status, ""
        )


# Statuses by which a server refuses one request, and how the kind of an `Unfit` begins.
_OF_THE_REQUEST, _NO_SCORE = (400, 413, 422), "no score"


KEYS = Names()  # of a training configuration


class EndpointJudge:
    """Judges by a model behind OpenAI-compatible chat completions, at temperature 0.

    Args:
        settings: Where the model is.
        rubric: What it is asked, as functions of a module, so that the judge can be pickled.
        names: Of the settings, for messages.
    """

    def __init__(self, settings: JudgeSettings, rubric: Rubric = SUBTASK, names: Names = KEYS):
        self._settings, self._rubric, self._names = settings, rubric, names
        self._client = ChatClient(Endpoint.of(settings))
        self._asked: AskOnce[Judgement] = AskOnce(settings.cache, lambda judgement: judgement.score is not None)
        self._told: set[str] = set()
        self._counts = no_counts()

    def __reduce__(self):
        return EndpointJudge, (self._settings, self._rubric, self._names)

    async def score(self, request: JudgeRequest) -> Judgement:
        """See `Judge.score`."""
        self._counts["calls"] += 1
        start = time.monotonic()
        try:
            messages = self._rubric.write(request)
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
        try:
            looks = look_at(self._client)
        except Unanswered as error:
            raise JudgeProblem(f"{self._names.api_key_env}: {error}") from None
        told = "; ".join(map(self._seen, looks))
        fit = sum(look.state == "fit" for look in looks)
        if not fit:
            raise JudgeProblem(f"{self._names.urls}: no server can judge ({told}); {self._names.fix}")
        return f"{fit} of {len(looks)} judge servers answer: {told}"

    async def close(self) -> None:
        """Close this event loop's connections, cancel what is in flight; a later judgement opens new ones."""
        await self._asked.close()
        await self._client.close()

    def report(self) -> dict[str, float]:
        """See `Judge.report`."""
        counts, self._counts = self._counts, no_counts()
        counts["retries"], self._client.retries = float(self._client.retries), 0
        return counts

    async def _judge(self, messages: list[dict[str, str]]) -> Judgement:
        """Ask until there is a score, in this judgement's turn."""
        settings = self._settings
        body = {"messages": messages, "temperature": 0, "max_tokens": settings.max_tokens}
        try:
            return Judgement(*(await self._client.ask(body, self._read)).value)
        except Unanswered as error:
            reason = error.last
            if error.kind == "key":
                reason = f"{self._names.api_key_env}: {reason}"
            elif at := self._names.look_at(error.status):
                reason = f"{reason}, check {at}"
            if error.tries:
                reason = (
                    f"no judgement after {error.tries} of {settings.attempts} attempts in {error.seconds:.1f} of "
                    f"{settings.deadline:g} s; last: {reason}"
                )
            if error.kind not in self._told:
                self._told.add(error.kind)
                logger.warning("judge: %s (further ones of this kind are only counted)", reason)
            outage = error.status not in _OF_THE_REQUEST and not error.kind.startswith(_NO_SCORE)
            return Judgement(None, reason, outage=outage)

    def _read(self, answer: dict[str, Any]) -> tuple[float, str]:
        """The score of a reply, and what was said with it.

        Raises:
            Unfit: There is none.
        """
        choice = answer["choices"][0]
        try:
            return self._rubric.read(choice["message"].get("content") or "")
        except NoScore as error:
            cut = choice.get("finish_reason") == "length"
            why = f"{error}, cut at max_tokens {self._settings.max_tokens}" if cut else str(error)
            raise Unfit(f"no score in the reply ({why})", f"{_NO_SCORE}: {error}") from error

    def _seen(self, look: Look) -> str:
        if look.state == "other":
            return f"{look.url}: {self._names.model} is {self._settings.model!r}, it has {', '.join(look.models[:8])}"
        return f"{look.said}; check {self._names.api_key_env}" if look.state == "refused" else look.said
