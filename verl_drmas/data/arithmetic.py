"""Small additions for the CPU job: a task a model of a million parameters learns within minutes."""

import itertools
import random
from typing import Any

from verl_drmas.data.parquet import prompt_row


def arithmetic_rows(
    *, max_operand: int = 9, held_out: int = 16, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All additions a + b with 0 <= a, b <= max_operand, split by problem into training and held-out prompts.

    `3+4` and `4+3` are two problems, so one may be held out while the other is trained on.

    Args:
        max_operand: largest operand; (max_operand + 1)² problems.
        held_out: number of problems kept for the test file.
        seed: fixes the split and the order.

    Returns:
        Training and held-out rows in verl's RLHF format: question `3+4`, gold `7`, data source `arithmetic`, and an
        index that is unique over both.

    Raises:
        ValueError: the split would leave one side empty.
    """
    problems = list(itertools.product(range(max(max_operand, 0) + 1), repeat=2))
    if max_operand < 1 or not 0 < held_out < len(problems):
        raise ValueError(
            f"max_operand {max_operand} gives {len(problems)} problems and held_out is {held_out}: "
            "max_operand must be at least 1 and held_out leave both sides at least one problem"
        )
    random.Random(seed).shuffle(problems)
    rows = [
        prompt_row(f"{a}+{b}", str(a + b), data_source="arithmetic", split=split, index=index)
        for index, (a, b) in enumerate(problems)
        for split in ["test" if index < held_out else "train"]
    ]
    return rows[held_out:], rows[:held_out]
