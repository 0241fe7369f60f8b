"""Texts as a page may show them: escaped, and with every character in sight that controls or turns text."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from html import escape
from itertools import groupby

_KEPT = "\t\n\u200c\u200d"  # the two joiners are spelling in several scripts and in emoji, and do nothing else
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: object) -> str:
    """The text as HTML, line breaks and tabs as they are.

    A control character stands as its picture (U+241B for ESC) and any other hidden one (marks of direction, separators,
    lone surrogates) as its number, both marked.
    """
    made = []
    for hidden, run in groupby(str(text).replace("\r\n", "\n"), key=_is_hidden):
        if hidden:
            made += [f'<span class="hidden-char">{_picture(character)}</span>' for character in run]
        else:
            made.append(escape("".join(run)))
    return "".join(made)


@lru_cache(maxsize=1 << 16)
def _is_hidden(character: str) -> bool:
    return character not in _KEPT and unicodedata.category(character) in _HIDDEN


def _picture(character: str) -> str:
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"[U+{code:04X}]"
