"""group_advantage against an implementation written from the paper's formulas with loops, and by hand."""

import math
import random
import statistics as st

import numpy as np
import pytest

from verl_drmas.advantage import ESTIMATORS, group_advantage

SWITCHES = {
    **{name: vars(switches) for name, switches in ESTIMATORS.items()},
    "at_grpo": {"mean_scope": "agent_nth", "std_scope": "agent_nth", "pool": "activation"},
    "agent_sessions": {"mean_scope": "agent", "std_scope": "agent", "pool": "session"},
    "mixed_sessions": {"mean_scope": "agent", "std_scope": "prompt", "pool": "session"},
    "dr_grpo": {"mean_scope": "agent", "std_scope": "none", "pool": "activation"},
}


def random_team(seed, prompts=4, sessions=5, shared=True):
    """Rows of a team as dicts, in random order: agents act unevenly, some not at all."""
    draw = random.Random(seed)
    rows = []
    for prompt in range(prompts):
        for session in range(sessions):
            outcome = draw.choice([0.0, 1.0])
            for activation in range(draw.randint(1, 7)):
                reward = outcome if shared else outcome - draw.choice([0.0, 0.0, 0.1, draw.random()])
                agent = draw.choice(["router", "searcher", "answerer"])
                rows.append(
                    {"uid": f"p{prompt}", "session": session, "agent_id": agent, "activation": activation, "r": reward}
                )
    draw.shuffle(rows)
    return rows


def call(rows, **arguments):
    columns = {key: [row[key] for row in rows] for key in ("uid", "session", "agent_id", "activation")}
    return group_advantage([row["r"] for row in rows], **{**columns, **arguments})


def slow(rows, mean_scope, std_scope, pool, ddof=1, eps=1e-6, std_floor=0.0):
    """The definition, one row at a time, with the standard library's exact statistics."""

    nth = {}
    for row in rows:
        mine = [r["activation"] for r in rows if all(r[k] == row[k] for k in ("uid", "session", "agent_id"))]
        nth[id(row)] = sorted(mine).index(row["activation"])

    def key(row, scope):
        if scope == "prompt":
            return (row["uid"],)
        return (row["uid"], row["agent_id"], nth[id(row)] if scope == "agent_nth" else 0)

    def values(row, scope):
        mine = key(row, scope)
        members = [r for r in rows if key(r, scope) == mine]
        if pool == "activation":
            return [r["r"] for r in members], row["r"]
        by_session = {}
        for r in members:
            by_session.setdefault(r["session"], []).append(r["r"])
        means = {session: st.mean(rewards) for session, rewards in by_session.items()}
        return list(means.values()), means[row["session"]]

    out = []
    for row in rows:
        group, score = values(row, mean_scope)
        advantage = score - st.mean(group) if len(group) > 1 else 0.0
        if std_scope != "none":
            spread, _ = values(row, std_scope)
            if len(spread) == 1 or max(spread) - min(spread) < 1e-12:
                advantage = 0.0
            else:
                deviation = st.stdev(spread) if ddof == 1 else st.pstdev(spread)
                advantage /= max(deviation, std_floor) + eps
        out.append(advantage)
    return np.array(out)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
def test_equals_the_definition(name, shared):
    for seed in range(6):
        rows = random_team(seed, shared=shared)
        for options in ({}, {"ddof": 0, "eps": 0.0, "std_floor": 0.3}):
            expected = slow(rows, **SWITCHES[name], **options)
            np.testing.assert_allclose(call(rows, **SWITCHES[name], **options), expected, rtol=1e-12, atol=1e-12)
            assert np.abs(expected).max() > 0.1


def test_drmas_is_equation_5():
    """mu_k and sigma_k over an agent's activations of one prompt; eps and ddof as in the paper's text."""
    rows = random_team(11)
    got = call(rows, **SWITCHES["drmas"], ddof=0, eps=0.0)
    for row, advantage in zip(rows, got, strict=True):
        y_k = [r["r"] for r in rows if r["uid"] == row["uid"] and r["agent_id"] == row["agent_id"]]
        mu_k = sum(y_k) / len(y_k)
        sigma_k = math.sqrt(sum((y - mu_k) ** 2 for y in y_k) / len(y_k))
        expected = (row["r"] - mu_k) / sigma_k if sigma_k > 0 else 0.0
        assert advantage == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_estimators_differ_where_the_table_says():
    """One prompt, sessions with outcome 1, 0, 0; the searcher acts once, once and four times."""
    rows = [
        {"uid": 0, "session": s, "agent_id": "answerer", "activation": 9, "r": r} for s, r in ((0, 1), (1, 0), (2, 0))
    ]
    for session, reward, calls in ((0, 1, 1), (1, 0, 1), (2, 0, 4)):
        rows += [
            {"uid": 0, "session": session, "agent_id": "searcher", "activation": i, "r": reward} for i in range(calls)
        ]
    team_mean, searcher_mean, row_mean = 1 / 3, 1 / 6, 2 / 9
    team_std, searcher_std, row_std = (
        math.sqrt(n / (n - 1) * p * (1 - p)) for n, p in ((3, 1 / 3), (6, 1 / 6), (9, 2 / 9))
    )
    expected = {
        "drmas": (1 - searcher_mean) / searcher_std,
        "drmas_mean": (1 - searcher_mean) / row_std,
        "drmas_std": (1 - row_mean) / searcher_std,
        "grpo_team": (1 - team_mean) / team_std,
        "grpo_activation": (1 - row_mean) / row_std,
    }
    for name, value in expected.items():
        assert call(rows, **SWITCHES[name], eps=0.0)[3] == pytest.approx(value, rel=1e-12), name
    assert set(expected) == set(ESTIMATORS)


def test_agent_nth_follows_activation_or_else_row_order():
    rows = [
        {"uid": 0, "session": 0, "agent_id": "a", "activation": 5, "r": 1.0},
        {"uid": 0, "session": 0, "agent_id": "a", "activation": 2, "r": 4.0},
        {"uid": 0, "session": 1, "agent_id": "a", "activation": 0, "r": 2.0},
        {"uid": 0, "session": 1, "agent_id": "a", "activation": 1, "r": 8.0},
    ]
    switches = {"mean_scope": "agent_nth", "std_scope": "none", "pool": "activation"}
    np.testing.assert_array_equal(call(rows, **switches), [-3.5, 1.0, -1.0, 3.5])
    np.testing.assert_array_equal(call(rows, **switches, activation=None), [-0.5, -2.0, 0.5, 2.0])


@pytest.mark.parametrize("name", ["drmas", "grpo_team", "grpo_activation"])
@pytest.mark.parametrize("reward", [0.99, 0.98, 0.9, 0.1, -0.7])
def test_equal_rewards_give_exactly_zero(name, reward):
    """Means of 3, 7 and 10 equal rewards round differently; none of that may become an advantage."""
    rows = [
        {"uid": 0, "session": s, "agent_id": "a", "activation": i, "r": reward}
        for s, calls in enumerate((3, 7, 10))
        for i in range(calls)
    ]
    assert not call(rows, **SWITCHES[name]).any()


@pytest.mark.parametrize("switches", [SWITCHES["drmas_mean"], SWITCHES["dr_grpo"]])
def test_a_constant_mean_group_gives_exactly_zero(switches):
    """The mean of ten rows of 0.1 is not 0.1 in float64, and here no constant std-group hides it."""
    rewards = [0.1] * 10 + [0.0, 1.0]
    assert sum(rewards[:10]) / 10 != 0.1
    got = group_advantage(rewards, uid=[0] * 12, session=range(12), agent_id=["a"] * 10 + ["b"] * 2, **switches)
    assert not got[:10].any()
    assert got[10:].all()


def test_session_means_equal_but_for_rounding_are_constant():
    """Rows 0.1, 0.2, -0.3 and rows 0 have the same mean; in float64 it is 1e-17 and 0."""
    rewards = [0.1, 0.2, -0.3, 0.0, 0.0, 0.0]
    assert sum(rewards[:3]) != 0
    got = group_advantage(
        rewards, uid=[0] * 6, session=[0, 0, 0, 1, 1, 1], agent_id=["a"] * 6, **SWITCHES["grpo_team"], eps=0.0
    )
    assert not got.any()


def test_small_real_differences_are_kept():
    got = group_advantage(
        [1.0, 1.0 + 1e-9], uid=[0, 0], session=[0, 1], agent_id=["a"] * 2, **SWITCHES["drmas"], eps=0.0
    )
    np.testing.assert_allclose(got, [-1 / math.sqrt(2), 1 / math.sqrt(2)], rtol=1e-6)


def test_a_spread_whose_squares_underflow_counts_as_none():
    got = group_advantage([0.0, 1e-200], uid=[0, 0], session=[0, 1], agent_id=["a"] * 2, **SWITCHES["drmas"], eps=0.0)
    assert not got.any()


def test_singletons():
    lone = {"uid": [0, 0, 0], "session": [0, 1, 2], "agent_id": ["a", "a", "lone"]}
    rewards = [0.0, 1.0, 0.7]
    assert group_advantage(rewards, **lone, **SWITCHES["drmas"])[2] == 0.0
    assert group_advantage(rewards, **lone, **SWITCHES["drmas"], singleton="raw", eps=0.0)[2] == 0.7
    # The reference divides by its std of 1 plus eps; a std floor is for groups that have a spread.
    assert group_advantage(rewards, **lone, **SWITCHES["drmas"], singleton="raw", std_floor=5.0)[2] == 0.7 / (1 + 1e-6)
    # Only the std-group is a singleton: the agent's own mean is not used, its std of 1 is.
    got = group_advantage(rewards, **lone, **SWITCHES["drmas_std"], singleton="raw", eps=0.0)
    assert got[2] == pytest.approx(0.7 - 1.7 / 3)
    assert group_advantage(rewards, **lone, **SWITCHES["drmas_std"])[2] == 0.0


def test_constant_raw_gives_what_the_formula_gives():
    rows = {"uid": [0] * 4, "session": [0, 1, 0, 1], "agent_id": ["a", "a", "b", "b"]}
    rewards = [1.0, 1.0, 0.0, 2.0]
    np.testing.assert_allclose(
        group_advantage([1.0, 1.0, 0.0, 4.0], **rows, **SWITCHES["drmas_std"], constant="raw")[:2], -0.5 / 1e-6
    )
    assert not group_advantage(rewards, **rows, **SWITCHES["drmas"], constant="raw")[:2].any()
    assert not group_advantage([1.0, 1.0, 0.0, 4.0], **rows, **SWITCHES["drmas_std"])[:2].any()


def test_std_floor_tames_a_penalty_only_group():
    rows = {"uid": [0] * 4, "session": [0, 1, 2, 3], "agent_id": ["a"] * 4}
    rewards = [0.0, 0.0, 0.0, -0.01]
    assert abs(group_advantage(rewards, **rows, **SWITCHES["drmas"])[3]) == pytest.approx(1.5, rel=1e-3)
    floored = group_advantage(rewards, **rows, **SWITCHES["drmas"], std_floor=0.1, eps=0.0)
    np.testing.assert_allclose(floored, [0.025, 0.025, 0.025, -0.075], rtol=1e-12)


def test_no_rows():
    assert group_advantage([], uid=[], session=[], agent_id=[], **SWITCHES["drmas"]).shape == (0,)


def test_many_agents_per_row_use_the_sorting_route():
    """As many agents as rows: the table of all pairs would be too large, and numbering falls back to sorting."""
    rows = [
        {"uid": i // 2, "session": i % 2, "agent_id": i // 2, "activation": 0, "r": float(i % 2)} for i in range(200)
    ]
    np.testing.assert_allclose(call(rows, **SWITCHES["drmas"]), slow(rows, **SWITCHES["drmas"]), rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean_scope": "agents"}, "mean_scope='agents' is unknown: did you mean 'agent'"),
        ({"std_scope": "promt"}, "did you mean 'prompt'"),
        ({"std_scope": None}, "std_scope=None"),
        ({"mean_scope": "none"}, "mean_scope='none' is unknown"),
        ({"pool": "sessions"}, "did you mean 'session'"),
        ({"singleton": "keep"}, "singleton='keep' is unknown"),
        ({"constant": "Zero"}, "did you mean 'zero'"),
        ({"ddof": 2}, "ddof=2"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"std_floor": math.nan}, "std_floor=nan"),
        ({"constant": "raw", "eps": 0.0}, "give eps or std_floor"),
        ({"uid": [0, 0]}, "uid has 2 ids for 3 rows"),
        ({"agent_id": None}, "agent_id is missing"),
        ({"agent_id": ["a", None, "a"]}, "agent_id of row 1 is None"),
        ({"session": [0, 1, math.nan]}, "session of row 2 is nan"),
        ({"rewards": [0.0, 1.0, math.inf]}, "rewards of row 2 is inf"),
        ({"rewards": [[0.0], [1.0], [2.0]]}, "shape \\(3, 1\\)"),
        ({"mean_scope": "agent_nth", "activation": [0, 1]}, "activation has shape"),
        ({"mean_scope": "agent_nth", "session": [0, 0, 1], "activation": [7, 7, 7]}, "activation of row 0 is 7"),
    ],
)
def test_wrong_input_is_refused(change, message):
    arguments = {"rewards": [0.0, 1.0, 2.0], "uid": [0, 0, 0], "session": [0, 1, 2], "agent_id": ["a"] * 3}
    arguments |= {**SWITCHES["drmas"], **change}
    with pytest.raises(ValueError, match=message):
        group_advantage(arguments.pop("rewards"), **arguments)
