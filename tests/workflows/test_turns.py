"""What a turn is taken for: calls, a result, or what broke it."""

import json
from typing import get_args

import pytest

from verl_drmas.workflows import Action
from verl_drmas.workflows.tools import Spoken, ToolCall, hermes_calls
from verl_drmas.workflows.turns import Kind, Turn, read_turn

CALL = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
READ = ToolCall("search", {"query": "a"})


def read(text, *, truncated=False, tools=True):
    return read_turn(Action("main", text=text, truncated=truncated, spoken=hermes_calls(text) if tools else None))


TURNS = {
    "calls": [CALL, f"I look. {CALL}", f"<think>Well, <result>no</result></think>\n{CALL}", f"{CALL} and {CALL}"],
    "result": [
        "<result>4</result>",
        "So: <result> 4\n</result> Done.",
        "<think>is it <result>5</result>?</think><result>4</result>",
        "no opening tag, which some templates write</think><result>4</result>",
        "<RESULT>4</RESULT>",
    ],
    "silent": ["", " \n"],
    "neither": ["4", "The answer is 4.", "<think>4</think>", "<think><result>4</result>", f"<think>{CALL}"],
    "both": [f"{CALL}<result>4</result>", f"<result>4</result>\n{CALL}", f"{CALL}<result>", f"{CALL}<result></result>"],
    "broken_call": [
        CALL[:-1],
        CALL.removesuffix("</tool_call>"),
        CALL.removeprefix("<tool_call>"),
        f"{CALL}<tool_call>",
        "<tool_call>search a</tool_call>",
        '<tool_call>{"name": "search", "arguments": "a"}</tool_call>',
        f'{CALL}<tool_call>{{"name": "search"}}</tool_call>',
        f"<result>4</result>{CALL[:-1]}",
    ],
    "broken_result": [
        "<result>4",
        "4</result>",
        "</result>4<result>",
        "<result></result>",
        "<result> \n</result>",
        "<result>4</result><result>4</result>",
        "<result><result>4</result></result>",
        f"<result>{'4' * 100_001}</result>",
    ],
}


@pytest.mark.parametrize("kind, text", [(kind, text) for kind, texts in TURNS.items() for text in texts])
def test_kinds_of_turns(kind, text):
    turn = read(text)
    assert turn.kind == kind
    assert bool(turn.calls) == (kind == "calls") and (turn.result is not None) == (kind == "result")


def test_every_kind_is_here():
    assert {*TURNS, "cut"} == set(get_args(Kind))


def test_what_was_read_of_it():
    assert read(f"{CALL} and {CALL}") == Turn("calls", [READ, READ])
    assert read("So: <result> 4\n</result> Done.") == Turn("result", result="4")
    assert read("<think>is it <result>5</result>?</think><result>4</result>").result == "4"


@pytest.mark.parametrize(
    "text", ["The ans", "<result>4", CALL[:-4], "<think>Let me", f"<think>{CALL}", f"{CALL}{CALL[:20]}"]
)
def test_a_turn_that_its_limit_ended_before_anything_whole_is_cut(text):
    assert read(text).kind != "cut"
    assert read(text, truncated=True) == Turn("cut")


@pytest.mark.parametrize("text, kind", [(CALL, "calls"), ("<result>4</result> wh", "result"), ("", "silent")])
def test_a_limit_after_something_whole_takes_nothing_back(text, kind):
    assert read(text, truncated=True).kind == kind


def test_without_tools_marks_of_calls_are_text():
    assert read(f"{CALL}", tools=False).kind == "neither"
    assert read(f"<result>{CALL}</result>", tools=False) == Turn("result", result=CALL)


def test_a_call_of_another_format_is_taken_as_its_parser_says():
    action = Action("main", text="[search(a)]", spoken=Spoken("", [READ]))
    assert read_turn(action) == Turn("calls", [READ])
    action.spoken = Spoken("", [ToolCall("search", None)])
    assert read_turn(action).kind == "broken_call"


def test_a_result_that_holds_a_call_in_json_is_one():
    text = f"<result>{json.dumps({'name': 'search', 'arguments': {}})}</result>"
    assert read(text).kind == "result"
