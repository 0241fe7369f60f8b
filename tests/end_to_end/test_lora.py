"""LoRA (`make drills`): two agents, an adapter each, on two copies of one base model.

An update moves a model's adapter and nothing else, and its server serves the adapter of the last sync.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from launch import run

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

AGENTS = ("writer", "editor")
# verl starts the engines on dummy weights, so the base model is synced once and the adapter after every update.
JOB = (
    "+drmas=base",
    "+drmas.workflow.name=team_workflows:Duo",
    *(f"+drmas.agents.{agent}.model={agent}" for agent in AGENTS),
    *(f"+drmas.models.{agent}={{}}" for agent in AGENTS),
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
    overrides = [
        f"data.train_files={assets / 'train.parquet'}",
        f"data.val_files={assets / 'val.parquet'}",
        f"actor_rollout_ref.model.path={assets / 'llama'}",
        *JOB,
    ]
    yield run(folder / "job", overrides, steps=3, timeout=600)
    shutil.rmtree(folder, ignore_errors=True)


def weights(job, step: int, model_id: str) -> dict[str, torch.Tensor]:
    """What rank 0 saved of a model after a step, by verl's names."""
    folder = job.folder / f"checkpoints/global_step_{step}/actor/{model_id}"
    saved = torch.load(folder / "model_world_size_1_rank_0.pt", weights_only=False)
    return {name: w.to_local() if hasattr(w, "to_local") else w for name, w in saved.items()}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_update_moves_the_adapter_and_nothing_else(job, agent):
    assert sorted(job.steps) == [1, 2, 3]
    assert all(step[f"drmas/model/{agent}/grad_norm"] > 0 for step in job.steps.values())
    first, last = weights(job, 1, agent), weights(job, 3, agent)
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved == {name for name in first if "lora_" in name}
    assert len(moved) == 56  # two matrices for each of seven layers in four blocks


@pytest.mark.parametrize("agent", AGENTS)
def test_the_server_serves_the_adapter_of_the_last_sync(job, agent):
    for number, step in job.steps.items():
        gap = step[f"drmas/model/{agent}/rollout_probs_diff_max"]
        print(f"LoRA, step {number}, {agent}: probability gap {gap:.1e}")
        assert gap < 1e-6
    # Were it the base model that samples, the difference would be what the adapter has changed by then.
    assert job.steps[1][f"drmas/model/{agent}/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert job.steps[3][f"drmas/model/{agent}/kl_loss"] > 1e-6


def test_the_checkpoint_says_what_the_adapter_is(job):
    metas = sorted((job.folder / "checkpoints" / "global_step_3").rglob("lora_train_meta.json"))
    assert [json.loads(path.read_text()) for path in metas] == [{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}] * 2
