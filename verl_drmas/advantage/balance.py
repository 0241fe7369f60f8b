"""Row weights that give every agent's group, or every session, of a prompt the same share of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_drmas.advantage.keys import combine, factorize, one_of, row_values

BALANCES = ("none", "agent", "session")

# What a row adds to the loss, by verl's aggregation mode (verl/trainer/ppo/core_algos.py, agg_loss). Under the seq-mean
# modes verl divides by the number of rows, so that one action counts once; token-sum weighs as token-mean does.
LOSS_UNITS: dict[str, str] = {
    "token-mean": "token",
    "token-sum": "token",
    "seq-mean-token-sum": "row",
    "seq-mean-token-sum-norm": "row",
    "seq-mean-token-mean": "row",
}


def loss_unit(loss_agg_mode: str) -> str:
    """Unit in which verl's `loss_agg_mode` counts rows: `token` or `row`.

    Raises:
        ValueError: The mode is not one of verl's.
    """
    one_of("loss_agg_mode", loss_agg_mode, tuple(LOSS_UNITS))
    return LOSS_UNITS[loss_agg_mode]


def row_size(tokens: Sequence[int] | np.ndarray, loss_agg_mode: str) -> np.ndarray:
    """Size of each row in the loss's own unit.

    Args:
        tokens: Trained tokens of each row (its response mask's sum), (rows,).
        loss_agg_mode: verl's `actor.loss_agg_mode`.

    Returns:
        float64 (rows,): the tokens themselves under the token modes; under the seq-mean modes 1, or 0 for a row without
        a trained token, which verl leaves out.

    Raises:
        ValueError: The mode is not one of verl's, or a count is not finite.
    """
    unit = loss_unit(loss_agg_mode)
    tokens = row_values("tokens", tokens, len(tokens))
    return tokens if unit == "token" else (tokens > 0).astype(np.float64)


def balance_weights(
    *,
    uid: Sequence | np.ndarray,
    session: Sequence | np.ndarray,
    agent_id: Sequence | np.ndarray,
    size: Sequence[float] | np.ndarray,
    balance: str,
) -> np.ndarray:
    """Weight of each row's loss; the total mass, the sum of weight * size, stays what it was.

    The reference code's later revisions weigh rows by the inverse frequency of their (prompt, agent); this is that
    idea, exact in the unit that the loss is counted in.

    Args:
        uid: Prompt of each row.
        session: Session of each row; the ids need only be distinct within a prompt.
        agent_id: Agent of each row.
        size: Size of each row in the loss's own unit, at least 0 (rows,), as from `row_size`.
        balance: `none`: all ones. `agent`: every (prompt, agent) carries the same mass. `session`: every (prompt,
            session) carries the same mass.

    Returns:
        Weights, float64 of shape (rows,). A row of size 0 has weight 1; a group of only such rows gets no share.

    Raises:
        ValueError: Lengths differ, a size is negative or not finite, or `balance` is unknown.
    """
    one_of("balance", balance, BALANCES)
    size = row_values("size", size, len(size))
    negative = np.flatnonzero(size < 0)
    if len(negative):
        raise ValueError(f"size of row {negative[0]} is {size[negative[0]]}: it must be at least 0")
    rows = len(size)
    prompts, _ = factorize("uid", uid, rows)
    agents, _ = factorize("agent_id", agent_id, rows)
    sessions, _ = factorize("session", session, rows)
    if balance == "none":
        return np.ones(rows)
    groups = combine(prompts, agents if balance == "agent" else sessions)
    mass = groups.sum(size)
    share = mass.sum() / max(np.count_nonzero(mass), 1)
    return np.divide(share, mass[groups.of_row], out=np.ones(rows), where=size > 0)
