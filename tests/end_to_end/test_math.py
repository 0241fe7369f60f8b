"""The paper's workflow on real text: `verl-drmas data math`, then `recipes/drmas_math` with math-verify rewards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from recipe_job import ROLLOUT, check, play

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]

DATA = Path(os.environ.get("VERL_DRMAS_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
REAL = DATA / "math" / "gsm8k_train_part.jsonl"

# Stand-ins of the same form where the real rows aren't at hand.
WRITTEN = [
    {
        "question": f"Ada has {a} pears and buys {b} more. She gives away {c}. How many pears has she?",
        "answer": f"{a}+{b}-{c}={a + b - c}\n#### {a + b - c}",
    }
    for a, b, c in ((12, 7, 3), (40, 2, 11), (5, 5, 5), (9, 31, 20), (8, 8, 1), (100, 1, 50), (3, 4, 2), (17, 6, 9))
]


@pytest.fixture(scope="module")
def job(assets):
    folder = Path(tempfile.mkdtemp(prefix="m"))
    source = folder / "gsm8k.jsonl"
    if REAL.exists():
        shutil.copy(REAL, source)
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in WRITTEN))
    parquet = folder / "train.parquet"
    command = [sys.executable, "-m", "verl_drmas.cli", "data", "math", str(source), "-o", str(parquet), "--limit", "8"]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "checked: 8 of 8" in done.stdout
    overrides = [
        f"{ROLLOUT}.n=4",
        "data.max_prompt_length=480",  # shorter than the verifier's prompt, so that the middle is cut
        "data.max_response_length=96",
        f"{ROLLOUT}.max_model_len=1024",
        f"{ROLLOUT}.max_num_batched_tokens=1024",
    ]
    finished = play(folder, "drmas_math", ["--mapping", "shared"], overrides, assets / "chatml", parquet)
    yield finished
    shutil.rmtree(folder, ignore_errors=True)


def test_it_is_the_recipe(job):
    last = check(job, "drmas_math")
    assert last["drmas/model/base/updates"] == 1


def test_every_session_ends_and_is_counted(job):
    for step in job.steps.values():
        assert step["drmas/sessions/failed"] == 0
        assert step["drmas/agent/verifier/activations_per_session"] == 1
        # A random model never says a verdict: each is invalid, counts as a rejection, and the solver speaks again.
        assert step["drmas/workflow/rounds"] == 2
        assert step["drmas/agent/solver/activations_per_session"] == 2
        assert step["drmas/agent/verifier/valid_share"] == 0
        assert step["drmas/agent/verifier/penalty/mean"] == pytest.approx(0.1)


def test_prompts_are_cut_and_keep_the_question(job):
    assert all(step["drmas/agent/verifier/cut_characters/mean"] > 0 for step in job.steps.values())
    shown = job.log[job.log.index("first session") :]
    assert "[...]" in shown.split("verifier.0")[1].split("response")[0]
    assert "Problem:" in shown.split("verifier.0")[1].split("response")[0]


def test_shadow_statistics_are_logged(job):
    for estimator in ("grpo_team", "grpo_activation", "drmas"):
        assert f"drmas/shadow/{estimator}/advantage_abs/max" in job.steps[1]
