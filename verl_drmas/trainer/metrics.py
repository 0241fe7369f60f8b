"""Numbers per agent and per workflow (`drmas/...`), from one step's real rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from verl_drmas.advantage import agent_diagnostics, shadow
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.step import StepRows
from verl_drmas.workflows import Workflow


def agent_metrics(step: StepRows) -> dict[str, float]:
    """`drmas/agent/<agent_id>/...` for every agent that acted."""
    rows, penalty = step.known, step.penalty()
    agents = np.array([row.agent_id for row in rows], dtype=object)
    sessions = len({(row.uid, row.session) for row in rows})
    inside = step.section.advantage.penalty == "inside"
    seen = step.scores - penalty if inside else step.scores  # what the groups' statistics saw
    diagnostics = agent_diagnostics(seen, step.advantage, tokens=step.tokens, **step.ids())
    metrics: dict[str, float] = {}
    for agent_id, numbers in diagnostics.items():
        mine = agents == agent_id
        valid = np.array([row.valid for row, m in zip(rows, mine, strict=True) if m])
        counts = [row.counts for row, m in zip(rows, mine, strict=True) if m]
        numbers = dict(numbers)
        numbers["rows"] = float(mine.sum())
        numbers["reward/mean"] = float(step.scores[mine].mean())
        numbers["penalty/mean"] = float(penalty[mine].mean())
        numbers["valid_share"] = float(valid.mean())
        numbers["activations_per_session"] = float(mine.sum() / sessions)
        numbers["response_length/mean"] = float(step.tokens[mine].mean())
        numbers["token_share"] = float(step.tokens[mine].sum() / max(1, step.tokens.sum()))
        for name in sorted({key for count in counts for key in count}):
            numbers[f"{name}/mean"] = float(np.mean([count.get(name, 0.0) for count in counts]))
        metrics |= {f"drmas/agent/{agent_id}/{name}": value for name, value in numbers.items()}
    return metrics


def shadow_metrics(step: StepRows, options: dict[str, Any]) -> dict[str, float]:
    """`drmas/shadow/<estimator>/...`: what the other estimators would have given on the same rows."""
    result = shadow(
        step.scores,
        step.advantage,
        tokens=step.tokens,
        penalty=step.penalty(),
        place=step.section.advantage.penalty,
        **step.ids(),
        **options,
    )
    return {
        f"drmas/shadow/{estimator}/{name}": value
        for estimator, numbers in result.items()
        for name, value in numbers.items()
    }


def workflow_metrics(rows: list[Row], workflow: type[Workflow] | None) -> dict[str, float]:
    """`drmas/workflow/...`: the workflow's own summary of its sessions' numbers."""
    sessions = [row.metrics for row in rows if row.metrics is not None]
    summarise = (workflow or Workflow).summarise
    return {f"drmas/workflow/{name}": value for name, value in summarise(sessions).items()}


def session_metrics(rows: list[Row], expected: int, report: dict[str, int]) -> dict[str, float]:
    """`drmas/sessions/...`: how many were asked for, ended, and failed, by reason."""
    ended = len({(row.uid, row.session) for row in rows})
    metrics = {
        "drmas/sessions/expected": float(expected),
        "drmas/sessions/failed": float(expected - ended),
        "drmas/sessions/rows_per_session": len(rows) / max(1, ended),
    }
    return metrics | {f"drmas/sessions/{name}": float(n) for name, n in report.items()}


class CollapseWatch:
    """Names an agent that stops acting, stops acting validly, or whose groups lose their spread.

    Args:
        fraction: A share that falls below this part of its start is warned about.
        start: Steps that make up the start.
        flat: Steps in a row without any spread that are warned about.
    """

    def __init__(self, fraction: float = 0.2, start: int = 3, flat: int = 5):
        self.fraction, self.start, self.flat = fraction, start, flat
        self._first: dict[str, list[float]] = defaultdict(list)
        self._flat_steps: Counter[str] = Counter()
        self._warned: set[str] = set()

    def look(self, metrics: dict[str, float], agents: list[str]) -> list[str]:
        """Warnings that this step's metrics give for the first time."""
        warnings = []
        for agent_id in agents:
            prefix = f"drmas/agent/{agent_id}"
            for name, what in (("activations_per_session", "activations per session"), ("valid_share", "valid share")):
                key = f"{prefix}/{name}"
                if name == "valid_share" and key not in metrics:
                    continue
                value = metrics.get(key, 0.0)  # an agent without rows has no metrics: it acted 0 times
                first = self._first[key]
                if len(first) < self.start:
                    first.append(value)
                elif value < self.fraction * np.mean(first) and key not in self._warned:
                    self._warned.add(key)
                    warnings.append(
                        f"agent {agent_id!r}: {what} fell to {value:.3g}, from {np.mean(first):.3g} at the start"
                    )
            no_spread = metrics.get(f"{prefix}/zero_std_share", 0.0) >= 1.0
            self._flat_steps[agent_id] = self._flat_steps[agent_id] + 1 if no_spread else 0
            if self._flat_steps[agent_id] == self.flat:
                warnings.append(
                    f"agent {agent_id!r}: no group had any spread in rewards for {self.flat} steps; it learns nothing"
                )
        return warnings
