"""Values as JSON can hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def encodable(text: str) -> str:
    r"""The text with lone surrogates, which no file in UTF-8 can hold, as their numbers (`\ud800`).

    A model can write one: JSON of a tool call may have it as an escape.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def plain_values(value: Any, text: Callable[[str], str] = str, odd: Callable[[Any], Any] = lambda value: value) -> Any:
    """The value with numbers and arrays of NumPy and torch as Python's, and tuples as lists.

    Args:
        value: Any value; keys become texts.
        text: Makes the texts of it, keys too.
        odd: Makes something of what JSON hasn't.
    """
    if hasattr(value, "tolist"):  # of objects, what it gives may hold NumPy's numbers still
        made = value.tolist()
        return odd(value) if made is value or hasattr(made, "tolist") else plain_values(made, text, odd)
    if isinstance(value, Mapping):
        return {text(str(key)): plain_values(own, text, odd) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(own, text, odd) for own in value]
    if isinstance(value, str):
        return text(value)
    return value if value is None or isinstance(value, int | float) else odd(value)
