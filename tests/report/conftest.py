"""Synthetic run logs for the report's tests."""

import json

import pytest


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
