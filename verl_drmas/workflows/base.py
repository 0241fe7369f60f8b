"""The contract between a workflow and the back end that serves its agents.

A workflow is the control flow of a team: which agent is asked what, in which order. It sees messages and texts. The
back end behind `Team` turns them into tokens: verl's engine in training, an OpenAI-compatible endpoint in evaluation,
canned replies in tests (`workflows/scripted.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any, ClassVar

from verl_drmas.workflows.tools import Spoken, Tool, ToolCall

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One attempt at one data row.

    Attributes:
        question: Text of the last user message of the data row. Never cut when a prompt is shortened.
        answer: The gold (`reward_model.ground_truth`), or None where the data has none.
        messages: The data row's own chat messages (`prompt`).
        data_source: Name of the data set the row is from.
        index: The row's `extra_info.index`; seeds are hashed from it.
        session: Which of the `rollout.n` attempts this is, from 0.
        step: Global training step.
        validate: True in validation.
        extra: The row's remaining fields (`extra_info` and others).
    """

    question: str
    answer: Any = None
    messages: tuple[Message, ...] = ()
    data_source: str = "unknown"
    index: int = 0
    session: int = 0
    step: int = 0
    validate: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Action:
    """What an agent did in one activation. The workflow fills `parsed`, `valid` and `reward_parts`.

    Attributes:
        agent_id: The agent that acted.
        nth: The agent's n-th activation in this session, from 0.
        text: Text of the last turn, special tokens removed.
        parsed: What the workflow read from the text (an answer, a verdict).
        valid: False costs the agent its `invalid_penalty`.
        reward_parts: The activation's own reward terms by name, beside the shared outcome.
        turns: LLM calls made in this activation.
        prompt_tokens: Length of the first prompt in tokens; None where the back end doesn't know.
        response_tokens: Sampled tokens over all turns; None where the back end doesn't know.
        truncated: True if the last turn ended at its token limit.
        fault: What outside the team kept the action from having its effect (`retrieval`); None: nothing.
        spoken: The last turn taken apart into content and tool calls, where the activation was opened with tools.
        passages: Title and text of what the activation's query found, for the rollout dumps; what agents read of them
            is the workflow's matter.
    """

    agent_id: str
    nth: int = 0
    text: str = ""
    parsed: Any = None
    valid: bool = True
    reward_parts: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    truncated: bool = False
    fault: str | None = None
    spoken: Spoken | None = None
    passages: list[tuple[str, str]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """True if nothing but white space (or nothing at all) was sampled."""
        return not self.text.strip()


@dataclass
class Outcome:
    """How a session ended.

    Attributes:
        reward: The shared outcome reward of the session.
        correct: 1.0 or 0.0 where the task has a right answer; what avg@k and pass@k count. None: `reward` is counted.
        answer: The team's final answer, for logs.
        metrics: Numbers of this session; averaged over sessions into `drmas/workflow/<name>`. A name that is absent in
            a session is left out of the mean, not counted as 0.
    """

    reward: float
    correct: float | None = None
    answer: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def message(text: str, role: str, call: ToolCall | None = None) -> Message:
    """A chat message; the result of a call names it, which some chat templates ask for."""
    named = {"name": call.name} if call is not None else {}
    known = {"tool_call_id": call.id} if call is not None and call.id is not None else {}
    return {"role": role, "content": text, **named, **known}


class Conversation(ABC):
    """One activation with one or more turns: `async with agent.converse(messages) as c: await c.turn();
    c.observe(...)`.
    """

    action: Action

    @abstractmethod
    async def turn(self) -> Action:
        """Let the agent speak once and return the activation's action, brought up to date.

        Raises:
            SessionFailed: The call could not be answered.
        """

    @abstractmethod
    def observe(self, text: str, role: str = "user", call: ToolCall | None = None) -> None:
        """Append what the agent sees before its next turn. Its tokens are masked in training.

        Args:
            text: What it sees.
            role: Of the message; `tool` for the result of a call.
            call: The call that the text is the result of.
        """

    async def __aenter__(self) -> Conversation:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


class Agent(ABC):
    """A team member as the workflow sees it."""

    agent_id: str
    prompt_length: int | None = None  # most tokens of a first prompt; None where the back end sets no limit

    @abstractmethod
    def converse(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), path: str = ""
    ) -> Conversation:
        """Open an activation with several turns.

        Args:
            messages: What the agent sees first.
            tools: Schemas (`Tool.schema`) of what it may call; the model's chat template says them in its own way.
            path: The activation's place in the workflow, which the seeds of its requests are hashed from; needed where
                agents run at the same time and start in no fixed order. Empty: the agent and its number.
        """

    def count_tokens(self, text: str) -> int:
        """Length of a text in this agent's tokens; a back end without its tokenizer estimates four characters each."""
        return -(-len(text) // 4)

    def plain(self, text: str) -> str:
        """A text from outside without what the agent's chat template would take for its own marks. `observe` does it by
        itself; a workflow that puts such a text into a first message does it there.
        """
        return text

    async def act(self, messages: Sequence[Message]) -> Action:
        """A one-turn activation.

        Raises:
            SessionFailed: The call could not be answered.
        """
        async with self.converse(messages) as conversation:
            return await conversation.turn()


class Team(ABC):
    """The agents of one session, by name. `actions` holds every activation so far, in the order they began."""

    actions: list[Action]

    @abstractmethod
    def __getitem__(self, agent_id: str) -> Agent:
        """Raises KeyError for an agent the workflow doesn't declare."""


class Workflow(ABC):
    """Base class of workflows.

    A subclass names its agents and implements `run`. Settings of the `drmas.workflow` section (all but `name`) arrive
    as the subclass's `Settings` dataclass; unknown ones are refused before the run starts.
    """

    agents: tuple[str, ...] = ()  # an instance may have others, where they follow from its settings
    aligned: tuple[str, ...] = ()  # sub-agents, whose trajectories M-GRPO aligns over sessions
    needs_answer: ClassVar[bool] = True  # refuse data rows without a gold before the run starts
    requires: ClassVar[tuple[str, ...]] = ()  # modules that must be installed, also checked before the run starts
    extra: ClassVar[str] = ""  # of verl-drmas that brings them

    @dataclass
    class Settings:
        """No settings."""

    def __init__(self, settings: Any = None):
        self.settings = settings if settings is not None else self.Settings()

    @abstractmethod
    async def run(self, task: Task, team: Team) -> Outcome:
        """Play one session.

        Raises:
            SessionFailed: The session has no outcome; it is counted and left out of training.
        """

    def preflight(self) -> str:
        """Look whether what the workflow needs beside its agents is there, once before a run starts.

        Returns:
            One line on what was found; empty if nothing is needed.

        Raises:
            Exception: It isn't; the message names setting, value and fix.
        """
        return ""

    def bring(self, tools: Mapping[str, Tool]) -> None:
        """Take over tools that only the back end knows, such as those of verl's registry.

        Raises:
            ValueError: One that the workflow needs is not among them.
        """
        return None

    def report(self) -> dict[str, float]:
        """Counts since the last report that belong to no session, such as a tool's retries; logged as
        `drmas/tools/<name>`.
        """
        return {}

    async def close(self) -> None:
        """Let go of the running event loop's connections; a later session opens new ones."""
        return None

    def reward(self, action: Action, outcome: Outcome) -> float:
        """Reward of one activation: the shared outcome plus the activation's own parts."""
        return outcome.reward + sum(action.reward_parts.values())

    @classmethod
    def summarise(cls, sessions: Sequence[dict[str, float]]) -> dict[str, float]:
        """Means of the sessions' metrics, each over the sessions that have it."""
        names = sorted({name for session in sessions for name in session})
        return {name: fmean(s[name] for s in sessions if name in s) for name in names}

    def activations(self) -> dict[str, tuple[int, int]]:
        """Fewest and most activations of each agent in a session; empty where the workflow can't tell."""
        return {}

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Names of the settings this workflow takes."""
        return tuple(f.name for f in fields(cls.Settings))
