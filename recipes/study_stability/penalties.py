"""Groups in which only a penalty differs: every outcome is the same, and one of n rows is malformed.

With the penalty inside the statistics the faulty row is the only spread there is, so that its advantage is
-(n - 1) / sqrt(n) whatever the coefficient (sample standard deviation): a fault that costs a hundredth of a reward
pushes as hard as a lost session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from verl_drmas.advantage import ESTIMATORS, penalised_advantage

EPS = 1e-6
FLOOR = 0.1
COEFFICIENTS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SIZES = (2, 5, 8, 11, 16, 32)
WAYS: dict[str, dict[str, Any]] = {
    "inside": {"place": "inside"},
    f"inside, std_floor {FLOOR:g}": {"place": "inside", "std_floor": FLOOR},
    "outside": {"place": "outside"},
}


def predicted(size: int, coefficient: float, place: str, std_floor: float = 0.0) -> float:
    """Advantage of the faulty row of `size` rows with equal outcomes, by formula.

    Inside, the row lies c (n - 1) / n below the mean, and the sample standard deviation is c / sqrt(n). Outside, the
    advantage is 0 and the penalty comes off it.
    """
    if place == "outside":
        return -coefficient
    return -coefficient * (size - 1) / size / (max(coefficient / np.sqrt(size), std_floor) + EPS)


def measured(size: int, coefficient: float, **way: Any) -> float:
    """Returns the same from the project's own code: an agent's `size` failed sessions, one of its actions malformed."""
    penalty = np.zeros(size)
    penalty[0] = coefficient
    ids = {"uid": [0] * size, "session": range(size), "agent_id": [0] * size}
    return float(penalised_advantage(np.zeros(size), penalty, **way, **vars(ESTIMATORS["drmas"]), **ids)[0])


def table() -> Iterator[dict[str, Any]]:
    """Yields ``way``, ``size``, ``coefficient``, ``measured`` and ``predicted`` of every combination."""
    for name, way in WAYS.items():
        for size in SIZES:
            for coefficient in COEFFICIENTS:
                yield {
                    "way": name,
                    "size": size,
                    "coefficient": coefficient,
                    "measured": measured(size, coefficient, **way),
                    "predicted": predicted(size, coefficient, **way),
                }


def reach(sessions: int = 8, calls: int = 3, coefficient: float = 0.01) -> dict[str, dict[str, float]]:
    """Who is pushed by one fault: a prompt whose sessions all failed, each with `calls` calls of two agents.

    Returns:
        For ``grpo_team`` and ``drmas`` the number of rows ``pushed`` at all, of the ``other`` agent's among them, and
        the advantage of the ``faulty`` row.
    """
    rows = sessions * 2 * calls
    penalty = np.zeros(rows)
    penalty[0] = coefficient
    agent = np.tile(np.repeat([0, 1], calls), sessions)
    ids = {"uid": np.zeros(rows, dtype=int), "session": np.repeat(np.arange(sessions), 2 * calls), "agent_id": agent}
    found = {}
    for name in ("grpo_team", "drmas"):
        advantage = penalised_advantage(np.zeros(rows), penalty, place="inside", **vars(ESTIMATORS[name]), **ids)
        # Rows that share a fault's baseline are pushed up a little; what counts as pushed is the fault's own direction.
        down = advantage < 0
        found[name] = {
            "pushed": int(down.sum()),
            "other": int((down & (agent == 1)).sum()),
            "faulty": float(advantage[0]),
        }
    return found
