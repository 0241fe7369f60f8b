"""A back end with canned replies, for tests of workflows: milliseconds, no model, every call recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verl_drmas.workflows.base import Action, Agent, Conversation, Message, Team, message
from verl_drmas.workflows.errors import SessionFailed
from verl_drmas.workflows.tools import ToolCall, hermes_calls

Reply = str | Exception
Script = Iterable[Reply] | Callable[[list[Message]], Reply]


class ScriptedTeam(Team):
    """Serves each agent from its script.

    Args:
        scripts: Replies by agent: a sequence that is used up in order, or a function of the messages seen so far. A
            reply that is an exception is raised.

    Attributes:
        seen: (agent_id, messages) of every call, in call order.
    """

    def __init__(self, scripts: Mapping[str, Script]):
        self.actions: list[Action] = []
        self.seen: list[tuple[str, list[Message]]] = []
        self._agents = {name: _ScriptedAgent(self, name, script) for name, script in scripts.items()}

    def __getitem__(self, agent_id: str) -> Agent:
        return self._agents[agent_id]


class _ScriptedAgent(Agent):
    def __init__(self, team: ScriptedTeam, agent_id: str, script: Script):
        self.team, self.agent_id = team, agent_id
        self._script = script if callable(script) else iter(script)

    def reply(self, messages: list[Message]) -> str:
        self.team.seen.append((self.agent_id, [dict(m) for m in messages]))
        if callable(self._script):
            reply: Any = self._script(messages)
        else:
            reply = next(self._script, SessionFailed("script", f"no reply left for agent {self.agent_id!r}"))
        if isinstance(reply, Exception):
            raise reply
        return reply

    def converse(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), path: str = ""
    ) -> Conversation:
        nth = sum(a.agent_id == self.agent_id for a in self.team.actions)
        action = Action(agent_id=self.agent_id, nth=nth)
        self.team.actions.append(action)
        return _ScriptedConversation(self, action, [dict(m) for m in messages], bool(tools))


class _ScriptedConversation(Conversation):
    def __init__(self, agent: _ScriptedAgent, action: Action, messages: list[Message], calls: bool):
        self.agent, self.action, self.messages, self.calls = agent, action, messages, calls

    async def turn(self) -> Action:
        self.action.text = self.agent.reply(self.messages)
        self.action.turns += 1
        if self.calls:
            self.action.spoken = hermes_calls(self.action.text)
        self.messages.append({"role": "assistant", "content": self.action.text})
        return self.action

    def observe(self, text: str, role: str = "user", call: ToolCall | None = None) -> None:
        self.messages.append(message(text, role, call))
