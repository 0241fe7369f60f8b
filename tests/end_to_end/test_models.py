"""Teams on several models: families, pools and a frozen one in one job; apart from each other; equal when shared."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from launch import run
from safetensors.torch import load_file

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(2400)]

ULP = 2**-21  # of a float32 log-prob between 4 and 8 nats: random models of 64 tokens

COMMON = (
    "+drmas=base",
    "algorithm.adv_estimator=recorded",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.save_freq=1",
)
SHARED = (
    "+drmas.workflow.name=team_workflows:Quartet",
    *(f"+drmas.agents.{agent}.model=base" for agent in ("writer", "editor", "critic", "judge")),
    "actor_rollout_ref.actor.optim.lr=1e-2",
)
# Four copies of one set of weights on one logical GPU.
SEPARATE = (
    "+drmas.workflow.name=team_workflows:Quartet",
    *(f"+drmas.agents.{agent}.model={agent}" for agent in ("writer", "editor", "critic", "judge")),
    *(f"+drmas.models.{agent}={{}}" for agent in ("writer", "editor", "critic", "judge")),
    "actor_rollout_ref.actor.optim.lr=1e-2",
)


def mixed(assets: Path, start: Path) -> list[str]:
    """Two families that train in pools of their own, and a frozen model beside the second."""
    return [
        "+drmas.workflow.name=team_workflows:Trio",
        "+drmas.agents.writer={model: gemini}",  # verl's metrics aggregator reads "min" in it
        "+drmas.agents.editor={model: small}",
        "+drmas.agents.judge={model: judge, sampling: {temperature: 0.7}}",
        f"+drmas.models.gemini={{init_from: '{start}'}}",
        "+drmas.models.small.pool=right",
        "+drmas.models.small.updates_per_step=3",
        f"+drmas.models.small.actor_rollout_ref.model.path={assets / 'qwen3'}",
        "+drmas.models.small.actor_rollout_ref.actor={use_kl_loss: true, optim: {lr: 5e-4}}",
        "+drmas.models.judge.trainable=false",
        "+drmas.models.judge.pool=right",
        f"+drmas.models.judge.actor_rollout_ref.model.path={assets / 'chatml'}",
        "+drmas.pools.right.n_gpus_per_node=1",
        "ray_kwargs.ray_init.num_gpus=2",
        "data.max_prompt_length=96",
        "actor_rollout_ref.rollout.max_model_len=128",
    ]


class Jobs:
    """The jobs by name, each launched when a test first asks for it: CI runs one of them, drills the others too."""

    def __init__(self, root: Path, assets: Path, start: Path, heavy: FileLock):
        self.root, self.heavy, self.done = root, heavy, {}
        self.data = [
            f"data.train_files={assets / 'train.parquet'}",
            f"data.val_files={assets / 'val.parquet'}",
            f"actor_rollout_ref.model.path={assets / 'llama'}",
        ]
        self.plans = {
            "shared": (SHARED, 2, {}),
            "separate": (SEPARATE, 1, {}),
            "mixed": (mixed(assets, start), 3, {}),
            "zeroed": (mixed(assets, start), 3, {"RECORDING_ZERO": "editor"}),
        }

    def __getitem__(self, name: str):
        if name not in self.done:
            overrides, steps, env = self.plans[name]
            with self.heavy:
                self.done[name] = run(
                    self.root / name,
                    [*self.data, *COMMON, f"trainer.rollout_data_dir={self.root / name / 'rows'}", *overrides],
                    steps=steps,
                    timeout=600,
                    VERL_USE_EXTERNAL_MODULES="recording",
                    RECORDING_PATH=str(self.root / f"{name}.jsonl"),
                    **env,
                )
        return self.done[name]


@pytest.fixture(scope="module")
def jobs(assets, parity_team, heavy):
    from recipes.cpu_arithmetic.tiny_model import build_tiny_model

    if not (assets / "qwen3").exists():
        build_tiny_model(assets / "qwen3", style="qwen3", seed=1)
    root = Path(tempfile.mkdtemp(prefix="m"))
    yield Jobs(root, assets, parity_team.folder / "checkpoints/global_step_3/actor/base", heavy)
    shutil.rmtree(root, ignore_errors=True)


def records(job) -> list[list]:
    """By step: [dataset index, session, activation, agent, score, advantage] of every row."""
    return [json.loads(line) for line in Path(f"{job.folder}.jsonl").read_text().splitlines()]


def dumped(job, step: int) -> list[tuple]:
    lines = (job.folder / "rows" / f"{step}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return sorted((r["agent_id"], r["input"], r["output"], r["score"]) for r in rows if r["agent_id"])


def weights(job, step: int, model_id: str) -> dict[str, torch.Tensor]:
    """A model's saved weights, float32, as its one rank wrote them."""
    folder = job.folder / f"checkpoints/global_step_{step}/actor/{model_id}"
    saved = torch.load(folder / "model_world_size_1_rank_0.pt", weights_only=False)
    return {name: w.to_local() if hasattr(w, "to_local") else w for name, w in saved.items()}


def furthest(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.drill
def test_four_copies_begin_as_the_shared_model_does(jobs):
    shared, separate = records(jobs["shared"])[0], records(jobs["separate"])[0]
    assert len(shared) == 4 * 4 * 4 - 8  # the critic is silent in odd sessions
    assert any(advantage for *_, advantage in shared)
    assert shared == separate
    assert dumped(jobs["shared"], 1) == dumped(jobs["separate"], 1)


@pytest.mark.drill
def test_four_models_on_one_gpu_are_four_policies(jobs):
    step = jobs["separate"].steps[1]
    for agent in ("writer", "editor", "critic", "judge"):
        assert step[f"drmas/model/{agent}/rows"] == (8 if agent == "critic" else 16)
        assert step[f"drmas/model/{agent}/weight_syncs"] == 1
        assert step[f"drmas/model/{agent}/grad_norm"] > 0
    assert not any(name.startswith("actor/") for name in step), "numbers of four models under one name"


@pytest.mark.parametrize("name", [pytest.param("separate", marks=pytest.mark.drill), "mixed"])
def test_every_server_serves_its_trainers_weights(jobs, name):
    checked = 0
    for number, step in jobs[name].steps.items():
        for key, gap in step.items():
            if not key.endswith("/log_prob_gap/max"):
                continue
            model = key.split("/")[2]
            probability = step[f"drmas/model/{model}/rollout_probs_diff_max"]
            mean = step[f"drmas/model/{model}/log_prob_gap/mean"]
            print(f"{name}, step {number}, {model}: log-prob gap {mean:.1e} (max {gap:.1e}), prob {probability:.1e}")
            assert probability <= 1e-6
            assert mean <= 1e-6
            assert gap <= 4 * ULP
            checked += 1
    assert checked == {"separate": 4, "mixed": 3 + 2}[name]


def test_both_families_learn_and_the_frozen_model_has_no_checkpoint(jobs, assets):
    job = jobs["mixed"]
    assert furthest(weights(job, 3, "gemini"), weights(job, 1, "gemini")) > 0
    assert furthest(weights(job, 3, "small"), load_file(assets / "qwen3/model.safetensors")) > 1e-4
    assert sorted(os.listdir(job.folder / "checkpoints/global_step_3/actor")) == ["gemini", "small"]
    for step in job.steps.values():
        assert step["drmas/model/gemini/grad_norm"] > 0
        assert "drmas/model/judge/rows" not in step
        assert step["drmas/agent/judge/rows"] == 16


def test_a_model_starts_from_another_jobs_checkpoint(jobs, assets, parity_team):
    start = weights(parity_team, 3, "base")
    after = weights(jobs["mixed"], 1, "gemini")
    # One step of Adam moves a weight by about the rate, 1e-3; the checkpoint is six steps of it from the model.
    assert furthest(after, start) <= 1.5e-3
    assert furthest(start, load_file(assets / "llama/model.safetensors")) > 3e-3
    assert "model gemini starts from the weights of" in jobs["mixed"].log


@pytest.mark.drill
def test_one_models_weights_do_not_depend_on_anothers_advantages(jobs):
    whole, zeroed = jobs["mixed"], jobs["zeroed"]
    assert furthest(weights(whole, 3, "small"), weights(zeroed, 3, "small")) > 1e-5
    one, other = weights(whole, 3, "gemini"), weights(zeroed, 3, "gemini")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_without_rows_of_a_model_is_fine(jobs):
    one, two, three = (jobs["mixed"].steps[i] for i in (1, 2, 3))
    assert one["drmas/model/small/rows"] == three["drmas/model/small/rows"] == 8
    assert "drmas/model/small/rows" not in two
    assert two["drmas/model/small/weight_syncs"] == 1
    assert one["drmas/model/small/updates"] == 3
    assert one["drmas/model/gemini/updates"] == 1


@pytest.mark.parametrize("name", [pytest.param("shared", marks=pytest.mark.drill), "mixed"])
def test_padding_is_less_than_a_rank_for_each_update(jobs, name):
    for step in jobs[name].steps.values():
        for key, padding in step.items():
            if key.endswith("/padding_rows"):
                assert padding < step[key.replace("padding_rows", "updates")]  # times one rank


def test_rows_are_padded_to_the_updates_of_their_model(jobs):
    assert jobs["mixed"].steps[1]["drmas/model/small/padding_rows"] == 1  # 8 rows in 3 updates


def test_weights_are_sent_once_a_step_to_every_model(jobs):
    for step in jobs["mixed"].steps.values():
        assert step["drmas/model/gemini/weight_syncs"] == step["drmas/model/small/weight_syncs"] == 1


def test_texts_are_decoded_by_their_own_tokenizer(jobs):
    rows = dumped(jobs["mixed"], 1)
    prompts = {agent: prompt for agent, prompt, *_ in rows}
    assert re.fullmatch(r"w: \d+\+\d+", prompts["writer"])  # a bare template
    assert prompts["editor"].startswith("e: ")
    assert "assistant" in prompts["judge"] and re.search(r"j: \d+\+\d+", prompts["judge"])  # ChatML
    assert re.search(r"-- judge.0 \[judge\].*\n.*<\|im_start\|>user", jobs["mixed"].log)


def test_split_pools_update_at_the_same_time(jobs):
    ratios = []
    for number in (1, 3):
        step = jobs["mixed"].steps[number]
        each = [step[f"drmas/model/{m}/seconds/update_actor"] for m in ("gemini", "small")]
        ratios.append(step["timing_s/update_actor"] / max(each))
        print(f"step {number}: update over the slower model's {ratios[-1]:.3f}; in turn {sum(each) / max(each):.2f}")
    assert min(ratios) <= 1.15
