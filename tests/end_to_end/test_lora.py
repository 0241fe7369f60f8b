"""LoRA: an update moves the adapter and nothing else, and the server serves the adapter of the last sync."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from launch import HERE, run

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]

# verl starts the engine on dummy weights, so the base model is synced once and the adapter after every update.
JOB = (
    "+drmas=rows",
    "algorithm.adv_estimator=grpo_team",
    "actor_rollout_ref.rollout.agent.default_agent_loop=one_call",
    f"reward.custom_reward_function.path={HERE / 'reward.py'}",
    "reward.custom_reward_function.name=compute_score",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.model.target_modules=all-linear",
    # The reference is the same model without its adapter, so the loss tells how far the adapter has gone.
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "trainer.save_freq=1",
)


@pytest.fixture(scope="module")
def job(assets):
    folder = Path(tempfile.mkdtemp(prefix="l"))
    loops = folder / "loops.yaml"
    loops.write_text("- {name: one_call, _target_: loops.OneCall}\n")
    overrides = [
        f"data.train_files={assets / 'train.parquet'}",
        f"data.val_files={assets / 'val.parquet'}",
        f"actor_rollout_ref.model.path={assets / 'llama'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        *JOB,
    ]
    yield run(folder / "job", overrides, steps=3, timeout=420)
    shutil.rmtree(folder, ignore_errors=True)


def weights(job, step: int) -> dict[str, torch.Tensor]:
    """What rank 0 saved of the model after a step, by verl's names."""
    (path,) = (job.folder / "checkpoints" / f"global_step_{step}").rglob("model_world_size_1_rank_0.pt")
    saved = torch.load(path, weights_only=False)
    return {name: w.to_local() if hasattr(w, "to_local") else w for name, w in saved.items()}


def test_an_update_moves_the_adapter_and_nothing_else(job):
    assert sorted(job.steps) == [1, 2, 3]
    assert all(step["actor/grad_norm"] > 0 for step in job.steps.values())
    first, last = weights(job, 1), weights(job, 3)
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved == {name for name in first if "lora_" in name}
    assert len(moved) == 56  # two matrices for each of seven layers in four blocks


def test_the_server_serves_the_adapter_of_the_last_sync(job):
    for step in job.steps.values():
        assert step["training/rollout_probs_diff_max"] < 1e-6
    # Were it the base model that samples, the difference would be what the adapter has changed by then.
    assert job.steps[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert job.steps[3]["actor/kl_loss"] > 1e-6


def test_the_checkpoint_says_what_the_adapter_is(job):
    (path,) = (job.folder / "checkpoints" / "global_step_3").rglob("lora_train_meta.json")
    assert json.loads(path.read_text()) == {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
