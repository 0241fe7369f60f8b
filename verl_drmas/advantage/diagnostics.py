"""What the statistics did to each agent in a step, and what other estimators would have done with the same rows.

Keys end so that verl's metric aggregator, which picks its rule by substring (verl/trainer/ppo/v1/utils.py), picks the
right one: max for `.../max`, min for `.../min`, a mean for all others. Agent ids come out as they went in: ids such as
`examiner` must be made safe by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_drmas.advantage.estimators import ESTIMATORS
from verl_drmas.advantage.keys import Codes, combine, factorize, row_values
from verl_drmas.advantage.penalty import penalised_advantage
from verl_drmas.advantage.statistics import statistics

SHADOWS = ("grpo_team", "grpo_activation", "drmas")

# An advantage this small is rounding, not a push: real ones are of order 1 / sqrt(group size).
_SILENT = 1e-9


def agent_diagnostics(
    rewards: Sequence[float] | np.ndarray,
    advantage: Sequence[float] | np.ndarray,
    *,
    uid: Sequence | np.ndarray,
    session: Sequence | np.ndarray,
    agent_id: Sequence | np.ndarray,
    tokens: Sequence[int] | np.ndarray,
) -> dict[str, dict[str, float]]:
    """Health of each agent's groups; a group is one prompt and one agent.

    The inflation factor is F = [var_k + (mean_k - mean)^2] / var (paper, Lemma 4.2): the second moment of the agent's
    advantages if they were normalised by the prompt's statistics. mean and var (population) are over the prompt's
    sessions, each with the mean of its rows; mean_k and var_k over the agent's rows. 1 means that sharing one baseline
    costs this agent nothing. With one shared reward per session F <= N - 1 for N sessions.

    Args:
        rewards: Reward of each row as the statistics saw it (rows,).
        advantage: Advantage of each row (rows,).
        uid: Prompt of each row.
        session: Session of each row; the ids need only be distinct within a prompt.
        agent_id: Agent of each row.
        tokens: Trained tokens of each row (rows,).

    Returns:
        By agent: `inflation_factor/mean` and `/max` over the agent's prompts with a defined F (absent if there are
        none), `inflation_factor/undefined_prompts` (the others: no spread between sessions), `group_size/mean`, `/min`,
        `/max` in rows, `zero_std_share` (of the agent's groups: constant or of one row), `advantage_mass_share`
        (the agent's sum of |advantage| * tokens over that of all agents), `advantage_abs/mean` and `/max`.

    Raises:
        ValueError: Lengths differ or a number is not finite.
    """
    rewards = row_values("rewards", rewards, len(rewards))
    rows = len(rewards)
    advantage = row_values("advantage", advantage, rows)
    tokens = row_values("tokens", tokens, rows)
    prompts, _ = factorize("uid", uid, rows)
    agents, names = factorize("agent_id", agent_id, rows)
    sessions = combine(prompts, factorize("session", session, rows)[0])
    groups = combine(prompts, agents)
    team = statistics(rewards, prompts, sessions, "session", ddof=0)
    own = statistics(rewards, groups, sessions, "activation", ddof=0)
    factor = np.divide(own.std**2 + (own.mean - team.mean) ** 2, team.std**2, out=np.zeros(rows), where=team.std > 0)

    agent_of_group = groups.pick(agents.of_row)
    factor, defined, flat = groups.pick(factor), groups.pick(team.std > 0), groups.pick(own.std == 0)
    size = groups.sum()
    mass_share = _mass_share(advantage, tokens, agents)
    magnitude = np.abs(advantage)

    result: dict[str, dict[str, float]] = {}
    for code, name in enumerate(names):
        mine, my_rows = agent_of_group == code, agents.of_row == code
        metrics = {
            "inflation_factor/undefined_prompts": float(np.count_nonzero(mine & ~defined)),
            "group_size/mean": float(size[mine].mean()),
            "group_size/min": float(size[mine].min()),
            "group_size/max": float(size[mine].max()),
            "zero_std_share": float(flat[mine].mean()),
            "advantage_mass_share": float(mass_share[code]),
            "advantage_abs/mean": float(magnitude[my_rows].mean()),
            "advantage_abs/max": float(magnitude[my_rows].max()),
        }
        if (mine & defined).any():
            metrics["inflation_factor/mean"] = float(factor[mine & defined].mean())
            metrics["inflation_factor/max"] = float(factor[mine & defined].max())
        result[name] = metrics
    return result


def shadow(
    rewards: Sequence[float] | np.ndarray,
    advantage: Sequence[float] | np.ndarray,
    *,
    uid: Sequence | np.ndarray,
    session: Sequence | np.ndarray,
    agent_id: Sequence | np.ndarray,
    tokens: Sequence[int] | np.ndarray,
    penalty: Sequence[float] | np.ndarray | None = None,
    place: str = "inside",
    **options: Any,
) -> dict[str, dict[str, float]]:
    """What `grpo_team`, `grpo_activation` and `drmas` would have made of the same rows.

    Args:
        rewards: Reward of each row before the penalty (rows,).
        advantage: Advantage of each row from the estimator in use (rows,).
        uid: Prompt of each row.
        session: Session of each row; the ids need only be distinct within a prompt.
        agent_id: Agent of each row.
        tokens: Trained tokens of each row (rows,).
        penalty: Penalty of each row, or None for none.
        place: Where the penalty goes, see `penalised_advantage`.
        **options: ddof, eps, std_floor, singleton and constant of `group_advantage`, as the estimator in use has them.

    Returns:
        By estimator: `advantage_abs/max`, `advantage_mass_share/<agent>` (its sum of |advantage| * tokens over that of
        all agents), `sign_flip_share` (rows pushed the other way than by the estimator in use) and
        `one_sided_share` (rows that only one of the two pushes at all).

    Raises:
        ValueError: As `group_advantage`.
    """
    rewards = row_values("rewards", rewards, len(rewards))
    rows = len(rewards)
    advantage = row_values("advantage", advantage, rows)
    tokens = row_values("tokens", tokens, rows)
    agents, names = factorize("agent_id", agent_id, rows)
    prompts, _ = factorize("uid", uid, rows)  # numbered once: comparing strings is most of an estimator's time
    sessions, _ = factorize("session", session, rows)
    penalty = np.zeros(rows) if penalty is None else penalty

    result: dict[str, dict[str, float]] = {}
    for estimator in SHADOWS:
        other = penalised_advantage(
            rewards,
            penalty,
            place=place,
            uid=prompts.of_row,
            session=sessions.of_row,
            agent_id=agents.of_row,
            **vars(ESTIMATORS[estimator]),
            **options,
        )
        flips, one_sided = disagreement(advantage, other)
        shares = _mass_share(other, tokens, agents)
        result[estimator] = {
            "advantage_abs/max": float(np.abs(other).max(initial=0.0)),
            "sign_flip_share": flips,
            "one_sided_share": one_sided,
            **{f"advantage_mass_share/{name}": float(share) for name, share in zip(names, shares, strict=True)},
        }
    return result


def disagreement(advantage: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Share of rows that two estimators push in opposite directions, and of those that only one of them pushes at all.

    Args:
        advantage: Of each row (rows,).
        other: The other one's (rows,).
    """
    one, two, rows = _sign(advantage), _sign(other), max(len(advantage), 1)
    opposite, one_sided = np.count_nonzero(one * two < 0), np.count_nonzero((one == 0) != (two == 0))
    return float(opposite / rows), float(one_sided / rows)


def _mass_share(advantage: np.ndarray, tokens: np.ndarray, agents: Codes) -> np.ndarray:
    """Each agent's share of sum |advantage| * tokens; all 0 where no row is pushed."""
    mass = agents.sum(np.abs(advantage) * tokens)
    whole = mass.sum()
    return mass / whole if whole > 0 else mass


def _sign(advantage: np.ndarray) -> np.ndarray:
    return np.where(np.abs(advantage) > _SILENT, np.sign(advantage), 0.0)
