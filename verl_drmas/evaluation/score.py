"""avg@k and pass@k of a team, with standard errors, per data source and on average over them (Dr. MAS, section 5)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum, isclose, sqrt
from statistics import fmean, stdev

# Successes of the sessions that ended, by run and by prompt.
Successes = Sequence[Mapping[Hashable, Sequence[float]]]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of k sessions drawn without replacement from n is right: 1 - C(n-c, k) / C(n, k),
    unbiased for pass@k (arXiv 2107.03374, section 2.1).

    Whole numbers up to one division at the end, so that nothing is lost where the chance is very small.

    Args:
        n: Sessions of the prompt.
        correct: How many of them were right.
        k: Sessions drawn, at most n.

    Raises:
        ValueError: k is larger than n, or correct isn't in 0..n.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}")
    draws = comb(n, k)
    return (draws - comb(n - correct, k)) / draws


def usual_ks(n: int) -> list[int]:
    """The k that are reported where nobody asks: powers of two from 2 up to n, and n; pass@1 is avg@n where sessions
    are right or wrong.
    """
    return sorted({*(2**i for i in range(1, n.bit_length()) if 2**i <= n), *([n] if n > 1 else [])})


@dataclass(frozen=True)
class Score:
    """A mean over prompts.

    Attributes:
        value: In 0..1.
        error: Its standard error over prompts; None: there is one prompt, or (of an average) a part has none.
        prompts: Prompts in it.
        runs: The same of each run alone; None where a run has none.
        runs_error: Standard error of the mean over runs; None: there is one run.
    """

    value: float
    error: float | None
    prompts: int
    runs: tuple[float | None, ...]
    runs_error: float | None


def score_source(runs: Successes, samples: int, ks: Sequence[int]) -> dict[str, Score]:
    """`avg@<samples>` and `pass@<k>` of one data source; a name without any value is left out.

    A session that failed is neither right nor wrong: a prompt's average is over those that ended, and one with fewer
    than k is left out of pass@k. With several runs a prompt's value is its mean over them.

    Args:
        runs: Successes: 1 right, 0 wrong; a fraction enters the average as it is, and pass@k if it is 1.
        samples: Sessions a prompt and run.
        ks: Each at most `samples`.
    """
    averages = [{prompt: fmean(found) for prompt, found in run.items() if found} for run in runs]
    scores = {f"avg@{samples}": _score(averages)}
    for k in ks:
        drawn = [
            {
                prompt: pass_at_k(len(found), sum(isclose(success, 1.0) for success in found), k)
                for prompt, found in run.items()
                if len(found) >= k
            }
            for run in runs
        ]
        scores[f"pass@{k}"] = _score(drawn)
    return {name: score for name, score in scores.items() if score is not None}


def macro_average(sources: Sequence[Mapping[str, Score]]) -> dict[str, Score]:
    """The plain mean over data sources, as in the papers' tables; a name that one of them lacks is left out."""
    names = [name for name in (sources[0] if sources else {}) if all(name in source for source in sources)]
    return {name: _average([source[name] for source in sources]) for name in names}


def _score(runs: Sequence[Mapping[Hashable, float]]) -> Score | None:
    by_prompt: dict[Hashable, list[float]] = {}
    for run in runs:
        for prompt, value in run.items():
            by_prompt.setdefault(prompt, []).append(value)
    values = [fmean(found) for found in by_prompt.values()]
    if not values:
        return None
    each = tuple(fmean(run.values()) if run else None for run in runs)
    return Score(
        fmean(values), _error(values), len(values), each, _error([value for value in each if value is not None])
    )


def _average(scores: Sequence[Score]) -> Score:
    errors = [score.error for score in scores]
    each = tuple(None if None in run else fmean(run) for run in zip(*(score.runs for score in scores), strict=True))
    return Score(
        fmean(score.value for score in scores),
        None if None in errors else sqrt(fsum(error**2 for error in errors)) / len(errors),
        sum(score.prompts for score in scores),
        each,
        _error([value for value in each if value is not None]),
    )


def _error(values: Sequence[float]) -> float | None:
    """Standard error of a mean; None: one value tells nothing of it."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None
