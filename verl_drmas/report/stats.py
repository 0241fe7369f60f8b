"""Numbers over runs: mean and standard error, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NOT_RUN = "not run"
NOT_LOGGED = "not logged"


@dataclass(frozen=True)
class Estimate:
    """A mean over runs.

    Attributes:
        mean: of the runs' values.
        error: its standard error, s / sqrt(n) with s unbiased; None: one run has none.
        n: runs.
    """

    mean: float
    error: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """Returns the estimate, or None of no values (never 0)."""
        n = len(values)
        if not n:
            return None
        mean = math.fsum(values) / n
        if n == 1:
            return cls(mean, None, 1)
        variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
        return cls(mean, math.sqrt(variance / n), n)

    def shown(self, digits: int = 1, *, scale: float = 1.0) -> str:
        """Returns such as `38.8 ± 0.4 (n = 3)`."""
        text = f"{self.mean * scale:,.{digits}f}"
        if self.error is not None:
            text += f" ± {self.error * scale:,.{digits}f}"
        return f"{text} (n = {self.n})"


def whole(value: float | None, missing: str = NOT_LOGGED) -> str:
    """Returns a count with its thousands apart, or `missing`."""
    return missing if value is None else f"{value:,.0f}"


def number(value: float | None, digits: int = 2, missing: str = NOT_LOGGED) -> str:
    """Returns a number with its thousands apart, or `missing`."""
    return missing if value is None else f"{value:,.{digits}f}"


def steps_shown(steps: Sequence[int], most: int = 8) -> str:
    """Returns steps as ranges: `1–4, 7, 9–12`; after `most` ranges, how many steps more."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in ranges[:most]]
    left = sum(b - a + 1 for a, b in ranges[most:])
    return ", ".join(shown) + (f" and {left} more" if left else "")
