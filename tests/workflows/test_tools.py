import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_drmas.workflows.tools import Spoken, ToolCall, hermes_calls

TAGS = ("<tool_call>", "</tool_call>")
# What a call may hold: no end tag inside, which ends it by the rule of verl's parser.
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(
    lambda text: not any(tag in json.dumps(text) for tag in TAGS)
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, words.filter(bool), st.dictionaries(words, values, max_size=3))
prose = st.text(st.characters(exclude_characters="<>", exclude_categories=("Cs",)), max_size=20)


def written(call):
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(prose, calls), max_size=4), prose)
def test_calls_come_back_as_they_were_written(parts, tail):
    text = "".join(said + written(call) for said, call in parts) + tail
    spoken = hermes_calls(text)
    assert spoken.calls == [call for _, call in parts]
    assert not spoken.broken
    assert spoken.content == ("".join(said for said, _ in parts) + tail).strip()


pieces = st.sampled_from(
    [*TAGS, "{", "}", "[", '"name"', '"arguments"', ":", ",", '"a"', "1", "null", "{}", "\\ud800", "NaN", "\n", "é"]
)


@settings(deadline=None)
@given(st.text() | st.lists(pieces, max_size=30).map("".join))
def test_any_text_is_taken_apart(text):
    spoken = hermes_calls(text)
    assert isinstance(spoken, Spoken)
    assert all(isinstance(call.arguments, dict | None) for call in spoken.calls)


GOOD = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "search", "arguments": {"query": "a"}}',
        '{"name": "search", "arguments": {}}</tool_call>',
        "<tool_call>search for a</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>3</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "search"}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {}</tool_call>',
    ],
)
def test_a_call_that_cant_be_read_is_told_from_none(text):
    assert hermes_calls(text).broken and not hermes_calls(text).calls
    both = hermes_calls(f"{GOOD} and {text}")
    assert both.broken and both.calls[0] == ToolCall("search", {"query": "a"})


def test_a_turn_without_calls_is_whole():
    assert hermes_calls(" The answer is 4. ") == Spoken("The answer is 4.", [], False)


@pytest.mark.parametrize("arguments", ['"query"', "null", "[1]", '"{}"'])
def test_arguments_that_are_no_object_are_none(arguments):
    spoken = hermes_calls(f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>')
    assert spoken.calls == [ToolCall("search", None)] and not spoken.broken


@pytest.mark.parametrize("inner", ["[" * 100_000, '{"a":' * 5_000])
def test_deep_nesting_is_a_broken_call(inner):
    assert hermes_calls(f"<tool_call>{inner}</tool_call>").broken


@pytest.mark.parametrize("name", ["null", "3", "{}"])
def test_a_name_is_text(name):
    spoken = hermes_calls(f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>')
    assert spoken.broken and not spoken.calls
