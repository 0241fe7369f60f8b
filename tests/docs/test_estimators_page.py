"""docs/estimators.md: its table is the code's, and so is every number in its examples."""

import ast
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from doc_pages import code, table_with, text_of

import verl_drmas
from verl_drmas.advantage import (
    ALIGN_MODES,
    ESTIMATORS,
    agent_diagnostics,
    group_advantage,
    invalid_penalty,
    mgrpo_advantage,
    penalised_advantage,
)
from verl_drmas.config import AdvantageConfig
from verl_drmas.support import MGRPO, PER_AGENT

PAGE = text_of("docs/estimators.md")
PROSE = " ".join(PAGE.split())


def test_the_table_names_every_estimator_with_its_switches():
    rows = {code(row[0]): tuple(map(code, row[1:4])) for row in table_with(PAGE, "`algorithm.adv_estimator`")}
    assert rows.pop(MGRPO) == ("agent", "agent", "aligned")
    assert rows == {name: (s.mean_scope, s.std_scope, s.pool) for name, s in ESTIMATORS.items()}
    assert f"algorithm.adv_estimator={PER_AGENT}" in PROSE


def test_no_other_estimator_is_registered():
    """`register_adv_est` is called for the names of ESTIMATORS (in a loop) and for the two others."""
    called = set()
    for path in Path(verl_drmas.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_adv_est":
                called.add(ast.unparse(node.args[0]))
    assert called == {"name", "PER_AGENT", "MGRPO"}


def test_the_options_are_all_there_with_their_defaults():
    told = {code(row[0]): code(row[1]) for row in table_with(PAGE, "`drmas.advantage.`")}
    assert told.keys() == {field.name for field in fields(AdvantageConfig)}
    for name, value in vars(AdvantageConfig()).items():
        shown = told[name]
        assert (
            float(shown) == value
            if isinstance(value, float | int) and not isinstance(value, bool)
            else (shown == str(value).lower())
        ), name


def test_the_modes_of_alignment_are_all_there():
    assert {code(row[0].split()[0]) for row in table_with(PAGE, "`mode`")} == set(ALIGN_MODES)


def column(rows, i, convert=str):
    return [convert(row[i]) for row in rows]


@pytest.fixture(scope="module")
def example():
    rows = table_with(PAGE, "session", "agent", "outcome")
    agents = column(rows, 1)
    valid = [{"yes": True, "no": False}[row[3]] for row in rows]
    ids = {"uid": ["a prompt"] * len(rows), "session": column(rows, 0, int), "agent_id": agents}
    penalty = invalid_penalty(valid, agent_id=agents, coefficients={"solver": 0.1, "verifier": 0.1})
    return rows, np.array(column(rows, 2, float)), penalty, ids


def test_the_worked_example_is_the_codes(example):
    rows, rewards, penalty, ids = example
    (header,) = [line for line in PAGE.splitlines() if line.startswith("| session | agent | outcome")]
    names = [code(cell.strip()) for cell in header.split("|")[5:-1]]
    assert names == list(ESTIMATORS)
    for i, name in enumerate(names):
        computed = penalised_advantage(rewards, penalty, place="inside", **ids, **vars(ESTIMATORS[name]))
        assert column(rows, 4 + i) == [f"{value:.4f}" for value in computed], name


def test_the_steps_by_hand_are_the_codes(example):
    _, rewards, penalty, ids = example
    own = (rewards - penalty)[np.array(ids["agent_id"]) == "solver"]
    assert "mean 2.9/7 = 0.4143 and sample deviation 0.5490" in PROSE
    assert (round(own.mean(), 4), round(own.std(ddof=1), 4)) == (0.4143, 0.549)


def test_the_example_of_alignment_is_the_codes():
    rows = table_with(PAGE, "session", "agent", "reward", "copies")
    places, seen = [], {}
    for row in rows:
        seen[row[0], row[1]] = seen.get((row[0], row[1]), -1) + 1
        places.append(seen[row[0], row[1]])
    rewards = column(rows, 2, float)
    found = mgrpo_advantage(
        rewards, uid=["p"] * len(rows), session=column(rows, 0, int), agent_id=column(rows, 1), activation=places,
        index=[0] * len(rows), aligned=["searcher"], target=2, mode="expected", seed=0, step=1,
    )  # fmt: skip
    assert column(rows, 3, float) == [round(copies, 4) for copies in found.copies]
    assert column(rows, 4) == [f"{value:.4f}" for value in found.advantage]
    subs = [reward for row, reward in zip(rows, rewards, strict=True) if row[1] == "searcher"]
    assert f"mean {found.mean[-1]:.4f} instead of the rows' {np.mean(subs):.4f}" in PROSE
    assert "Six values" in PROSE and found.values[-1] == 6


def team(calls, outcomes):
    """Ids and rewards of sessions in which each agent acts so many times."""
    ids = {"uid": [], "session": [], "agent_id": []}
    rewards = []
    for session, outcome in enumerate(outcomes):
        for agent, times in calls.items():
            ids["uid"] += ["p"] * times
            ids["session"] += [session] * times
            ids["agent_id"] += [agent] * times
            rewards += [outcome] * times
    return np.array(rewards), ids


def of(name, rewards, ids, **options):
    return group_advantage(rewards, **ids, **vars(ESTIMATORS[name]), **options)


def test_where_they_coincide():
    outcomes = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.3, 0.0]
    alone = team({"solver": 1}, outcomes)
    assert len({of(name, *alone).tobytes() for name in ESTIMATORS}) == 1
    even = team({"solver": 3, "verifier": 1}, outcomes)
    first, *others = (of(name, *even, ddof=0, eps=0.0) for name in ESTIMATORS)
    assert all(np.allclose(first, other, rtol=1e-12) for other in others)
    once = team({"solver": 1, "verifier": 1}, outcomes)
    np.testing.assert_array_equal(of("drmas", *once), of("grpo_team", *once))
    n, ratio = 2 * len(outcomes), of("grpo_activation", *once, eps=0.0) / of("grpo_team", *once, eps=0.0)
    np.testing.assert_allclose(ratio, np.sqrt((n / 2) / (n / 2 - 1)) / np.sqrt(n / (n - 1)), rtol=1e-12)


def test_what_is_said_of_f():
    outcomes = [1.0, 0.0, 0.0, 0.0]
    rewards, ids = team({"solver": 2, "verifier": 1}, outcomes)
    tokens = np.ones(len(rewards))
    even = agent_diagnostics(rewards, rewards, **ids, tokens=tokens)
    assert even["solver"]["inflation_factor/max"] == pytest.approx(1) == even["verifier"]["inflation_factor/max"]
    keep = [i for i in range(len(rewards)) if ids["agent_id"][i] == "verifier" or ids["session"][i] == 0]
    rewards, ids = rewards[keep], {name: [values[i] for i in keep] for name, values in ids.items()}
    alone = agent_diagnostics(rewards, rewards, **ids, tokens=tokens[keep])
    assert alone["solver"]["inflation_factor/max"] == pytest.approx(len(outcomes) - 1)  # the bound, N - 1
    own = of("drmas", rewards, ids)
    assert not own[np.array(ids["agent_id"]) == "solver"].any()


@pytest.mark.parametrize("coefficient", [0.001, 1.0])
def test_a_penalty_inside_acts_at_full_size(coefficient):
    rewards, ids = team({"solver": 1}, [0.0] * 8)
    rewards[3] -= coefficient
    assert abs(of("drmas", rewards, ids, eps=0.0)[3]) == pytest.approx(7 / np.sqrt(8))
    assert "(2.47 for n = 8)" in PROSE and f"{7 / np.sqrt(8):.2f}" == "2.47"
