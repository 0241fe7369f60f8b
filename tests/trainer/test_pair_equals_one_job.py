"""Recorded sessions, trained by one job with both models and by a pair: the sub-agents' numbers are the same."""

from collections import Counter
from dataclasses import replace

import pytest
from recorded_jobs import CALLS, CASES, LEFT_OUT, SUBS, player, train, trainee

pytestmark = pytest.mark.long

EQUAL = [name for name in CASES if name != "grpo_team"]
STEPS = tuple(CALLS)


@pytest.fixture(scope="module")
def one_job(queue):
    """The steps of the one job, by case."""
    known = {}

    def run(name):
        if name not in known:
            made = player("one", "", CASES[name], seed=1)
            known[name] = [train(made, step) for step in STEPS]
        return known[name]

    return run


def pair(name, tmp_path, tamper=lambda sub: None):
    """The steps of the two jobs in step, by model."""
    url, case = f"sqlite:///{tmp_path}/pair.db", CASES[name]
    main, sub = player("main", url, case, seed=2), trainee(url, case)
    tamper(sub)
    steps = []
    for step in STEPS:
        own = train(main, step)
        assert main.feeds["sub"].producer.gate(step + 1, 0).unfinished == (step,)
        steps.append({**own, **train(sub, step)})
        assert main.feeds["sub"].producer.gate(step + 1, 0).unfinished == ()
    sub.consumer.detach()
    return steps


# What an agent's numbers say of the team is said of the job's own agents.
OF_THE_TEAM = ("advantage_mass_share", "token_share")


def numbers(trained):
    """Alignment metrics, and those of the sub-agents."""
    wanted = ("drmas/alignment/", *(f"drmas/agent/{agent}/" for agent in SUBS))
    return {
        name: value
        for name, value in trained.metrics.items()
        if name.startswith(wanted) and not name.endswith(OF_THE_TEAM) and "inflation" not in name
    }


@pytest.mark.parametrize("name", EQUAL)
def test_the_pair_trains_what_the_one_job_trains(name, one_job, tmp_path):
    wanted, found = one_job(name), pair(name, tmp_path)
    for one, two in zip(wanted, found, strict=True):
        for model_id in ("main", "sub"):
            assert two[model_id].batch == one[model_id].batch
        assert numbers(two["sub"]) == numbers(one["sub"])


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_compared_is_there(name, one_job):
    steps = one_job(name)
    for step, trained in zip(STEPS, steps, strict=True):
        rows = trained["sub"].rows
        calls = [c for p, own in CALLS[step].items() if p != LEFT_OUT for c in own if isinstance(c, tuple)]
        if name != "physical":
            assert Counter(row["agent_id"] for row in rows) == dict(
                zip(SUBS, map(sum, zip(*calls, strict=True)), strict=True)
            )
        assert {row["index"] for row in rows} < set(CALLS[step])
        assert "padding" in trained["sub"].batch or len(rows) % 8 == 0
        assert len({str(row["advantages"]) for row in rows}) > 5
        assert any("finder/turn" in row["path"] for row in rows) and {row["valid"] for row in rows} == {True, False}
        assert len(numbers(trained["sub"])) > 20
        assert {row["index"] for row in trained["main"].rows} == set(CALLS[step]) - {LEFT_OUT}


# -- and would show what is wrong --------------------------------------------------------------------------------------

MODES = ("sample", "expected", "mask", "none")


def test_every_mode_trains_otherwise(one_job):
    made = {
        mode: [[(row["advantages"], row["rollout_is_weights"]) for row in step["sub"].rows] for step in one_job(mode)]
        for mode in MODES
    }
    assert all(made[a] != made[b] for a in MODES for b in MODES if a < b)


def test_a_measured_target_is_the_steps_own(one_job):
    found = [step["sub"].metrics["drmas/alignment/finder/target"] for step in one_job("auto")]
    assert found == [4, 5]


def of_another_seed(sub):
    sub.alignment.seed += 1


def with_another_target(sub):
    sub.replay_buffer.put = lambda claimed: sub._take(
        replace(claimed, manifest={**claimed.manifest, "target": dict.fromkeys(SUBS, 4)})
    )


def without_silent_sessions(sub):
    sub.replay_buffer.put = lambda claimed: sub._take(
        replace(claimed, sessions=tuple(session for session in claimed.sessions if session.rows))
    )


@pytest.mark.parametrize(
    ("name", "tamper"), [("sample", of_another_seed), ("physical", of_another_seed), ("expected", with_another_target)]
)
def test_other_draws_would_show(name, tamper, one_job, tmp_path):
    wanted, found = one_job(name), pair(name, tmp_path, tamper)
    assert all(one["sub"].batch != two["sub"].batch for one, two in zip(wanted, found, strict=True))


def test_a_session_without_a_call_that_is_missing_would_show(one_job, tmp_path):
    wanted, found = one_job("sample"), pair("sample", tmp_path, without_silent_sessions)
    for one, two in zip(wanted, found, strict=True):
        before, after = numbers(one["sub"]), numbers(two["sub"])
        wrong = {name.split("/", 3)[3] for name, value in before.items() if after[name] != value}
        assert {"calls/mean", "share_without_call", "activations_per_session"} <= wrong


def test_statistics_over_all_agents_of_a_prompt_are_no_pairs(one_job, tmp_path):
    """Which is why the check refuses such estimators: the other agents' rewards are not in the store."""
    wanted, found = one_job("grpo_team"), pair("grpo_team", tmp_path)
    for one, two in zip(wanted, found, strict=True):
        assert [row["advantages"] for row in one["sub"].rows] != [row["advantages"] for row in two["sub"].rows]
