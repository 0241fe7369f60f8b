"""The training back end of a workflow: an agent's messages become tokens for verl's engine, and its activations
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.profiler import simple_timer
from verl.workers.rollout.llm_server import LLMServerClient

from verl_drmas.config import DrmasConfig
from verl_drmas.rollout.activation import Activation
from verl_drmas.rollout.marks import plain
from verl_drmas.rollout.seeds import call_seed
from verl_drmas.rollout.told import told
from verl_drmas.rollout.verl_tools import verl_calls, verl_schemas
from verl_drmas.workflows import Action, Agent, Conversation, Outcome, SessionFailed, Task, Team, Workflow
from verl_drmas.workflows.base import Message, message
from verl_drmas.workflows.shorten import shorten
from verl_drmas.workflows.tools import ToolCall

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
)  # fmt: skip
WEIGHT_VERSIONS = ("global_steps", "min_global_steps", "max_global_steps")
VALIDATION_FIELDS = ("temperature", "top_p", "top_k")  # rollout.val_kwargs decides these in validation


@dataclass(frozen=True)
class Engine:
    """One model as the rollout sees it: its servers, and verl's token helpers with its tokenizer and template.

    Attributes:
        model_id: The model.
        client: Its servers.
        loop: verl's helpers, with the model's tokenizer and lengths.
        sampling: What the model samples differently from the run.
        row_temperature: Whether its rows must carry their own temperature to training.
        remote: Another job serves it, and must know which step a call is of.
    """

    model_id: str
    client: LLMServerClient
    loop: AgentLoopBase
    sampling: dict[str, Any] = field(default_factory=dict)
    row_temperature: bool = False
    remote: bool = False

    @property
    def tokenizer(self) -> Any:
        return self.loop.tokenizer

    @cached_property
    def parser(self) -> ToolParser:
        """verl's parser of the model's own format of calls (`rollout.multi_turn.format`)."""
        return ToolParser.get_tool_parser(self.loop.rollout_config.multi_turn.format, self.tokenizer)


class TrainingTeam(Team):
    """The agents of one session.

    Args:
        config: The `drmas` section.
        engines: By model id.
        task: The session's task.
        sampling: verl's sampling parameters of this rollout.
        agents: Agents the workflow declares.
        dumped: Whether the rows are dumped, and so bear what `told.py` tells of them.
    """

    def __init__(
        self,
        config: DrmasConfig,
        engines: dict[str, Engine],
        task: Task,
        sampling: dict[str, Any],
        agents: Sequence[str],
        *,
        dumped: bool = False,
    ):
        self.dumped = dumped
        self.config, self.engines, self.task, self.sampling = config, engines, task, sampling
        self.actions: list[Action] = []
        self.conversations: list[TrainingConversation] = []
        self._agents = {name: TrainingAgent(self, name) for name in agents}

    def __getitem__(self, agent_id: str) -> Agent:
        return self._agents[agent_id]

    def rows(self, workflow: Workflow, outcome: Outcome) -> list[Activation]:
        """The session's rows; those without a sampled token are left out.

        In the order in which the activations began, or, where the workflow names their places, in the order of those:
        what an activation called stands before it, so that a main agent's row is the last one, which verl takes a
        session's score from.

        Raises:
            SessionFailed: No activation sampled anything.
        """
        spoken = self._spoken()
        if not spoken:
            raise SessionFailed("empty", "no agent of the session sampled a token")
        correct = outcome.reward if outcome.correct is None else outcome.correct
        metrics = {
            **outcome.metrics,
            "outcome": outcome.reward,
            "empty_outputs": float(sum(a.empty for a in self.actions)),
        }
        # reward_extra_info must hold the same keys on every row, and verl's validation reads it from the last row
        # alone.
        extra = {"acc": correct, "outcome": outcome.reward, **{f"session/{k}": v for k, v in metrics.items()}}
        rows = []
        for order, conversation in enumerate(spoken):
            row = conversation.row(workflow.reward(conversation.action, outcome))
            row.extra_fields |= {"activation": order, "reward_extra_info": extra}
            row.extra_fields["session_metrics"] = metrics if order == 0 else None
            rows.append(row)
        rows[-1].reward_score = rows[-1].own_reward  # set, so verl's own reward loop isn't asked
        return rows

    def _spoken(self) -> list[TrainingConversation]:
        spoken = [c for c in self.conversations if any(c.mask)]
        if any("/" in c.path for c in spoken):
            spoken.sort(key=lambda c: place_of(c.path))
        return spoken

    def masked_rows(self, failure: SessionFailed) -> list[Activation]:
        """What was said before the session failed, marked so that nothing trains on it; it has no reward, and its 0
        enters no statistics and no metric.
        """
        rows = [conversation.row(0.0) for conversation in self._spoken()]
        for order, row in enumerate(rows):
            row.extra_fields |= {"activation": order, "reward_extra_info": {}, "session_metrics": None}
            row.extra_fields["failed"] = failure.reason
        if rows:
            rows[-1].reward_score = rows[-1].own_reward
        return rows


def place_of(path: str) -> list[tuple[int, str, int]]:
    """Sort key of a place (`main/turn.10/call.0/finder`): numbers as numbers, and children before their parent."""
    key = []
    for part in path.split("/"):
        name, _, number = part.rpartition(".")
        key.append((0, name, int(number)) if name and number.isdecimal() else (0, part, 0))
    return [*key, (1, "", 0)]


class TrainingAgent(Agent):
    """One agent of a `TrainingTeam`."""

    def __init__(self, team: TrainingTeam, agent_id: str):
        self.team, self.agent_id = team, agent_id
        self.config = team.config.agent(agent_id)
        self.engine = team.engines[self.config.model]
        self.prompt_length = self.config.prompt_length or self.engine.loop.rollout_config.prompt_length

    def plain(self, text: str) -> str:
        return plain(text, self.engine.tokenizer)

    def count_tokens(self, text: str) -> int:
        return len(self.engine.tokenizer.encode(text, add_special_tokens=False))

    def converse(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), path: str = ""
    ) -> Conversation:
        nth = sum(a.agent_id == self.agent_id for a in self.team.actions)
        conversation = TrainingConversation(self, Action(agent_id=self.agent_id, nth=nth), messages, tools, path)
        self.team.actions.append(conversation.action)
        self.team.conversations.append(conversation)
        return conversation


class TrainingConversation(Conversation):
    """One activation: the prompt, then what was sampled (mask 1) and what was observed (mask 0).

    Turns are joined with verl's Continuous Token helpers, so that nothing sampled is ever rendered or tokenised again.
    """

    def __init__(
        self,
        agent: TrainingAgent,
        action: Action,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        path: str = "",
    ):
        self.agent, self.team, self.action = agent, agent.team, action
        self.path = path or f"{action.agent_id}.{action.nth}"
        self.tools = [dict(tool) for tool in tools] or None
        self.parsed_tools = verl_schemas(tools)
        self.messages = [dict(m) for m in messages]
        self.unseen: list[Message] = []
        self.prompt_ids: list[int] = []
        self.tokens: list[int] = []  # prompt and everything after it
        self.mask: list[int] = []
        self.full = False  # an observation left no room: the agent says no more in this row
        self.logprobs: list[float] | None = None
        self.extra: dict[str, Any] = {}
        self.metrics = {"num_preempted": -1}
        self.counts = {"cut_characters": 0.0}
        self.calls: list[tuple[int, ToolCall]] = []  # with the turn that they were made in

    def observe(self, text: str, role: str = "user", call: ToolCall | None = None) -> None:
        self.unseen.append(message(self.agent.plain(text), role, call))

    async def turn(self) -> Action:
        action, config = self.action, self.agent.config
        await self._extend()
        length = config.response_length or self.agent.engine.loop.rollout_config.response_length
        room = length - len(self.mask)
        if self.full or room < 1:
            action.text, action.truncated = "", True
            return action
        limit = min(room, config.turn_length or room)
        with simple_timer("generate_sequences", self.metrics):
            output = await self.agent.engine.client.generate(
                uuid4().hex, prompt_ids=self.tokens, sampling_params=self._sampling(limit), **self._of_step()
            )
        sampled = output.token_ids[:room]
        logprobs = output.log_probs[:room] if output.log_probs else None
        if logprobs is not None and self.logprobs is None:
            self.logprobs = [0.0] * len(self.mask)
        merged, self.mask, self.logprobs = await self.agent.engine.loop.ct_merge_assistant_token(
            self.tokens, sampled, self.mask, self.logprobs, assistant_logprobs=logprobs
        )
        self.tokens = merged.token_ids
        self._note(output)
        action.turns += 1
        action.text = self.agent.engine.tokenizer.decode(sampled, skip_special_tokens=True)
        if self.tools:
            action.spoken = await verl_calls(self.agent.engine.parser, sampled, self.parsed_tools)
            self.calls += [(action.turns - 1, call) for call in action.spoken.calls]
        action.prompt_tokens = len(self.prompt_ids)
        action.response_tokens = (action.response_tokens or 0) + len(sampled)
        ended = bool(sampled) and sampled[-1] == self.agent.engine.tokenizer.eos_token_id
        action.truncated = len(sampled) >= limit and not ended
        self.messages.append({"role": "assistant", "content": action.text})
        return action

    async def _extend(self) -> None:
        """Render the prompt on the first turn; merge what was observed on later ones."""
        loop, config = self.agent.engine.loop, self.agent.config
        if not self.tokens:
            self.messages += self.unseen
            self.unseen = []
            limit = self.agent.prompt_length
            build = partial(loop.continuous_token_builder.build_initial_tokens, tools=self.tools)
            ids = await loop.loop.run_in_executor(None, build, self.messages)
            if len(ids) > limit:
                # verl would keep the last `limit` tokens, which drops the question or the role.
                def cut() -> tuple[list[Message], int]:
                    return shorten(
                        self.messages, limit=limit, count=lambda m: len(build(m)), keep=self.team.task.question
                    )

                self.messages, characters = await loop.loop.run_in_executor(None, cut)
                self.counts["cut_characters"] += characters
                ids = await loop.loop.run_in_executor(None, build, self.messages)
            self.prompt_ids, self.tokens = list(ids), list(ids)
        elif self.unseen:
            updated = self.messages + self.unseen
            merged, mask, logprobs = await loop.ct_merge_context_msg(
                self.messages, updated, self.tokens, self.mask, self.logprobs, tools=self.tools
            )
            length = config.response_length or loop.rollout_config.response_length
            if len(mask) >= length:  # the observation leaves no room to answer; the row ends with what was sampled
                self.full = True
            else:
                self.tokens, self.mask, self.logprobs = merged.token_ids, mask, logprobs
                self.messages = updated
            self.unseen = []

    def _sampling(self, max_tokens: int) -> dict[str, Any]:
        own, task = self.agent.config.sampling, self.team.task
        fixed = VALIDATION_FIELDS if task.validate else ()
        overrides = {k: v for k in SAMPLING_FIELDS if k not in fixed and (v := getattr(own, k)) is not None}
        model = {} if task.validate else self.agent.engine.sampling
        params = {**self.team.sampling, **model, **overrides, "max_tokens": max_tokens}
        if self.tools and self.agent.engine.parser.stop_token_ids:
            params["stop_token_ids"] = self.agent.engine.parser.stop_token_ids  # some models don't end after a call
        if self.team.config.request_seed is not None:
            params["seed"] = call_seed(
                self.team.config.request_seed,
                index=task.index,
                session=task.session,
                step=task.step,
                path=f"{self.path}/turn.{self.action.turns}",
                validate=task.validate,
            )
        return params

    def _of_step(self) -> dict[str, Any]:
        task = self.team.task
        return {"step": task.step, "validate": task.validate} if self.agent.engine.remote else {}

    def _note(self, output: Any) -> None:
        """Keep the weight versions an activation spans, and verl's other notes of the engine."""
        fields = dict(output.extra_fields)
        for name in WEIGHT_VERSIONS:
            if fields.get(name) is None:  # a served model has no version; verl's metrics take whole numbers
                fields[name] = max(self.team.task.step - 1, 0)
        first = self.extra.get("min_global_steps", fields.get("min_global_steps"))
        self.extra |= fields
        self.extra["min_global_steps"] = first
        if output.num_preempted is not None:
            self.metrics["num_preempted"] = max(0, self.metrics["num_preempted"]) + output.num_preempted

    def row(self, reward: float) -> Activation:
        """The activation as a training row.

        A mask ends with the last sampled token: what was observed after it is nobody's answer.
        """
        action, config = self.action, self.agent.config
        end = len(self.mask) - self.mask[::-1].index(1)
        response = self.tokens[len(self.tokens) - len(self.mask) :][:end]
        row = Activation(
            prompt_ids=self.tokens[: len(self.tokens) - len(self.mask)],
            response_ids=response,
            response_mask=self.mask[:end],
            response_logprobs=self.logprobs[:end] if self.logprobs is not None else None,
            num_turns=2 * action.turns,
            metrics=AgentLoopMetrics(**self.metrics),
            own_reward=float(reward),
            extra_fields={
                **self.extra,
                "turn_scores": [],
                "tool_rewards": [],
                "agent_id": action.agent_id,
                "model_id": config.model,
                "valid": bool(action.valid),
                "path": self.path,
                "fault": action.fault,
                "reward_parts": {k: float(v) for k, v in action.reward_parts.items()},
                **({"told": told(action, self.calls)} if self.team.dumped else {}),
                "counts": {**self.counts, "turns": float(action.turns), "truncated": float(action.truncated)},
            },
        )
        engine = self.agent.engine
        if engine.row_temperature or engine.remote:
            temperature = float(self._sampling(1)["temperature"])
            if engine.row_temperature:
                row.row_temperature = temperature
            if engine.remote:  # the job that trains on it decides whether it needs to know
                row.extra_fields["temperature"] = temperature
        return row
