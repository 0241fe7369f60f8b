"""Thin registrations of the team estimators in verl (`verl/trainer/ppo/core_algos.py`, `register_adv_est`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

from verl_drmas.advantage import ESTIMATORS, broadcast, penalised_advantage
from verl_drmas.trainer.step import StepRows, current_rows

PER_AGENT = "drmas_per_agent"


def advantage_options(step: StepRows) -> dict[str, Any]:
    """The options of `group_advantage` that the `drmas.advantage` section sets."""
    section = step.section.advantage
    return {
        "ddof": section.ddof,
        "eps": section.eps,
        "std_floor": section.std_floor,
        "singleton": section.singleton,
        "constant": section.constant,
    }


def _register(name: str) -> None:
    @register_adv_est(name)
    def estimator(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = current_rows(name)
        scores = token_level_rewards.sum(-1).double().numpy()[step.real]
        switches = vars(ESTIMATORS[name])
        if config is not None and not config.get("norm_adv_by_std_in_grpo", True):
            switches = {**switches, "std_scope": "none"}
        real = penalised_advantage(
            scores,
            step.penalty(),
            place=step.section.advantage.penalty,
            activation=[row.activation for row in step.known],
            **step.ids(),
            **switches,
            **advantage_options(step),
        )
        per_row = np.zeros(len(step.rows))
        per_row[step.real] = real
        step.scores, step.advantage = scores, real
        step.tokens = response_mask.sum(-1).numpy()[step.real]
        advantage = broadcast(per_row, response_mask)
        return advantage, advantage


for _name in ESTIMATORS:
    _register(_name)


@register_adv_est(PER_AGENT)
def per_agent(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One of verl's own group estimators with the group (prompt, agent) instead of the prompt (`drmas.group_by:
    agent`).
    """
    step = current_rows(PER_AGENT)
    # A padding row keeps its own uid, so it can't enter a real group.
    groups = np.array(
        [u if row is None else f"{u}/{row.agent_id}" for u, row in zip(index, step.rows, strict=True)], dtype=object
    )
    step.scores = token_level_rewards.sum(-1).double().numpy()[step.real]
    step.tokens = response_mask.sum(-1).numpy()[step.real]
    penalty = torch.zeros(len(step.rows), dtype=token_level_rewards.dtype)
    penalty[torch.from_numpy(step.real)] = torch.from_numpy(step.penalty()).to(penalty.dtype)
    inside = step.section.advantage.penalty == "inside"
    rewards = token_level_rewards
    if inside:
        rewards = token_level_rewards.clone()
        rewards[:, 0] -= penalty  # group estimators sum over tokens, so any column will do
    advantage, returns = get_adv_estimator_fn(step.base_estimator)(
        token_level_rewards=rewards, response_mask=response_mask, index=groups, config=config, **kwargs
    )
    if not inside:
        advantage = advantage - penalty.unsqueeze(-1) * response_mask
    first = response_mask.argmax(dim=1, keepdim=True)
    step.advantage = advantage.gather(1, first).squeeze(1).double().numpy()[step.real]
    return advantage, returns
