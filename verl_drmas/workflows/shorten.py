"""Cutting an over-long prompt: the middle of the longest text goes, the question stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl_drmas.workflows.errors import PromptTooLong

GAP = "\n[...]\n"


def shorten(
    messages: Sequence[dict[str, Any]], *, limit: int, count: Callable[[list[dict[str, Any]]], int], keep: str
) -> tuple[list[dict[str, Any]], int]:
    """Cut text out of messages until they fit.

    The longest stretch of text that isn't `keep` loses its middle, then the next longest, until the prompt fits; head
    and tail stay, because instructions stand first and the newest turn last.

    Args:
        messages: Chat messages with string contents; left untouched.
        limit: Largest allowed prompt, in tokens.
        count: Length in tokens of rendered messages.
        keep: Text that must survive whole (the question) where it stands first; an agent's copies of it may go. Empty
            to protect nothing.

    Returns:
        The messages and the number of characters cut (0 if they fitted).

    Raises:
        PromptTooLong: They don't fit with everything cut that may be cut.
    """
    messages = [dict(m) for m in messages]
    size = count(messages)
    if size <= limit:
        return messages, 0
    characters = 0
    exhausted: set[int] = set()
    while size > limit:
        stretches = [
            (end - start, number, which, start, end)
            for number, (which, start, end) in enumerate(_stretches(messages, keep))
            if number not in exhausted and end - start > len(GAP)
        ]
        if not stretches:
            raise PromptTooLong(f"{size} tokens with everything but the question cut; the limit is {limit}")
        _, number, which, start, end = max(stretches)
        content = messages[which]["content"]
        # Smallest cut that fits, by bisection; the whole stretch if none does. Token counts are close to monotone in
        # the characters kept, so bisection lands within a token or two of the best cut.
        low, high = 1, end - start
        while low < high:
            cut = (low + high) // 2
            messages[which]["content"] = _cut(content, start, end, cut)
            low, high = (low, cut) if count(messages) <= limit else (cut + 1, high)
        messages[which]["content"] = _cut(content, start, end, low)
        exhausted.add(number)
        characters += low
        size = count(messages)
    return messages, characters


def _cut(content: str, start: int, end: int, characters: int) -> str:
    kept = end - start - characters
    head = start + (kept + 1) // 2
    return content[:head] + GAP + content[head + characters :]


def _stretches(messages: list[dict[str, Any]], keep: str) -> list[tuple[int, int, int]]:
    """(message, start, end) of every run of text outside the protected question, in the same order after any cut."""
    found = []
    for i, message in enumerate(messages):
        content, start = message["content"], 0
        if keep and (at := content.find(keep)) >= 0:
            found.append((i, start, at))
            start, keep = at + len(keep), ""
        found.append((i, start, len(content)))
    return found
