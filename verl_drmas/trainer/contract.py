"""What the two jobs of a pair must agree on, or the sub-agents would train on something else than was played."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_drmas.config import ConfigError, DrmasConfig
from verl_drmas.support import get

# Keys of verl's that enter a row's advantage, weight or log-probs.
RUN_KEYS = (
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "drmas_base_estimator",
)


def terms(config: Any, section: DrmasConfig, agents: Sequence[str]) -> dict[str, Any]:
    """What must be the same in both jobs, by key; JSON values.

    Args:
        config: A job's configuration as the model sees it.
        section: Its `drmas` section.
        agents: Those on the model that the jobs share.
    """
    run = {key: get(config, key) for key in RUN_KEYS}
    own = {f"drmas.{name}": dataclasses.asdict(getattr(section, name)) for name in ("advantage", "alignment")}
    own["drmas.advantage"].pop("shadow")  # for the metrics alone
    team = {
        f"drmas.agents.{agent}": {k: v for k, v in dataclasses.asdict(section.agents[agent]).items() if k != "model"}
        for agent in sorted(agents)
    }
    return {**run, **own, "drmas.workflow": dict(section.workflow or {}), "agents": sorted(agents), **team}


def check_terms(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Both jobs have the same terms.

    Args:
        theirs: Of the job that plays the sessions.
        ours: Of the job that trains on them.

    Raises:
        ConfigError: Names every key that differs, with both values.
    """
    lines = list(_differences(theirs, ours))
    if lines:
        raise ConfigError(
            f"the job that plays the sessions has other settings than this one, which trains on them: "
            f"{'; '.join(lines)}: set both alike"
        )


def check_store(
    key: str, saved: Mapping[str, str] | None, now: Mapping[str, str], *, known: int, step: int, chosen: bool
) -> None:
    """Hold a store against the checkpoint that a job goes on from: both jobs resume by this rule.

    Args:
        key: Of the section that names the store.
        saved: Id and role of the store that the checkpoint was saved with; None: there is no checkpoint, or it had no
            store.
        now: Of the store that the section names.
        known: Step of the job's last checkpoint that the store knows of; 0: none.
        step: Of the checkpoint; 0 without one.
        chosen: The user named the checkpoint, or named none.

    Raises:
        ConfigError: Another store, or one that knows of a later checkpoint.
    """
    if saved and dict(saved) != dict(now):
        raise ConfigError(
            f"{key}: the checkpoint of step {step} was saved with store {saved['id']} (role {saved['role']}), and this "
            f"is {now['id']} (role {now['role']}): name the store that the run began with"
        )
    if step and not saved and known:
        raise ConfigError(
            f"{key}: the checkpoint of step {step} was saved without a store, and this one holds another run's steps "
            f"up to {known}: give this run a store of its own"
        )
    if known > step and not chosen:
        raise ConfigError(
            f"{key}: the store knows of a checkpoint of step {known}, and this run would start from step {step}: "
            "restore the checkpoint, give the run a new store, or say which to resume with "
            "trainer.resume_mode=resume_path (or disable)"
        )


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*theirs, *ours]):
        here = f"{path}.{key}" if path else key
        a, b = theirs.get(key), ours.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, here)
        elif a != b:
            yield f"{here} is {a!r} there and {b!r} here"
