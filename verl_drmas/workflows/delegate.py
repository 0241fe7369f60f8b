"""A main agent that plans and delegates to sub-agents with tools of their own (M-GRPO, arXiv 2511.13288, section 3)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, get_args

from verl_drmas.rewards.delegation import main_reward, outcome_for_subs, sub_reward
from verl_drmas.rewards.judge import Judge, Judgement, JudgeRequest, golds_or_none, open_judge
from verl_drmas.rewards.qa import exact_match, f1, golds_of
from verl_drmas.workflows.base import Action, Conversation, Message, Outcome, Task, Team, Workflow
from verl_drmas.workflows.delegate_settings import DELEGATE, MAIN, VERL, DelegateSettings, SubSettings
from verl_drmas.workflows.errors import SessionFailed
from verl_drmas.workflows.registry import register_workflow
from verl_drmas.workflows.toolbox import open_tools
from verl_drmas.workflows.tools import Tool, ToolCall, ToolError, ToolOutage
from verl_drmas.workflows.turns import Kind, Turn, read_turn

MAIN_ROLE = (
    "You are in charge of answering a question. Plan how to get there, find out one thing after the other, and check "
    "that what you found fits together. In each turn either call tools, or finish with the answer, as short as it can "
    "be, inside <result></result>; never both in one turn."
)
SUB_ROLE = (
    "You carry out one task for a colleague who sees nothing of your work but its result. In each turn either call "
    "tools, or finish with what you found, complete enough to be used without you, inside <result></result>; never "
    "both in one turn. If the task can't be carried out, say so in the result."
)
LAST_TURN = "This is your last turn: give your result now."
ENDS = (*(kind for kind in get_args(Kind) if kind != "calls"), "last_turn")  # of a trajectory


@dataclass
class _Part:
    """What one kind of agent is given."""

    tools: dict[str, Tool]
    subs: dict[str, SubSettings]
    max_turns: int


@dataclass
class _Finished:
    """One trajectory, played to its end.

    Attributes:
        action: Its activation.
        result: What it gave; None if its format is broken.
        why: `result`, or what broke it.
    """

    action: Action
    result: str | None
    why: str


@register_workflow("delegate")
class Delegate(Workflow):
    """The main agent calls tools and delegates until it gives a result; every delegation is a trajectory of its own.

    A delegation starts a fresh context with the sub-agent's role, the task and what the caller adds to it; its result
    returns word for word as the call's observation. Calls of one turn run at the same time. A turn that neither calls
    nor gives a result, or does both, breaks the trajectory's format and ends it.
    """

    agents = (MAIN,)
    Settings = DelegateSettings

    def __init__(self, settings: Any = None, tools: dict[str, Tool] | None = None, judge: Judge | None = None):
        super().__init__(settings)
        self.agents = (MAIN, *self.settings.subs)
        self.aligned = tuple(self.settings.subs)
        self.awaited = [name for name, tool in self.settings.tools.items() if tool.get("kind") == VERL]
        own = {name: tool for name, tool in self.settings.tools.items() if name not in self.awaited}
        self.tools = open_tools(own) if tools is None else tools
        self.judge = judge or open_judge(self.settings.judge)
        self._equip()

    def bring(self, tools: Mapping[str, Tool]) -> None:
        missing = [name for name in self.awaited if name not in tools]
        if missing:
            raise ValueError(
                f"drmas.workflow.tools.{missing[0]}: kind is {VERL!r}, but verl's registry has "
                f"{', '.join(tools) or 'no tool'}; name it in actor_rollout_ref.rollout.multi_turn.tool_config_path or "
                "function_tool_path"
            )
        self.tools |= {name: tools[name] for name in self.awaited}
        self._equip()

    def _equip(self) -> None:
        """Hand the tools out."""
        subs = self.settings.subs
        self.parts = {
            MAIN: _Part(self._named(self.settings.main_tools), dict(subs), self.settings.max_turns),
            **{
                name: _Part(self._named(sub.tools), {k: subs[k] for k in sub.subs}, sub.max_turns)
                for name, sub in subs.items()
            },
        }

    def _named(self, names: Sequence[str]) -> dict[str, Tool]:
        return {name: self.tools[name] for name in names if name in self.tools}

    def preflight(self) -> str:
        found = [tool.check() for tool in self.tools.values()]
        if self.judge is not None:
            found.append(self.judge.check())
        return "; ".join(line for line in found if line)

    def report(self) -> dict[str, float]:
        numbers = {f"{name}/{key}": v for name, tool in self.tools.items() for key, v in tool.report().items()}
        judged = {} if self.judge is None else self.judge.report()
        return numbers | {f"judge/{key}": value for key, value in judged.items()}

    async def close(self) -> None:
        closing = [tool.close() for tool in self.tools.values()]
        await asyncio.gather(*closing, *([] if self.judge is None else [self.judge.close()]))

    async def run(self, task: Task, team: Team) -> Outcome:
        session = _Session(task, golds_of(task.answer))
        try:
            main = await self.play(MAIN, main_request(task.question), team, session, depth=0, path=MAIN)
            judged = dict(zip(session.judging, await asyncio.gather(*session.judging.values()), strict=True))
        finally:
            for judging in session.judging.values():
                judging.cancel()
            await asyncio.gather(*session.judging.values(), return_exceptions=True)
        style = self.settings.normalisation
        em = 0.0 if main.result is None else exact_match(main.result, session.golds, style=style)
        reward, main.action.reward_parts = main_reward(main.result is not None, em, self.settings.main)
        for number, sub in enumerate(session.subs):
            score = judged[number].score if number in judged else None
            outcome = outcome_for_subs(main.result is not None, em)
            _, sub.action.reward_parts = sub_reward(sub.result is not None, outcome, score, self.settings.sub)
        metrics = {
            "em": em,
            "f1": 0.0 if main.result is None else f1(main.result, session.golds, style=style),
            **session.numbers(main, list(judged.values()), self.settings.subs),
        }
        return Outcome(reward=reward, correct=em, answer=main.result, metrics=metrics)

    async def play(
        self, agent_id: str, messages: list[Message], team: Team, session: _Session, *, depth: int, path: str
    ) -> _Finished:
        """One trajectory of an agent, with everything it calls.

        Raises:
            SessionFailed: A tool gave no answer to a proper call (`tool`), or an agent can't be asked.
        """
        part = self.parts[agent_id]
        schemas = [tool.schema for tool in part.tools.values()]
        if self.may_delegate(part, depth):
            schemas.append(delegate_schema(part.subs))
        async with team[agent_id].converse(messages, schemas, path) as talk:
            for number in range(part.max_turns):
                turn = read_turn(await talk.turn())
                if turn.kind != "calls" or number + 1 == part.max_turns:
                    return self.end(talk.action, turn)
                await self.carry_out(turn, agent_id, talk, team, session, depth=depth, path=f"{path}/turn.{number}")
                if number + 2 == part.max_turns:
                    talk.observe(LAST_TURN)
        raise AssertionError("unreachable: max_turns is at least 1")

    def may_delegate(self, part: _Part, depth: int) -> bool:
        return bool(part.subs) and depth < self.settings.max_depth

    def end(self, action: Action, turn: Turn) -> _Finished:
        """A trajectory's end: its result, or what broke its format."""
        action.parsed = turn.result
        action.valid = turn.kind == "result"
        return _Finished(action, turn.result, "last_turn" if turn.kind == "calls" else turn.kind)

    async def carry_out(
        self, turn: Turn, agent_id: str, talk: Conversation, team: Team, session: _Session, *, depth: int, path: str
    ) -> None:
        """All calls of a turn at the same time; their texts are observed in the order of the calls.

        Raises:
            SessionFailed: One of them gave no answer; the others are waited for first.
        """
        most = self.settings.max_parallel
        session.counts["calls_beyond_limit"] += max(0, len(turn.calls) - most)
        done = await asyncio.gather(
            *(
                self.one_call(call, agent_id, team, session, depth=depth, path=f"{path}/call.{i}")
                for i, call in enumerate(turn.calls[:most])
            ),
            return_exceptions=True,
        )
        outages = [outcome for outcome in done if isinstance(outcome, ToolOutage)]
        if outages:  # before anything else that went wrong: what this agent lost is marked on it
            talk.action.fault = outages[0].tool
            raise SessionFailed("tool", str(outages[0])) from outages[0]
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        for call, text in zip(turn.calls, done, strict=False):
            talk.observe(str(text), role="tool", call=call)
        for call in turn.calls[most:]:
            talk.observe(f"Not carried out: at most {most} calls in one turn.", role="tool", call=call)

    async def one_call(
        self, call: ToolCall, agent_id: str, team: Team, session: _Session, *, depth: int, path: str
    ) -> str:
        """What the agent reads of one call; a wrong call reads what is wrong with it."""
        part = self.parts[agent_id]
        session.counts["calls"] += 1
        try:
            if call.name == DELEGATE and self.may_delegate(part, depth):
                return await self.delegate(call.arguments or {}, part, agent_id, team, session, depth=depth, path=path)
            if call.name not in part.tools:
                known = ", ".join([*part.tools, *([DELEGATE] if self.may_delegate(part, depth) else [])]) or "none"
                raise ToolError(f"There is no tool {call.name!r}; the tools are: {known}.")
            return await part.tools[call.name].call(call.arguments or {})
        except ToolError as error:
            session.counts["call_errors"] += 1
            return str(error)

    async def delegate(
        self,
        arguments: dict[str, Any],
        part: _Part,
        caller: str,
        team: Team,
        session: _Session,
        *,
        depth: int,
        path: str,
    ) -> str:
        """Let a sub-agent carry out a task; returns its result.

        Raises:
            ToolError: No such sub-agent, no task, or one of them is no text.
        """
        name, task, context = (arguments.get(key) for key in ("agent", "task", "context"))
        if name is None and len(part.subs) == 1:
            (name,) = part.subs
        if not isinstance(name, str) or name not in part.subs:
            raise ToolError(f"There is no agent {name!r} to delegate to; the agents are: {', '.join(part.subs)}.")
        if not isinstance(task, str) or not task.strip():
            raise ToolError("A delegation needs a task, as text.")
        if not isinstance(context, str | None):
            raise ToolError("The context of a delegation must be text.")
        plain = team[name].plain
        about = f"\n\nContext: {plain(context)}" if context and context.strip() else ""
        request = [{"role": "user", "content": f"{SUB_ROLE}\n\nTask: {plain(task)}{about}"}]
        session.counts[f"delegations/{name}"] += 1
        session.depth = max(session.depth, depth + 1)
        finished = await self.play(name, request, team, session, depth=depth + 1, path=f"{path}/{name}")
        session.subs.append(finished)
        if finished.result is None:
            return f"The agent {name} gave no result."
        if self.judge is not None:
            asked = JudgeRequest(
                question=session.task.question,
                subtask=task,
                context=context or "",
                result=finished.result,
                gold=session.golds,
                facts=tuple(golds_or_none(session.task.extra.get("facts"))),
            )
            session.judging[len(session.subs) - 1] = asyncio.create_task(self.judge.score(asked))
        return self.shown(finished.result, part.subs[name].result_tokens, team[caller].count_tokens, session)

    def shown(self, result: str, limit: int | None, count: Callable[[str], int], session: _Session) -> str:
        """A result within its budget: what doesn't fit is cut from its end, and counted."""
        size = count(result)
        if limit is None or size <= limit:
            return result
        low, high = 0, len(result)  # the most characters that fit, by bisection
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if count(f"{result[:middle]} [...]") <= limit else (low, middle - 1)
        session.counts.update(cut_results=1, cut_tokens=size - count(result[:low]))
        return f"{result[:low]} [...]"

    def reward(self, action: Action, outcome: Outcome) -> float:
        """The activation's own reward; the shared outcome is in it already."""
        return sum(action.reward_parts.values())

    def activations(self) -> dict[str, tuple[int, int]]:
        if self.settings.max_depth > 1:
            return {}
        most = (self.settings.max_turns - 1) * self.settings.max_parallel
        return {MAIN: (1, 1), **{name: (0, most) for name in self.settings.subs}}


def main_request(question: str) -> list[Message]:
    """What the main agent sees first."""
    return [{"role": "user", "content": f"{MAIN_ROLE}\n\nQuestion: {question}"}]


def delegate_schema(subs: dict[str, SubSettings]) -> dict[str, Any]:
    """The call that delegates, in OpenAI's form."""
    kinds = "; ".join(f"{name}: {sub.description}" for name, sub in subs.items())
    properties = {
        "agent": {"type": "string", "enum": list(subs), "description": f"Who carries it out. {kinds}."},
        "task": {"type": "string", "description": "What to do, complete in itself."},
        "context": {"type": "string", "description": "What the agent should know beside the task."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["agent", "task"]}
    description = "Give a task to an agent with tools of its own; its result comes back."
    return {"type": "function", "function": {"name": DELEGATE, "description": description, "parameters": parameters}}


class _Session:
    """One session's state.

    Attributes:
        subs: Delegations that came to an end, in that order.
        judging: Judgements that run, by number in `subs`.
        depth: How deep delegations went.
    """

    def __init__(self, task: Task, golds: list[str]):
        self.task, self.golds = task, golds
        self.subs: list[_Finished] = []
        self.judging: dict[int, asyncio.Task[Judgement]] = {}
        self.depth = 0
        self.counts: Counter[str] = Counter(
            {name: 0 for name in ("calls", "call_errors", "calls_beyond_limit", "cut_results", "cut_tokens")}
        )

    def numbers(self, main: _Finished, judged: list[Judgement], subs: dict[str, SubSettings]) -> dict[str, float]:
        """The session's numbers for the log."""
        numbers = {name: float(value) for name, value in self.counts.items()}
        numbers |= {f"delegations/{name}": float(self.counts[f"delegations/{name}"]) for name in subs}
        numbers["delegations"] = float(len(self.subs))
        numbers["depth"] = float(self.depth)
        numbers["main_format"] = float(main.result is not None)
        numbers["main_turns"] = float(main.action.turns)
        if self.subs:
            numbers["sub_format"] = fmean(float(sub.result is not None) for sub in self.subs)
        ends = Counter(finished.why for finished in (main, *self.subs))
        numbers |= {f"ends/{why}": float(ends[why]) for why in ENDS}  # those of 0 too, else a mean leaves them out
        if judged:
            scores = [judgement.score for judgement in judged if judgement.score is not None]
            numbers["judge_failed"] = float(len(judged) - len(scores))
            numbers["judge_seconds"] = fmean(judgement.seconds for judgement in judged)
            if scores:
                numbers["judge_score"] = fmean(scores)
        return numbers
