"""Reading a verdict from a text, strictly: exactly one tag, with a known word."""

from __future__ import annotations

import re

_TAG = re.compile(r"<verdict>(.*?)</verdict>", re.IGNORECASE | re.DOTALL)
_OPEN = re.compile(r"</?verdict>", re.IGNORECASE)


def parse_verdict(text: str, *, words: tuple[str, ...]) -> str | None:
    """The one verdict of a text.

    Args:
        text: What the agent said.
        words: The verdicts that exist, lower case.

    Returns:
        The verdict, or None if it is missing, doubled, unclosed or unknown.
    """
    found = _TAG.findall(text)
    if len(found) != 1 or len(_OPEN.findall(text)) != 2:
        return None
    word = found[0].strip().lower()
    return word if word in words else None
