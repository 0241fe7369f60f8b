"""One agent, one call, `grpo_team`: the numbers of stock verl's `sync` trainer with `grpo`, metric by metric."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from launch import run

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1500)]

# Engine against trainer: differences of float32 log-probs, which are rounding (1e-8) and nothing else while both agree.
ROUNDING = re.compile(r"rollout_corr/|training/rollout_")
UNLIKE = re.compile(r"timing|perf/|mfu|throughput")


def mean_rounding(metrics: dict, name: str) -> float:
    """What the order of a float32 sum may change: rows come in completion order, and a centred mean cancels to about 0.

    Both jobs average the same values, whose size is told by the metrics beside the mean, so this is four units in the
    last place of the largest one (5e-7 for advantages of size 1), whatever the mean itself is.
    """
    stem, _, kind = name.rpartition("/")
    if kind != "mean" or f"{stem}/max" not in metrics:
        return 0.0
    return 4 * 2**-23 * max(abs(metrics[f"{stem}/max"]), abs(metrics[f"{stem}/min"]))


@pytest.fixture(scope="module")
def jobs(parity_team, parity_common):
    folder = Path(tempfile.mkdtemp(prefix="p"))
    yield run(folder, [*parity_common, "algorithm.adv_estimator=grpo"], steps=3), parity_team
    shutil.rmtree(folder, ignore_errors=True)


def test_every_shared_metric_is_equal(jobs):
    stock, team = (job.steps for job in jobs)
    assert sorted(stock) == sorted(team) == [1, 2, 3]
    compared, off = 0, []
    for step, metrics in stock.items():
        for name, value in metrics.items():
            if UNLIKE.search(name) or not isinstance(value, (int, float)):
                continue
            assert name in team[step], f"{name} is missing"
            compared += 1
            floor = 1e-6 if ROUNDING.match(name) else 1e-8
            if abs(value - team[step][name]) > 1e-5 * abs(value) + floor + mean_rounding(metrics, name):
                off.append((step, name, value, team[step][name]))
    print(f"\nparity: {compared} values compared over 3 steps, {len(off)} off by more than 1e-5: {off}")
    assert compared > 200
    assert not off


def test_the_job_is_not_trivial(jobs):
    for step in jobs[0].steps.values():
        assert step["actor/grad_norm"] > 0
        assert step["critic/score/max"] > step["critic/score/min"]
    assert jobs[0].steps[3]["actor/kl_loss"] > 0


def test_rows_without_ids_are_said_once(jobs):
    assert jobs[1].log.count("each counts as agent 'default'") == 1
