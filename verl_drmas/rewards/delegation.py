"""Rewards of a main agent and its sub-agents (M-GRPO): a broken format earns 0, all else is a weighted sum.

What the paper leaves open is decided here: the subs of a session whose main agent broke its format earn nothing for
the outcome (`outcome_for_subs`), and where there is no judgement its term is dropped and the others are scaled up, so
that an outage of the judge is no judgement of the work (`sub_reward`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass
class MainWeights:
    """Weights of the main agent's reward.

    Attributes:
        format: Earned by a proper form.
        correct: Times the correctness of the final answer.
    """

    format: float = 0.1
    correct: float = 0.9

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        _check(self)
        if not self.format + self.correct > 0:
            raise ValueError("format and correct are both 0; set one of them above 0, else nothing can be earned")


@dataclass
class SubWeights:
    """Weights of a sub-agent's reward.

    Attributes:
        format: Earned by a proper form.
        outcome: Times the correctness of the main agent's final answer.
        judge: Times the judgement of how well the subtask was carried out; dropped where there is none.
    """

    format: float = 0.1
    outcome: float = 0.4
    judge: float = 0.5

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        _check(self)
        if not self.format + self.outcome > 0:
            raise ValueError(
                "format and outcome are both 0; set one of them above 0, else a failed judge leaves nothing to go by"
            )


def main_reward(format_ok: bool, correct: float, weights: MainWeights) -> tuple[float, dict[str, float]]:
    """The main agent's reward.

    Args:
        format_ok: Whether its trajectory has the proper form; 0 is earned otherwise.
        correct: How right its final answer is, in 0..1.
        weights: What format and correctness count.

    Returns:
        The total, at most the sum of the weights, and its weighted parts `format` and `correct`.

    Raises:
        ValueError: `correct` is not in 0..1.
    """
    _check_share("correct", correct)
    parts = {"format": float(weights.format), "correct": weights.correct * correct}
    return _total(parts, format_ok)


def outcome_for_subs(format_ok: bool, correct: float) -> float:
    """The correctness that a session's sub-agents share in: main's own, and 0 where main's format is broken.

    A broken final answer is an answer that nobody can use, whatever it says. Main's format part isn't shared.

    Args:
        format_ok: Whether main's trajectory has the proper form.
        correct: How right its final answer is, in 0..1.
    """
    _check_share("correct", correct)
    return float(correct) if format_ok else 0.0


def sub_reward(
    format_ok: bool, main_correct: float, judged: float | None, weights: SubWeights
) -> tuple[float, dict[str, float]]:
    """The reward of one trajectory of a sub-agent.

    Args:
        format_ok: Whether this trajectory itself has the proper form; 0 is earned otherwise.
        main_correct: What `outcome_for_subs` says, in 0..1; the same for all trajectories of a session.
        judged: How well the subtask was carried out, in 0..1. None if nothing judged it or the judge failed: then the
            judge's weight goes to the others in proportion, and the most that can be earned stays the same.
        weights: What format, outcome and judgement count.

    Returns:
        The total, at most the sum of the weights, and its weighted parts `format`, `outcome` and, only where there is
        a judgement, `judge`: a mean over rows then is one over judged rows.

    Raises:
        ValueError: `main_correct` or `judged` is not in 0..1.
    """
    _check_share("main_correct", main_correct)
    parts = {"format": float(weights.format), "outcome": weights.outcome * main_correct}
    if judged is None:
        known = weights.format + weights.outcome
        scale = (known + weights.judge) / known
        parts = {name: part * scale for name, part in parts.items()}
    else:
        _check_share("judged", judged)
        parts["judge"] = weights.judge * judged
    return _total(parts, format_ok)


def _total(parts: dict[str, float], format_ok: bool) -> tuple[float, dict[str, float]]:
    if not format_ok:
        return 0.0, dict.fromkeys(parts, 0.0)
    return sum(parts.values()), parts


def _check(weights: MainWeights | SubWeights) -> None:
    for name in (field.name for field in fields(weights)):
        value = getattr(weights, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; a weight is a number of at least 0")


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must be in 0..1")
