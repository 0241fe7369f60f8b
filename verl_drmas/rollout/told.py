"""What a reader of the rollout dumps is told of an activation beside its text: what was read from it, its calls, and
the passages that its query found. Cut short: the whole of it stands in the texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from verl_drmas.plain import encodable
from verl_drmas.workflows import Action
from verl_drmas.workflows.tools import ToolCall

MOST = 400  # characters of one value
MOST_ITEMS = 32  # calls or passages of one activation


def told(action: Action, calls: Sequence[tuple[int, ToolCall]] = ()) -> dict[str, Any]:
    """JSON values, and only those that there are.

    Args:
        action: The activation; `parsed` and `passages` are read.
        calls: Its calls of tools, each with the turn that it was made in.

    Returns:
        Any of `parsed` (text), `calls` (`turn`, `name` and `arguments` as JSON text, or null where there was no object)
        and `passages` (`title` and `text`).
    """
    made: dict[str, Any] = {}
    if action.parsed is not None:
        made["parsed"] = short(str(action.parsed))
    if calls:
        made["calls"] = [
            {"turn": turn, "name": short(call.name), "arguments": _arguments(call)} for turn, call in calls[:MOST_ITEMS]
        ]
    if action.passages:
        made["passages"] = [{"title": short(t), "text": short(x)} for t, x in action.passages[:MOST_ITEMS]]
    return made


def _arguments(call: ToolCall) -> str | None:
    if call.arguments is None:
        return None
    return short(json.dumps(call.arguments, ensure_ascii=False, default=str))


def short(text: str) -> str:
    """The text as a file can hold it, without what is beyond its room."""
    text = encodable(text[: MOST + 1])
    return text if len(text) <= MOST else f"{text[:MOST]} [...]"
