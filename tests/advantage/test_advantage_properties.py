"""Properties that hold for every team, and the paper's second-moment identity (Lemma 4.2)."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_drmas.advantage import ESTIMATORS, agent_diagnostics, group_advantage

REWARDS = st.one_of(st.sampled_from([0.0, 1.0, -0.1, 0.9, 0.99]), st.floats(-10, 10, allow_subnormal=False))
NAMES = st.sampled_from(sorted(ESTIMATORS))
AGENT_NTH = {"mean_scope": "agent_nth", "std_scope": "agent_nth", "pool": "activation"}


@st.composite
def teams(draw):
    """Columns of a batch: up to 3 prompts, 5 sessions, 3 agents, 40 rows, own rewards per row."""
    rows = draw(st.integers(1, 40))
    column = lambda values: draw(st.lists(values, min_size=rows, max_size=rows))  # noqa: E731
    return {
        "rewards": np.array(column(REWARDS)),
        "uid": np.array(column(st.integers(0, 2))),
        "session": np.array(column(st.integers(0, 4))),
        "agent_id": np.array(column(st.sampled_from(["solver", "verifier", "critic"]))),
        "activation": np.array(draw(st.permutations(range(rows)))),
    }


def advantage(columns, switches, **options):
    columns = dict(columns)
    return group_advantage(columns.pop("rewards"), **columns, **switches, **options)


def switches_of(name):
    return AGENT_NTH if name == "agent_nth" else vars(ESTIMATORS[name])


ALL = st.sampled_from([*sorted(ESTIMATORS), "agent_nth"])


@settings(max_examples=150, deadline=None)
@given(teams(), ALL, st.randoms(use_true_random=False))
def test_row_order_changes_nothing(team, name, shuffler):
    order = list(range(len(team["rewards"])))
    shuffler.shuffle(order)
    moved = advantage({key: column[order] for key, column in team.items()}, switches_of(name), eps=1e-3)
    np.testing.assert_allclose(moved, advantage(team, switches_of(name), eps=1e-3)[order], rtol=1e-9, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(teams(), ALL)
def test_relabelling_changes_nothing(team, name):
    """Prompts, sessions and agents are names only: other names, of another type, the same numbers to the bit."""
    renamed = {
        **team,
        "uid": [f"prompt-{10 - uid}" for uid in team["uid"]],
        "session": [(uid, session) for uid, session in zip(team["uid"], team["session"], strict=True)],
        "agent_id": [hash(agent) for agent in team["agent_id"]],
    }
    np.testing.assert_array_equal(advantage(renamed, switches_of(name)), advantage(team, switches_of(name)))


@settings(max_examples=100, deadline=None)
@given(teams(), ALL)
def test_other_prompts_change_nothing(team, name):
    """Rows of other prompts, and padding that the caller drops, leave a prompt's values the same to the bit."""
    whole = advantage(team, switches_of(name))
    for uid in set(team["uid"].tolist()):
        mine = team["uid"] == uid
        alone = advantage({key: column[mine] for key, column in team.items()}, switches_of(name))
        np.testing.assert_array_equal(whole[mine], alone)


@settings(max_examples=150, deadline=None)
@given(teams(), st.sampled_from(["drmas", "grpo_activation", "agent_nth", "grpo_team"]), st.sampled_from([0, 1]))
def test_size_is_bounded(team, name, ddof):
    """|A| <= (n - 1) / sqrt(n) at ddof 1 and <= sqrt(n - 1) at ddof 0, n the values of the largest group."""
    switches = switches_of(name)
    value = "session" if switches["pool"] == "session" else "activation"
    largest = 1
    for uid in set(team["uid"].tolist()):
        for agent in set(team["agent_id"].tolist()):
            rows = (team["uid"] == uid) & ((team["agent_id"] == agent) | (switches["mean_scope"] == "prompt"))
            largest = max(largest, len(set(team[value][rows].tolist())))
    bound = (largest - 1) / math.sqrt(largest) if ddof == 1 else math.sqrt(largest - 1)
    assert np.abs(advantage(team, switches, ddof=ddof)).max() <= bound * (1 + 1e-8)


def test_bound_is_reached():
    """One faulty row among n: |A| is (n - 1) / sqrt(n) whatever the coefficient."""
    for n in (2, 5, 8, 11):
        got = group_advantage(
            [0.0] * (n - 1) + [-0.01],
            uid=[0] * n,
            session=range(n),
            agent_id=["a"] * n,
            **vars(ESTIMATORS["drmas"]),
            eps=0.0,
        )
        assert abs(got[-1]) == pytest.approx((n - 1) / math.sqrt(n), rel=1e-12)


def same_calls_in_every_session(outcomes, calls):
    rows = [(s, f"agent{k}", r) for s, r in enumerate(outcomes) for k, count in enumerate(calls) for _ in range(count)]
    session, agent_id, rewards = zip(*rows, strict=True)
    return {"rewards": rewards, "uid": ["p"] * len(rows), "session": session, "agent_id": agent_id}


@settings(max_examples=100, deadline=None)
@given(st.lists(REWARDS, min_size=2, max_size=8), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_equal_activation_counts_make_the_estimators_equal(outcomes, calls):
    """Every session has the same calls of each agent and one shared outcome: at ddof 0 there is only one estimator."""
    columns = same_calls_in_every_session(outcomes, calls)
    drmas, by_activation, team = (
        advantage(columns, vars(ESTIMATORS[name]), ddof=0, eps=1e-3)
        for name in ("drmas", "grpo_activation", "grpo_team")
    )
    np.testing.assert_allclose(drmas, team, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(by_activation, team, rtol=1e-9, atol=1e-9)


def test_sample_std_sees_repeated_values():
    """At ddof 1 the estimators differ even then: sqrt((n - 1) / n) with n sessions, or n rows of 2 agents x 2 calls."""
    columns = same_calls_in_every_session([1.0, 0.0, 0.0, 1.0], [2, 2])
    for name, n in (("grpo_team", 4), ("drmas", 8), ("grpo_activation", 16)):
        got = advantage(columns, vars(ESTIMATORS[name]), eps=0.0)
        np.testing.assert_allclose(np.abs(got), math.sqrt((n - 1) / n), rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(teams(), NAMES, REWARDS)
def test_constant_rewards_give_exactly_zero(team, name, reward):
    team["rewards"] = np.full(len(team["rewards"]), reward)
    assert not advantage(team, vars(ESTIMATORS[name])).any()


@settings(max_examples=100, deadline=None)
@given(teams(), st.sampled_from(["drmas", "drmas_mean", "drmas_std"]))
def test_singletons_give_exactly_zero(team, name):
    got = advantage(team, vars(ESTIMATORS[name]))
    raw = advantage(team, vars(ESTIMATORS["drmas"]), singleton="raw", eps=0.0)
    groups = list(zip(team["uid"].tolist(), team["agent_id"].tolist(), strict=True))
    for row, group in enumerate(groups):
        if groups.count(group) == 1:
            assert got[row] == 0.0
            assert raw[row] == team["rewards"][row]


def lemma_case(seed):
    """One prompt, N sessions with one outcome each, and how often agent k acted in each; None where degenerate."""
    draw = random.Random(seed)
    sessions = draw.choice([5, 8])
    outcomes = [float(draw.random() < 0.4) for _ in range(sessions)]
    calls = [draw.randint(0, 4) for _ in range(sessions)]
    if len(set(outcomes)) == 1 or not any(calls):
        return None
    # The others act once a session, so that every session has a row and the agent's mean is not the team's.
    rows = [(s, "other", outcomes[s]) for s in range(sessions)]
    rows += [(s, "k", outcomes[s]) for s in range(sessions) for _ in range(calls[s])]
    session, agent_id, rewards = map(np.array, zip(*rows, strict=True))
    return (
        sessions,
        calls,
        {"rewards": rewards, "uid": np.zeros(len(rows), int), "session": session, "agent_id": agent_id},
    )


def inflation(columns):
    columns = {**columns, "tokens": np.ones(len(columns["rewards"]))}
    return agent_diagnostics(columns.pop("rewards"), np.zeros(len(columns["tokens"])), **columns)["k"][
        "inflation_factor/mean"
    ]


def test_second_moment_identity():
    """E|g|^2 = E|z|^2 F + Cov(|z|^2, A^2), with g = z A made as vectors and Cov from all pairs of rows."""
    draw = np.random.default_rng(0)
    checked, inflated = 0, 0
    for seed in range(300):
        case = lemma_case(seed)
        if case is None:
            continue
        sessions, _, columns = case
        mine = columns["agent_id"] == "k"
        got = advantage(columns, vars(ESTIMATORS["grpo_team"]), ddof=0, eps=0.0)[mine]
        score = draw.normal(size=(len(got), 6)) * (1 + columns["rewards"][mine])[:, None]  # |z|^2 correlates with R
        gradient = score * got[:, None]
        second_moment = np.mean(np.sum(gradient**2, axis=1))

        z2, a2 = np.sum(score**2, axis=1), got**2
        pairs = (z2[:, None] - z2[None, :]) * (a2[:, None] - a2[None, :])
        covariance = pairs.sum() / (2 * len(got) ** 2)  # half the mean product of differences, over all pairs
        factor = inflation(columns)
        assert second_moment == pytest.approx(z2.mean() * factor + covariance, rel=1e-12)
        assert factor <= sessions - 1 + 1e-12
        checked += 1
        inflated += factor > 1.2
    assert checked > 200
    assert inflated > 20


def test_agent_wise_normalisation_has_factor_one():
    """Equation 6: under drmas an agent's E[A^2] is 1 (population) or (n - 1) / n (sample) where there is spread."""
    for seed in range(100):
        case = lemma_case(seed)
        if case is None:
            continue
        mine = case[2]["agent_id"] == "k"
        n = mine.sum()
        for ddof, expected in ((0, 1.0), (1, (n - 1) / n)):
            got = advantage(case[2], vars(ESTIMATORS["drmas"]), ddof=ddof, eps=0.0)[mine]
            if np.ptp(case[2]["rewards"][mine]) > 0:
                assert np.mean(got**2) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("calls", [1, 3])
def test_equal_counts_have_factor_one(calls):
    outcomes = [1.0, 0.0, 0.0, 1.0, 0.0]
    columns = {
        "rewards": np.repeat(outcomes, calls),
        "uid": np.zeros(5 * calls, int),
        "session": np.repeat(range(5), calls),
        "agent_id": np.full(5 * calls, "k"),
    }
    assert inflation(columns) == pytest.approx(1.0, rel=1e-12)


def test_factor_reaches_sessions_minus_one():
    """The agent acts only in the one session of N that succeeds."""
    columns = {
        "rewards": np.array([1.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        "uid": np.zeros(6, int),
        "session": np.array([0, 1, 2, 3, 4, 0]),
        "agent_id": np.array(["other"] * 5 + ["k"]),
    }
    assert inflation(columns) == pytest.approx(4.0, rel=1e-12)
