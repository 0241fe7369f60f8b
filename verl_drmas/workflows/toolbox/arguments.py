"""What the bundled tools have in common: arguments looked at before use, and texts cut where the cut is seen."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from verl_drmas.workflows.tools import ToolError

GAP = " [...]"


def refuse_unknown(arguments: dict[str, Any], known: Collection[str]) -> None:
    """Refuse arguments that a tool doesn't have.

    Raises:
        ToolError: One is unknown; the message holds the nearest known one.
    """
    for name in arguments:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ToolError(f"unknown argument {str(name)!r}; {hint}")


def text_argument(arguments: dict[str, Any], name: str, *, characters: int) -> str:
    """An argument that must hold text, without white space around it.

    Args:
        arguments: Of the call.
        name: Which one.
        characters: Most it may have.

    Raises:
        ToolError: It is missing, no text, blank, too long or no proper Unicode.
    """
    if name not in arguments:
        raise ToolError(f"argument {name!r} is missing; write it")
    return proper_text(arguments[name], f"argument {name!r}", characters=characters)


def proper_text(value: Any, what: str, *, characters: int) -> str:
    """A value from an agent as text, without white space around it; see `text_argument`."""
    if not isinstance(value, str):
        raise ToolError(f"{what} is {type(value).__name__}; write it as text, in quotes")
    text = value.strip()
    if not text:
        raise ToolError(f"{what} is empty; write it")
    if len(text) > characters:
        raise ToolError(f"{what} has {len(text)} characters; write at most {characters}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone half of a surrogate pair, which JSON can hold
        raise ToolError(f"{what} is no proper Unicode text") from error
    return text


def clip(text: str, characters: int) -> tuple[str, int]:
    """A text's beginning, cut between words where one ends near the limit.

    Args:
        text: The text.
        characters: Most characters of the result, its mark included.

    Returns:
        The text with a mark where it was cut, and the number of characters left out (0 if it fits).
    """
    if len(text) <= characters:
        return text, 0
    room = max(characters - len(GAP), 0)
    kept = text[:room]
    if not text[room : room + 1].isspace():
        head, _, _ = kept.rpartition(" ")
        if len(head) >= room // 2:
            kept = head
    kept = kept.rstrip()
    return (kept + GAP)[:characters], len(text) - len(kept)


def check_positive(settings: Any, *names: str) -> None:
    """Look whether these settings are above 0.

    Raises:
        ValueError: One isn't.
    """
    for name in names:
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be above 0")
