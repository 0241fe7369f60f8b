"""Two jobs and a database between them train what one job trains: real verl, vLLM and PostgreSQL."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from delegate_job import STEPS, rows, stages
from metric_page import of_run
from pair_job import Pair, of_main, of_sub

from verl_drmas.trainer.metrics import WHOLE_TEAM

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def pair(delegate_start, delegate_run, postgres_url, heavy):
    folder = Path(tempfile.mkdtemp(prefix="p"))
    main = of_main(
        delegate_start, f"trainer.rollout_data_dir={folder / 'dump'}", f"trainer.save_freq={STEPS}",
        stages(delegate_start), f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=disable",
    )  # fmt: skip
    sub = of_sub(
        delegate_start, f"trainer.rollout_data_dir={folder / 'sub_dump'}", f"trainer.save_freq={STEPS}",
        "trainer.resume_mode=disable",
    )  # fmt: skip
    with heavy:
        ended = Pair(folder, main, sub, store=postgres_url).wait(600)
    yield ended
    shutil.rmtree(folder, ignore_errors=True)


def told(row: dict) -> tuple:
    return row["input"], row["output"], row["score"], row["acc"]


def test_the_sub_job_trains_on_the_rows_that_one_job_has(pair, delegate_run):
    for step in range(1, STEPS + 1):
        in_one = {
            (r["index"], r["session"], r["order"]): told(r)
            for r in rows(delegate_run.folder / "dump", step)
            if r["agent_id"] == "finder"
        }
        in_sub = {(r["index"], r["session"], r["order"]): told(r) for r in rows(pair.folder / "sub_dump", step)}
        assert in_one and in_sub == in_one
        assert {r["model_id"] for r in rows(pair.folder / "sub_dump", step)} == {"sub"}


def test_numbers_of_the_sub_agent_and_of_its_alignment_are_those_of_one_job(pair, delegate_run):
    steps, compared = pair.steps("sub"), 0
    for step, numbers in delegate_run.steps.items():
        for name, value in numbers.items():
            if name.startswith(("drmas/agent/finder/", "drmas/alignment/finder/")) and not WHOLE_TEAM.match(name):
                # verl weighs a step's numbers by its rows and divides again, and one job has more of them.
                assert math.isclose(steps[step][name], value, rel_tol=1e-12, abs_tol=1e-15), (step, name)
                compared += 1
    assert compared >= 25 * STEPS


def test_both_models_end_with_the_weights_of_one_job(pair, delegate_run):
    for job, model in (("main", "main"), ("sub", "sub")):
        part = Path("checkpoints") / f"global_step_{STEPS}" / "actor" / model / "model_world_size_1_rank_0.pt"
        ours, theirs = (torch.load(f / part, weights_only=False) for f in (pair.folder / job, delegate_run.folder))
        assert ours.keys() == theirs.keys() and len(ours) > 10
        for name, weight in ours.items():
            a, b = (getattr(w, "to_local", lambda w=w: w)() for w in (weight, theirs[name]))
            assert torch.equal(a, b), (model, name)


def test_every_session_was_trained_once_and_the_store_can_be_read(pair):
    for arguments, said in ((["verify"], ""), (["status"], "saved")):
        command = [sys.executable, "-m", "verl_drmas.cli", "store", *arguments, pair.store]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout


def test_the_jobs_went_in_step_and_count_their_waiting(pair):
    for step, numbers in pair.steps("main").items():
        assert numbers["drmas/store/sub/version"] >= step - 1  # max_lag 0
        assert numbers["drmas/sessions/failed"] == 0
    assert {
        n["drmas/store/sub/count/duplicate"]
        for n in pair.steps("main").values()
        if "drmas/store/sub/count/duplicate" in n
    } <= {0}
    token = [line for line in pair.log.splitlines() if "Bearer" in line]
    assert token == []


def test_every_metric_is_on_the_page(pair):
    assert [of_run(pair.steps(name)) for name in ("main", "sub")] == [[], []]
