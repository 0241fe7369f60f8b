"""Step wall of `drmas_sync` over stock `sync` on the same single-agent job, both at the same short poll interval."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "end_to_end"), str(HERE.parents[1])]

STEPS, WARM_UP, PAIRS = 40, 5, 2


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_step_wall():
    from launch import run

    from recipes.cpu_arithmetic.tiny_model import build_tiny_model
    from verl_drmas.data.arithmetic import arithmetic_rows
    from verl_drmas.data.parquet import write_rows

    folder = Path(tempfile.mkdtemp(prefix="b"))
    try:
        build_tiny_model(folder / "model")
        train, held_out = arithmetic_rows(seed=0)
        write_rows(train, folder / "train.parquet")
        write_rows(held_out, folder / "val.parquet")
        (folder / "loops.yaml").write_text("- {name: one_call, _target_: loops.OneCall}\n")
        common = [
            f"data.train_files={folder / 'train.parquet'}",
            f"data.val_files={folder / 'val.parquet'}",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=one_call",
            f"reward.custom_reward_function.path={HERE.parent / 'end_to_end' / 'reward.py'}",
            "reward.custom_reward_function.name=compute_score",
        ]
        stock = [
            "algorithm.adv_estimator=grpo",
            f"trainer.v1.sampler.custom_sampler.path={HERE / 'sampler.py'}",
            "trainer.v1.sampler.custom_sampler.name=ShortPoll",
        ]
        team = ["+drmas=rows", "algorithm.adv_estimator=grpo_team", "drmas.poll_interval=0.05"]
        ratios = []
        for pair in range(PAIRS):
            walls = {}
            # The order turns around, so that a machine that gets slower or faster favours neither.
            for name, own in [("stock", stock), ("team", team)][:: 1 if pair % 2 == 0 else -1]:
                job = run(folder / f"{name}{pair}", [*common, *own], steps=STEPS, timeout=600)
                # The lower quartile: a busy machine only ever adds time, and adds it to some steps more than to others.
                steps = [s["timing_s/step"] for n, s in job.steps.items() if n > WARM_UP]
                walls[name] = quantiles(steps, n=4)[0]
            ratios.append(walls["team"] / walls["stock"])
            print(f"\nstep wall, pair {pair}: drmas_sync {walls['team']:.3f} s / sync {walls['stock']:.3f} s", end="")
            print(f" = {ratios[-1]:.3f}")
        print(f"step wall of drmas_sync over stock sync: {median(ratios):.3f}")
        assert median(ratios) <= 1.05
    finally:
        shutil.rmtree(folder, ignore_errors=True)
