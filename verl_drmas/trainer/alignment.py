"""Trajectory alignment in training: D by sub-agent, each row's copies, their weights in the loss, and numbers on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_drmas.advantage import copy_weights, mgrpo_advantage, target_of
from verl_drmas.config import AlignmentConfig
from verl_drmas.rollout.rows import Row


@dataclass(frozen=True)
class StepAlignment:
    """How the rows of one step are aligned.

    Attributes:
        aligned: Sub-agents.
        target: D by sub-agent.
        mode: As in `align`; `none` where copies are rows already.
        seed: The run's.
        step: The global step.
    """

    aligned: tuple[str, ...]
    target: dict[str, int]
    mode: str
    seed: int
    step: int


class Alignment:
    """The run's alignment: knows D, or finds it in the first steps.

    Args:
        config: The section's `alignment`.
        aligned: Sub-agents.
        seed: Of every draw, with step, dataset index and agent.
    """

    def __init__(self, config: AlignmentConfig, aligned: Sequence[str], seed: int):
        self.config, self.aligned, self.seed = config, tuple(aligned), seed
        self._seen: dict[str, Counter[int]] = {agent: Counter() for agent in aligned}
        self._steps = 0

    def of_step(self, counts: dict[str, list[int]], step: int) -> StepAlignment:
        """This step's alignment.

        Args:
            counts: Trajectories of each session that ended, by sub-agent; sessions without one count as 0.
            step: The global step.
        """
        if self.config.target == "auto" and self._steps < self.config.auto_steps:
            self._steps += 1
            for agent in self.aligned:
                self._seen[agent].update(counts.get(agent, ()))
        target = {agent: self._target(agent) for agent in self.aligned}
        return StepAlignment(self.aligned, target, self.config.mode, self.seed, step)

    def _target(self, agent: str) -> int:
        if self.config.target != "auto":
            return self.config.target
        seen = self._seen[agent]
        return target_of(seen.elements()) if seen else 1

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same D; JSON values."""
        return {"steps": self._steps, "seen": {a: {str(d): n for d, n in s.items()} for a, s in self._seen.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self._steps = int(state.get("steps", 0))
        for agent, seen in state.get("seen", {}).items():
            if agent in self._seen:
                self._seen[agent] = Counter({int(d): n for d, n in seen.items()})


def calls_by_session(rows: Iterable[Row], aligned: Sequence[str]) -> dict[str, list[int]]:
    """Trajectories of each session that has a row, by sub-agent, zeros included; sessions as they first appear."""
    rows = list(rows)
    sessions = dict.fromkeys((row.uid, row.session) for row in rows)
    counts = {agent: dict.fromkeys(sessions, 0) for agent in aligned}
    for row in rows:
        if row.agent_id in counts:
            counts[row.agent_id][row.uid, row.session] += 1
    return {agent: list(by_session.values()) for agent, by_session in counts.items()}


def places(rows: Sequence[Row]) -> list[int]:
    """Order of rows by their place in the workflow, which doesn't depend on which parallel call ended first."""
    known = sorted({(row.path, row.activation) for row in rows})
    rank = {place: number for number, place in enumerate(known)}
    return [rank[row.path, row.activation] for row in rows]


def copies_of(rows: Sequence[Row], step: StepAlignment) -> np.ndarray:
    """How often each row counts, float64 (rows,)."""
    return mgrpo_advantage(
        np.zeros(len(rows)),
        uid=[row.uid for row in rows],
        session=[row.session for row in rows],
        agent_id=[row.agent_id for row in rows],
        activation=places(rows),
        index=[row.index for row in rows],
        **vars(step),
    ).copies


def loss_weights(
    rows: Sequence[Row | None],
    copies: np.ndarray,
    owners: Sequence[str | None],
    step: StepAlignment,
    *,
    prompts: int,
    sessions: int,
) -> np.ndarray:
    """Weight of every row of the batch in its model's loss, see `copy_weights`.

    Args:
        rows: Of the batch; None stands for padding.
        copies: Of each real row (real rows,).
        owners: The model that trains on each row of the batch, padding too; None: nobody.
        step: The step's alignment.
        prompts: Of the step.
        sessions: A prompt.

    Returns:
        float64 (rows,); 1 for padding and for rows that nobody trains.
    """
    of_row = np.full(len(rows), np.nan)
    of_row[[i for i, row in enumerate(rows) if row is not None]] = copies
    weights = np.ones(len(rows))
    mine: dict[str, list[int]] = defaultdict(list)
    for i, owner in enumerate(owners):
        if owner is not None:
            mine[owner].append(i)
    for places_ in mine.values():
        real = [i for i in places_ if rows[i] is not None]
        weights[real] = copy_weights(
            of_row[real],
            agent_id=[rows[i].agent_id for i in real],
            aligned=step.aligned,
            target=step.target,
            mode=step.mode,
            prompts=prompts,
            sessions=sessions,
            rows_in_batch=len(places_),
        )
    return weights


def alignment_metrics(
    rows: Sequence[Row], copies: np.ndarray, step: StepAlignment, counts: dict[str, list[int]]
) -> dict[str, float]:
    """`drmas/alignment/<agent>/...`: how often sub-agents were called, and what alignment made of it.

    Args:
        rows: The step's real rows.
        copies: Of each of them.
        step: The step's alignment.
        counts: As `calls_by_session` gives them.
    """
    metrics: dict[str, float] = {}
    agents = np.array([row.agent_id for row in rows], dtype=object)
    for agent in step.aligned:
        calls, target = np.array(counts.get(agent, [0])), step.target[agent]
        own = copies[agents == agent]
        numbers = {
            "target": target,
            "calls/mean": calls.mean(),
            "calls/max": calls.max(),
            "share_without_call": (calls == 0).mean(),
            "share_above_target": (calls > target).mean(),
            "dropped": (own == 0).sum(),
            "copies_added": np.maximum(own - 1, 0).sum(),
        }
        if len(own):
            numbers["copies/max"] = own.max()
        for d in range(target + 2):
            name = f"calls_{d}" if d <= target else f"calls_{d}_or_more"
            numbers[f"histogram/{name}"] = ((calls == d) if d <= target else (calls >= d)).mean()
        metrics |= {f"drmas/alignment/{agent}/{name}": float(value) for name, value in numbers.items()}
    return metrics
