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

    A control character, and any other that can't be seen (marks of direction, separators, lone surrogates), stands as
    its number.
    """
    made = []
    for hidden, run in groupby(str(text).replace("\r\n", "\n"), key=_is_hidden):
        if hidden:
            made += [f'<span class="hidden-char">[U+{ord(character):04X}]</span>' for character in run]
        else:
            made.append(escape("".join(run)))
    return "".join(made)


@lru_cache(maxsize=1 << 16)
def _is_hidden(character: str) -> bool:
    return character not in _KEPT and unicodedata.category(character) in _HIDDEN
