"""Tools as a workflow sees them: a name, a schema, and a coroutine that turns arguments into a text."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolError(ValueError):
    """A call that the agent made wrongly (unknown tool, missing argument, a page that isn't allowed). The agent reads
    the text as the call's result, and may do better.
    """


class ToolOutage(RuntimeError):
    """A proper call without an answer, through nobody's fault in the team: nothing may be scored by it.

    Args:
        tool: Which one.
        detail: What happened, for the log.
    """

    def __init__(self, tool: str, detail: str = ""):
        super().__init__(f"{tool}: {detail}" if detail else tool)
        self.tool, self.detail = tool, detail


@dataclass(frozen=True)
class ToolCall:
    """A call that an agent wrote.

    Attributes:
        name: The tool.
        arguments: By name; None where the text held no object of them.
        id: Where the model's format has one.
    """

    name: str
    arguments: dict[str, Any] | None
    id: str | None = None


class Tool(ABC):
    """One tool. An instance serves all sessions of a process, from its one event loop.

    Attributes:
        name: What agents call it by.
        description: What it does, for the agent.
        parameters: JSON schema of its arguments (`{"type": "object", "properties": ..., "required": [...]}`).
    """

    name: str
    description: str
    parameters: dict[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @abstractmethod
    async def call(self, arguments: dict[str, Any]) -> str:
        """Carry out one call.

        Raises:
            ToolError: The call is wrong.
            ToolOutage: There is no answer, after every attempt.
        """

    def check(self) -> str:
        """Look once, before a run starts, whether calls can work; returns a line on what was found.

        Raises:
            Exception: They can't; the message names setting, value and fix.
        """
        return self.name

    async def close(self) -> None:
        """Let go of connections."""
        return None

    def report(self) -> dict[str, float]:
        """Counts since the last report."""
        return {}


@dataclass(frozen=True)
class Spoken:
    """A turn taken apart.

    Attributes:
        content: What was said beside the calls.
        calls: The calls, in order.
        broken: True if a call was begun and not ended, or its text is no JSON object with a name.
    """

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    broken: bool = False


def hermes_calls(text: str) -> Spoken:
    """Calls in the form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    The rule of verl's `hermes` parser (verl/experimental/agent_loop/tool_parser.py), with broken calls told apart from
    none.
    """
    calls, broken = [], False
    text = text.rpartition("</think>")[2]  # what is thought isn't called
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):  # the last is json's, of a thousand brackets
            broken = True
            continue
        if not isinstance(name, str):
            broken = True
            continue
        calls.append(ToolCall(name, arguments if isinstance(arguments, dict) else None))
    content = _CALL.sub("", text)
    return Spoken(content.strip(), calls, broken or "<tool_call>" in content or "</tool_call>" in content)
