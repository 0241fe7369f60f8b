"""Synthetic run logs for the report's tests."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for simulated_runs


@pytest.fixture
def write_log(tmp_path):
    """Returns a function that writes (step, metrics) pairs in the form of verl's file logger and returns the path."""

    def write(entries, name="run"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in entries))
        return path

    return write


@pytest.fixture
def team_entries():
    """Returns a function that makes a team's log: each keyword is a metric's (first, last) value, linear between."""

    short = {
        "success": "drmas/workflow/solver_success",
        "balanced": "drmas/workflow/verifier_balanced_accuracy",
        "right": "drmas/workflow/verifier_accuracy_right",
        "wrong": "drmas/workflow/verifier_accuracy_wrong",
        "solver": "drmas/agent/solver/reward/mean",
        "verifier": "drmas/agent/verifier/reward/mean",
        "grad": "actor/grad_norm",
        "seconds": "timing_s/step",
    }

    def make(steps=20, **ends):
        return [
            (step, {short[key]: a + (b - a) * (step - 1) / (steps - 1) for key, (a, b) in ends.items()})
            for step in range(1, steps + 1)
        ]

    return make


@pytest.fixture
def settings(tmp_path):
    """Returns a function that writes a run's configuration with some changes and reads it."""
    from simulated_runs import config_text

    from verl_drmas.report.settings import read_settings

    def read(name="config.yaml", **changes):
        path = tmp_path / name
        path.write_text(config_text(**changes))
        return read_settings(path)

    return read


@pytest.fixture
def runs(tmp_path):
    """Returns a function that writes run folders, by name with options of `write_run`, and reads them."""
    from simulated_runs import write_run

    from verl_drmas.report.find import find_runs

    def make(**options):
        for name, own in options.items():
            write_run(tmp_path / "runs" / name, **own)
        return find_runs([tmp_path / "runs"])[0]

    return make
