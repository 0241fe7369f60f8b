"""Mean, spread and degeneracy of groups of rows, in float64, for the advantages and for the diagnostics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_drmas.advantage.keys import Codes, combine


@dataclass(frozen=True)
class Statistics:
    """What each row sees of its group; every field has one entry per row."""

    score: np.ndarray  # the reward the row is judged by
    mean: np.ndarray
    std: np.ndarray  # 0 where single or constant
    single: np.ndarray  # the group has one value
    constant: np.ndarray  # the group has several values, all equal


def statistics(rewards: np.ndarray, groups: Codes, sessions: Codes, pool: str, ddof: int) -> Statistics:
    """Statistics of each row's group.

    Args:
        rewards: float64 (rows,).
        groups: Group of each row; no group spans two prompts.
        sessions: Session of each row, numbered over all prompts.
        pool: `activation`: every row is a value. `session`: every session's mean within the group is one.
        ddof: Taken off the number of values in the variance; 0 or 1.
    """
    score, values, of_value = rewards, rewards, groups
    if pool == "session":
        units = combine(groups, sessions)
        values = units.sum(rewards) / units.sum()
        score, of_value = values[units.of_row], Codes(units.pick(groups.of_row), groups.size)

    count = of_value.sum()
    mean = of_value.sum(values) / count
    deviation = values - mean[of_value.of_row]
    single = count == 1
    std = np.sqrt(of_value.sum(deviation * deviation) / np.where(single, 1.0, count - ddof))

    # Equal values must count as equal although two session means of equal rows can differ in their last bits: the mean
    # of m rows is off by at most unit roundoff * sum|row|, so two equal ones lie within machine epsilon * sum|row| of
    # the group (twice that, for the divisions). Real differences between rewards are orders of magnitude larger.
    tolerance = 2 * np.finfo(np.float64).eps * groups.sum(np.abs(rewards))
    differs = np.abs(values - of_value.pick(values)[of_value.of_row]) > tolerance[of_value.of_row]
    underflow = std == 0.0  # a spread so tiny that its squares vanish would divide by 0
    constant = ~single & (~of_value.any(differs) | underflow)
    std = np.where(constant | single, 0.0, std)

    row = groups.of_row
    return Statistics(score, mean[row], std[row], single[row], constant[row])
