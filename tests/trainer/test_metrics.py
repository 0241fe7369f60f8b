"""Numbers per agent and per session, by hand, and the warnings for an agent that collapses."""

from dataclasses import replace

import numpy as np
import pytest

from verl_drmas.config import parse
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.metrics import (
    CollapseWatch,
    agent_metrics,
    session_metrics,
    shadow_metrics,
    workflow_metrics,
)
from verl_drmas.trainer.step import StepRows

ROWS = [
    Row("p", 0, 0, 0, "solver", "base", metrics={"rounds": 1.0}, counts={"turns": 1.0}),
    Row("p", 0, 1, 0, "verifier", "base", valid=False),
    Row("p", 1, 0, 0, "solver", "base", metrics={"rounds": 2.0, "approved": 1.0}, counts={"turns": 1.0}),
    Row("p", 1, 1, 0, "verifier", "base"),
    Row("p", 1, 2, 0, "solver", "base", counts={"turns": 3.0, "cut_characters": 6.0}),
]


def step(**advantage):
    section = parse(
        {
            "agents": {"solver": {"model": "base"}, "verifier": {"model": "base", "invalid_penalty": 0.25}},
            "advantage": advantage,
        }
    )
    built = StepRows([None, *ROWS, None], section)
    built.scores = np.array([0.0, 1.0, 1.0, 1.0, 0.5])
    built.advantage = np.array([-1.0, 0.0, 1.0, 0.0, 0.0])
    built.tokens = np.array([10, 20, 30, 40, 100])
    return built


def test_agent_metrics_by_hand():
    metrics = agent_metrics(step())
    solver = {k.removeprefix("drmas/agent/solver/"): v for k, v in metrics.items() if "/solver/" in k}
    assert solver["rows"] == 3
    assert solver["reward/mean"] == pytest.approx(0.5)
    assert solver["penalty/mean"] == 0
    assert solver["valid_share"] == 1
    assert solver["activations_per_session"] == 1.5
    assert solver["response_length/mean"] == pytest.approx(140 / 3)
    assert solver["token_share"] == pytest.approx(0.7)
    assert solver["turns/mean"] == pytest.approx(5 / 3)
    assert solver["cut_characters/mean"] == 2.0  # a row without the count has none of it
    assert solver["advantage_mass_share"] == 1.0
    assert solver["zero_std_share"] == 0.0
    assert metrics["drmas/agent/verifier/valid_share"] == 0.5
    assert metrics["drmas/agent/verifier/penalty/mean"] == 0.125
    assert metrics["drmas/agent/verifier/reward/mean"] == 1.0


@pytest.mark.parametrize(("place", "flat"), [("inside", 0.0), ("outside", 1.0)])
def test_a_group_has_the_spread_that_its_statistics_saw(place, flat):
    """Equal outcomes, one invalid action: the penalty gives the group a spread only if it enters the statistics."""
    assert agent_metrics(step(penalty=place))["drmas/agent/verifier/zero_std_share"] == flat


def test_shadow_metrics_name_the_estimators():
    options = {"ddof": 1, "eps": 1e-6, "std_floor": 0.0, "singleton": "zero", "constant": "zero"}
    metrics = shadow_metrics(step(), options)
    assert {k.split("/")[2] for k in metrics} == {"grpo_team", "grpo_activation", "drmas"}
    assert "drmas/shadow/grpo_team/advantage_mass_share/verifier" in metrics


def test_workflow_metrics_average_over_the_sessions_that_have_the_number():
    assert workflow_metrics(ROWS, None) == {"drmas/workflow/rounds": 1.5, "drmas/workflow/approved": 1.0}


def test_a_workflow_may_summarise_its_sessions_itself():
    class Own:
        @classmethod
        def summarise(cls, sessions):
            return {"sessions": float(len(sessions))}

    assert workflow_metrics(ROWS, Own) == {"drmas/workflow/sessions": 2.0}


def test_session_metrics_count_what_is_missing():
    metrics = session_metrics(ROWS, 4, {"failed/timeout": 1, "retried_calls": 3})
    assert metrics == {
        "drmas/sessions/expected": 4.0,
        "drmas/sessions/failed": 2.0,
        "drmas/sessions/rows_per_session": 2.5,
        "drmas/sessions/failed/timeout": 1.0,
        "drmas/sessions/retried_calls": 3.0,
    }
    assert session_metrics([], 4, {})["drmas/sessions/failed"] == 4.0


def test_sessions_of_different_prompts_are_different():
    other = [replace(row, uid="q") for row in ROWS]
    assert session_metrics([*ROWS, *other], 4, {})["drmas/sessions/failed"] == 0.0


# -- collapse ----------------------------------------------------------------------------------------------------------


def numbers(agent="a", activations=1.0, valid=1.0, flat=0.0):
    prefix = f"drmas/agent/{agent}"
    return {
        f"{prefix}/activations_per_session": activations,
        f"{prefix}/valid_share": valid,
        f"{prefix}/zero_std_share": flat,
    }


def watch(steps, agents=("a",), **settings):
    """Warnings of each step."""
    watcher = CollapseWatch(**settings)
    return [watcher.look(metrics, list(agents)) for metrics in steps]


def test_an_agent_below_a_fifth_of_its_start_is_named_once():
    said = watch([numbers(activations=2.0)] * 3 + [numbers(activations=0.41), numbers(activations=0.39)] * 2)
    assert [len(s) for s in said] == [0, 0, 0, 0, 1, 0, 0]
    assert said[4] == ["agent 'a': activations per session fell to 0.39, from 2 at the start"]


def test_the_start_is_the_mean_of_the_first_steps():
    said = watch([numbers(valid=v) for v in (1.0, 0.5, 0.0, 0.11, 0.09)])
    assert [len(s) for s in said] == [0, 0, 0, 0, 1]
    assert "valid share" in said[4][0]


def test_an_agent_that_stops_acting_has_no_metrics_and_is_named():
    said = watch([numbers()] * 3 + [{}])
    assert said[3] == ["agent 'a': activations per session fell to 0, from 1 at the start"]


def test_an_agent_that_never_acted_is_not_said_to_have_fallen():
    assert watch([{}] * 6) == [[]] * 6


def test_no_spread_for_some_steps_in_a_row():
    flat, fine = numbers(flat=1.0), numbers(flat=0.9)
    said = watch([flat] * 4 + [fine] + [flat] * 7)
    assert [len(s) for s in said] == [0] * 9 + [1, 0, 0]
    assert "no group had any spread in rewards for 5 steps" in said[9][0]


def test_agents_are_watched_apart():
    first = {**numbers("a"), **numbers("b")}
    said = watch([first] * 3 + [{**numbers("a", valid=0.0), **numbers("b")}], agents=("a", "b"))
    assert [len(s) for s in said] == [0, 0, 0, 1]
    assert said[3][0].startswith("agent 'a'")
