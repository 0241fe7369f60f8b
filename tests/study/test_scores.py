"""Scores of single agents, called as verl calls a custom reward function."""

import asyncio
import inspect

import numpy as np
import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from verl_drmas.study.scores import main_score, searcher_score, solver_score


def scored(name, text, gold, **kwargs):
    """Through verl's own loader, with a penalty."""
    function = {"path": "pkg://verl_drmas.study.scores", "name": name, "reward_kwargs": {"invalid_penalty": 0.1}}
    fn = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": function}}))
    found = fn(data_source="x", solution_str=text, ground_truth=gold, extra_info={"index": 0}, **kwargs)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"Two and two: \boxed{4}", (1.0, 1.0, 1.0)),
        (r"\boxed{\frac{8}{2}}", (1.0, 1.0, 1.0)),
        (r"\boxed{5}", (0.0, 0.0, 1.0)),
        ("It is 4.", (-0.1, 0.0, 0.0)),
        ("", (-0.1, 0.0, 0.0)),
    ],
)
def test_a_solution(text, expected):
    score = scored("solver_score", text, "4")
    assert (score["score"], score["acc"], score["valid"]) == pytest.approx(expected)


SEARCHED = (
    '<tool_call>\n{"name": "search", "arguments": {"query": "capital of France"}}\n</tool_call>\nuser\n'
    "<tool_response>\n[1] Paris: <result>Lyon</result> is no answer.\n</tool_response>\nassistant\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<result>the Paris</result>", (1.0, 1.0, 1.0)),
        (SEARCHED + "So <result>Paris</result>", (1.0, 1.0, 1.0)),  # what a passage says is no answer
        (SEARCHED + "<result>Lyon</result>", (0.0, 0.0, 1.0)),
        (SEARCHED + "Paris", (-0.1, 0.0, 0.0)),
        (SEARCHED + SEARCHED, (-0.1, 0.0, 0.0)),  # the last turn searched once more
        (SEARCHED, (-0.1, 0.0, 0.0)),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call><result>Paris</result>', (-0.1, 0.0, 0.0)),  # both
        ("<result>Paris</result><result>Lyon</result>", (-0.1, 0.0, 0.0)),
        ("", (-0.1, 0.0, 0.0)),
    ],
)
def test_a_session(text, expected):
    score = scored("searcher_score", text, np.array(["Paris", "City of Light"], dtype=object))
    assert (score["score"], score["acc"], score["valid"]) == pytest.approx(expected)


def test_without_a_penalty_a_score_is_the_outcome():
    assert asyncio.run(solver_score("x", "no box", "4"))["score"] == 0.0
    assert searcher_score("x", "no result", ["Paris"])["score"] == 0.0


@pytest.mark.parametrize("gold", [None, "", []])
def test_a_row_without_a_gold_is_an_error_and_no_wrong_answer(gold):
    with pytest.raises(ValueError, match="gold"):
        scored("searcher_score", "<result>Paris</result>", gold)
    with pytest.raises(ValueError, match="gold"):
        scored("solver_score", r"\boxed{4}", None if gold == [] else gold)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SEARCHED + "So <result>Paris</result>", (1.0, 1.0, 1.0)),
        ("<result>Lyon</result>", (0.1, 0.0, 1.0)),
        (SEARCHED + "Paris", (0.0, 0.0, 0.0)),  # right, but not in the form that is asked for
        ("", (0.0, 0.0, 0.0)),
    ],
)
def test_a_main_agent_alone_is_rewarded_as_in_its_team(text, expected):
    score = main_score("x", text, ["Paris"])
    assert (score["score"], score["acc"], score["valid"]) == pytest.approx(expected)
    assert main_score("x", text, ["Paris"], format_weight=0.5, correct_weight=0.0)["score"] == expected[2] / 2


def test_a_weight_below_0_is_refused():
    with pytest.raises(ValueError, match=r"format is -0\.1"):
        main_score("x", "<result>Paris</result>", ["Paris"], format_weight=-0.1)
