"""The rewards of a main agent and its sub-agents: the paper's values to the digit, and no reward out of an outage."""

import math

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_drmas.rewards.delegation import MainWeights, SubWeights, main_reward, outcome_for_subs, sub_reward

MAIN, SUB = MainWeights(), SubWeights()
SHARES = st.floats(0, 1)
WEIGHTS = st.floats(0, 10)


@pytest.mark.parametrize(
    "format_ok, correct, total", [(False, 0, 0.0), (False, 1, 0.0), (True, 0, 0.1), (True, 1, 1.0)]
)
def test_main_earns_what_the_paper_says(format_ok, correct, total):
    assert main_reward(format_ok, correct, MAIN)[0] == total


@pytest.mark.parametrize("correct, judged, total", [(0, 0, 0.1), (0, 1, 0.6), (1, 0, 0.5), (1, 1, 1.0), (1, 0.5, 0.75)])
def test_a_sub_earns_what_the_paper_says(correct, judged, total):
    assert sub_reward(True, correct, judged, SUB)[0] == total
    assert sub_reward(False, correct, judged, SUB)[0] == 0.0


def test_the_parts_are_weighted_and_all_0_where_the_format_is_broken():
    assert main_reward(True, 1, MAIN)[1] == {"format": 0.1, "correct": 0.9}
    assert main_reward(False, 1, MAIN)[1] == {"format": 0.0, "correct": 0.0}
    assert sub_reward(True, 1, 0.5, SUB)[1] == {"format": 0.1, "outcome": 0.4, "judge": 0.25}
    assert sub_reward(False, 1, 0.5, SUB)[1] == {"format": 0.0, "outcome": 0.0, "judge": 0.0}


@pytest.mark.parametrize("correct, total", [(0, 0.2), (1, 1.0), (0.5, 0.6)])
def test_without_a_judgement_the_others_share_its_weight(correct, total):
    reward, parts = sub_reward(True, correct, None, SUB)
    assert reward == pytest.approx(total, abs=1e-15) and "judge" not in parts
    assert sub_reward(False, correct, None, SUB) == (0.0, {"format": 0.0, "outcome": 0.0})


def test_a_failed_judge_is_not_a_judgement_of_0():
    assert sub_reward(True, 1, None, SUB)[0] == 1.0 != sub_reward(True, 1, 0.0, SUB)[0]


def test_an_answer_of_broken_form_is_no_outcome_for_the_subs():
    assert outcome_for_subs(False, 1) == 0.0
    assert outcome_for_subs(True, 0.5) == 0.5


@given(WEIGHTS, WEIGHTS, WEIGHTS, SHARES, st.none() | SHARES)
def test_a_sub_earns_the_sum_of_its_parts_and_at_most_that_of_the_weights(form, outcome, judge, correct, judged):
    weights = SubWeights(form + 0.01, outcome, judge)
    most = weights.format + weights.outcome + weights.judge
    reward, parts = sub_reward(True, correct, judged, weights)
    assert math.isclose(reward, sum(parts.values())) and reward <= most * (1 + 1e-12)
    best, _ = sub_reward(True, 1.0, None if judged is None else 1.0, weights)
    assert math.isclose(best, most) and reward <= best * (1 + 1e-12)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_a_share_outside_of_0_to_1_is_refused(value):
    with pytest.raises(ValueError, match=r"correct is .*; it must be in 0\.\.1"):
        main_reward(True, value, MAIN)
    with pytest.raises(ValueError, match=r"main_correct is"):
        sub_reward(True, value, 1.0, SUB)
    with pytest.raises(ValueError, match=r"judged is"):
        sub_reward(False, 1.0, value, SUB)


@pytest.mark.parametrize("kind", [MainWeights, SubWeights])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_weights_that_are_none_are_refused_with_the_name_and_the_fix(kind, value):
    with pytest.raises(ValueError, match=rf"format is {value}; a weight is a number of at least 0"):
        kind(format=value)


def test_weights_that_leave_nothing_to_earn_are_refused():
    with pytest.raises(ValueError, match="format and correct are both 0"):
        MainWeights(0, 0)
    with pytest.raises(ValueError, match=r"format and outcome are both 0; .* failed judge"):
        SubWeights(0, 0, 1)


def test_an_unknown_weight_is_refused_where_a_configuration_is_read():
    adapter = pydantic.TypeAdapter(SubWeights)
    assert adapter.validate_python({"judge": 0}) == SubWeights(judge=0)
    with pytest.raises(pydantic.ValidationError, match="outcom"):
        adapter.validate_python({"outcom": 0.4})
