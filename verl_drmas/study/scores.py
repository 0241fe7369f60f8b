"""Scores of single agents on verl's own trainer, in the form of verl's `reward.custom_reward_function`.

Each returns `score` (the outcome less the penalty of an invalid action, as a team's rows have it), `acc` (the outcome,
which verl's validation and group filter read) and `valid`.
"""

from __future__ import annotations

from typing import Any

from verl_drmas.rewards.delegation import MainWeights, main_reward
from verl_drmas.rewards.math import math_score_async
from verl_drmas.rewards.qa import exact_match
from verl_drmas.workflows.base import Action
from verl_drmas.workflows.delegate_settings import MAIN
from verl_drmas.workflows.tools import hermes_calls
from verl_drmas.workflows.turns import read_turn


async def solver_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, invalid_penalty: float = 0.0
) -> dict[str, float]:
    """A solution of `SolverPrompts`; one without a boxed answer is invalid.

    Args:
        data_source: Not looked at.
        solution_str: What was said.
        ground_truth: The gold.
        extra_info: Not looked at.
        invalid_penalty: Taken off the score of an invalid solution.

    Raises:
        ValueError: There is no gold.
    """
    found = await math_score_async(solution_str, "" if ground_truth is None else str(ground_truth))
    return _scored(found.score, found.answer is not None, invalid_penalty)


def searcher_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, invalid_penalty: float = 0.0
) -> dict[str, float]:
    """A session of `SearcherPrompts`: exact match of its last turn's result; one without a result is invalid.

    Args:
        data_source: Not looked at.
        solution_str: All turns with what the tool answered, in the chat template of Hermes and Qwen.
        ground_truth: The golds.
        extra_info: Not looked at.
        invalid_penalty: Taken off the score of an invalid session.

    Raises:
        ValueError: There is no gold.
    """
    result = _result(solution_str)
    return _scored(exact_match(result or "", ground_truth), result is not None, invalid_penalty)


def main_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    format_weight: float = 0.1,
    correct_weight: float = 0.9,
) -> dict[str, float]:
    """A session of `SearcherPrompts`, rewarded as `delegate` rewards its main agent (M-GRPO, section 3.2).

    Args:
        data_source: Not looked at.
        solution_str: As in `searcher_score`.
        ground_truth: The golds.
        extra_info: Not looked at.
        format_weight: Earned by a last turn with a result and nothing else; without one, all is 0.
        correct_weight: Times exact match.

    Raises:
        ValueError: There is no gold, or a weight is below 0.
    """
    result = _result(solution_str)
    em = 0.0 if result is None else exact_match(result, ground_truth)
    score, _ = main_reward(result is not None, em, MainWeights(format_weight, correct_weight))
    return {"score": score, "acc": em, "valid": float(result is not None)}


def _result(solution_str: str) -> str | None:
    """What the last turn of a session gives as its result."""
    said = solution_str.rpartition("</tool_response>")[2]
    return read_turn(Action(agent_id=MAIN, text=said, spoken=hermes_calls(said))).result


def _scored(outcome: float, valid: bool, penalty: float) -> dict[str, float]:
    return {"score": outcome - penalty * (not valid), "acc": outcome, "valid": float(valid)}
