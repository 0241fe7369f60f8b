"""What a run worked through: steps, sessions, rows and tokens, and the time of each phase of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verl_drmas.report.runlog import RunLog, Step

# Phases of a step by verl's timers (`trainer_base.py`); the last is outside of verl's own step.
PHASES: dict[str, tuple[str, ...]] = {
    "rollout": ("gen",),
    "reward": ("reward",),
    "old log-probs": ("old_log_prob",),
    "reference": ("ref",),
    "critic": ("values", "update_critic"),
    "advantages": ("adv",),
    "update": ("update_actor",),
    "weight sync": ("update_weights",),
    "save": ("save_checkpoint",),
}
OTHER, TEST = "other", "test"
ALL_PHASES = (*PHASES, OTHER, TEST)
# Phases that all tokens of the batch pass; rollout samples its own, the rest handle none.
WHOLE_BATCH = ("old log-probs", "reference", "critic", "advantages", "update")


@dataclass(frozen=True)
class Totals:
    """Sums over a run's training steps; None: not logged.

    Attributes:
        steps: training steps in the log.
        asked: sessions that were asked for.
        failed: of them.
        rows: activations that entered statistics.
        sampled: tokens that agents sampled in those rows (not masked).
        tokens: prompt and response tokens of all rows of the batch (verl's `perf/total_num_tokens`).
        seconds: of steps and of tests.
        rate: verl's `perf/throughput`, tokens a second and GPU, mean over steps.
    """

    steps: int
    asked: int | None
    failed: int | None
    rows: int | None
    sampled: int | None
    tokens: int | None
    seconds: float | None
    rate: float | None

    @property
    def ended(self) -> int | None:
        """Sessions that ended."""
        return None if self.asked is None or self.failed is None else self.asked - self.failed


def totals(log: RunLog) -> Totals:
    """Returns what a run's training steps logged, summed."""
    steps = log.training
    agents = log.agents()
    rates = [step.metrics["perf/throughput"] for step in steps if "perf/throughput" in step.metrics]
    asked = _sum(steps, "drmas/sessions/expected")
    return Totals(
        steps=len(steps),
        asked=asked,
        # A job of another's sessions (`drmas_store`) logs no failures: those are the other job's.
        failed=0
        if asked is not None and "drmas/sessions/failed" not in log.names()
        else _sum(steps, "drmas/sessions/failed"),
        rows=_sum(steps, *(f"drmas/agent/{agent}/rows" for agent in agents)),
        sampled=_sampled(steps, agents),
        tokens=_sum(steps, "perf/total_num_tokens"),
        seconds=wall(log),
        rate=math.fsum(rates) / len(rates) if rates else None,
    )


def _sum(steps: Sequence[Step], *names: str) -> int | None:
    values = [step.metrics[name] for step in steps for name in names if name in step.metrics]
    return round(math.fsum(values)) if values else None


def _sampled(steps: Sequence[Step], agents: Sequence[str]) -> int | None:
    """The mean length of an agent's rows times their number is a whole number but for rounding."""
    counts = []
    for step in steps:
        for agent in agents:
            rows = step.metrics.get(f"drmas/agent/{agent}/rows")
            length = step.metrics.get(f"drmas/agent/{agent}/response_length/mean")
            if rows is not None and length is not None:
                counts.append(round(rows * length))
    return sum(counts) if counts else None


def wall(log: RunLog) -> float | None:
    """Returns the seconds of all training steps with their tests; start-up is in none of verl's timers."""
    seconds = [
        step.metrics["timing_s/step"] + step.metrics.get("timing_s/testing", 0.0)
        for step in log.training
        if "timing_s/step" in step.metrics
    ]
    return math.fsum(seconds) if seconds else None


def phases(log: RunLog) -> dict[str, float]:
    """Returns the seconds of each phase over all training steps; a phase without a timer is left out.

    `other` is what verl's step took beyond its timers; `test` lies outside of the step.
    """
    seconds: dict[str, float] = {}
    steps = [step.metrics for step in log.training if "timing_s/step" in step.metrics]
    for phase, timers in PHASES.items():
        values = [m[f"timing_s/{timer}"] for m in steps for timer in timers if f"timing_s/{timer}" in m]
        if values:
            seconds[phase] = math.fsum(values)
    if steps:
        seconds[OTHER] = max(0.0, math.fsum(m["timing_s/step"] for m in steps) - math.fsum(seconds.values()))
    tests = [m["timing_s/testing"] for m in steps if "timing_s/testing" in m]
    if tests:
        seconds[TEST] = math.fsum(tests)
    return seconds


def tokens_of(phase: str, run: Totals) -> int | None:
    """Returns how many tokens a phase worked on; None: none, or not logged."""
    if phase == "rollout":
        return run.sampled
    return run.tokens if phase in WHOLE_BATCH else None
