"""The invalid-action penalty, inside and outside the statistics."""

import numpy as np
import pytest

from verl_drmas.advantage import ESTIMATORS, invalid_penalty, penalised_advantage

DRMAS, TEAM = vars(ESTIMATORS["drmas"]), vars(ESTIMATORS["grpo_team"])
ROWS = {"uid": ["p"] * 6, "session": [0, 0, 1, 1, 2, 2], "agent_id": ["solver", "verifier"] * 3}
VALID = [True, True, False, True, True, False]
REWARDS = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_each_agent_has_its_own_coefficient():
    got = invalid_penalty(
        VALID, agent_id=ROWS["agent_id"], coefficients={"solver": 0.1, "verifier": 0.3, "absent": 9.0}
    )
    np.testing.assert_array_equal(got, [0, 0, 0.1, 0, 0, 0.3])
    np.testing.assert_array_equal(invalid_penalty(VALID, agent_id=ROWS["agent_id"], coefficients={}), np.zeros(6))


def test_inside_moves_the_statistics():
    """The solver's scores are 1, -0.1, 0: mean 0.3, sample variance 0.37."""
    penalty = invalid_penalty(VALID, agent_id=ROWS["agent_id"], coefficients={"solver": 0.1})
    got = penalised_advantage(REWARDS, penalty, place="inside", **ROWS, **DRMAS, eps=0.0)
    np.testing.assert_allclose(got[::2], np.array([0.7, -0.4, -0.3]) / np.sqrt(0.37), rtol=1e-12)
    np.testing.assert_allclose(
        got[1::2], np.array([2, -1, -1]) / 3 / np.sqrt(1 / 3), rtol=1e-12
    )  # the verifier's do not


def test_inside_under_the_team_baseline_reaches_the_whole_session():
    """Session scores are 1, (0 - 0.1) / 2, 0: the verifier pays for the solver's fault."""
    penalty = invalid_penalty(VALID, agent_id=ROWS["agent_id"], coefficients={"solver": 0.1})
    got = penalised_advantage(REWARDS, penalty, place="inside", **ROWS, **TEAM, eps=0.0)
    scores = np.array([1.0, -0.05, 0.0])
    np.testing.assert_allclose(got, np.repeat((scores - scores.mean()) / scores.std(ddof=1), 2), rtol=1e-12)


def test_outside_reaches_only_the_faulty_row():
    penalty = invalid_penalty(VALID, agent_id=ROWS["agent_id"], coefficients={"solver": 0.1, "verifier": 0.3})
    clean = penalised_advantage(REWARDS, np.zeros(6), place="outside", **ROWS, **DRMAS)
    got = penalised_advantage(REWARDS, penalty, place="outside", **ROWS, **DRMAS)
    np.testing.assert_allclose(clean - got, [0, 0, 0.1, 0, 0, 0.3], rtol=1e-12, atol=1e-15)


def test_all_sessions_failed():
    """Inside, a lone fault acts at full size whatever its coefficient; outside, at its coefficient."""
    for coefficient in (0.01, 0.5):
        penalty = invalid_penalty([1, 1, 0, 1, 1, 1], agent_id=ROWS["agent_id"], coefficients={"solver": coefficient})
        inside = penalised_advantage(np.zeros(6), penalty, place="inside", **ROWS, **DRMAS, eps=0.0)
        outside = penalised_advantage(np.zeros(6), penalty, place="outside", **ROWS, **DRMAS)
        np.testing.assert_allclose(inside[::2], np.array([1, -2, 1]) / 3 / np.sqrt(1 / 3), rtol=1e-12)
        assert not inside[1::2].any()
        np.testing.assert_array_equal(outside, [0, 0, -coefficient, 0, 0, 0])


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="place='before' is unknown"):
        penalised_advantage(REWARDS, np.zeros(6), place="before", **ROWS, **DRMAS)
    with pytest.raises(ValueError, match="penalty has shape"):
        penalised_advantage(REWARDS, np.zeros(5), place="inside", **ROWS, **DRMAS)
    with pytest.raises(ValueError, match=r"invalid_penalty of agent 'solver' is -0\.1"):
        invalid_penalty(VALID, agent_id=ROWS["agent_id"], coefficients={"solver": -0.1})
