"""What the dumps tell of an activation beside its text."""

import json

from verl_drmas.rollout.told import MOST, MOST_ITEMS, told
from verl_drmas.workflows import Action
from verl_drmas.workflows.tools import ToolCall


def test_an_activation_of_which_there_is_nothing_to_tell_tells_nothing():
    assert told(Action("a")) == {}


def test_what_was_read_called_and_found():
    action = Action("a", parsed="approve", passages=[("Ada", "Born in 1815.")])
    calls = [(0, ToolCall("search", {"query": "Ada né"})), (2, ToolCall("broken", None))]
    assert told(action, calls) == {
        "parsed": "approve",
        "calls": [
            {"turn": 0, "name": "search", "arguments": '{"query": "Ada né"}'},
            {"turn": 2, "name": "broken", "arguments": None},
        ],
        "passages": [{"title": "Ada", "text": "Born in 1815."}],
    }


def test_it_is_short_and_json_whatever_it_is():
    action = Action("a", parsed={"x": object()}, passages=[("t" * 999, "x" * 999)] * 99)
    made = told(action, [(0, ToolCall("f", {"q": ["y" * 999]}))] * 99)
    json.dumps(made)
    assert len(made["calls"]) == len(made["passages"]) == MOST_ITEMS
    assert all(len(text) <= MOST + 6 for passage in made["passages"] for text in passage.values())
    assert len(made["calls"][0]["arguments"]) <= MOST + 6


def test_half_a_character_can_be_written():
    call = ToolCall(name="\udc00", arguments=json.loads(r'{"q": "\ud800"}'))
    made = told(Action(agent_id="a", parsed="\udfff" * MOST), [(0, call)])
    json.dumps(made, ensure_ascii=False).encode()
    assert made["calls"] == [{"turn": 0, "name": r"\udc00", "arguments": r'{"q": "\ud800"}'}]
    assert made["parsed"].startswith(r"\udfff\udfff") and len(made["parsed"]) <= MOST + 6
