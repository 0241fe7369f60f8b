"""Math prompts for training and testing: the paper's sets by name, files, and Hugging Face data sets.

Names, sources and sizes follow Dr. MAS (arXiv 2602.08847), math experiments.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_drmas.data.hub import (
    Loaded,
    MissingCell,
    arrange,
    find_key,
    is_file,
    load_hub,
    missing_cell_error,
    question_text,
    refuse_unknown,
)
from verl_drmas.data.parquet import prompt_row, read_rows
from verl_drmas.rewards.math import MAX_ANSWER_CHARS, extract_boxed


@dataclass(frozen=True)
class Source:
    """A set known by name.

    Attributes:
        hub: Hugging Face data set id.
        split: its split there.
        question_key: column of the question.
        answer_key: column of the gold answer.
        size: rows it should have; None where the paper gives none.
        use: split written into the rows.
    """

    hub: str
    split: str
    question_key: str
    answer_key: str
    size: int | None
    use: str = "test"


SOURCES = {
    "dapo_filter": Source("aaabiao/dapo_filter", "train", "prompt", "reward_model", None, use="train"),
    "aime24": Source("HuggingFaceH4/aime_2024", "train", "problem", "answer", 30),
    "aime25": Source("MathArena/aime_2025", "train", "problem", "answer", 30),
    "amc23": Source("knoveleng/AMC-23", "train", "problem", "answer", 40),
    "math500": Source("HuggingFaceH4/MATH-500", "test", "problem", "answer", 500),
    "minerva": Source("zwhe99/simplerl-minerva-math", "test", "problem", "answer", 272),
    "olympiad": Source("realtreetune/olympiadbench", "test", "problem", "answer", 675),
}

# The paper's three files: (set, how many of its first rows).
FILES: dict[str, tuple[tuple[str, int | None], ...]] = {
    "paper-train": (("dapo_filter", None),),
    "paper-test": tuple((name, None) for name in ("aime24", "aime25", "amc23", "math500", "minerva", "olympiad")),
    "paper-test-sampled": (("math500", 50), ("aime24", None), ("aime25", None)),
}

QUESTION_KEYS = ("question", "problem", "prompt", "query", "input")
ANSWER_KEYS = ("answer", "final_answer", "gold", "ground_truth", "expected_answer", "reward_model", "solution")

# "Let's think step by step and output the final answer within \boxed{}." and its kin, closing a question: the agents'
# own prompts say how to answer.
_INSTRUCTION = re.compile(
    r"(?:\s|\\n)*(?:let[’']?s\s+think|(?:please\s+)?(?:think|reason))\s+step[\s-]+by[\s-]+step\b[^.]*\\boxed\s*\{\s*\}"
    r"[^\w.]*\.?\s*$",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def load_prompts(
    sources: Sequence[str],
    *,
    question_key: str | None = None,
    answer_key: str | None = None,
    split: str | None = None,
    data_source: str | None = None,
    drop_missing: bool = False,
    shuffle_seed: int | None = None,
    limit: int | None = None,
) -> Loaded:
    """Prompts of all sources, one after the other, in verl's RLHF format.

    Args:
        sources: each a name of `SOURCES` or `FILES`, a .json/.jsonl/.parquet file, or a Hugging Face data set id.
        question_key: column of the question; None looks for one of `QUESTION_KEYS`.
        answer_key: column of the gold answer; None looks for one of `ANSWER_KEYS`.
        split: split to read from the hub, and the split written into the rows; None means `train`. Sets known by name
            have their own.
        data_source: name validation scores are reported under; None means the set's name or the file's stem.
        drop_missing: leave out rows without question or gold (counted in the notes) instead of refusing them.
        shuffle_seed: None keeps the order.
        limit: keep the first rows of the (shuffled) whole.

    Raises:
        ValueError: one line that names source, row (counted from 0), key and fix.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for source in sources:
        for part in _parts(source):
            asked = {"question_key": question_key, "answer_key": answer_key, "split": split}
            part_rows, part_notes = _load(part, data_source=data_source, drop_missing=drop_missing, **asked)
            rows += part_rows
            notes += part_notes
    return Loaded(arrange(rows, shuffle_seed=shuffle_seed, limit=limit), notes)


class _Part(NamedTuple):
    source: str
    first: int | None = None


def _parts(source: str) -> list[_Part]:
    if source in FILES:
        return [_Part(name, first) for name, first in FILES[source]]
    refuse_unknown(source, [*FILES, *SOURCES])
    return [_Part(source)]


def _load(
    part: _Part,
    *,
    question_key: str | None,
    answer_key: str | None,
    split: str | None,
    data_source: str | None,
    drop_missing: bool,
) -> Loaded:
    known = SOURCES.get(part.source)
    if known:
        raw = load_hub(known.hub, known.split)
        question_key, answer_key, split = question_key or known.question_key, answer_key or known.answer_key, known.use
        name = part.source
    elif is_file(part.source):
        raw = read_rows(part.source)
        name = Path(part.source).stem
    else:
        raw = load_hub(part.source, split or "train")
        name = part.source
    loaded = convert_rows(
        raw[: part.first],
        file=part.source,
        data_source=data_source or name,
        split=split or "train",
        question_key=question_key,
        answer_key=answer_key,
        drop_missing=drop_missing,
    )
    if known and known.size not in (None, len(raw)):
        loaded.notes.append(f"{part.source}: {known.hub} has {len(raw)} rows, expected were {known.size}")
    return loaded


def convert_rows(
    raw: Iterable[dict[str, Any]],
    *,
    file: str,
    data_source: str,
    split: str,
    question_key: str | None = None,
    answer_key: str | None = None,
    drop_missing: bool = False,
) -> Loaded:
    """Rows as they were published, in verl's RLHF format, indexed from 0. See `load_prompts` for the arguments.

    A gold follows `####` (GSM8K) or stands in the last box of a worked solution; a whole float loses its `.0`; of a
    list of equivalent forms (Minerva) the first is taken, and the notes say how often.
    """
    raw = list(raw)
    if not raw:
        raise ValueError(f"{file}: no rows")
    question_key = find_key(raw, question_key, QUESTION_KEYS, file, "question")
    answer_key = find_key(raw, answer_key, ANSWER_KEYS, file, "answer")
    rows, dropped, several = [], 0, 0
    for number, row in enumerate(raw):
        try:
            question = _question(row.get(question_key), f"{file}: row {number}: {question_key}")
            gold, forms = _gold(row.get(answer_key), f"{file}: row {number}: {answer_key}")
        except MissingCell as missing:
            if not drop_missing:
                raise missing_cell_error(missing) from None
            dropped += 1
            continue
        several += forms > 1
        rows.append(prompt_row(question, gold, data_source=data_source, split=split, index=len(rows)))
    if not rows:
        raise ValueError(f"{file}: none of {len(raw)} rows has both {question_key} and {answer_key}")
    notes = [f"{file}: dropped {dropped} of {len(raw)} rows without question or gold"] if dropped else []
    if several:
        notes.append(f"{file}: {several} rows list several forms of the gold; the first is used")
    return Loaded(rows, notes)


def _question(value: Any, where: str) -> str:
    question = _INSTRUCTION.sub("", question_text(value, where)).strip()
    if not question:
        raise MissingCell(where)
    return question


def _gold(value: Any, where: str) -> tuple[str, int]:
    """The gold answer, and how many forms of it the row lists."""
    if isinstance(value, dict):  # reward_model, as in verl's own files
        value, where = value.get("ground_truth"), f"{where}.ground_truth"
    forms = 1
    if isinstance(value, list):
        forms = len(value)
        value = value[0] if value else None
    if isinstance(value, float):
        value = str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where} is {type(value).__name__}: a gold answer is text or a number")
    gold = (value or "").strip()
    if "####" in gold:
        gold = gold.rpartition("####")[2].strip()
        if _THOUSANDS.fullmatch(gold):
            gold = gold.replace(",", "")
    elif "\\boxed" in gold or "\\fbox" in gold:
        gold = extract_boxed(gold) or ""
    if not gold:
        raise MissingCell(where)
    if len(gold) > MAX_ANSWER_CHARS:
        raise ValueError(
            f"{where} has {len(gold)} characters: a worked solution? name the gold's column (--answer-key)"
        )
    return gold, forms
