"""Per-agent diagnostics and shadow statistics against cases small enough to work out by hand."""

import math

import numpy as np
import pytest
from verl.trainer.ppo.v1.utils import MetricsAggregator

from verl_drmas.advantage import ESTIMATORS, agent_diagnostics, group_advantage, penalised_advantage, shadow

# Prompt p: outcomes 1, 0, 0; the searcher acts 1, 1 and 4 times, the answerer once each. Prompt q: two outcomes of 1.
CALLS = [("p", 0, 1.0, 1), ("p", 1, 0.0, 1), ("p", 2, 0.0, 4), ("q", 0, 1.0, 2), ("q", 1, 1.0, 0)]
ROWS = [(uid, s, "searcher", r) for uid, s, r, calls in CALLS for _ in range(calls)]
ROWS += [(uid, s, "answerer", r) for uid, s, r, _ in CALLS]
COLUMNS = {"uid": [r[0] for r in ROWS], "session": [r[1] for r in ROWS], "agent_id": [r[2] for r in ROWS]}
REWARDS = [r[3] for r in ROWS]
TOKENS = np.arange(1, len(ROWS) + 1)
SEARCHER = np.array([r[2] == "searcher" for r in ROWS])


def of(name, rewards=REWARDS, **options):
    return group_advantage(rewards, **COLUMNS, **vars(ESTIMATORS[name]), **options)


def test_agent_diagnostics_by_hand():
    advantage = of("drmas", eps=0.0)
    got = agent_diagnostics(REWARDS, advantage, **COLUMNS, tokens=TOKENS)
    # Team of p: mean 1/3, variance 2/9. Searcher: mean 1/6, variance 5/36.
    factor = (5 / 36 + (1 / 6 - 1 / 3) ** 2) / (2 / 9)
    mass = np.abs(advantage) * TOKENS
    assert got["searcher"] == pytest.approx(
        {
            "inflation_factor/mean": factor,
            "inflation_factor/max": factor,
            "inflation_factor/undefined_prompts": 1,
            "group_size/mean": 4,
            "group_size/min": 2,
            "group_size/max": 6,
            "zero_std_share": 0.5,
            "advantage_mass_share": mass[SEARCHER].sum() / mass.sum(),
            "advantage_abs/mean": 5
            * (1 / 6)
            / math.sqrt(1 / 6)
            * 2
            / 8,  # five rows of 1/6 and one of 5/6 over sqrt(1/6)
            "advantage_abs/max": 5 / 6 / math.sqrt(1 / 6),
        },
        rel=1e-12,
    )
    assert got["answerer"]["inflation_factor/mean"] == pytest.approx(1.0)
    assert got["answerer"]["group_size/mean"] == 2.5
    assert sum(agent["advantage_mass_share"] for agent in got.values()) == pytest.approx(1.0)


def test_factor_is_absent_where_no_prompt_has_spread():
    got = agent_diagnostics(
        [0.1] * 5, np.zeros(5), uid=[0] * 5, session=[0, 0, 0, 1, 2], agent_id=["a"] * 4 + ["b"], tokens=np.ones(5)
    )
    assert "inflation_factor/mean" not in got["a"]
    assert got["a"]["inflation_factor/undefined_prompts"] == 1
    assert got["a"]["zero_std_share"] == got["b"]["zero_std_share"] == 1.0
    assert got["a"]["advantage_mass_share"] == 0.0


def test_factor_averages_over_prompts():
    """Prompt 0 as above (3/4), prompt 1 with equal counts (1)."""
    rows = [(0, s, r) for s, r, calls in ((0, 1.0, 1), (1, 0.0, 1), (2, 0.0, 4)) for _ in range(calls)]
    rows += [(1, 0, 1.0), (1, 1, 0.0)]
    uid, session, rewards = zip(*rows, strict=True)
    got = agent_diagnostics(rewards, np.zeros(8), uid=uid, session=session, agent_id=["a"] * 8, tokens=np.ones(8))["a"]
    assert got["inflation_factor/mean"] == pytest.approx((0.75 + 1.0) / 2)
    assert got["inflation_factor/max"] == pytest.approx(1.0)


def test_shadow_of_the_estimator_in_use_is_itself():
    for name in ("drmas", "grpo_team", "grpo_activation"):
        advantage = of(name)
        got = shadow(REWARDS, advantage, **COLUMNS, tokens=TOKENS)
        assert set(got) == {"drmas", "grpo_team", "grpo_activation"}
        assert got[name]["sign_flip_share"] == got[name]["one_sided_share"] == 0.0
        assert got[name]["advantage_abs/max"] == np.abs(advantage).max()
        mass = np.abs(advantage) * TOKENS
        assert got[name]["advantage_mass_share/searcher"] == pytest.approx(mass[SEARCHER].sum() / mass.sum())
        assert got[name]["advantage_mass_share/answerer"] == pytest.approx(mass[~SEARCHER].sum() / mass.sum())


def test_shadow_counts_flips_and_one_sided_rows():
    """Agent a has 0.4 and 0 in a team of mean 1: drmas pushes its better row up, the team baseline pushes it down.

    Agent b's only row is pushed by the team baseline alone.
    """
    columns = {"uid": [0] * 4, "session": [0, 1, 2, 3], "agent_id": ["a", "a", "c", "b"]}
    rewards = np.array([0.4, 0.0, 1.0, 2.6])
    drmas = group_advantage(rewards, **columns, **vars(ESTIMATORS["drmas"]))
    np.testing.assert_array_equal(np.sign(drmas), [1, -1, 0, 0])
    got = shadow(rewards, drmas, **columns, tokens=np.ones(4))["grpo_team"]
    assert got["sign_flip_share"] == 0.25
    assert got["one_sided_share"] == 0.25  # b's; c's reward is the mean


def test_shadow_takes_penalty_and_options():
    penalty = np.where(SEARCHER, 0.2, 0.0)
    options = {"ddof": 0, "singleton": "raw"}
    for place in ("inside", "outside"):
        used = penalised_advantage(REWARDS, penalty, place=place, **COLUMNS, **vars(ESTIMATORS["grpo_team"]), **options)
        got = shadow(REWARDS, used, **COLUMNS, tokens=TOKENS, penalty=penalty, place=place, **options)["grpo_team"]
        assert got["advantage_abs/max"] == np.abs(used).max()
        assert got["sign_flip_share"] == got["one_sided_share"] == 0.0


def test_keys_aggregate_as_they_say():
    """verl's aggregator reads max, min and sum out of a key's letters; under our prefixes it must read what we mean."""
    aggregator = MetricsAggregator()
    agents = agent_diagnostics(REWARDS, of("drmas"), **COLUMNS, tokens=TOKENS)
    shadows = shadow(REWARDS, of("drmas"), **COLUMNS, tokens=TOKENS)
    keys = [f"drmas/agent/{agent}/{key}" for agent, metrics in agents.items() for key in metrics]
    keys += [f"drmas/shadow/{name}/{key}" for name, metrics in shadows.items() for key in metrics]
    for key in keys:
        expected = {"max": {"max"}, "min": {"min"}}.get(key.rsplit("/", 1)[1], {"avg", "weighted_avg"})
        assert aggregator._get_aggregation_type(key) in expected, key


def test_values_are_floats():
    for metrics in (
        *agent_diagnostics(REWARDS, of("drmas"), **COLUMNS, tokens=TOKENS).values(),
        *shadow(REWARDS, of("drmas"), **COLUMNS, tokens=TOKENS).values(),
    ):
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
