"""Plays the scripts of recipes with their shipped files, made small by overrides alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launch import Run, run

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEPS = 2
ROLLOUT = "actor_rollout_ref.rollout"
SMALL = (
    "+drmas_runtime=cpu",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
    "data.dataloader_num_workers=0",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    f"{ROLLOUT}.n=2",
    "data.max_prompt_length=400",
    "data.max_response_length=24",
    f"{ROLLOUT}.max_model_len=512",
    f"{ROLLOUT}.max_num_batched_tokens=512",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
)


def play(folder: Path, recipe: str, options: list[str], overrides: list[str], model: Path, data: Path) -> Run:
    """Two steps of a recipe's script; its metrics stand where the recipe leaves them."""
    files = [f"data.train_files={data}", f"data.val_files={data}", f"actor_rollout_ref.model.path={model}"]
    job = run(
        folder,
        [*SMALL, *files, *overrides],
        steps=STEPS,
        timeout=420,
        defaults=[*options, "--seed", "3", "--runs", str(folder / "runs")],
        program=[str(RECIPES / recipe / "run.py")],
    )
    (job.folder,) = (folder / "runs" / recipe).iterdir()
    (job.folder / "log.txt").symlink_to(folder / "log.txt")
    job.command = json.loads((job.folder / "command.json").read_text())
    return job


def check(job: Run, config: str, lr: str = "actor/lr") -> dict[str, float]:
    """What holds for every run; returns the last step's metrics. `lr` names a learning rate that is logged."""
    assert job.command[:5] == [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", config]
    assert job.folder.name.endswith("_seed3")
    assert sorted(job.steps) == [1, 2]
    last = job.steps[2]
    assert last[lr] == pytest.approx(1e-6)
    return last
