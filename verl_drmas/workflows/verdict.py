"""Reading a verdict from a text, strictly: exactly one tag, with a known word. And how often verdicts are right."""

from __future__ import annotations

import re

from verl_drmas.rewards.thinking import after_thinking

_TAG = re.compile(r"<verdict>(.*?)</verdict>", re.IGNORECASE | re.DOTALL)
_OPEN = re.compile(r"</?verdict>", re.IGNORECASE)


def parse_verdict(text: str, *, words: tuple[str, ...]) -> str | None:
    """The one verdict of a text.

    Args:
        text: What the agent said; only what follows its thinking counts.
        words: The verdicts that exist, lower case.

    Returns:
        The verdict, or None if it is missing, doubled, unclosed or unknown.
    """
    spoken = after_thinking(text) or ""
    found = _TAG.findall(spoken)
    if len(found) != 1 or len(_OPEN.findall(spoken)) != 2:
        return None
    word = found[0].strip().lower()
    return word if word in words else None


def with_balanced_accuracy(numbers: dict[str, float]) -> dict[str, float]:
    """Adds `verifier_balanced_accuracy`, the mean over right and wrong proposals, where both occurred.

    A verifier with one word for everything has 0.5, whatever the mix of proposals.
    """
    classes = [numbers.get(f"verifier_accuracy_{name}") for name in ("right", "wrong")]
    if None in classes:
        return numbers
    return {**numbers, "verifier_balanced_accuracy": sum(classes) / 2}
