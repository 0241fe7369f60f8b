"""A verifier over a search and an answer agent (Dr. MAS, search task): is the evidence enough, else what to look up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl_drmas.retrieval import (
    IndexProblem,
    Passage,
    QueryRejected,
    RetrievalOutage,
    RetrievalSettings,
    Retriever,
    open_retriever,
)
from verl_drmas.rewards.qa import exact_match, extract_answer, f1, golds_of, normalise
from verl_drmas.rewards.thinking import after_thinking
from verl_drmas.workflows.base import Action, Message, Outcome, Task, Team, Workflow
from verl_drmas.workflows.errors import SessionFailed
from verl_drmas.workflows.evidence import Evidence
from verl_drmas.workflows.registry import register_workflow
from verl_drmas.workflows.verdict import parse_verdict, with_balanced_accuracy

TEMPLATE_TOKENS = 64  # what a chat template and the lines between the parts of a prompt may add
VERIFIER = (
    "You lead a team that answers a question by searching a library of passages. Decide whether the evidence gathered "
    "so far is enough to answer the question with certainty. Give a short reason, then finish with exactly one line: "
    "<verdict>yes</verdict> if it is enough, or <verdict>no</verdict> if another search is needed."
)
SEARCH = (
    "You search a library of passages for a team that has to answer a question. Write the one query that is most "
    "likely to find the next missing fact; look for one thing at a time, and use names that the evidence gives. Finish "
    "with exactly one line: <search>your query</search>"
)
ANSWER = (
    "You answer a question for a team that has gathered evidence. Rely on the evidence, and keep the answer as short "
    "as it can be: a name, a number, a date, yes or no. Finish with exactly one line: <answer>your answer</answer>"
)


@register_workflow("search_hierarchy")
class SearchHierarchy(Workflow):
    """At most `max_turns` turns; in each the verifier decides whether the team searches once more or answers.

    The last turn is the answer agent's, without a verifier, because nobody could act on its verdict; in the reference
    code (`strict_last_turn`) the verifier is asked there too, and a team that still wants to search gets nothing
    (Dr. MAS, section 5 and appendix). Everybody sees the question and the evidence, the search agent also why the
    verifier wants more (`SEES`); nobody sees another's thinking.
    """

    agents = ("verifier", "search", "answer")
    roles = {"verifier": VERIFIER, "search": SEARCH, "answer": ANSWER}  # noqa: RUF012  (read only)
    SEES = {  # noqa: RUF012  (read only)
        "verifier": ("question", "evidence"),
        "search": ("question", "evidence", "check"),
        "answer": ("question", "evidence"),
    }

    @dataclass
    class Settings:
        """Settings of `drmas.workflow`.

        Attributes:
            retrieval: Where passages come from, see `RetrievalSettings`.
            max_turns: Most turns of a session; one less is the most searches.
            topk: Passages asked for in a search.
            evidence_tokens: Most tokens of evidence in a prompt, and never more than the agent's prompt has room for;
                null for the latter alone.
            strict_last_turn: As in the reference code: no answer, and so nothing earned, if the verifier isn't content
                on the last turn.
            on_invalid: What a verifier turn without exactly one known verdict counts as (`answer` in the reference
                code).
            metric: Outcome reward: exact match, or token F1.
            normalisation: How answers are compared, see `rewards/qa.py`.
            search_cost: Taken off the outcome for each search.
        """

        retrieval: RetrievalSettings
        max_turns: int = 4
        topk: int = 3
        evidence_tokens: int | None = 3072
        strict_last_turn: bool = False
        on_invalid: Literal["search", "answer"] = "search"
        metric: Literal["em", "f1"] = "em"
        normalisation: Literal["squad", "wide"] = "squad"
        search_cost: float = 0.0

        def __post_init__(self):
            if not isinstance(self.retrieval, RetrievalSettings):
                self.retrieval = RetrievalSettings(**self.retrieval)
            for name, least in (("max_turns", 1), ("topk", 1), ("evidence_tokens", 32)):
                value = getattr(self, name)
                if value is not None and value < least:
                    raise ValueError(f"{name} is {value}; it must be at least {least}")
            if self.search_cost < 0:
                raise ValueError(f"search_cost is {self.search_cost}; a negative one would pay for every search")

    def __init__(self, settings: Any = None, retriever: Retriever | None = None):
        super().__init__(settings)
        self.retriever = retriever or open_retriever(self.settings.retrieval)

    def preflight(self) -> str:
        return self.retriever.check(self.settings.topk)

    async def close(self) -> None:
        await self.retriever.close()

    def report(self) -> dict[str, float]:
        return {f"retrieval/{name}": value for name, value in self.retriever.report().items()}

    async def run(self, task: Task, team: Team) -> Outcome:
        session = _Session(task, golds_of(task.answer), self.settings.normalisation)
        for turn in range(1, self.settings.max_turns + 1):
            last = turn == self.settings.max_turns
            if not last or self.settings.strict_last_turn:
                check = await team["verifier"].act(await self.prompt("verifier", team, session))
                session.check = after_thinking(check.text) or ""
                if self.judge(check, session):
                    return self.outcome(session, await self.answer(team, session))
            if not last:
                await self.search(team, session)
        if self.settings.strict_last_turn:
            return self.outcome(session, None)
        return self.outcome(session, await self.answer(team, session))

    async def prompt(self, agent_id: str, team: Team, session: _Session) -> list[Message]:
        """What an agent sees: its role, and the parts that `SEES` names."""
        parts = {
            "question": f"Question: {session.task.question}",
            "check": f"Why the evidence is not enough:\n{team[agent_id].plain(session.check)}" if session.check else "",
        }
        # Other sessions share the event loop, and tokenising much would hold them up.
        parts["evidence"] = await asyncio.to_thread(self._evidence, agent_id, team, session, parts)
        shown = [parts[name] for name in self.SEES[agent_id] if parts[name]]
        return [{"role": "user", "content": "\n\n".join([self.roles[agent_id], *shown])}]

    def _evidence(self, agent_id: str, team: Team, session: _Session, parts: dict[str, str]) -> str:
        agent, budget = team[agent_id], self.settings.evidence_tokens
        if agent.prompt_length is not None:
            others = [self.roles[agent_id], *(parts.get(name, "") for name in self.SEES[agent_id])]
            room = agent.prompt_length - TEMPLATE_TOKENS - sum(agent.count_tokens(text) for text in others)
            budget = max(0, room) if budget is None else max(0, min(room, budget))
        sizes = session.sizes.setdefault(agent_id, {})
        evidence, cut = session.evidence.render(agent.count_tokens, budget, sizes)
        if cut.passages or cut.tokens:
            session.counts.update(cut_prompts=1, cut_passages=cut.passages, cut_tokens=cut.tokens)
        if evidence:
            return f"Evidence:\n{agent.plain(evidence)}"
        return "Evidence: none that fits." if session.evidence.searches else "Evidence: none yet."

    def judge(self, check: Action, session: _Session) -> bool:
        """Whether the verifier finds the evidence enough; anything but one known verdict is an invalid action."""
        check.parsed = parse_verdict(check.text, words=("yes", "no"))
        check.valid = check.parsed is not None
        enough = check.parsed == "yes" if check.valid else self.settings.on_invalid == "answer"
        session.verdicts.append((enough, session.has_gold))
        return enough

    async def search(self, team: Team, session: _Session) -> None:
        """The search agent's turn. A query that is missing or refused is an invalid action and finds nothing.

        Raises:
            SessionFailed: The retriever gave no answer (`retrieval`).
        """
        query = await team["search"].act(await self.prompt("search", team, session))
        query.parsed, reason = extract_answer(query.text, tag="search")
        query.valid = query.parsed is not None
        if not query.valid:
            session.counts["rejected_queries"] += reason == "too_long"
            return
        began = time.monotonic()
        try:
            hits = await self.retriever.search(query.parsed, self.settings.topk)
        except QueryRejected:
            query.valid = False
            session.counts["rejected_queries"] += 1
            return
        except (RetrievalOutage, IndexProblem) as outage:
            query.fault = "retrieval"
            raise SessionFailed("retrieval", str(outage)) from outage
        finally:
            session.seconds += time.monotonic() - began
        query.passages = [(hit.passage.title, hit.passage.text) for hit in hits]
        new = session.evidence.add(query.parsed, [hit.passage for hit in hits])
        await asyncio.to_thread(session.look_for_gold, new)
        session.counts.update(
            searches=1, passages=len(new), empty_results=not hits, repeated_passages=len(hits) - len(new)
        )

    async def answer(self, team: Team, session: _Session) -> str | None:
        """The answer agent's turn; an answer outside its tag is an invalid action and none."""
        action = await team["answer"].act(await self.prompt("answer", team, session))
        action.parsed, _ = extract_answer(action.text, tag="answer")
        action.valid = action.parsed is not None
        return action.parsed

    def outcome(self, session: _Session, answer: str | None) -> Outcome:
        """The session's reward and numbers."""
        style = self.settings.normalisation
        em = exact_match(answer or "", session.golds, style=style)
        score = {"em": em, "f1": f1(answer or "", session.golds, style=style)}
        reward = score[self.settings.metric] - self.settings.search_cost * session.counts["searches"]
        metrics = {**score, "answered": float(answer is not None), **session.numbers()}
        return Outcome(reward=reward, correct=em, answer=answer, metrics=metrics)

    def activations(self) -> dict[str, tuple[int, int]]:
        turns, strict = self.settings.max_turns, self.settings.strict_last_turn
        checks = turns if strict else turns - 1
        return {
            "verifier": (min(1, checks), checks),
            "search": (0, turns - 1),
            "answer": (0 if strict else 1, 1),
        }

    @classmethod
    def summarise(cls, sessions: Sequence[dict[str, float]]) -> dict[str, float]:
        return with_balanced_accuracy(super().summarise(sessions))


class _Session:
    """One session's state.

    Attributes:
        check: What the verifier said last, without its thinking.
        verdicts: (found it enough, the evidence held a gold) of every verdict; the second is None where that says
            nothing.
        has_gold: Whether a gold stands in the passages, word for word; None for golds that any text holds (yes, no).
        sizes: Lengths of the evidence's lines in tokens, by agent.
    """

    def __init__(self, task: Task, golds: list[str], style: str):
        self.task, self.golds, self.style = task, golds, style
        self.evidence = Evidence()
        self.sizes: dict[str, dict[str, int]] = {}
        wanted = [normalise(gold, style=style) for gold in golds]
        self._wanted = [f" {gold} " for gold in wanted if gold not in ("", "yes", "no")]
        self.has_gold: bool | None = False if self._wanted else None
        self.check = ""
        self.verdicts: list[tuple[bool, bool | None]] = []
        self.seconds = 0.0
        self.counts: Counter[str] = Counter(
            {
                name: 0
                for name in (
                    "searches", "rejected_queries", "empty_results", "passages", "repeated_passages",
                    "cut_prompts", "cut_passages", "cut_tokens",
                )
            }
        )  # fmt: skip

    def look_for_gold(self, passages: Sequence[Passage]) -> None:
        """Bring `has_gold` up to date with new passages."""
        if self.has_gold is False:
            texts = [f" {normalise(f'{p.title} {p.text}', style=self.style)} " for p in passages]
            self.has_gold = any(gold in text for gold in self._wanted for text in texts)

    def numbers(self) -> dict[str, float]:
        """The session's numbers for the log; verdicts stand apart for evidence with and without a gold."""
        numbers = {name: float(value) for name, value in self.counts.items()}
        numbers["verdicts"] = float(len(self.verdicts))
        numbers["retrieval_seconds"] = self.seconds
        if self.has_gold is not None:
            numbers["gold_in_evidence"] = float(self.has_gold)
        for name, wanted in (("right", True), ("wrong", False)):
            hits = [float(enough == wanted) for enough, held in self.verdicts if held is wanted]
            if hits:
                numbers[f"verifier_accuracy_{name}"] = sum(hits) / len(hits)
        return numbers
