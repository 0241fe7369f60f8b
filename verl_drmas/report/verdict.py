"""Decides whether a solver and verifier learned, from the log of their run."""

import math
from dataclasses import dataclass

from verl_drmas.report.runlog import RunLog, mean


@dataclass(frozen=True)
class Criterion:
    """What counts as learning.

    Attributes:
        min_gain: least rise, last fifth minus first fifth, of every metric in `rising`.
        min_class_accuracy: the last fifth of every metric in `classes` must exceed this. A verifier that always says
            the same word has 1 in one class and 0 in the other, so a rising reward alone proves nothing.
    """

    min_gain: float = 0.10
    min_class_accuracy: float = 0.5
    rising: tuple[str, ...] = ("drmas/workflow/solver_success", "drmas/workflow/verifier_balanced_accuracy")
    classes: tuple[str, ...] = ("drmas/workflow/verifier_accuracy_right", "drmas/workflow/verifier_accuracy_wrong")


def learned(log: RunLog, criterion: Criterion | None = None) -> tuple[bool, dict[str, dict[str, float | bool | None]]]:
    """Tests a run against a criterion.

    Args:
        log: the run.
        criterion: the CPU job's by default.

    Returns:
        Whether every test passed, and for each metric what was measured (``gain`` with ``first`` and ``last``, or
        ``last``), what was ``required`` and whether it ``passed``. A metric that was not logged fails with None.
    """
    criterion = criterion or Criterion()
    first, last = log.fifths()
    tests: dict[str, dict[str, float | bool | None]] = {}
    for name in criterion.rising:
        start, end = mean(first, name), mean(last, name)
        gain = None if start is None or end is None else end - start
        # A gain of exactly the bound must not fail by the last digit of a sum of floats.
        passed = gain is not None and (
            gain >= criterion.min_gain or math.isclose(gain, criterion.min_gain, rel_tol=1e-9)
        )
        tests[name] = {"first": start, "last": end, "gain": gain, "required": criterion.min_gain, "passed": passed}
    for name in criterion.classes:
        end = mean(last, name)
        passed = end is not None and end > criterion.min_class_accuracy
        tests[name] = {"last": end, "required": criterion.min_class_accuracy, "passed": passed}
    return all(test["passed"] for test in tests.values()), tests
