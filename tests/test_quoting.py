"""Overrides with any text: Hydra reads it back as it was."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_drmas.quoting import quoted

TEXTS = [
    *("/plain/path-1.x", "/a b/c=d", "it's", '/say "x"', "/a,b=[c]{d}", "/50%", "${z}", "", "$HOME #é", "/é"),
    *("a\\", "\\'", "C:\\new\\table", "a\\\\b", "two \\\\", "\\\\'x'\\", "1e5", "null", "true", "12"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_back_as_it_was(text):
    (override,) = OverridesParser.create().parse_overrides([f"key={quoted(text)}"])
    found = override.value()
    assert str(found) == text and not isinstance(found, int | float | bool | None)


def test_a_plain_path_stays_readable(tmp_path):
    assert quoted(tmp_path) == str(tmp_path)
