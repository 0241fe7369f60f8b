"""What an estimator's advantages have in common with those that were trained, by agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_drmas.advantage import disagreement
from verl_drmas.replay.run import Replayed, Trained, per_row

AGENT_METRICS = {  # of the trainer's metrics, what a table shows
    "mass": "advantage_mass_share",
    "f_mean": "inflation_factor/mean",
    "f_max": "inflation_factor/max",
    "no_spread": "zero_std_share",
}


@dataclass(frozen=True)
class Comparison:
    """One estimator against the training.

    Attributes:
        replayed: What it gave.
        difference: Largest |difference| of a trained token's advantage.
        rounding: What float32 can't tell apart, at the largest advantage.
        copies_differ: Rows that count otherwise than in training.
        agents: By agent: `rows`, `mean`, `std`, `abs_mean`, `abs_max` of the rows' advantages, `difference`, `flips`
            (share of rows pushed the other way than in training), `one_sided` (share that only one of the two pushes),
            and those of `AGENT_METRICS` that are defined.
    """

    replayed: Replayed
    difference: float
    rounding: float
    copies_differ: int
    agents: dict[str, dict[str, float]]

    @property
    def same(self) -> bool:
        """Nothing differs but by rounding."""
        return self.difference <= self.rounding and not self.copies_differ

    @property
    def broken(self) -> bool:
        """The step's own estimator gave something else than in training."""
        return self.replayed.arm.own and not self.same


def compare(trained: Trained, replayed: Replayed) -> Comparison:
    """Hold an estimator's advantages against the dumped ones, token by token."""
    before, after = trained.tokens(), replayed.tokens
    gaps = np.array(
        [float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) for a, b in zip(before, after, strict=True)]
    )
    largest = max((float(np.abs(own).max(initial=0.0)) for own in before), default=0.0)
    copies_differ = 0
    if replayed.copies is not None and replayed.arm.own:
        was = np.array([row.trained["copies"] for row in trained.rows], dtype=np.float64)
        copies_differ = int(np.count_nonzero(was != replayed.copies))
    was, now, names = per_row(before), per_row(after), np.array(trained.agents, dtype=object)
    agents = {}
    for agent in dict.fromkeys(trained.agents):
        mine = names == agent
        flips, one_sided = disagreement(was[mine], now[mine])
        own = {key: replayed.metrics.get(f"drmas/agent/{agent}/{name}") for key, name in AGENT_METRICS.items()}
        agents[agent] = {
            **spread(now[mine]),
            "difference": float(gaps[mine].max()),
            "flips": flips,
            "one_sided": one_sided,
            **{key: value for key, value in own.items() if value is not None},
        }
    rounding = float(np.spacing(np.float32(largest)))
    return Comparison(replayed, float(gaps.max(initial=0.0)), rounding, copies_differ, agents)


def spread(advantage: np.ndarray) -> dict[str, float]:
    """How some rows' advantages lie."""
    return {
        "rows": len(advantage),
        "mean": float(advantage.mean()),
        "std": float(advantage.std()),
        "abs_mean": float(np.abs(advantage).mean()),
        "abs_max": float(np.abs(advantage).max()),
    }


def as_trained(trained: Trained) -> dict[str, dict[str, float]]:
    """The same of the dumped advantages, with each agent's mean reward before any penalty."""
    values, names = per_row(trained.tokens()), np.array(trained.agents, dtype=object)
    rewards = np.array([row.trained["reward"] for row in trained.rows])
    return {
        agent: {**spread(values[names == agent]), "reward": float(rewards[names == agent].mean())}
        for agent in dict.fromkeys(trained.agents)
    }


def as_json(trained: Trained, comparisons: list[Comparison]) -> dict[str, Any]:
    """Everything, rows too, as JSON values."""
    return {
        "dump": str(trained.step.file),
        "step": trained.step.step,
        "settings": dict(trained.step.settings),
        "trained": as_trained(trained),
        "replays": [
            {
                "estimator": one.replayed.arm.name,
                "own": one.replayed.arm.own,
                "same": one.same,
                "difference": one.difference,
                "copies_differ": one.copies_differ,
                "algorithm": dict(one.replayed.arm.algorithm),
                "alignment": None if one.replayed.arm.alignment is None else vars(one.replayed.arm.alignment),
                "agents": one.agents,
                "metrics": one.replayed.metrics,
            }
            for one in comparisons
        ],
        "rows": [
            {
                "uid": row.line["uid"],
                "index": row.line["index"],
                "agent": row.agent,
                "path": row.own["path"],
                "reward": row.trained["reward"],
                "valid": row.own["valid"],
                "tokens": row.trained["tokens"],
                "trained": row.trained["advantage"],
                "replayed": [_value(one.replayed.tokens[i]) for one in comparisons],
            }
            for i, row in enumerate(trained.rows)
        ],
    }


def _value(tokens: np.ndarray) -> float | list[float] | None:
    if not len(tokens):
        return None
    return float(tokens[0]) if (tokens == tokens[0]).all() else tokens.tolist()
