"""Estimates, spikes, totals, phases and faults against plain arithmetic."""

import math
import random
import statistics

import numpy as np
import pytest
from simulated_runs import make_records

from verl_drmas.report.faults import DEAD, MASKED, RETRIED, faults
from verl_drmas.report.runlog import read_run
from verl_drmas.report.spikes import FACTOR, LEAST, WINDOW, running_ratios, spikes
from verl_drmas.report.stats import Estimate, steps_shown
from verl_drmas.report.totals import phases, totals


def trained(entries):
    return [(step, {"training/global_step": step, **data}) for step, data in entries]


@pytest.mark.parametrize("values", [[1.0, 2.0], [0.5, 0.5, 0.5], [1e-9, 3.0, -2.0, 7.5]])
def test_an_estimate_is_mean_and_standard_error(values):
    estimate = Estimate.of(values)
    assert estimate.mean == pytest.approx(statistics.fmean(values))
    assert estimate.error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)))
    assert estimate.n == len(values)


def test_one_run_has_no_error_and_none_no_estimate():
    assert Estimate.of([0.5]).shown(scale=100) == "50.0 (n = 1)"
    assert Estimate.of([]) is None
    assert Estimate.of([0.4, 0.6]).shown(scale=100) == "50.0 ± 10.0 (n = 2)"


@pytest.mark.parametrize(
    ("steps", "text"),
    [([], ""), ([1, 2, 3, 7, 9, 10], "1–3, 7, 9–10"), (list(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more")],
)
def test_steps_are_shown_as_ranges(steps, text):
    assert steps_shown(steps) == text


def test_ratios_are_to_the_median_of_the_values_before():
    values = [random.Random(3).lognormvariate(0, 1) for _ in range(200)]
    values[50:60] = [1.0] * 10  # equal values must leave the window one by one
    expected = [
        None if i < LEAST else value / statistics.median(values[max(0, i - WINDOW) : i])
        for i, value in enumerate(values)
    ]
    assert running_ratios(values) == pytest.approx(expected)


def test_spikes_are_counted_by_model_and_nan_apart(write_log):
    truth = make_records(steps=60, spikes=(30, 31, 50), lost=(40, 45), agents={"a": "x", "b": "y"})
    x, y = spikes(read_run(write_log(truth.records)))
    assert (x.model, y.model) == ("x", "y")
    for one in (x, y):
        assert one.steps == (30, 31, 50)
        assert one.lost == (40, 45)
        assert one.judged == 60 - LEAST - 2
        assert one.worst > FACTOR


def test_a_spike_is_above_five_medians_and_not_at_them(write_log):
    entries = [(step, {"actor/grad_norm": 1.0}) for step in range(1, 11)]
    entries += [(11, {"actor/grad_norm": 5.0}), (12, {"actor/grad_norm": 5.001})]
    (one,) = spikes(read_run(write_log(trained(entries))))
    assert one.steps == (12,)
    assert one.model == "model"


def test_a_norm_that_was_nan_throughout_is_no_missing_norm(write_log):
    (one,) = spikes(read_run(write_log(trained([(step, {"actor/grad_norm": None}) for step in (1, 2)]))))
    assert (one.logged, one.lost, one.median) == (0, (1, 2), None)


def test_totals_are_what_was_made_up(write_log):
    truth = make_records(steps=50, failing=(3, 9, 20), test_every=10)
    found = totals(read_run(write_log(truth.records)))
    assert (found.steps, found.asked, found.failed) == (50, 50 * 16, 3)
    assert (found.ended, found.rows, found.sampled, found.tokens) == (
        truth.sessions,
        truth.rows,
        truth.sampled,
        truth.tokens,
    )
    assert found.seconds == pytest.approx(truth.seconds)


def test_a_stock_run_has_tokens_and_no_sessions(write_log):
    entries = trained([(1, {"perf/total_num_tokens": 70}), (2, {"perf/total_num_tokens": 30})])
    found = totals(read_run(write_log(entries)))
    assert (found.tokens, found.asked, found.ended, found.rows, found.sampled) == (100, None, None, None, None)


def test_phases_add_up_to_steps_and_tests(write_log):
    truth = make_records(steps=20, test_every=5)
    found = phases(read_run(write_log(truth.records)))
    assert math.fsum(found.values()) == pytest.approx(truth.seconds)
    assert found["test"] == pytest.approx(20.0)
    assert found["other"] == pytest.approx(20 * 0.7)
    assert list(found) == ["rollout", "old log-probs", "advantages", "update", "weight sync", "other", "test"]


def test_faults_are_counted_by_reason(write_log):
    entries = trained(
        [
            (1, {"drmas/sessions/expected": 8.0, "drmas/sessions/failed": 0.0}),
            (
                2,
                {
                    "drmas/sessions/expected": 8.0,
                    "drmas/sessions/failed": 3.0,
                    "drmas/sessions/failed/timeout": 1.0,
                    "drmas/sessions/failed/retrieval": 2.0,
                    "drmas/sessions/masked": 2.0,
                    "drmas/sessions/retried_calls": 5.0,
                    "drmas/sessions/dead_servers": 1.0,
                    "drmas/alignment/sub/dropped": 4.0,
                    "training/off_policy/evicted_samples": 6,
                    "val/a/b/failed_sessions": 2.0,
                    "val/drmas/sessions/failed/timeout": 2.0,
                },
            ),
            (3, {"drmas/sessions/expected": 8.0, "drmas/sessions/failed": 0.0, "drmas/sessions/dead_servers": 1.0}),
            (4, {"drmas/sessions/expected": 8.0, "drmas/sessions/failed": 0.0, "drmas/sessions/dead_servers": 2.0}),
        ]
    )
    found = faults(read_run(write_log(entries)))
    assert (found.asked, found.failed, found.reasons) == (32, 3, {"retrieval": 2, "timeout": 1})
    # The trainer's count of dead servers goes on from step to step.
    assert found.counted == {MASKED: 2, RETRIED: 5, DEAD: 2}
    assert found.dropped == {"too old": 6, "sub: no copy (alignment)": 4}
    assert (found.tests, found.test_reasons) == (2, {"timeout": 2})


def test_a_run_that_counts_no_sessions_has_no_zero_faults(write_log):
    found = faults(read_run(write_log(trained([(1, {"a": 1.0})]))))
    assert (found.asked, found.failed, found.counted, found.tests) == (None, None, {}, None)


def test_running_means_and_common_means_are_plain_means():
    figures = pytest.importorskip("verl_drmas.report.figures")
    values = np.random.default_rng(0).normal(size=37)
    plain = [np.mean(values[max(0, i - 4) : i + 1]) for i in range(37)]
    assert figures.running_mean(values, 5) == pytest.approx(plain)
    assert figures.running_mean(values, 1) is values
    steps, means = figures.common_mean(
        [(np.array([1, 2, 3, 5]), np.array([1.0, 2.0, 3.0, 5.0])), (np.array([2, 3, 4]), np.array([4.0, 6.0, 9.0]))]
    )
    assert (steps.tolist(), means.tolist()) == ([2, 3], [3.0, 4.5])
    assert len(figures.common_mean([(np.array([1]), np.array([1.0])), (np.array([2]), np.array([2.0]))])[0]) == 0
