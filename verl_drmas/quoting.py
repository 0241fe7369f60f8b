"""Texts in Hydra's overrides (`key=value`)."""

from __future__ import annotations

import re


def quoted(value: object) -> str:
    """A value's text as Hydra's grammar takes it, whatever is in it: a text it stays, and no number, list or null.

    A plain absolute path is left as it is, so that commands stay readable.
    """
    # Later than the module: commands that start a run show their help without Hydra.
    from hydra.core.override_parser.types import Quote, QuotedString

    text = str(value)
    if re.fullmatch(r"/[\w./-]*", text, re.ASCII):
        return text
    return QuotedString(text, Quote.single).with_quotes()
