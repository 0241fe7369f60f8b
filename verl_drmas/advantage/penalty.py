"""The penalty for invalid actions: inside the group statistics, as the reference code has it, or outside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_drmas.advantage.groups import group_advantage
from verl_drmas.advantage.keys import factorize, one_of, row_values

PLACES = ("inside", "outside")


def invalid_penalty(
    valid: Sequence[bool] | np.ndarray, *, agent_id: Sequence | np.ndarray, coefficients: Mapping[str, float]
) -> np.ndarray:
    """Penalty of each row: its agent's coefficient if its action is invalid, else 0.

    Args:
        valid: Whether each row's action is valid, bool (rows,).
        agent_id: Agent of each row.
        coefficients: Penalty by agent, in units of the reward; an agent without one is never penalised.

    Returns:
        Penalties to subtract, float64 of shape (rows,).

    Raises:
        ValueError: Lengths differ, or a coefficient is negative or not finite.
    """
    for agent, coefficient in coefficients.items():
        if not (np.isfinite(coefficient) and coefficient >= 0):
            raise ValueError(f"invalid_penalty of agent {agent!r} is {coefficient!r}: it must be finite and at least 0")
    valid = row_values("valid", valid, len(valid)).astype(bool)
    agents, names = factorize("agent_id", agent_id, len(valid))
    by_agent = np.array([coefficients.get(name, 0.0) for name in names], dtype=np.float64)
    return np.where(valid, 0.0, by_agent[agents.of_row])


def penalised_advantage(
    rewards: Sequence[float] | np.ndarray, penalty: Sequence[float] | np.ndarray, *, place: str, **arguments: Any
) -> np.ndarray:
    """Group advantages with each row's penalty taken off.

    Args:
        rewards: One reward per row (rows,).
        penalty: One penalty per row (rows,), as from `invalid_penalty`.
        place: `inside`: off the reward before the statistics (reference code), so that the penalty also moves means
            and stds and is scaled by them: where a group's outcomes are all equal, it acts at full size whatever the
            coefficient. `outside`: off the advantage after normalisation, so that it is in units of the advantage,
            reaches only the faulty row, and reaches it also in a group whose advantage is 0.
        **arguments: Keyword arguments of `group_advantage`.

    Returns:
        Advantages, float64 of shape (rows,).

    Raises:
        ValueError: As `group_advantage`, or `place` is unknown.
    """
    one_of("place", place, PLACES)
    rewards = row_values("rewards", rewards, len(rewards))
    penalty = row_values("penalty", penalty, len(rewards))
    if place == "inside":
        return group_advantage(rewards - penalty, **arguments)
    return group_advantage(rewards, **arguments) - penalty
