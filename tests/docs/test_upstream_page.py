"""docs/upstream.md: what it says would be deleted is there, and as long as it says."""

import ast
import re

import pytest
from doc_pages import ROOT, table_with, text_of

PAGE = text_of("docs/upstream.md")
ROWS = table_with(PAGE, "change in verl", "what goes", "lines")
PACKAGE = ROOT / "verl_drmas"


def length(path, name):
    """Lines of a file, or of a class or function in it with its decorators."""
    text = (PACKAGE / path).read_text()
    if not name:
        return len(text.splitlines())
    node = ast.parse(text)
    for part in name.split("."):
        (node,) = (n for n in node.body if getattr(n, "name", None) == part)
    return node.end_lineno - min([node.lineno, *(d.lineno for d in node.decorator_list)]) + 1


def named(cell):
    """Files and symbols of a row that go whole: not those after words such as `part of`, nor one that stays."""
    for found in re.finditer(r"`([\w/]+\.py(?::[\w.]+)?)`", cell):
        partly = re.search(r"(half of|most of|part of|\bin|where|and|the context around .*) $", cell[: found.start()])
        if not partly and not cell[found.end() :].startswith(" stays"):
            yield found[1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "_", row[0])[:40])
def test_what_goes_is_there_and_as_long_as_is_said(row):
    whole = list(named(row[1]))
    for span in re.findall(r"`([\w/]+\.py(?::[\w.]+)?)`", row[1]):
        path, _, name = span.partition(":")
        assert length(path, name) > 0
    if whole:
        total = sum(length(*span.partition(":")[::2]) for span in whole)
        assert abs(total - int(row[2])) <= max(3, total // 8), (row[0], total)


def test_words_without_a_file_are_in_the_sources():
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    words = "own_reward row_temperature VALIDATE NO_ADAPTERS rollout_is_weights init_model in_rows SWITCHES"
    for word in words.split():
        assert f"`{word}`" in PAGE and word in sources
    assert "chunked_prefill_size" in (ROOT / "configs/drmas_math_sglang.yaml").read_text()
