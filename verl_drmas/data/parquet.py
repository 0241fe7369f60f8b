"""Prompts on disk in verl's RLHF format (verl/utils/dataset/rl_dataset.py): rows, files, and the check before a run."""

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [("split", pa.string()), ("index", pa.int64()), ("question", pa.string()), ("answer", pa.string())]
            ),
        ),
    ]
)


def prompt_row(question: str, gold: str, *, data_source: str, split: str, index: int) -> dict[str, Any]:
    """One prompt: a user message, its gold answer, and an index that request seeds are hashed from.

    Args:
        index: unique within the file the row is written to.
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": split, "index": index, "question": question, "answer": gold},
    }


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` at the end; an interrupted write leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_rows(rows: Sequence[dict[str, Any]], path: str | os.PathLike, *, schema: pa.Schema = SCHEMA) -> Path:
    """Write prompts to a parquet file; an interrupted write leaves no half file.

    Args:
        rows: prompts with an `extra_info.index` each.
        path: the file.
        schema: columns and their types.

    Raises:
        ValueError: no rows, or an `extra_info.index` that occurs twice.
    """
    path = Path(path).expanduser()
    if not rows:
        raise ValueError(f"{path}: no rows to write")
    first: dict[int, int] = {}
    for number, row in enumerate(rows):
        index = row["extra_info"]["index"]
        if index in first:
            raise ValueError(f"{path}: rows {first[index]} and {number} both have extra_info.index {index}")
        first[index] = number
    with whole_file(path) as partial:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), partial)
    return path


def read_rows(path: str | os.PathLike, *, leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """Rows of a `.parquet`, `.jsonl` or `.json` file (the last either a list of objects or one object a line).

    Args:
        path: the file.
        leave_out: columns of a parquet file, or fields in them (`metadata.context`), that are not read: they may hold
            whole pages.

    Raises:
        ValueError: the file is missing, of another kind, unreadable or empty; one line that names it.
    """
    path = _existing(path)
    if path.suffix == ".parquet":
        try:
            file = pq.ParquetFile(path)
            leaves = [file.schema.column(number).path for number in range(len(file.schema))]
            skipped = tuple(f"{name}." for name in leave_out)
            rows = file.read(columns=[leaf for leaf in leaves if not f"{leaf}.".startswith(skipped)]).to_pylist()
        except pa.ArrowException as error:
            raise ValueError(f"{path}: not a readable parquet file ({_one_line(error)})") from error
    else:
        rows = _read_json(path)
    if not rows:
        raise ValueError(f"{path}: no rows; write at least one prompt into it")
    return rows


def check_prompts(
    files: str | os.PathLike | Iterable[str | os.PathLike], *, prompt_key: str = "prompt", needs_answer: bool = True
) -> int:
    """Check that verl can train on these files, reading only the columns it takes.

    Each file exists and has rows; each row has a non-empty list of messages and a non-empty
    `reward_model.ground_truth` (a string, or for question answering a list or struct of them). Files with a remote
    address (`hdfs://...`), which verl fetches itself, are passed over.

    Args:
        files: value of `data.train_files` or `data.val_files`.
        prompt_key: value of `data.prompt_key`.
        needs_answer: whether every row needs a gold.

    Returns:
        Number of rows in the files that were checked.

    Raises:
        ValueError: one line that names file, row (counted from 0), key and fix.
    """
    if isinstance(files, str | os.PathLike):
        files = [files]
    return sum(_check_file(file, prompt_key, needs_answer) for file in files if "://" not in str(file))


def check_indices(files: Iterable[str | os.PathLike]) -> None:
    """Check that every row has an `extra_info.index` of its own, over all files together.

    verl gives a row without one the index 0; seeds that are hashed from it would then be the same for every prompt.

    Args:
        files: value of `data.train_files`; remote addresses are passed over.

    Raises:
        ValueError: one line that names the file and the fix.
    """
    seen = 0
    indices: set[int] = set()
    for file in files:
        if "://" in str(file):
            continue
        path = _existing(file)
        table = _columns(path, "extra_info")
        column = table["extra_info"].combine_chunks() if "extra_info" in table.column_names else None
        if column is None or not pa.types.is_struct(column.type) or column.type.get_field_index("index") < 0:
            raise ValueError(f"{path}: no extra_info.index; seeds are hashed from it: number the rows")
        values = pc.struct_field(column, "index")
        seen += len(values)
        indices.update(values.to_pylist())
        if None in indices or len(indices) < seen:
            raise ValueError(f"{path}: extra_info.index repeats; seeds are hashed from it: number the rows anew")


def _check_file(file: str | os.PathLike, prompt_key: str, needs_answer: bool) -> int:
    path = _existing(file)
    table = _columns(path, prompt_key)
    if table.num_rows == 0:
        raise ValueError(f"{path}: no rows; write at least one prompt into it")
    for key in (prompt_key, "reward_model") if needs_answer else (prompt_key,):
        if key not in table.column_names:
            raise ValueError(
                f"{path}: no column {key!r} (columns: {', '.join(table.column_names)}); "
                "build the file with `verl-drmas data`" + (" or set data.prompt_key" if key == prompt_key else "")
            )
    prompts = table[prompt_key].combine_chunks()
    if not (_is_list(prompts.type) and pa.types.is_struct(prompts.type.value_type)):
        raise ValueError(
            f"{path}: column {prompt_key!r} holds {prompts.type}, but verl reads a list of messages "
            '[{"role": "user", "content": ...}]; build the file with `verl-drmas data`'
        )
    _refuse(path, _blank(prompts), f"{prompt_key} is empty")
    if not needs_answer:
        return table.num_rows
    rewards = table["reward_model"].combine_chunks()
    if not pa.types.is_struct(rewards.type) or rewards.type.get_field_index("ground_truth") < 0:
        raise ValueError(f"{path}: reward_model has no ground_truth; add the gold answer of every row")
    golds = pc.struct_field(rewards, "ground_truth")
    _refuse(path, _blank(golds), "reward_model.ground_truth is missing or empty")
    return table.num_rows


def _columns(path: Path, prompt_key: str) -> pa.Table:
    if path.suffix != ".parquet":
        rows = _read_json(path)
        keys = [key for key in (prompt_key, "reward_model") if any(key in row for row in rows)]
        try:
            return pa.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows])
        except pa.ArrowException as error:
            raise ValueError(f"{path}: rows differ in type ({_one_line(error)})") from error
    try:
        file = pq.ParquetFile(path)
        if {prompt_key, "reward_model"} <= set(file.schema_arrow.names):
            return file.read(columns=[prompt_key, "reward_model"])
        return file.read()
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a readable parquet file ({_one_line(error)})") from error


def _blank(values: pa.Array) -> pa.Array:
    """Which values are null, a blank string, or a list or struct with nothing but such values; bool [rows]."""
    kind = values.type
    if pa.types.is_null(kind):
        return pa.array([True] * len(values), pa.bool_())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        blank = pc.equal(pc.utf8_trim_whitespace(values), "")
    elif _is_list(kind):
        filled = pc.invert(_blank(pc.list_flatten(values)))
        blank = pc.invert(pc.is_in(pa.array(range(len(values))), pc.list_parent_indices(values).filter(filled)))
    elif pa.types.is_struct(kind):
        blank = pa.array([True] * len(values), pa.bool_())
        for field in range(kind.num_fields):
            blank = pc.and_(blank, _blank(pc.struct_field(values, [field])))
    else:
        blank = pa.array([False] * len(values), pa.bool_())
    return pc.or_(pc.is_null(values), pc.fill_null(blank, True))


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _refuse(path: Path, bad: pa.Array, what: str) -> None:
    count = pc.sum(bad).as_py()
    if count:
        row = pc.index(bad, True).as_py()
        others = f" ({count} such rows)" if count > 1 else ""
        raise ValueError(f"{path}: row {row}: {what}{others}; fill it or drop the row (--drop-missing)")


def _existing(path: str | os.PathLike) -> Path:
    path = Path(path).expanduser()
    if path.suffix not in (".parquet", ".json", ".jsonl"):
        raise ValueError(f"{path}: unknown kind of file; give .parquet, .json or .jsonl")
    if not path.is_file():
        raise ValueError(f"{path}: no such file; build it with `verl-drmas data` or correct the path")
    return path


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from error
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not readable as JSON (line {error.lineno}: {error.msg})") from error
    if rows is None:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}: line {number} is not a JSON object ({error.msg})") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} is {type(row).__name__}, not an object with named fields")
    return rows


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
