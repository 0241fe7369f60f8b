"""The passages of an index: read from JSONL, kept in one Arrow file that is mapped into memory, not loaded."""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from verl_drmas.retrieval.errors import IndexProblem
from verl_drmas.retrieval.manifest import whole_file
from verl_drmas.retrieval.passages import Passage

FILE = "passages.arrow"
# Every batch of the file but the last has this many rows, so that a row's place follows from its number.
BATCH_ROWS = 4096
SUFFIXES = (".jsonl", ".jsonl.gz")
_SCHEMA = pa.schema([(name, pa.large_string()) for name in ("id", "title", "text")])


class Corpus:
    """Passages by row number. Opening reads the file's footer only; a passage is read when it is asked for."""

    def __init__(self, reader: pa.ipc.RecordBatchFileReader, rows: int):
        self._reader = reader
        self._rows = rows
        self._batches: dict[int, pa.RecordBatch] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """The corpus of an index folder.

        Raises:
            IndexProblem: The file is missing or damaged.
        """
        path = Path(folder) / FILE
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            last = reader.num_record_batches - 1
            rows = last * BATCH_ROWS + reader.get_batch(last).num_rows if last >= 0 else 0
        except (OSError, pa.ArrowInvalid) as error:
            raise IndexProblem(f"{path}: can't be read ({error}); build the index again with --force") from error
        if reader.schema != _SCHEMA:
            raise IndexProblem(f"{path}: has other columns than id, title, text; build the index again with --force")
        return cls(reader, rows)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows} passages")
        number, place = divmod(int(row), BATCH_ROWS)
        return Passage(*(column[place].as_py() for column in self._batch(number).columns))

    def take(self, rows: Iterable[int]) -> list[Passage]:
        """The passages of these rows, in their order."""
        return [self[row] for row in rows]

    def batches(self, rows: int, start: int = 0, stop: int | None = None) -> Iterator[list[Passage]]:
        """Passages from `start` up to `stop`, at most `rows` at a time."""
        stop = self._rows if stop is None else min(stop, self._rows)
        for first in range(start, stop, rows):
            yield self.take(range(first, min(first + rows, stop)))

    def __iter__(self) -> Iterator[Passage]:
        for number in range(self._reader.num_record_batches):
            columns = (column.to_pylist() for column in self._reader.get_batch(number).columns)
            yield from map(Passage, *columns)

    def _batch(self, number: int) -> pa.RecordBatch:
        if number not in self._batches:  # a few pointers into the mapped file, no copy
            self._batches[number] = self._reader.get_batch(number)
        return self._batches[number]


def write_corpus(
    inputs: Sequence[str | Path], folder: str | Path, tick: Callable[[int, int], None] | None = None
) -> int:
    """Read passages from JSONL files into the folder's Arrow file, a batch at a time.

    A line is `{"id", "title", "text"}` or Search-R1's `{"id", "contents"}`; both may stand in one file. A passage
    without id takes the number of its line, counted from 1 through all files.

    Args:
        inputs: `.jsonl` and `.jsonl.gz` files, in the order of the rows.
        folder: An existing folder; the file appears there when it is whole.
        tick: Called with bytes read and bytes of all files (packed bytes of packed ones).

    Returns:
        How many passages there are.

    Raises:
        IndexProblem: One line that names file, line and fix.
    """
    files = [Path(file) for file in inputs]
    total = sum(file.stat().st_size for file in files)
    digests = array("Q")  # 8 bytes a passage where a set of ids would take 100
    with whole_file(Path(folder) / FILE) as part, pa.OSFile(str(part), "wb") as sink:
        with pa.ipc.new_file(sink, _SCHEMA) as writer:
            batch: list[Passage] = []
            for line in _lines(files):
                passage = _passage(line)
                digests.append(_digest(passage.id))
                batch.append(passage)
                if len(batch) == BATCH_ROWS:
                    writer.write_batch(_record_batch(batch))
                    batch = []
                    if tick:
                        tick(line.bytes_read, total)
            if batch:
                writer.write_batch(_record_batch(batch))
        if not digests:
            raise IndexProblem(f"{', '.join(map(str, files))}: no passages; give files with a passage a line")
        _refuse_duplicates(files, digests)
    if tick:
        tick(total, total)
    return len(digests)


def check_inputs(inputs: Sequence[str | Path]) -> None:
    """Refuse files that can't be a corpus, before anything is written.

    Raises:
        IndexProblem: One line that names file and fix.
    """
    if not inputs:
        raise IndexProblem(f"no input files; give one or more of {', '.join(SUFFIXES)}")
    for file in map(Path, inputs):
        if not file.is_file():
            raise IndexProblem(f"{file}: no such file; give {' or '.join(SUFFIXES)} files")
        if not file.name.endswith(SUFFIXES):
            raise IndexProblem(f"{file}: not a {' or '.join(SUFFIXES)} file; convert it to one passage a line")


class _Line(NamedTuple):
    file: Path
    number: int  # within its file, from 1
    running: int  # through all files, from 1
    data: bytes
    bytes_read: int

    def problem(self, what: str, fix: str) -> IndexProblem:
        return IndexProblem(f"{self.file}: line {self.number}: {what}; {fix}")


def _lines(files: Sequence[Path]) -> Iterator[_Line]:
    running, before = 0, 0
    for file in files:
        number = 0
        packed = file.suffix == ".gz"
        with file.open("rb") as raw, gzip.GzipFile(fileobj=raw) if packed else nullcontext(raw) as lines:
            try:
                for number, data in enumerate(lines, 1):
                    running += 1
                    if not data.isspace():
                        yield _Line(file, number, running, data, before + raw.tell())
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                where = f"{file}: after line {number}"
                raise IndexProblem(f"{where}: broken gzip ({error}); copy the file again") from error
        before += file.stat().st_size


def _record(line: _Line) -> dict[str, Any]:
    try:
        record = json.loads(line.data)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise line.problem(f"no JSON ({reason})", "write one JSON object a line, in UTF-8") from error
    if not isinstance(record, dict):
        raise line.problem(f"{type(record).__name__}, no object", 'write {"id", "title", "text"} or {"id", "contents"}')
    return record


def _id(line: _Line, record: dict[str, Any]) -> str:
    value = record.get("id")
    if value is None:
        return str(line.running)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise line.problem(f"id is {type(value).__name__}", "write text or a whole number, or leave it out")
    return str(value)


def _passage(line: _Line) -> Passage:
    record = _record(line)
    identity = _id(line, record)
    key = "text" if record.get("text") is not None else "contents"
    body, title = record.get(key), record.get("title")
    if body is None:
        raise line.problem(f"neither text nor contents among {sorted(record)}", "give the passage's text")
    if not isinstance(body, str) or not isinstance(title, str | None):
        wrong = "title" if isinstance(body, str) else key
        raise line.problem(f"{wrong} is {type(record[wrong]).__name__}", "write text")
    if key == "text":
        passage = Passage(identity, title or "", body)
    else:
        passage = Passage.from_contents(identity, body)
        if title:
            passage = Passage(identity, title, passage.text)
    if not passage.text.strip():
        raise line.problem(f"{key} of passage {identity!r} is empty", "fill it or drop the line")
    try:
        f"{identity}{passage.title}{passage.text}".encode()
    except UnicodeEncodeError as error:
        raise line.problem(f"half a character ({error.reason})", "write the text anew in UTF-8") from error
    return passage


def _record_batch(passages: Sequence[Passage]) -> pa.RecordBatch:
    columns = ([getattr(passage, name) for passage in passages] for name in _SCHEMA.names)
    return pa.record_batch([pa.array(column, pa.large_string()) for column in columns], schema=_SCHEMA)


def _digest(identity: str) -> int:
    return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest(), "little")


def _refuse_duplicates(files: Sequence[Path], digests: array) -> None:
    ordered = np.sort(np.frombuffer(digests, dtype=np.uint64))
    twice = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not twice:
        return
    seen: dict[str, _Line] = {}
    for line in _lines(files):
        identity = _id(line, _record(line))
        if _digest(identity) in twice and seen.setdefault(identity, line) is not line:
            first = seen[identity]
            raise line.problem(
                f"id {identity!r} stands in {first.file}: line {first.number} already",
                "give every passage its own id, or leave all ids out",
            )
