"""Rows as others published them: in a file or on Hugging Face, under column names of their own."""

import difflib
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE_KINDS = (".json", ".jsonl", ".parquet")


class Loaded(NamedTuple):
    """Prompts, and what a reader should be told about them (rows dropped, sizes that differ, several golds)."""

    rows: list[dict[str, Any]]
    notes: list[str]


class MissingCell(Exception):
    """A cell without content; its text says where."""


def is_file(source: str) -> bool:
    """Whether a source's name is that of a file."""
    return Path(source).suffix in FILE_KINDS


def refuse_unknown(source: str, known: Collection[str]) -> None:
    """Refuse a source that is neither a known set nor a file nor a Hugging Face id.

    Raises:
        ValueError: one line that names the nearest known set.
    """
    if source in known or is_file(source) or "/" in source:
        return
    near = difflib.get_close_matches(source, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known sets: {', '.join(known)}"
    raise ValueError(f"{source}: neither a known set nor a file nor a Hugging Face id; {hint}")


def load_hub(hub: str, split: str, *, leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """All rows of one split of a Hugging Face data set.

    Args:
        hub: its id.
        split: name of the split.
        leave_out: columns that are not read, where the data set has them.

    Raises:
        ValueError: it can't be loaded; one line that names the cause.
    """
    import datasets

    try:
        loaded = datasets.load_dataset(hub, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _not_loaded(hub, f"split {split!r}", error) from error
    return loaded.remove_columns([name for name in loaded.column_names if name in leave_out]).to_list()


def fetch_hub_file(hub: str, name: str) -> str:
    """Path of one file of a Hugging Face data set, downloaded where the cache doesn't have it.

    Raises:
        ValueError: it can't be downloaded; one line that names the cause.
    """
    import huggingface_hub

    try:
        return huggingface_hub.hf_hub_download(hub, name, repo_type="dataset")
    except (OSError, ValueError) as error:
        raise _not_loaded(hub, name, error) from error


def _not_loaded(hub: str, part: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(
        f"{hub}: can't load {part} from Hugging Face ({type(error).__name__}: {reason}); "
        "check id and network, or download it elsewhere and give the file"
    )


def find_key(raw: Sequence[dict[str, Any]], asked: str | None, usual: Sequence[str], file: str, what: str) -> str:
    """Name of the column that holds the question or the answer.

    Args:
        raw: rows.
        asked: the user's choice.
        usual: names to look for where the user made none, the best first.
        file: for the message.
        what: `question` or `answer`, as in the option `--question-key`.

    Raises:
        ValueError: there is no such column; one line that lists those there are.
    """
    columns = list(dict.fromkeys(key for row in raw for key in row))
    if asked is not None:
        if asked not in columns:
            raise ValueError(f"{file}: no column {asked!r} (--{what}-key); its columns are {', '.join(columns)}")
        return asked
    for key in usual:
        if key in columns:
            return key
    raise ValueError(f"{file}: no {what} column among {', '.join(columns)}; name it with --{what}-key")


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """The row's fields, and those that verl's files keep in `extra_info` and FlashRAG's in `metadata`; the row's own
    come first.
    """
    kept_apart = [fields for key in ("metadata", "extra_info") if isinstance(fields := row.get(key), dict)]
    return {key: value for fields in (*kept_apart, row) for key, value in fields.items()}


def question_text(value: Any, where: str) -> str:
    """The question of a cell: its text, or the one user message of a chat, as in verl's own files.

    Raises:
        MissingCell: there is none.
        ValueError: the cell holds something else, or several user messages.
    """
    if isinstance(value, list):
        said = [message.get("content") for message in value if message.get("role") == "user"]
        if len(said) > 1:
            raise ValueError(f"{where} has {len(said)} user messages; a prompt is one question")
        value = said[0] if said else None
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where} is {type(value).__name__}, not text")
    question = (value or "").strip()
    if not question:
        raise MissingCell(where)
    return question


def missing_cell_error(missing: MissingCell) -> ValueError:
    """What is raised where a cell is missing and such rows are not to be dropped."""
    return ValueError(f"{missing} is missing or empty; fill it or drop such rows (--drop-missing)")


def arrange(rows: list[dict[str, Any]], *, shuffle_seed: int | None, limit: int | None) -> list[dict[str, Any]]:
    """The rows that are kept, in order, with `extra_info.index` counted from 0.

    Args:
        rows: prompts; shuffled in place and numbered in place.
        shuffle_seed: None keeps the order.
        limit: keep the first rows of the (shuffled) whole.

    Raises:
        ValueError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}: give at least 1")
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(rows)
    kept = rows[:limit]
    for index, row in enumerate(kept):
        row["extra_info"]["index"] = index
    return kept
