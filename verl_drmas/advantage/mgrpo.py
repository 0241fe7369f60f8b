"""M-GRPO: group-relative advantages of main agents over sessions, and of sub-agents over aligned trajectories
(arXiv 2511.13288, Eq. 9-19).

A trajectory is stored and trained once and counts `copies` times: in the statistics, and by its row weight in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_drmas.advantage.alignment import ALIGN_MODES, align, check_count
from verl_drmas.advantage.balance import LOSS_UNITS
from verl_drmas.advantage.groups import check_switches, nth_activation
from verl_drmas.advantage.keys import Codes, combine, factorize, one_of, row_values
from verl_drmas.advantage.statistics import statistics

# Where a row of weight c adds to the loss what c copies of it would, given one update a step and no KL or entropy term,
# which verl adds without weights: a row's loss must be a mean or sum of its own, that verl averages over rows. Under
# token-mean copies would also change the number of tokens it divides by; token-sum divides by nothing.
EXACT_LOSS_AGG_MODES = tuple(mode for mode, unit in LOSS_UNITS.items() if unit == "row")

# verl's policy losses that multiply each row's own loss by its weight. Not among them: geo_mean (the weight enters a
# geometric mean), clip_cov and kl_cov (they choose tokens by statistics of the batch), bypass_mode (reads no weight).
EXACT_POLICY_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "dro")


@dataclass(frozen=True)
class MgrpoAdvantage:
    """What each row gets and what it was measured by; every field is float64 of shape (rows,)."""

    advantage: np.ndarray  # 0 for a dropped row
    copies: np.ndarray  # how often the row counts: 0 dropped; 1 for an agent that isn't aligned
    mean: np.ndarray  # of the row's group
    std: np.ndarray  # of the row's group; 0 where it has no spread
    values: np.ndarray  # in the row's group, copies counted: D times the sessions that called, if aligned by copies


def mgrpo_advantage(
    rewards: Sequence[float] | np.ndarray,
    *,
    uid: Sequence | np.ndarray,
    session: Sequence | np.ndarray,
    agent_id: Sequence | np.ndarray,
    activation: Sequence[int] | np.ndarray,
    index: Sequence | np.ndarray,
    aligned: Collection[str],
    target: int | Mapping[str, int] | None,
    mode: str,
    seed: int,
    step: int,
    std_scope: str = "agent",
    ddof: int = 0,
    eps: float = 0.0,
    std_floor: float = 0.0,
    singleton: str = "zero",
    constant: str = "zero",
) -> MgrpoAdvantage:
    """Advantage of each row: (reward - mean) / (std + eps) over the rows of its (prompt, agent), counted by copies.

    An agent that is not in `aligned` (the main agent) counts with every row once: the same numbers as `group_advantage`
    with scopes `agent` and pool `activation`. Rows of an aligned agent count as often as `align` says; a session
    without a row of the agent is not in its statistics.

    Args:
        rewards: One finite reward per row (rows,), real rows only: the caller has dropped padding.
        uid: Prompt of each row.
        session: Session of each row, whole numbers or strings, the same in every run (the draws are made from them).
        agent_id: Agent of each row.
        activation: Order of each row among its agent's rows of its session, unique there and the same in every run (a
            trajectory's draw is that of its place).
        index: Dataset index of each row's prompt, a whole number or string; the draws are made from it.
        aligned: Agents whose trajectories are aligned (the sub-agents).
        target: D, for all aligned agents or by agent. Not read under mode `none`.
        mode: How to align, see `align`. Under `mask` and `none` the statistics are plain ones over the rows kept.
        seed: The run's seed.
        step: The training step.
        std_scope: `agent`, or `none` for no division at all (neither by the std nor by eps).
        ddof: 0 (population std, as the paper) or 1, taken off the number of values.
        eps: Added to the std.
        std_floor: Least std of a group with spread, in units of the reward.
        singleton: A group of one value, copies counted: `zero` gives 0, `raw` the raw reward over 1 + eps.
        constant: A group whose values are all equal gets exactly 0 either way, since mean and std are of one group;
            checked as in `group_advantage`, so that every estimator takes the same options.

    Returns:
        Advantages, copies and statistics.

    Raises:
        ValueError: Lengths differ, a reward is not finite, an id is None, a prompt has two indices, an aligned agent
            has no target, `activation` repeats itself, or a name or number is out of its range.
    """
    one_of("std_scope", std_scope, ("agent", "none"))
    check_switches("agent", std_scope, "activation", ddof, eps, std_floor, singleton, constant)
    rewards = row_values("rewards", rewards, len(rewards))
    rows = len(rewards)
    prompts, _ = factorize("uid", uid, rows)
    agents, names = factorize("agent_id", agent_id, rows)
    attempts, session_ids = factorize("session", session, rows)
    groups = combine(prompts, agents)

    targets = _targets(aligned, names, target, mode)
    keys = _keys(prompts, agents, names, index, groups)

    def align_group(group: int, counts: np.ndarray, ids: list) -> list[np.ndarray]:
        place, agent = keys[group]
        own = mode if agent in targets else "none"
        return align(counts, targets.get(agent), seed=(seed, step, place, agent), mode=own, sessions=ids)

    copies = _row_copies(groups, attempts, activation, session_ids, align_group)
    mean, std, values, single = _statistics(rewards, copies, groups, ddof)
    flat = ~single & (std == 0)
    centred = np.where(flat | single, 0.0, rewards - mean)
    if singleton == "raw":
        centred = np.where(single, rewards, centred)
    if std_scope == "agent":
        scale = np.where(single, 1.0, np.maximum(std, std_floor)) + eps
        centred = np.divide(centred, scale, out=np.zeros(rows), where=~flat)
    return MgrpoAdvantage(np.where(copies > 0, centred, 0.0), copies, mean, std, values)


def copy_weights(
    copies: Sequence[float] | np.ndarray,
    *,
    agent_id: Sequence | np.ndarray,
    aligned: Collection[str],
    target: int | Mapping[str, int] | None,
    mode: str,
    prompts: int,
    sessions: int,
    rows_in_batch: int,
) -> np.ndarray:
    """Weight of each row of one model, so that verl's mean over the batch's rows is the paper's objective.

    verl divides the sum over rows by `rows_in_batch`. With weight copies * rows_in_batch / denominator a model's loss
    is the sum over its agents of (sum of copies * row loss) / denominator; the denominator is prompts * D * sessions
    for an aligned agent (its number of rows under mode `none`) and prompts * sessions for any other. So each agent has
    an objective of its own, a mean that other agents' rows leave alone, and agents that share a model add theirs up one
    to one, whatever their numbers of rows. Sessions and prompts that don't call an agent stay in its denominator.

    Args:
        copies: Of each real row of the model, from `mgrpo_advantage` (rows,).
        agent_id: Agent of each row.
        aligned: As in `mgrpo_advantage`.
        target: As in `mgrpo_advantage`.
        mode: As in `mgrpo_advantage`.
        prompts: Prompts of the step, those without a row of this model too.
        sessions: Sessions a prompt (`rollout.n`), failed ones too.
        rows_in_batch: Rows that verl's seq-mean divides by: of the model's batch, padding included.

    Returns:
        Weights, float64 of shape (rows,). Padding rows, which have no loss, may have any.

    Raises:
        ValueError: Lengths differ, a copy count is negative or not finite, an aligned agent has no target, or a number
            or the mode is out of its range.
    """
    copies = row_values("copies", copies, len(copies))
    negative = np.flatnonzero(copies < 0)
    if len(negative):
        raise ValueError(f"copies of row {negative[0]} is {copies[negative[0]]}: it must be at least 0")
    check_count("prompts", prompts)
    check_count("sessions", sessions)
    check_count("rows_in_batch", rows_in_batch, least=len(copies))
    agents, names = factorize("agent_id", agent_id, len(copies))
    targets = _targets(aligned, names, target, mode)
    slots = np.array([prompts * sessions * (targets.get(name) or 1) for name in names], dtype=np.float64)
    if mode == "none":
        slots = np.where([name in targets for name in names], agents.sum(), slots)
    return copies * rows_in_batch / slots[agents.of_row]


def _targets(
    aligned: Collection[str], names: list, target: int | Mapping[str, int] | None, mode: str
) -> dict[str, int | None]:
    """D of each aligned agent that has rows; None under mode `none`."""
    one_of("mode", mode, ALIGN_MODES)
    if isinstance(aligned, str):
        raise ValueError(f"aligned={aligned!r} is a string: give a collection of agent ids, such as [{aligned!r}]")
    targets: dict[str, int | None] = {}
    for name in names:
        if name not in aligned:
            continue
        own = target
        if mode != "none":
            if isinstance(target, Mapping):
                if name not in target:
                    known = ", ".join(map(str, target)) or "no agent"
                    raise ValueError(f"target of aligned agent {name!r} is missing: it lists {known}; add {name!r}")
                own = target[name]
            check_count(f"target of aligned agent {name!r}", own)
        targets[name] = None if mode == "none" else own
    return targets


def _keys(prompts: Codes, agents: Codes, names: list, index: Sequence | np.ndarray, groups: Codes) -> list[tuple]:
    """(dataset index, agent) of each group."""
    indices, index_ids = factorize("index", index, len(prompts.of_row))
    other = np.flatnonzero(prompts.pick(indices.of_row)[prompts.of_row] != indices.of_row)
    if len(other):
        row = other[0]
        raise ValueError(
            f"index of row {row} is {index_ids[indices.of_row[row]]!r}, unlike that of another row of its uid"
        )
    of_group = zip(groups.pick(indices.of_row), groups.pick(agents.of_row), strict=True)
    return [(index_ids[place], names[agent]) for place, agent in of_group]


def _row_copies(
    groups: Codes,
    attempts: Codes,
    activation: Sequence[int] | np.ndarray,
    session_ids: list,
    align_group: Callable[[int, np.ndarray, list], list[np.ndarray]],
) -> np.ndarray:
    """Copies of each row: every group's sessions aligned once, their trajectories taken in order of activation."""
    rows = len(groups.of_row)
    units = combine(groups, attempts)
    rank = nth_activation(units, activation, rows)
    group_of_unit, attempt_of_unit = units.pick(groups.of_row), units.pick(attempts.of_row)
    counts = units.sum().astype(np.int64)
    by_group = np.argsort(group_of_unit, kind="stable")
    start = np.empty(units.size, dtype=np.int64)
    start[by_group] = np.cumsum(counts[by_group]) - counts[by_group]
    copies: list[np.ndarray] = [np.empty(0)]
    ends = np.cumsum(np.bincount(group_of_unit, minlength=groups.size))
    for group, members in enumerate(np.split(by_group, ends[:-1]) if rows else []):
        ids = [session_ids[attempt] for attempt in attempt_of_unit[members]]
        copies += align_group(group, counts[members], ids)
    return np.concatenate(copies)[start[units.of_row] + rank]


def _statistics(
    rewards: np.ndarray, copies: np.ndarray, groups: Codes, ddof: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, std, number of values and whether there is but one, of each row's group, as if copies were rows."""
    kept = np.flatnonzero(copies)
    kept_groups = Codes(groups.of_row[kept], groups.size)
    plain = statistics(rewards[kept], kept_groups, kept_groups, "activation", ddof=0)
    flat = kept_groups.pick(plain.single | plain.constant)

    values = np.rint(groups.sum(copies))  # whole in every mode: D a session, or the rows kept
    mean = groups.sum(copies * rewards) / values
    deviation = rewards - mean[groups.of_row]
    variance = groups.sum(copies * deviation * deviation) / np.maximum(values - ddof, 1)
    std = np.where(flat | (values <= ddof), 0.0, np.sqrt(variance))
    single = flat & (values == 1)
    row = groups.of_row
    return mean[row], std[row], values[row], single[row]
