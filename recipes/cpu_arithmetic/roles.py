"""What the two agents of the arithmetic team read and say, as text and as token tables for supervised training.

The solver reads ``S:3+4=`` and should say ``7``; the verifier reads ``V:3+4=8?`` and should say ``y`` or ``n``. A wrong
proposal is a near miss, so that telling it from the truth takes the sum and not a glance at its size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

NEAR_MISSES = (-10, -2, -1, 1, 2, 10)
RIGHT, WRONG = "y", "n"


@dataclass(frozen=True)
class Problem:
    """One addition: its question as in the data, such as ``3+4``, and the sum."""

    question: str
    truth: int

    def near_misses(self) -> list[int]:
        """Returns the wrong proposals of this problem, none negative, none equal to the truth."""
        return [self.truth + miss for miss in NEAR_MISSES if self.truth + miss >= 0]


def problems(rows: Iterable[dict]) -> list[Problem]:
    """Returns the problems of rows in verl's data format, in their order."""
    return [Problem(row["prompt"][-1]["content"], int(row["reward_model"]["ground_truth"])) for row in rows]


def solver_prompt(question: str) -> str:
    """Returns what the solver reads, such as ``S:3+4=``."""
    return f"S:{question}="


def verifier_prompt(question: str, proposal: str) -> str:
    """Returns what the verifier reads, such as ``V:3+4=8?``."""
    return f"V:{question}={proposal}?"


@dataclass(frozen=True)
class Table:
    """Prompt and answer pairs as tokens, padded on the right.

    Attributes:
        ids: int64 (rows, length), prompt, answer, end of sequence, padding.
        answer: bool (rows, length), true on the answer and its end of sequence.
    """

    ids: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor) -> "Table":
        """Returns the rows of these numbers."""
        return Table(self.ids[rows], self.answer[rows])


def stack(tables: Sequence[Table]) -> Table:
    """Returns the rows of several tables of the same length as one."""
    return Table(torch.cat([t.ids for t in tables]), torch.cat([t.answer for t in tables]))


def tokenise(pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, length: int) -> Table:
    """Returns (prompt, answer) pairs as a table whose rows hold `length` tokens.

    Raises:
        ValueError: a pair with its end of sequence is longer than that.
    """
    ids = torch.full((len(pairs), length), tokenizer.pad_token_id)
    answer = torch.zeros((len(pairs), length), dtype=torch.bool)
    for row, (prompt, text) in enumerate(pairs):
        start = tokenizer(prompt)["input_ids"]
        tokens = [*start, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        if len(tokens) > length:
            raise ValueError(f"{prompt!r} and {text!r} are {len(tokens)} tokens long; the table's rows hold {length}")
        ids[row, : len(tokens)] = torch.tensor(tokens)
        answer[row, len(start) : len(tokens)] = True
    return Table(ids, answer)


@dataclass(frozen=True)
class Lessons:
    """Supervised pairs for a set of problems, truthful ones and their opposites, row by row for the same prompts.

    Attributes:
        problems: each problem's sum, once; to measure the solver by.
        solver: each problem's sum, and a near miss, once for each near miss.
        right: right proposals, accepted and rejected.
        wrong: near misses, rejected and accepted.
    """

    problems: Table
    solver: tuple[Table, Table]
    right: tuple[Table, Table]
    wrong: tuple[Table, Table]

    @classmethod
    def of(cls, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> "Lessons":
        """Returns the lessons for these problems."""
        misses = [(problem, miss) for problem in problems for miss in problem.near_misses()]
        solver = [(solver_prompt(p.question), str(p.truth), str(miss)) for p, miss in misses]
        right = [(verifier_prompt(p.question, str(p.truth)), RIGHT, WRONG) for p in problems]
        wrong = [(verifier_prompt(p.question, str(miss)), WRONG, RIGHT) for p, miss in misses]
        longest = max(len(prompt) + len(true) for prompt, true, _ in solver + right + wrong) + 2

        def both(rows: list[tuple[str, str, str]]) -> tuple[Table, Table]:
            truthful = [(prompt, true) for prompt, true, _ in rows]
            opposite = [(prompt, false) for prompt, _, false in rows]
            return tokenise(truthful, tokenizer, longest), tokenise(opposite, tokenizer, longest)

        asked = tokenise([(solver_prompt(p.question), str(p.truth)) for p in problems], tokenizer, longest)
        return cls(asked, both(solver), both(right), both(wrong))
