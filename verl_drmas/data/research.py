"""Questions of the benchmarks that research agents are measured on, from the files that their makers publish.

GAIA (arXiv 2311.12983), XBench-DeepSearch (arXiv 2506.13651) and WebWalkerQA (arXiv 2501.07572) are those of M-GRPO
(arXiv 2511.13288, section 5). None is downloaded here: GAIA's terms forbid passing it on, and XBench is encrypted so
that no crawler reads it. What is written from either belongs on no public disk.
"""

from __future__ import annotations

import base64
import binascii
import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_drmas.data.hub import Loaded, MissingCell, arrange, missing_cell_error, question_text
from verl_drmas.data.parquet import read_rows
from verl_drmas.data.search import question_row
from verl_drmas.rewards.qa import gold_text

SIZES = {"gaia": 165, "xbench_deepsearch": 100, "webwalkerqa": 680}  # of the published sets; GAIA's validation split
GAIA_LEVELS = ("1", "2", "3")
WITHHELD = "?"  # what GAIA's test split has for an answer
# Anything shorter may be a word: base64 of a question is longer, and has no blank in it.
_BASE64 = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}")


def load_gaia(
    file: str,
    *,
    levels: Sequence[str] = (),
    keep_attachments: bool = False,
    drop_missing: bool = False,
    shuffle_seed: int | None = None,
    limit: int | None = None,
) -> Loaded:
    """GAIA's validation split, its `metadata.jsonl` or `metadata.parquet`.

    Args:
        file: With `Question`, `Final answer`, `Level`, and `file_name`, which is empty where a question has no file.
        levels: Those that are kept; none: all.
        keep_attachments: Keep questions that come with a file, which no bundled agent can read, instead of leaving
            them out. Either way they are counted, by level, in the notes.
        drop_missing: Leave out rows without question or answer (counted) instead of refusing them.
        shuffle_seed: None keeps the order.
        limit: Keep the first rows of the (shuffled) whole.

    Returns:
        Rows as `search.SEARCH_SCHEMA` has them, with the level in `extra_info.level`.

    Raises:
        ValueError: One line that names file, row (counted from 0), field and fix.
    """
    for level in levels:
        if level not in GAIA_LEVELS:
            raise ValueError(f"--level is {level!r}; GAIA's levels are {', '.join(GAIA_LEVELS)}")
    raw = read_rows(file)
    _need(raw, ("Question", "Final answer", "Level", "file_name"), file, "GAIA's metadata")
    notes = _size_note(raw, file, "gaia")
    kept: list[tuple[int, dict[str, Any]]] = []
    attached: Counter[str] = Counter()
    for number, row in enumerate(raw):
        level = gold_text(row["Level"]) if isinstance(row["Level"], str | int | float) else ""
        if level not in GAIA_LEVELS:
            raise ValueError(f"{file}: row {number}: Level is {row['Level']!r}; GAIA's are {', '.join(GAIA_LEVELS)}")
        if row["Final answer"] == WITHHELD:
            raise ValueError(
                f"{file}: row {number}: Final answer is {WITHHELD!r}: the answers of the test split aren't published; "
                "give the validation split's file"
            )
        if levels and level not in levels:
            continue
        if row["file_name"]:
            attached[level] += 1
            if not keep_attachments:
                continue
        kept.append((number, {**row, "level": level}))
    if attached:
        each = ", ".join(f"{attached[level]} of level {level}" for level in sorted(attached))
        done = "kept, and count though" if keep_attachments else "left out (--keep-attachments keeps them), because"
        notes.append(
            f"{file}: {attached.total()} questions come with a file ({each}); {done} no agent here reads files"
        )
    return _loaded(
        kept,
        notes,
        file=file,
        name="gaia",
        split="validation",
        question_key="Question",
        answer_key="Final answer",
        about=lambda row, _: {"level": row["level"]},
        drop_missing=drop_missing,
        shuffle_seed=shuffle_seed,
        limit=limit,
    )


def load_xbench(
    file: str, *, drop_missing: bool = False, shuffle_seed: int | None = None, limit: int | None = None
) -> Loaded:
    """XBench-DeepSearch, as published (`DeepSearch-2505.csv` and later ones) or decrypted.

    In the published files `prompt` and `answer` are base64 of the text's UTF-8 bytes, exclusive-ored with the bytes of
    the row's `canary` over and over. A row whose prompt is no base64 is taken as it stands.

    Args:
        file: .csv, .parquet, .json or .jsonl with `prompt` and `answer`.
        drop_missing: Leave out rows without either (counted) instead of refusing them.
        shuffle_seed: None keeps the order.
        limit: Keep the first rows of the (shuffled) whole.

    Raises:
        ValueError: As `load_gaia`.
    """
    raw = _read_csv(file) if Path(file).suffix == ".csv" else read_rows(file)
    _need(raw, ("prompt", "answer"), file, "XBench-DeepSearch")
    notes = _size_note(raw, file, "xbench_deepsearch")
    if not any(row.keys() & {"canary", "reference_steps"} for row in raw):
        notes.append(f"{file}: has neither canary nor reference_steps, which the published file has; is it XBench's?")
    rows = [_decrypted(row, f"{file}: row {number}") for number, row in enumerate(raw)]
    count = sum(encrypted for _, encrypted in rows)
    if 0 < count < len(rows):
        first = next(number for number, (_, encrypted) in enumerate(rows) if not encrypted)
        raise ValueError(
            f"{file}: row {first}: prompt is no base64, and {count} others are encrypted; give a file that is "
            "encrypted or decrypted throughout"
        )
    if count:
        notes.append(f"{file}: decrypted {count} rows; keep what is written from them off public places")
    return _loaded(
        [(number, row) for number, (row, _) in enumerate(rows)],
        notes,
        file=file,
        name="xbench_deepsearch",
        split="test",
        question_key="prompt",
        answer_key="answer",
        drop_missing=drop_missing,
        shuffle_seed=shuffle_seed,
        limit=limit,
    )


def load_webwalker(
    file: str,
    *,
    languages: Sequence[str] = (),
    root_url: bool = False,
    drop_missing: bool = False,
    shuffle_seed: int | None = None,
    limit: int | None = None,
) -> Loaded:
    """WebWalkerQA.

    Args:
        file: .parquet, .json or .jsonl with `question`, `answer`, `root_url`, and `info` (`type`, `difficulty_level`,
            `lang`). Their first letters may be capitals, as on its card.
        languages: Those of `info.lang` that are kept (`en`, `zh`; counted in the notes); none: all.
        root_url: Name the website in the question, as the benchmark's own agents are given it.
        drop_missing: Leave out rows without question or answer (counted) instead of refusing them.
        shuffle_seed: None keeps the order.
        limit: Keep the first rows of the (shuffled) whole.

    Returns:
        Rows as `search.SEARCH_SCHEMA` has them, with `single_source` or `multi_source` in `extra_info.type` and the
        difficulty in `extra_info.level`.

    Raises:
        ValueError: As `load_gaia`.
    """
    raw = [{key.lower(): value for key, value in row.items()} for row in read_rows(file)]
    _need(raw, ("question", "answer", *(("root_url",) if root_url else ())), file, "WebWalkerQA")
    _need_one(raw, ("info", "root_url"), file, "WebWalkerQA")
    notes = _size_note(raw, file, "webwalkerqa")
    kept = []
    for number, row in enumerate(raw):
        info = _info(row.get("info"), f"{file}: row {number}: info")
        language = str(info.get("lang") or info.get("language") or "")
        if not languages or language in languages:
            kept.append((number, {**row, "info": info}))
    if len(kept) < len(raw):
        notes.append(f"{file}: kept {len(kept)} of {len(raw)} rows, those with info.lang in {', '.join(languages)}")

    def about(row: dict[str, Any], where: str) -> dict[str, Any]:
        if root_url and not row["root_url"]:
            raise ValueError(f"{where}: root_url is empty; fill it, or leave out --root-url")
        kind, level = (row["info"].get(key) for key in ("type", "difficulty_level"))
        return {"type": kind and str(kind), "level": level and str(level).lower()}

    def asked(question: str, row: dict[str, Any]) -> str:
        return f"{question}\n\nWebsite to begin with: {row['root_url']}" if root_url else question

    return _loaded(
        kept,
        notes,
        file=file,
        name="webwalkerqa",
        split="test",
        question_key="question",
        answer_key="answer",
        about=about,
        asked=asked,
        drop_missing=drop_missing,
        shuffle_seed=shuffle_seed,
        limit=limit,
    )


def decrypt(text: str, canary: str) -> str:
    """A cell of XBench as it was before it was encrypted.

    Args:
        text: Base64.
        canary: The row's key.

    Raises:
        ValueError: It is no base64, or the key doesn't give UTF-8.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is no base64 ({error})") from error
    try:
        return bytes(a ^ b for a, b in zip(data, itertools.cycle(canary.encode()), strict=False)).decode()
    except UnicodeDecodeError as error:
        raise ValueError("gives no text with the row's canary") from error


def _decrypted(row: dict[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """The row in clear, and whether it was encrypted."""
    prompt, answer = (row.get(key) for key in ("prompt", "answer"))
    if not isinstance(prompt, str) or not _BASE64.fullmatch(prompt.strip()):
        return row, False
    canary = row.get("canary")
    if not isinstance(canary, str) or not canary:
        raise ValueError(f"{where}: prompt is encrypted, and canary is missing; give the published file, or decrypt it")
    clear = {}
    for key, text in {"prompt": prompt, "answer": answer}.items():
        try:
            clear[key] = decrypt(text.strip(), canary) if isinstance(text, str) else text
        except ValueError as error:
            raise ValueError(f"{where}: {key} {error}; take the file as it was published") from None
    return {**row, **clear}, True


def _loaded(
    rows: Iterable[tuple[int, dict[str, Any]]],
    notes: list[str],
    *,
    file: str,
    name: str,
    split: str,
    question_key: str,
    answer_key: str,
    drop_missing: bool,
    shuffle_seed: int | None,
    limit: int | None,
    about: Callable[[dict[str, Any], str], dict[str, Any]] = lambda row, where: {},
    asked: Callable[[str, dict[str, Any]], str] = lambda question, row: question,
) -> Loaded:
    """Numbered rows in verl's RLHF format. An answer is one gold, as it is written."""
    made, dropped, number = [], 0, -1  # -1 stays where nothing was left to look at
    for number, row in rows:
        where = f"{file}: row {number}"
        try:
            question = question_text(row.get(question_key), f"{where}: {question_key}")
            gold = gold_text(row.get(answer_key))
            if not gold:
                raise MissingCell(f"{where}: {answer_key}")
        except MissingCell as missing:
            if not drop_missing:
                raise missing_cell_error(missing) from None
            dropped += 1
            continue
        except TypeError as error:
            raise ValueError(f"{where}: {answer_key}: {error}") from None
        made.append(
            question_row(
                asked(question, row), [gold], data_source=name, split=split, index=len(made), **about(row, where)
            )
        )
    if not made:
        why = f"none has both {question_key} and {answer_key}" if number >= 0 else "none is what was asked for"
        raise ValueError(f"{file}: no rows are left: {why}")
    if dropped:
        notes = [*notes, f"{file}: dropped {dropped} rows without question or answer"]
    return Loaded(arrange(made, shuffle_seed=shuffle_seed, limit=limit), notes)


def _need(raw: Sequence[dict[str, Any]], fields: Sequence[str], file: str, what: str) -> None:
    for number, row in enumerate(raw):
        for field in fields:
            if field not in row:
                raise ValueError(
                    f"{file}: row {number}: no field {field!r}, which {what} has (fields: {', '.join(row)}); "
                    "is it another file?"
                )


def _need_one(raw: Sequence[dict[str, Any]], fields: Sequence[str], file: str, what: str) -> None:
    """Question and answer alone are any data set's; a row of a benchmark has one of these fields beside them."""
    for number, row in enumerate(raw):
        if not row.keys() & {*fields}:
            raise ValueError(
                f"{file}: row {number}: neither {' nor '.join(map(repr, fields))}, one of which {what} has (fields: "
                f"{', '.join(row)}); is it another file?"
            )


def _size_note(raw: Sequence[Any], file: str, name: str) -> list[str]:
    return [] if len(raw) == SIZES[name] else [f"{file}: has {len(raw)} rows, the published set {SIZES[name]}"]


def _info(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is text and no JSON ({error.msg}); give an object") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}, not an object with type, difficulty_level and lang")
    return {key.lower(): inner for key, inner in value.items()}


def _read_csv(file: str) -> list[dict[str, Any]]:
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"{path}: no such file; correct the path")
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.DictReader(lines, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as CSV in UTF-8 ({error})") from error
    if not rows:
        raise ValueError(f"{path}: no rows; write at least one prompt into it")
    for number, row in enumerate(rows):
        if None in row or None in row.values():
            raise ValueError(f"{path}: row {number} has not as many cells as the first line names columns")
    return rows
