"""Steps at which a gradient norm leaps."""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from verl_drmas.report.runlog import RunLog

FACTOR = 5.0
WINDOW = 20  # values before a step
LEAST = 5  # of them; below, nothing is called a spike


@dataclass(frozen=True)
class Spikes:
    """A model's gradient norm over a run.

    Attributes:
        model: its id.
        steps: of the spikes: norm over `FACTOR` times the median of the `WINDOW` values before it.
        worst: the largest such ratio of any step; None: no step was judged.
        judged: how many steps had enough values before them.
        logged: how many logged a finite norm.
        lost: steps whose norm was NaN or infinite.
        median: of all; None: there is none.
        highest: of all; None: there is none.
    """

    model: str
    steps: tuple[int, ...]
    worst: float | None
    judged: int
    logged: int
    lost: tuple[int, ...]
    median: float | None
    highest: float | None


def spikes(log: RunLog) -> list[Spikes]:
    """Returns the spikes of each model's gradient norm (before clipping); empty: no norm was logged."""
    found = []
    for model, name in log.by_model("grad_norm").items():
        steps, values = log.series(name)
        ratios = running_ratios(values)
        judged = [(step, ratio) for step, ratio in zip(steps, ratios, strict=True) if ratio is not None]
        found.append(
            Spikes(
                model=model,
                steps=tuple(step for step, ratio in judged if ratio > FACTOR),
                worst=max((ratio for _, ratio in judged), default=None),
                judged=len(judged),
                logged=len(values),
                lost=tuple(step.step for step in log.steps if name in step.lost),
                median=statistics.median(values) if values else None,
                highest=max(values, default=None),
            )
        )
    return found


def running_ratios(values: Sequence[float]) -> list[float | None]:
    """Returns each value over the median of the `WINDOW` before it; None where there are fewer than `LEAST`."""
    window: list[float] = []  # sorted
    ratios: list[float | None] = []
    for i, value in enumerate(values):
        if len(window) < LEAST:
            ratios.append(None)
        else:
            middle = statistics.median(window)
            ratios.append(value / middle if middle > 0 else (float("inf") if value > 0 else 1.0))
        insort(window, value)
        if i >= WINDOW:
            del window[bisect_left(window, values[i - WINDOW])]
    return ratios
