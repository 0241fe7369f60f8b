"""Texts from outside, such as web pages and other agents' words, must not speak in a chat template's own marks."""

from __future__ import annotations

from typing import Any

BREAK = "\u200b"  # a zero-width space: a reader sees the same text, a tokenizer sees no mark


def plain(text: str, tokenizer: Any) -> str:
    """The text with every string broken that the tokenizer has a token of its own for (`<|im_end|>`, `</tool_call>`),
    so that it can neither end a turn nor begin another.
    """
    for mark in tokenizer.get_added_vocab():
        if len(mark) > 1 and mark in text:
            text = text.replace(mark, f"{mark[0]}{BREAK}{mark[1:]}")
    return text
