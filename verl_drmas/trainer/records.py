"""What the rollout dumps hold of each row beside its text; `dumps.py` has the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_drmas import __version__
from verl_drmas.config import DrmasConfig
from verl_drmas.dumps import FORMAT
from verl_drmas.plain import encodable, plain_values
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.step import StepRows


@dataclass(frozen=True)
class TrainedStep:
    """What a step's estimator saw, kept until the step is dumped.

    Attributes:
        rows: By TransferQueue key: position, reward, penalty, tokens, copies and updated, as the dump has them.
        settings: See `STEP_SETTINGS`.
    """

    rows: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, step: StepRows, updated: Mapping[str, bool], settings: dict[str, Any]) -> TrainedStep:
        """Take a step's numbers over.

        Args:
            step: The batch's rows, with the estimator's numbers.
            updated: Whether each row of the batch enters an update, by key in batch order.
            settings: Of the step.
        """
        penalty, rows = step.penalty(), {}
        real = [key for key, row in zip(updated, step.rows, strict=True) if row is not None]
        for i, key in enumerate(real):
            rows[key] = {
                "position": i,
                "reward": float(step.scores[i]),
                "penalty": float(penalty[i]),
                "tokens": int(step.tokens[i]),
                "copies": None if step.copies is None else float(step.copies[i]),
                "updated": updated[key],
            }
        return cls(rows, settings)


def step_settings(
    config: DictConfig,
    section: DrmasConfig,
    step: StepRows,
    *,
    copies: str | None,
    whole_team: bool,
    played: int | None,
) -> dict[str, Any]:
    """All that decides a step's advantages beside its rows; JSON values.

    Args:
        config: The run's.
        section: The `drmas` section.
        step: The step's rows.
        copies: `drmas.alignment.copies` under `mgrpo`.
        whole_team: False: other agents' rows are in another job.
        played: Sessions that the rows are of; None: as many as have a row.
    """
    agents = {
        name: {"model": agent.model, "trainable": agent.trainable, "invalid_penalty": agent.invalid_penalty}
        for name, agent in section.agents.items()
    }
    return {
        "estimator": str(config.algorithm.adv_estimator),
        "base_estimator": step.base_estimator,
        "algorithm": OmegaConf.to_container(config.algorithm, resolve=True),
        "sessions": int(config.actor_rollout_ref.rollout.n),
        "sessions_played": played or len({(row.uid, row.session) for row in step.known}),
        "section": {
            "agents": agents,
            "models": list(section.models),
            "advantage": asdict(section.advantage),
            "group_by": section.group_by,
        },
        "alignment": None if step.alignment is None else asdict(step.alignment),
        "copies": copies,
        "whole_team": whole_team,
        "version": __version__,
    }


def record(
    row: Row,
    extra: Mapping[str, Any],
    spans: list,
    prompt_tokens: int,
    reward: float | None,
    trained: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The column `drmas` of one row.

    Args:
        row: What the trainer knows of it.
        extra: Its `extra_fields`.
        spans: Of its response.
        prompt_tokens: Length of its prompt.
        reward: Its own; None: it has none, since its session failed.
        trained: What training made of it; None: nothing.
    """
    made = {
        "format": FORMAT,
        "path": row.path,
        "activation": row.activation,
        "valid": row.valid,
        "spans": spans,
        "prompt_tokens": prompt_tokens,
        "turns": row.counts.get("turns"),
        "versions": [extra.get("min_global_steps"), extra.get("max_global_steps")],
        "reward": reward,
        "outcome": (extra.get("reward_extra_info") or {}).get("outcome"),
        "parts": row.parts,
        "counts": row.counts,
        "session": row.metrics,
        "told": extra.get("told") or {},
    }
    return made if trained is None else made | {"trained": dict(trained)}


def one_number(values: torch.Tensor, mask: torch.Tensor) -> float | list[float] | None:
    """What a row's trained tokens have in common: one number where all have the same, a list where not, None where no
    token trains.

    Args:
        values: Of the response's tokens (tokens,).
        mask: Which of them train (tokens,).
    """
    own = values[mask.bool()]
    if not len(own):
        return None
    return own[0].item() if bool((own == own[0]).all()) else own.tolist()


def plain(value: Any) -> Any:
    """The value as a dump can hold it: text for what JSON hasn't, and no text that a file can't hold. A dump must not
    fail over what a workflow or a model said.
    """
    return plain_values(value, text=encodable, odd=lambda value: encodable(str(value)))
