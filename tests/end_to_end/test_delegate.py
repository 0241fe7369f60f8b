"""M-GRPO through real verl and vLLM: a main agent and a sub-agent on models of their own, in multi-turn rows."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from delegate_job import AGENTS, PROMPTS, SESSIONS, STEPS
from delegate_job import rows as rows_of
from metric_page import of_run
from safetensors.torch import load_file

from verl_drmas.data.parquet import read_rows

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]


@pytest.fixture
def start(delegate_start):
    return delegate_start


@pytest.fixture
def job(delegate_run):
    return delegate_run


def rows(job, step: int) -> list[dict]:
    return rows_of(job.folder / "dump", step)


def test_every_sub_row_belongs_to_a_session_of_the_same_steps_main_batch(job):
    for step in range(1, STEPS + 1):
        mains = Counter((r["prompt"], r["session"]) for r in rows(job, step) if r["agent_id"] == "main")
        subs = {(r["prompt"], r["session"]) for r in rows(job, step) if r["agent_id"] == "finder"}
        assert set(mains.values()) == {1} and len(mains) == PROMPTS * SESSIONS  # one trajectory, one row
        assert subs and subs <= set(mains)
        assert {r["model_id"] for r in rows(job, step) if r["agent_id"] == "finder"} == {"sub"}


def test_rewards_are_those_of_the_value_table(job):
    for step in range(1, STEPS + 1):
        scores = {agent: {round(r["score"], 6) for r in rows(job, step) if r["agent_id"] == agent} for agent in AGENTS}
        assert scores["main"] <= {0.0, 0.1, 1.0}
        assert scores["finder"] <= {0.0, 0.1, 0.5, 0.6, 1.0}


def test_the_counts_of_alignment_add_up(job):
    for step, numbers in job.steps.items():
        calls = Counter((r["prompt"], r["session"]) for r in rows(job, step) if r["agent_id"] == "finder")
        d = [calls.get(key, 0) for key in {(r["prompt"], r["session"]) for r in rows(job, step)}]
        prefix = "drmas/alignment/finder"
        assert numbers[f"{prefix}/calls/mean"] == pytest.approx(sum(d) / len(d))
        assert numbers[f"{prefix}/share_without_call"] == pytest.approx(d.count(0) / len(d))
        assert numbers[f"{prefix}/copies_added"] == sum(2 - n for n in d if n == 1)
        assert numbers[f"{prefix}/dropped"] == sum(max(0, n - 2) for n in d)
        assert sum(v for k, v in numbers.items() if k.startswith(f"{prefix}/histogram")) == pytest.approx(1)


def test_both_models_really_change(job, start):
    for agent, model in AGENTS.items():
        before = load_file(start.models[agent] / "model.safetensors")
        folder = job.folder / "checkpoints" / f"global_step_{STEPS}" / "actor" / model
        after = torch.load(next(folder.glob("model_world_size_1_rank_0.pt")), weights_only=False)
        after = {name: getattr(weight, "to_local", lambda w=weight: w)() for name, weight in after.items()}
        moved = [name for name, weight in before.items() if not torch.equal(after[name].cpu(), weight)]
        assert len(moved) > len(before) * 0.9, f"{model}: {len(moved)} of {len(before)}"


def test_the_stages_of_the_curriculum_follow_each_other(job, start):
    assert [step["drmas/curriculum/stage"] for _, step in sorted(job.steps.items())] == [1, 1, 2]
    held_out = {row["extra_info"]["index"] for row in read_rows(start.val)}
    for step in range(1, STEPS + 1):
        indices = {row["index"] for row in rows(job, step)}
        assert (indices <= held_out) is (step == STEPS)


def test_data_filter_measures_prompts_by_the_runs_dumps(job, start):
    out = job.folder / "band.parquet"
    command = [sys.executable, "-m", "verl_drmas.cli", "data", "filter", str(start.train), "-o", str(out)]
    command += ["--run", str(job.folder / "dump"), "--until-step", "2", "--samples", str(SESSIONS), "--high", "1.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    right = {}
    for step in (1, 2):
        for row in rows(job, step):
            right.setdefault(row["index"], {})[step, row["session"]] = row["acc"]
    kept = {row["extra_info"]["index"]: row["extra_info"]["success_rate"] for row in read_rows(out)}
    assert kept == {index: pytest.approx(sum(accs.values()) / len(accs)) for index, accs in right.items()}


def test_a_trajectory_of_several_turns_is_one_row(job):
    for numbers in job.steps.values():
        assert numbers["drmas/agent/main/turns/mean"] == pytest.approx(numbers["drmas/workflow/main_turns"])
        assert numbers["drmas/agent/main/activations_per_session"] == 1
        assert numbers["drmas/workflow/main_turns"] > 1
        assert numbers["drmas/agent/finder/activations_per_session"] == numbers["drmas/workflow/delegations"]


def test_every_metric_is_on_the_page(job):
    assert of_run(job.steps) == []
