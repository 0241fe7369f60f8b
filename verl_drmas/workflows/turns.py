"""One turn of an agent with tools: it calls, or it gives its result, and never both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from verl_drmas.rewards.qa import extract_answer
from verl_drmas.workflows.base import Action
from verl_drmas.workflows.tools import Spoken, ToolCall

Kind = Literal[
    "calls",
    "result",
    "silent",  # nothing was said, for want of room in the context or of words
    "cut",  # the turn ended at its token limit before it had said anything whole
    "neither",  # no call and no result
    "both",  # a call and a result in one turn
    "broken_call",  # a call that never ends, or whose text is no object with a name and arguments
    "broken_result",  # a result tag that never closes, is empty or doubled
]


@dataclass(frozen=True)
class Turn:
    """A turn as the workflow reads it; only `calls` and `result` keep the format whole."""

    kind: Kind
    calls: list[ToolCall] = field(default_factory=list)
    result: str | None = None


def read_turn(action: Action) -> Turn:
    """Take the last turn of an activation apart. Thinking before it is free, and counts as nothing said."""
    if action.empty:
        return Turn("silent")
    spoken = action.spoken or Spoken(action.text)
    result, reason = extract_answer(spoken.content, tag="result", max_chars=100_000)
    if reason == "open_think":  # what is called in there isn't said
        return Turn("cut" if action.truncated else "neither")
    if spoken.broken or any(call.arguments is None for call in spoken.calls):
        return Turn("cut" if action.truncated else "broken_call")
    if spoken.calls:
        return Turn("calls", spoken.calls) if reason in ("no_tag", "empty") else Turn("both")
    if result is not None:
        return Turn("result", result=result)
    if action.truncated:
        return Turn("cut")
    return Turn("neither" if reason in ("no_tag", "empty") else "broken_result")
