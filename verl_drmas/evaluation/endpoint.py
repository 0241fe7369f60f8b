"""The back end that serves a workflow's agents from OpenAI-compatible endpoints: messages in, texts out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_drmas.evaluation.completions import Completions
from verl_drmas.rollout.seeds import call_seed
from verl_drmas.serving.client import Answered, ContextFull, Unanswered
from verl_drmas.workflows.base import Action, Agent, Conversation, Message, Task, Team, message
from verl_drmas.workflows.errors import PromptTooLong, SessionFailed
from verl_drmas.workflows.tools import Spoken, ToolCall, hermes_calls

LENGTHS = ("max_tokens", "max_completion_tokens")  # either name of the same bound


@dataclass(frozen=True)
class Sampling:
    """How an agent samples.

    Attributes:
        temperature: None: the server's own.
        top_p: None: the server's own.
        max_tokens: Most tokens of one turn; None: what the context leaves.
        seed: Hashed with data row, session and the call's place into each request; None: none is sent.
        more: Further fields of each request, such as `stop` or vLLM's `top_k`.
    """

    temperature: float | None = 1.0
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature:g}; it must be 0 or above")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p:g}; it must be above 0, and at most 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")


@dataclass(frozen=True)
class Call:
    """One LLM call that was answered.

    Attributes:
        agent_id: Who asked.
        model_id: Of the model that answered.
        prompt_tokens: It read; None: the server doesn't say.
        response_tokens: It sampled; None: the server doesn't say.
        seconds: Of the attempt that was answered.
        tries: Attempts, with that one.
    """

    agent_id: str
    model_id: str
    prompt_tokens: int | None
    response_tokens: int | None
    seconds: float
    tries: int


class EndpointTeam(Team):
    """The agents of one session. `calls` holds every call that was answered so far.

    Args:
        models: Served models by model id; they are shared by sessions, and limit the calls in flight.
        agents: The model of each agent.
        task: The session's task.
        sampling: How the agents sample.
        own: How some of them sample instead, by agent id.
    """

    def __init__(
        self,
        models: Mapping[str, Completions],
        agents: Mapping[str, str],
        task: Task,
        sampling: Sampling | None = None,
        own: Mapping[str, Sampling] | None = None,
    ):
        self.actions: list[Action] = []
        self.calls: list[Call] = []
        self.task = task
        default, own = sampling or Sampling(), own or {}
        self._agents = {
            name: EndpointAgent(self, name, model, models[model], own.get(name, default))
            for name, model in agents.items()
        }

    def __getitem__(self, agent_id: str) -> Agent:
        return self._agents[agent_id]


class EndpointAgent(Agent):
    """One agent of an `EndpointTeam`."""

    def __init__(self, team: EndpointTeam, agent_id: str, model_id: str, model: Completions, sampling: Sampling):
        self.team, self.agent_id, self.model_id, self.model, self.sampling = team, agent_id, model_id, model, sampling

    def converse(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), path: str = ""
    ) -> Conversation:
        nth = sum(a.agent_id == self.agent_id for a in self.team.actions)
        action = Action(agent_id=self.agent_id, nth=nth)
        self.team.actions.append(action)
        return EndpointConversation(self, action, messages, tools, path)


class EndpointConversation(Conversation):
    """One activation. What the agent said goes back to the server as the server gave it."""

    def __init__(
        self,
        agent: EndpointAgent,
        action: Action,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        path: str,
    ):
        self.agent, self.action = agent, action
        self.path = path or f"{action.agent_id}.{action.nth}"
        self.messages = [dict(m) for m in messages]
        self.tools = [dict(tool) for tool in tools]
        self.full = False  # the context has no room left: the agent says no more

    def observe(self, text: str, role: str = "user", call: ToolCall | None = None) -> None:
        self.messages.append(message(text, role, call))

    async def turn(self) -> Action:
        action = self.action
        if self.full:
            action.text, action.spoken, action.truncated = "", None, True
            return action
        try:
            answered = await self._ask()
        except ContextFull as error:
            if not action.turns:
                raise PromptTooLong(str(error)) from error
            self.full = True  # as in training, where an observation that leaves no room ends the row
            return await self.turn()
        except Unanswered as error:
            raise SessionFailed("server", str(error)) from error
        self._hear(answered)
        return action

    async def _ask(self) -> Answered[dict[str, Any]]:
        """One completion. Where the messages fit and the tokens that are asked for beside them don't, with what the
        context leaves: training's engines cut the length of a response so, and servers refuse.

        Raises:
            ContextFull: The messages alone don't fit.
            Unanswered: See `ChatClient.ask`.
        """
        request = self._request()
        try:
            return await self.agent.model.ask(request)
        except ContextFull as refused:
            unbounded = {name: value for name, value in request.items() if name not in LENGTHS}
            if len(unbounded) == len(request):
                raise
            answered = await self.agent.model.ask(unbounded)
            return replace(answered, tries=refused.tries + answered.tries)

    def _request(self) -> dict[str, Any]:
        own, task, served = self.agent.sampling, self.agent.team.task, self.agent.model.served
        body: dict[str, Any] = {"messages": self.messages, **served.extra_body, **own.more}
        for name in ("temperature", "top_p", "max_tokens"):
            if getattr(own, name) is not None:
                body[name] = getattr(own, name)
        if own.seed is not None:
            body["seed"] = call_seed(
                own.seed,
                index=task.index,
                session=task.session,
                step=task.step,
                path=f"{self.path}/turn.{self.action.turns}",
                validate=task.validate,
            )
        if self.tools:
            body |= {"tools": self.tools, "tool_choice": "auto" if served.calls == "server" else "none"}
        return body

    def _hear(self, answered: Answered[dict[str, Any]]) -> None:
        """Take an answer over into action, messages and calls."""
        action, agent, answer = self.action, self.agent, answered.value
        choice = answer["choices"][0]
        said = choice["message"]
        content, raw = said.get("content") or "", said.get("tool_calls") or []
        action.turns += 1
        action.truncated = choice.get("finish_reason") == "length"
        if self.tools:
            action.spoken = server_calls(content, raw) if raw else hermes_calls(content)
        action.text = content + "".join(f"\n{_written(call)}" for call in raw) if raw else content
        self.messages.append({"role": "assistant", "content": content, **({"tool_calls": raw} if raw else {})})
        read, sampled = (_tokens(answer.get("usage"), name) for name in ("prompt_tokens", "completion_tokens"))
        agent.team.calls.append(
            Call(agent.agent_id, agent.model_id, read, sampled, answered.seconds, answered.tries),
        )
        if action.turns == 1:
            action.prompt_tokens = read
        known = action.response_tokens if action.turns > 1 else 0
        action.response_tokens = None if sampled is None or known is None else known + sampled


def _tokens(usage: Any, name: str) -> int | None:
    """A count of an answer's `usage`; None where the server gives none."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count >= 0 else None


def server_calls(content: str, raw: Sequence[Any]) -> Spoken:
    """A turn whose calls the server has read.

    Args:
        content: What was said beside them.
        raw: `tool_calls` of the message.
    """
    calls, broken = [], False
    for entry in raw:
        function = entry.get("function") if isinstance(entry, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            broken = True
            continue
        calls.append(ToolCall(name, _arguments(function.get("arguments")), entry.get("id")))
    return Spoken(content.strip(), calls, broken)


def _arguments(given: Any) -> dict[str, Any] | None:
    """The arguments, which most servers send as JSON in a string and some as an object; none are an empty object."""
    if given in (None, ""):
        return {}
    try:
        read = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _written(entry: Any) -> str:
    """A call that the server has read, written as text again, so that a turn of calls alone isn't silence."""
    function = entry.get("function") if isinstance(entry, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = _arguments(function.get("arguments"))
    call = {"name": function.get("name"), "arguments": function.get("arguments") if arguments is None else arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
