"""Thin registrations of the team estimators in verl (`verl/trainer/ppo/core_algos.py`, `register_adv_est`)."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

from verl_drmas.advantage import ESTIMATORS, broadcast, mgrpo_advantage, penalised_advantage
from verl_drmas.support import MGRPO, PER_AGENT
from verl_drmas.trainer.alignment import places
from verl_drmas.trainer.step import StepRows, current_rows

NORM = "norm_adv_by_std_in_grpo"


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
        if config is not None and not config.get(NORM, True):
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
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One of verl's own group estimators with the group (prompt, agent) instead of the prompt (`drmas.group_by:
    agent`). It sees real rows only: some of them divide by a group's size less one or by its tokens, and padding rows
    have neither.
    """
    step = current_rows(PER_AGENT)
    real = torch.from_numpy(step.real)
    mask, scores = response_mask[real], token_level_rewards[real].sum(-1)
    step.scores, step.tokens = scores.double().numpy(), mask.sum(-1).numpy()
    penalty = torch.from_numpy(step.penalty()).to(scores.dtype)
    inside = step.section.advantage.penalty == "inside"
    # Group estimators sum over tokens, so any column will do. The penalty goes from the sum, which a dump keeps: of a
    # KL term's many tokens, a sum with the penalty among them has other last bits.
    rewards = torch.zeros_like(mask, dtype=scores.dtype)
    rewards[:, 0] = scores - penalty if inside else scores
    estimator = get_adv_estimator_fn(step.base_estimator)
    options = {}
    if config is not None and NORM in signature(estimator).parameters:  # verl hands it to its `grpo` as an argument
        options[NORM] = config.get(NORM, True)
    groups = np.array([f"{row.uid}/{row.agent_id}" for row in step.known], dtype=object)
    own, own_returns = estimator(
        token_level_rewards=rewards, response_mask=mask, index=groups, config=config, **options
    )
    if not inside:
        own = own - penalty.unsqueeze(-1) * mask
    first = mask.argmax(dim=1, keepdim=True)
    step.advantage = own.gather(1, first).squeeze(1).double().numpy()
    advantage, returns = torch.zeros_like(token_level_rewards), torch.zeros_like(token_level_rewards)
    advantage[real], returns[real] = own.to(advantage.dtype), own_returns.to(returns.dtype)
    return advantage, returns


@register_adv_est(MGRPO)
def mgrpo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """M-GRPO (`advantage/mgrpo.py`); leaves how often each row counts, which the trainer makes a weight of."""
    step = current_rows(MGRPO)
    if step.alignment is None:
        raise RuntimeError(f"algorithm.adv_estimator={MGRPO} needs a workflow: set drmas.workflow.name")
    scores = token_level_rewards.sum(-1).double().numpy()[step.real]
    penalty, inside = step.penalty(), step.section.advantage.penalty == "inside"
    no_division = config is not None and not config.get(NORM, True)
    result = mgrpo_advantage(
        scores - penalty if inside else scores,
        activation=places(step.known),
        index=[row.index for row in step.known],
        std_scope="none" if no_division else "agent",
        **vars(step.alignment),
        **step.ids(),
        **advantage_options(step),
    )
    real = result.advantage if inside else result.advantage - penalty
    per_row = np.zeros(len(step.rows))
    per_row[step.real] = real
    step.scores, step.advantage, step.copies = scores, real, result.copies
    step.tokens = response_mask.sum(-1).numpy()[step.real]
    advantage = broadcast(per_row, response_mask)
    return advantage, advantage
