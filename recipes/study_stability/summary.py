"""What is told of a run, and of the runs that differ only by their seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.study_stability.training import Setting
from recipes.study_stability.worlds import AGENTS
from verl_drmas.report.spikes import FACTOR, running_ratios
from verl_drmas.report.stats import Estimate

LAST = 0.8  # a run's end: what it samples after this share of its budget


@dataclass(frozen=True)
class Run:
    """A run and what `train` yielded of it."""

    setting: Setting
    steps: Sequence[dict[str, Any]]

    def series(self, agent: str, name: str) -> tuple[list[int], list[float]]:
        """Returns the actions sampled at, and the values of, the steps that have an agent's measure."""
        pairs = [(s["actions"], s["agents"][agent][name]) for s in self.steps if name in s["agents"][agent]]
        return [actions for actions, _ in pairs], [value for _, value in pairs]

    def on(self, grid: np.ndarray) -> np.ndarray:
        """Returns success at these numbers of sampled actions, interpolated."""
        return np.interp(grid, [s["actions"] for s in self.steps], [s["success"] for s in self.steps])

    @property
    def area(self) -> float:
        """Mean success over the budget: how fast the team learned."""
        return float(self.on(np.linspace(0, self.setting.budget, 201)).mean())

    @property
    def final(self) -> float:
        """Mean success at the run's end."""
        return self._end(lambda step: step["success"])

    @property
    def flat_mass(self) -> float:
        """Mean share of the push that penalties alone made, over the run."""
        return float(np.mean([step["flat_mass"] for step in self.steps]))

    def valid(self) -> float:
        """Mean share of well-formed actions at the run's end, over agents."""
        return float(np.mean([self._end(lambda step, a=a: step["agents"][a].get("valid", 1.0)) for a in AGENTS]))

    def spikes(self, agent: str) -> int:
        """Steps whose gradient norm is over five times its running median, as the report counts them."""
        return sum(ratio is not None and ratio > FACTOR for ratio in running_ratios(self.series(agent, "norm")[1]))

    def worst(self, agent: str) -> float | None:
        """Largest gradient norm over its running median; None: the run is too short for one."""
        ratios = [ratio for ratio in running_ratios(self.series(agent, "norm")[1]) if ratio is not None]
        return max(ratios, default=None)

    def _end(self, value: Callable[[dict[str, Any]], float]) -> float:
        at = LAST * self.setting.budget
        return float(np.mean([value(step) for step in self.steps if step["actions"] > at]))

    def as_dict(self) -> dict[str, Any]:
        """Returns the run in a line: its setting and these measures."""
        penalty = self.setting.penalty
        agents = {}
        for agent in AGENTS:
            norms, factors = self.series(agent, "norm")[1], self.series(agent, "f")[1]
            agents[agent] = {
                "norm_median": float(np.median(norms)) if norms else None,
                "norm_max": max(norms, default=None),
                "norm_over_median": self.worst(agent),
                "spikes": self.spikes(agent),
                "f_mean": float(np.mean(factors)) if factors else None,
                "f_max": max(self.series(agent, "f_max")[1], default=None),
            }
        return {
            **{k: v for k, v in vars(self.setting).items() if k != "penalty"},
            "penalty": penalty.name if penalty else None,
            "steps": len(self.steps),
            "actions": self.steps[-1]["actions"],
            "area": self.area,
            "final": self.final,
            "flat_mass": self.flat_mass,
            "valid": self.valid(),
            "agents": agents,
        }


def choose(runs: Iterable[Run], **setting: Any) -> list[Run]:
    """Returns the runs whose setting has these values, by seed."""
    fitting = [run for run in runs if all(getattr(run.setting, name) == value for name, value in setting.items())]
    return sorted(fitting, key=lambda run: run.setting.seed)


def main_runs(runs: Iterable[Run], world: str, estimator: str) -> list[Run]:
    """Returns the runs at the study's own optimiser and learning rate, without a penalty, by seed."""
    return choose(runs, world=world, estimator=estimator, optimiser=Setting.optimiser, rate=Setting.rate, penalty=None)


def estimate(runs: Sequence[Run], value: Callable[[Run], float]) -> Estimate | None:
    """Returns mean and standard error over seeds; None without runs."""
    return Estimate.of([value(run) for run in runs])


def paired(runs: Sequence[Run], base: Sequence[Run], value: Callable[[Run], float]) -> tuple[Estimate | None, int]:
    """Returns the mean difference to the runs of the same seeds in `base`, and in how many seeds it is above 0."""
    other = {run.setting.seed: value(run) for run in base}
    differences = [value(run) - other[run.setting.seed] for run in runs if run.setting.seed in other]
    return Estimate.of(differences), sum(difference > 0 for difference in differences)


def lines(runs: Iterable[Run]) -> Iterator[dict[str, Any]]:
    """Yields every step of every run with what names its run."""
    for run in runs:
        setting = run.as_dict()
        name = {key: setting[key] for key in ("world", "estimator", "seed", "optimiser", "rate", "penalty")}
        for step in run.steps:
            yield {**name, **step}
