"""What the workflow `delegate` can be told: its sub-agents, tools, bounds, judge and weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from verl_drmas.rewards.delegation import MainWeights, SubWeights
from verl_drmas.rewards.judge import JudgeSettings

MAIN = "main"
DELEGATE = "delegate"
VERL = "verl"  # the kind of tools that verl's registry has


@dataclass
class SubSettings:
    """One kind of sub-agent.

    Attributes:
        description: What it is good for, told to whoever may delegate to it.
        tools: Names of `tools` that it may call.
        subs: Sub-agents that it may delegate to, while `max_depth` allows.
        max_turns: Most turns of one trajectory.
        result_tokens: Most tokens of its result in the other's context; the rest is cut and counted. None: no limit.
    """

    description: str = "carries out a task"
    tools: list[str] = field(default_factory=list)
    subs: list[str] = field(default_factory=list)
    max_turns: int = 6
    result_tokens: int | None = 512

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        check_turns(self.max_turns, bool(self.tools or self.subs))
        if self.result_tokens is not None and self.result_tokens < 1:
            raise ValueError(f"result_tokens is {self.result_tokens}; it must be at least 1, or null for no limit")


@dataclass
class DelegateSettings:
    """Settings of `drmas.workflow`.

    Attributes:
        subs: Kinds of sub-agents by agent id; none for a single agent with all tools.
        tools: The tools by name, see `workflows/toolbox`; `{kind: verl}` takes the one of that name from verl's
            registry.
        main_tools: Names of `tools` that the main agent may call itself.
        max_turns: Most turns of the main agent.
        max_parallel: Most calls of one turn; more are not carried out, and the agent is told.
        max_depth: How deep delegations nest; 1 is the main agent's alone.
        judge: Who says how well a subtask was carried out, see `rewards/judge.py`.
        main: Weights of the main agent's reward.
        sub: Weights of the sub-agents' reward.
        normalisation: How answers are compared, see `rewards/qa.py`.
    """

    subs: dict[str, SubSettings] = field(default_factory=dict)
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    main_tools: list[str] = field(default_factory=list)
    max_turns: int = 8
    max_parallel: int = 4
    max_depth: int = 1
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    main: MainWeights = field(default_factory=MainWeights)
    sub: SubWeights = field(default_factory=SubWeights)
    normalisation: Literal["squad", "wide"] = "squad"

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        for name, cls in {"judge": JudgeSettings, "main": MainWeights, "sub": SubWeights}.items():
            if not isinstance(getattr(self, name), cls):
                setattr(self, name, cls(**getattr(self, name)))
        self.subs = {k: v if isinstance(v, SubSettings) else SubSettings(**v) for k, v in self.subs.items()}
        check_turns(self.max_turns, bool(self.main_tools or self.subs))
        for name, least in (("max_parallel", 1), ("max_depth", 1 if self.subs else 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        self._check_tools()
        self._check_subs()

    def _check_tools(self) -> None:
        if DELEGATE in self.tools:
            raise ValueError(f"tools.{DELEGATE}: is the name of the call that delegates; choose another")
        for name, own in self.tools.items():
            if own.get("kind") == VERL and len(own) > 1:
                other = next(key for key in own if key != "kind")
                raise ValueError(
                    f"tools.{name}.{other}: a tool of kind {VERL} is set in verl's own files; leave it out"
                )
        owners = {"main_tools": self.main_tools} | {f"subs.{k}.tools": v.tools for k, v in self.subs.items()}
        for owner, names in owners.items():
            for name in names:
                if name not in self.tools:
                    raise ValueError(f"{owner}: {name!r} is not in tools ({', '.join(self.tools) or 'none'}); add it")

    def _check_subs(self) -> None:
        if MAIN in self.subs:
            raise ValueError(f"subs.{MAIN}: is the main agent's name; choose another")
        for name, sub in self.subs.items():
            for other in sub.subs:
                if other not in self.subs:
                    raise ValueError(f"subs.{name}.subs: {other!r} is not in subs ({', '.join(self.subs)}); add it")


def check_turns(max_turns: int, calls: bool) -> None:
    """Refuse a number of turns in which nothing can be said, or no call's result can be read."""
    if max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
    if calls and max_turns < 2:
        raise ValueError(
            "max_turns is 1, and the agent may call: it needs a turn more to read what a call gives, set 2"
        )
