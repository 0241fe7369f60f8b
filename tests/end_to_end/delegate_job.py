"""The delegating team's CPU job, small: warm start, overrides, and the rows of its dumps."""

from __future__ import annotations

import json
from pathlib import Path

STEPS, PROMPTS, SESSIONS = 3, 4, 4
AGENTS = {"main": "main", "finder": "sub"}
CONFIG = ("--config-name=cpu_delegate",)


def warm(folder: Path):
    """Models that know the form of calls and results; some ten seconds."""
    from recipes.cpu_delegate.warm_start import warm_start
    from recipes.cpu_search.teaching import Settings

    return warm_start(folder, Settings(team="delegate", worlds=60, clean_steps=150, clean_gate={}, bands={}, threads=1))


def sizes() -> list[str]:
    """Overrides of both jobs of a pair, and of the one job."""
    return [
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={SESSIONS}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.logger=[file]",
    ]


def overrides(start, *more: str) -> list[str]:
    """Overrides of a job that plays the sessions."""
    from recipes.cpu_delegate.train import own_overrides

    return [*own_overrides(start, seed=1, hops=2), *sizes(), *more]


def stages(start) -> str:
    """A curriculum of two stages."""
    easy, hard = (
        f"{{name: easy, files: [{start.train}], until_step: 2}}",
        f"{{name: hard, files: [{start.val}]}}",
    )
    return f"drmas.curriculum=[{easy}, {hard}]"


def rows(dump: Path, step: int) -> list[dict]:
    """The step's rows as they were dumped, with prompt, session and order taken from their key."""
    found = [json.loads(line) for line in (dump / f"{step}.jsonl").read_text().splitlines()]
    for row in found:
        row["prompt"], row["session"], row["order"] = row["uid"].rsplit("_", 2)
    return [row for row in found if row["agent_id"] is not None]
