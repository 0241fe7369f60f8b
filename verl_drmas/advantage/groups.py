"""Group-normalised advantages of a team: one scalar per row, from the rows' rewards and who made them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_drmas.advantage.keys import Codes, combine, factorize, one_of, order_within, row_values
from verl_drmas.advantage.statistics import Statistics, statistics

MEAN_SCOPES = ("prompt", "agent", "agent_nth")
STD_SCOPES = (*MEAN_SCOPES, "none")
POOLS = ("activation", "session")
DEGENERATE = ("zero", "raw")


def group_advantage(
    rewards: Sequence[float] | np.ndarray,
    *,
    uid: Sequence | np.ndarray,
    session: Sequence | np.ndarray,
    agent_id: Sequence | np.ndarray,
    mean_scope: str,
    std_scope: str,
    pool: str,
    activation: Sequence[int] | np.ndarray | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    std_floor: float = 0.0,
    singleton: str = "zero",
    constant: str = "zero",
) -> np.ndarray:
    """Advantage of each row: (score - mean of its mean-group) / (std of its std-group + eps).

    Scope `prompt` groups the rows of one `uid`; `agent` those of one (`uid`, `agent_id`); `agent_nth` those of one
    (`uid`, `agent_id`, n-th activation of that agent in its session). With pool `activation` every row is one value.
    With pool `session` each session counts once per group, with the mean of its rows there, and a row's score is
    its session's mean within its mean-group. Dr. MAS is agent, agent, activation (arXiv 2602.08847, Eq. 5); GRPO as
    in the paper's Eq. 2 is prompt, prompt, session. Rows of one prompt never touch another prompt's values.

    Args:
        rewards: One finite reward per row (rows,), real rows only: the caller has dropped padding.
        uid: Prompt of each row, any hashable ids.
        session: Session of each row; the ids need only be distinct within a prompt.
        agent_id: Agent of each row.
        mean_scope: `prompt`, `agent` or `agent_nth`.
        std_scope: The same, or `none` for no division at all (neither by the std nor by eps).
        pool: `activation` or `session`.
        activation: Order of each row within its session, unique among the rows of one agent in one session. It
            decides which activation is the n-th for `agent_nth` and is not read otherwise. None: order of the rows.
        ddof: 1 (sample std, as the reference code) or 0 (population std, as the paper).
        eps: Added to the std.
        std_floor: Least std of a group with spread (and, with `constant="raw"`, of one without), in units of the
            reward. It tames groups whose only spread is a small penalty.
        singleton: A mean- or std-group with one value: `zero` gives 0; `raw` takes mean 0 and std 1, as the reference
            code and verl's own GRPO do, so that the advantage is the raw reward (over 1 + eps).
        constant: A std-group whose values are all equal: `zero` gives exactly 0; `raw` gives what the formula gives,
            which explodes (difference / eps) where the mean-group is wider than the std-group.

    Returns:
        Advantages, float64 of shape (rows,).

    Raises:
        ValueError: Lengths differ, a reward is not finite, an id is None, a name or number is out of its range, or
            `activation` repeats itself within one agent and session under `agent_nth`.
    """
    check_switches(mean_scope, std_scope, pool, ddof, eps, std_floor, singleton, constant)
    rewards = row_values("rewards", rewards, len(rewards))
    rows = len(rewards)
    prompts, _ = factorize("uid", uid, rows)
    agents, _ = factorize("agent_id", agent_id, rows)
    sessions = combine(prompts, factorize("session", session, rows)[0])

    def of_scope(scope: str) -> Statistics:
        groups = prompts if scope == "prompt" else combine(prompts, agents)
        if scope == "agent_nth":
            rank = nth_activation(combine(sessions, agents), activation, rows)
            groups = combine(groups, Codes(rank, int(rank.max(initial=-1)) + 1))
        return statistics(rewards, groups, sessions, pool, ddof)

    mean = of_scope(mean_scope)
    centred = np.where(mean.constant, 0.0, mean.score - mean.mean)  # without the rounding of a mean of equal values
    if singleton == "raw":
        centred = np.where(mean.single, mean.score, centred)  # otherwise it is the value less itself: 0
    if std_scope == "none":
        return centred

    std = mean if std_scope == mean_scope else of_scope(std_scope)
    scale = np.where(std.single, 1.0, np.maximum(std.std, std_floor)) + eps
    zero = (std.single & (singleton == "zero")) | (std.constant & (constant == "zero"))
    return np.divide(centred, scale, out=np.zeros(rows), where=~zero)


def nth_activation(agent_sessions: Codes, activation: Sequence[int] | np.ndarray | None, rows: int) -> np.ndarray:
    """How many activations of its agent came before this row in its session, int64 (rows,)."""
    if activation is None:
        return order_within(agent_sessions, None)
    order = row_values("activation", activation, rows)
    places = combine(agent_sessions, factorize("activation", order, rows)[0])
    repeated = np.flatnonzero(places.sum()[places.of_row] > 1)
    if len(repeated):
        raise ValueError(
            f"activation of row {repeated[0]} is {order[repeated[0]]:g}, as is that of another row of the same uid, "
            "session and agent_id: give each row of a session its own order"
        )
    return order_within(agent_sessions, order)


def check_switches(
    mean_scope: str, std_scope: str, pool: str, ddof: int, eps: float, std_floor: float, singleton: str, constant: str
) -> None:
    one_of("mean_scope", mean_scope, MEAN_SCOPES)
    one_of("std_scope", std_scope, STD_SCOPES)
    one_of("pool", pool, POOLS)
    one_of("singleton", singleton, DEGENERATE)
    one_of("constant", constant, DEGENERATE)
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof!r} must be 0 (population std) or 1 (sample std)")
    for name, value in (("eps", eps), ("std_floor", std_floor)):
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value!r} must be a finite number of at least 0")
    if constant == "raw" and eps + std_floor == 0:
        raise ValueError("constant='raw' divides a constant group by eps + std_floor = 0: give eps or std_floor > 0")
