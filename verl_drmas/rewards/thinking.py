"""What a model says after its thinking."""

from __future__ import annotations


def after_thinking(text: str) -> str | None:
    """The text after the last `</think>`; None if a `<think>` stays open, because nothing was said then."""
    spoken = text.rpartition("</think>")[2]
    return None if "<think>" in spoken else spoken
