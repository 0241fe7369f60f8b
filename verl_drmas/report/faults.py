"""What went wrong in a run and was survived: failed sessions by reason, retried calls, what was masked or dropped."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise

from verl_drmas.report.runlog import RunLog

REASON = re.compile(r"^drmas/sessions/failed/(.+)$")
IN_TESTS = re.compile(r"^val/drmas/sessions/failed/(.+)$")
FAILED_TESTS = re.compile(r"^val/[^/]+(?:/[^/]+)*/failed_sessions$")
# Counted only when it happened: absent means 0, in a run that counts its sessions at all.
MASKED, RETRIED, DEAD = "masked sessions", "retried calls", "dead servers"
COUNTED = {
    MASKED: "drmas/sessions/masked",
    RETRIED: "drmas/sessions/retried_calls",
    DEAD: "drmas/sessions/dead_servers",
}
# verl's replay buffer: whole prompts it threw away.
DROPPED = {
    "too old": "training/off_policy/evicted_samples",
    "no signal (filter_groups)": "training/filter_groups/evicted_samples",
    "surplus (filter_groups)": "training/filter_groups/discarded_surplus_samples",
    "rollout failed": "training/rollout_failure/evicted_samples",
}
ALIGNED = re.compile(r"^drmas/alignment/(.+)/dropped$")


@dataclass(frozen=True)
class Faults:
    """Counts over a run.

    Attributes:
        asked: training sessions asked for; None: the run doesn't count sessions (stock verl).
        failed: of them.
        reasons: failed training sessions by reason.
        counted: masked sessions, retried calls and dead servers.
        dropped: what verl threw away, by why; rows that alignment gave no copy, by agent.
        tests: sessions that failed in validations.
        test_reasons: those by reason.
    """

    asked: int | None
    failed: int | None
    reasons: dict[str, int]
    counted: dict[str, int]
    dropped: dict[str, int]
    tests: int | None
    test_reasons: dict[str, int]


def faults(log: RunLog) -> Faults:
    """Returns a run's faults."""
    names = log.names()
    asked = _total(log, "drmas/sessions/expected")
    counted = {label: _total(log, name) or 0 for label, name in COUNTED.items()}
    counted[DEAD] = _risen(log, COUNTED[DEAD])
    dropped = {label: total for label, name in DROPPED.items() if (total := _total(log, name)) is not None}
    for name in sorted(names):
        if found := ALIGNED.match(name):
            dropped[f"{found[1]}: no copy (alignment)"] = _total(log, name) or 0
    tests = [_total(log, name) or 0 for name in names if FAILED_TESTS.match(name)]
    return Faults(
        asked=asked,
        failed=_total(log, "drmas/sessions/failed"),
        reasons=_by_reason(log, REASON),
        counted=counted if asked is not None else {},
        dropped=dropped,
        tests=sum(tests) if tests else None,
        test_reasons=_by_reason(log, IN_TESTS),
    )


def _by_reason(log: RunLog, pattern: re.Pattern[str]) -> dict[str, int]:
    return {found[1]: _total(log, name) or 0 for name in sorted(log.names()) if (found := pattern.match(name))}


def _total(log: RunLog, name: str) -> int | None:
    _, values = log.columns.get(name, ([], []))
    return round(math.fsum(values)) if values else None


def _risen(log: RunLog, name: str) -> int:
    """The total of a count that goes on from step to step, and from 0 after a resume."""
    _, values = log.series(name)
    rises = (value - last if value >= last else value for last, value in pairwise([0.0, *values]))
    return round(math.fsum(rises))
