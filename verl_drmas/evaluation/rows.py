"""The rows that a team is evaluated on: verl's files, and plain ones of questions and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_drmas.data import math, search
from verl_drmas.data.hub import Loaded, find_key
from verl_drmas.data.parquet import check_indices, check_prompts, read_rows
from verl_drmas.evaluation.journal import digest

Kind = Literal["auto", "math", "search"]


@dataclass(frozen=True)
class Rows:
    """The rows of all files, one after the other.

    Attributes:
        rows: In verl's RLHF format.
        files: A short name of each file's content, by its name.
        notes: What a reader should be told.
    """

    rows: list[dict[str, Any]]
    files: dict[str, str]
    notes: list[str]

    @property
    def sources(self) -> list[str]:
        """The data source of each row."""
        return [str(row.get("data_source", "unknown")) for row in self.rows]

    def measured(self) -> dict[str, Any]:
        """What a file's header says of the data: a row's number counts over all files, so that their order matters."""
        return {"data": self.files, "order of data": [*self.files]}


def read_files(
    paths: Sequence[Path],
    *,
    needs_answer: bool = True,
    kind: Kind = "auto",
    question_key: str | None = None,
    answer_key: str | None = None,
) -> Rows:
    """Read parquet, JSON or JSONL files.

    Args:
        paths: Files in verl's RLHF format, as `verl-drmas data` writes them, or with a question and an answer a row.
        needs_answer: Whether every row needs a gold.
        kind: How plain rows are read: `math`, one gold, as it follows `####` or stands in the last box; `search`,
            several golds; `auto`: by whether an answer is a list or struct.
        question_key: Column of the question in plain rows.
        answer_key: Column of the answer in plain rows.

    Raises:
        ValueError: One line that names file, row (counted from 0), key and fix.
    """
    rows: list[dict[str, Any]] = []
    files: dict[str, str] = {}
    notes: list[str] = []
    for path in paths:
        if path.name in files:
            raise ValueError(f"{path}: a file of that name is given before; rename one of them")
        raw = read_rows(path)
        if isinstance(raw[0].get("prompt"), list):
            check_prompts(path, needs_answer=needs_answer)
            check_indices([path])
            mine = raw
        else:
            mine, told = _converted(raw, path, kind, question_key, answer_key)
            notes += told
        files[path.name] = digest(mine)
        rows += mine
    return Rows(rows, files, notes)


def _converted(
    raw: list[dict[str, Any]], path: Path, kind: Kind, question_key: str | None, answer_key: str | None
) -> Loaded:
    if kind == "auto":
        usual = (*search.ANSWER_KEYS, *math.ANSWER_KEYS)
        key = find_key(raw, answer_key, usual, str(path), "answer")
        kind = "search" if any(isinstance(row.get(key), list | dict) for row in raw) else "math"
    keys = {"question_key": question_key, "answer_key": answer_key}
    if kind == "math":
        return math.convert_rows(raw, file=str(path), data_source=path.stem, split="test", **keys)
    return search.convert_rows(raw, file=str(path), name=path.stem, split="test", **keys)
