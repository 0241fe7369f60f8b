"""The closing table and the verdict on learning."""

import io

import pytest
from rich.console import Console

from verl_drmas.report.runlog import read_run
from verl_drmas.report.table import Metric, as_dict, rows, table
from verl_drmas.report.verdict import Criterion, learned


def rendered(log):
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(table(log))
    return console.file.getvalue()


def line_of(text, label):
    return next(line for line in text.splitlines() if label in line)


def test_table_shows_means_of_the_fifths_and_a_dash_for_what_is_missing(write_log, team_entries):
    log = read_run(write_log(team_entries(steps=20, success=(0.0, 0.95), grad=(2.0, 2.0))))

    plain = as_dict(log)["drmas/workflow/solver_success"]
    assert plain["first"] == pytest.approx((0.0 + 0.05 + 0.10 + 0.15) / 4)
    assert plain["last"] == pytest.approx((0.80 + 0.85 + 0.90 + 0.95) / 4)
    assert plain["change"] == pytest.approx(0.8)
    text = rendered(log)
    assert "+0.800" in line_of(text, "solver success")
    assert "(1–4)" in text and "(17–20)" in text
    cells = [cell.strip() for cell in line_of(text, "seconds per step").split("│")[2:5]]
    assert cells == ["-", "-", "-"]
    assert as_dict(log)["timing_s/step"]["first"] is None


def test_a_metric_logged_late_has_no_change(write_log):
    log = read_run(write_log([(step, {"late": 1.0} if step > 5 else {}) for step in range(1, 11)]))
    (row,) = rows(log, [Metric("late", "late")])
    assert (row.first, row.last, row.change) == (None, 1.0, None)


def test_table_has_the_reward_of_every_agent(write_log, team_entries):
    log = read_run(write_log(team_entries(solver=(0.4, 0.9), verifier=(0.5, 0.8))))
    assert {"drmas/agent/solver/reward/mean", "drmas/agent/verifier/reward/mean"} <= set(as_dict(log))
    assert "solver: reward" in rendered(log) and "verifier: reward" in rendered(log)


SEARCHED = {
    "drmas/workflow/em": "exact match",
    "drmas/workflow/f1": "token F1",
    "drmas/workflow/searches": "searches per session",
    "drmas/workflow/gold_in_evidence": "gold in the evidence",
    "drmas/workflow/verifier_balanced_accuracy": "verifier balanced accuracy",
    "drmas/workflow/verifier_accuracy_right": "verifier accuracy, right",
    "drmas/workflow/verifier_accuracy_wrong": "verifier accuracy, wrong",
}


def test_a_search_teams_outcomes_stand_first_and_a_solvers_are_left_out(write_log):
    entries = [(step, dict.fromkeys(reversed(SEARCHED), step / 10) | {"timing_s/step": 2.0}) for step in range(1, 6)]
    log = read_run(write_log(entries))
    shown = as_dict(log)
    assert {name: row["label"] for name, row in list(shown.items())[:7]} == SEARCHED
    assert list(shown) == [*SEARCHED, "timing_s/step"]
    assert "solver" not in rendered(log)


def test_a_solver_and_verifiers_outcomes_are_as_before(write_log, team_entries):
    shown = as_dict(read_run(write_log(team_entries(**GOOD))))
    assert [name for name in shown if name.startswith("drmas/workflow/")] == [
        f"drmas/workflow/{name}"
        for name in (
            *("solver_success", "verifier_balanced_accuracy", "verifier_accuracy_right", "verifier_accuracy_wrong"),
        )
    ]


def test_an_outcome_logged_at_any_step_is_shown_with_a_dash_where_it_is_missing(write_log):
    log = read_run(
        write_log([(step, {"drmas/workflow/em": 0.5} if step == 10 else {"x": 1.0}) for step in range(1, 11)])
    )
    assert [cell.strip() for cell in line_of(rendered(log), "exact match").split("│")[2:5]] == ["-", "0.500", "-"]
    assert "drmas/workflow/f1" not in as_dict(log)


def test_each_agent_has_its_share_of_valid_actions(write_log):
    name = "drmas/agent/{}/valid_share"
    entries = [(step, {name.format("search"): 0.1 * step, name.format("answer"): 1.0}) for step in range(1, 6)]
    log = read_run(write_log(entries))
    text = rendered(log)
    assert [cell.strip() for cell in line_of(text, "search: valid share").split("│")[2:5]] == [
        "0.100",
        "0.500",
        "+0.400",
    ]
    assert [cell.strip() for cell in line_of(text, "answer: valid share").split("│")[2:5]] == [
        "1.000",
        "1.000",
        "+0.000",
    ]
    labels = [row["label"] for row in as_dict(log).values()]
    own = ["reward", "activations per session", "valid share", "inflation factor"]
    assert labels[:8] == [f"{agent}: {label}" for agent in ("answer", "search") for label in own]


@pytest.mark.parametrize(
    ("models", "labels"),
    [
        ({"actor/grad_norm": 2.0}, {"actor/grad_norm": "grad norm"}),
        ({"actor/grad_norm": 2.0, "drmas/model/base/grad_norm": 2.0}, {"drmas/model/base/grad_norm": "grad norm"}),
        (
            {"drmas/model/b/grad_norm": 2.0, "drmas/model/a/grad_norm": 2.0},
            {"drmas/model/a/grad_norm": "a: grad norm", "drmas/model/b/grad_norm": "b: grad norm"},
        ),
    ],
)
def test_each_model_has_its_gradient_norm(write_log, models, labels):
    shown = as_dict(read_run(write_log([(step, models) for step in range(1, 6)])))
    assert {name: row["label"] for name, row in shown.items() if "grad" in name} == labels


def test_searches_are_counted_to_two_digits(write_log):
    log = read_run(write_log([(1, {"drmas/workflow/searches": 2.346})]))
    cells = [cell.strip() for cell in line_of(rendered(log), "searches per session").split("│")[2:5]]
    assert cells == ["2.35", "2.35", "+0.00"]


GOOD = {"success": (0.4, 0.9), "balanced": (0.55, 0.85), "right": (0.5, 0.9), "wrong": (0.6, 0.8)}


def test_a_team_that_learned_passes(write_log, team_entries):
    passed, tests = learned(read_run(write_log(team_entries(**GOOD))))
    assert passed
    assert all(test["passed"] for test in tests.values()) and len(tests) == 4


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"success": (0.4, 0.45)}, "drmas/workflow/solver_success"),
        ({"balanced": (0.55, 0.60)}, "drmas/workflow/verifier_balanced_accuracy"),
        # Says "right" to everything: the class of right proposals is perfect.
        ({"right": (0.5, 1.0), "wrong": (0.5, 0.1)}, "drmas/workflow/verifier_accuracy_wrong"),
        ({"right": (0.5, 0.2)}, "drmas/workflow/verifier_accuracy_right"),
    ],
)
def test_one_failing_test_fails_the_verdict_and_is_named(write_log, team_entries, change, culprit):
    passed, tests = learned(read_run(write_log(team_entries(**{**GOOD, **change}))))
    assert not passed
    assert [name for name, test in tests.items() if not test["passed"]] == [culprit]


def test_a_metric_that_was_never_logged_fails(write_log, team_entries):
    passed, tests = learned(
        read_run(write_log(team_entries(success=(0.4, 0.9), balanced=(0.5, 0.9), right=(0.6, 0.9))))
    )
    assert not passed
    assert tests["drmas/workflow/verifier_accuracy_wrong"] == {"last": None, "required": 0.5, "passed": False}


def test_the_bounds_are_as_the_criterion_says(write_log):
    name = "drmas/workflow/solver_success"
    entries = [(1, {name: 0.7}), (2, {name: 0.7}), (3, {name: 0.7}), (4, {name: 0.7}), (5, {name: 0.8})]
    log = read_run(write_log(entries))
    only = Criterion(rising=(name,), classes=())
    assert learned(log, only)[0]  # 0.8 - 0.7 is a little less than 0.1 in floats
    assert not learned(log, Criterion(min_gain=0.11, rising=(name,), classes=()))[0]
    assert not learned(log, Criterion(min_class_accuracy=0.8, rising=(), classes=(name,)))[0]
