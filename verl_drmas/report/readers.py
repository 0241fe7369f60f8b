"""Reads what verl's loggers leave of a run: JSON lines (file), events (TensorBoard), or lines of a log (console)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import numpy as np

from verl_drmas.report.runlog import Entry, RunLog, RunLogError, is_record, join, json_entries

EVENTS = "events.out.tfevents"
# `verl/utils/logger/aggregate_logger.py`: "step:1 - name:value - name:value"; values as pprint shows them, so numpy's
# with their type.
LINE = re.compile(r"step:(\d+) - (.+)$")
VALUE = re.compile(r"^(.*):(?:np\.\w+\()?(-?(?:\d[\d.]*(?:e[+-]?\d+)?|inf|nan))\)?$")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Kind(str, Enum):
    """Which of verl's loggers wrote a file; of several in a run's folder the first of these is read."""

    FILE = "file"
    TENSORBOARD = "TensorBoard"
    CONSOLE = "console"


def kind_of(path: Path) -> Kind | None:
    """Returns which logger wrote a file, None if none of verl's did, by its name and its beginning."""
    if path.name.startswith(EVENTS):
        return Kind.TENSORBOARD
    with path.open("rb") as file:
        first = file.readline(1 << 24)
        if b"\0" in first:
            return None
        if first.lstrip()[:1] == b"{":
            try:
                return Kind.FILE if is_record(json.loads(first)) else None
            except ValueError:  # a run that was killed within its first line
                return Kind.FILE if first.startswith(b'{"step":') else None
        if path.suffix in (".jsonl", ".json"):
            return Kind.FILE if path.suffix == ".jsonl" and not first.strip() else None
        return Kind.CONSOLE if b"step:" in first or any(b"step:" in line for line in file) else None


def read_files(files: Sequence[Path], kind: Kind, *, name: str) -> RunLog:
    """Reads the files of one run: one, or the parts that resumes left, in any order.

    Args:
        files: all of one kind, at least one.
        kind: of all of them.
        name: of the run.

    Raises:
        RunLogError: a file can't be read as what it is, or there is no step in any.
        ImportError: events, and the package tensorboard isn't installed.
    """
    read = {Kind.FILE: json_entries, Kind.TENSORBOARD: event_entries, Kind.CONSOLE: console_entries}[kind]
    cut: list[Path] = []
    parts = [(path, list(read(path, cut))) for path in files]
    # A later part begins later, or, where a resume failed and was repeated, was written later.
    parts.sort(key=lambda part: (min((e.step for e in part[1]), default=0), part[0].stat().st_mtime, str(part[0])))
    entries = [entry for _, part in parts for entry in part]
    return join(entries, name=name, source=", ".join(str(path) for path in files), cut=cut)


def console_entries(path: Path, cut: list[Path]) -> Iterator[Entry]:
    """Yields the steps of a log that holds the console logger's lines among others, such as Ray's.

    Args:
        path: the file.
        cut: gets the path if it ends within a step's line, which is left out.

    Raises:
        RunLogError: no such file.
    """
    try:
        file = path.open(encoding="utf-8", errors="replace", newline="")
    except OSError as error:
        raise RunLogError(f"{path}: {error.strerror or error}; give a file that can be read") from None
    with file:
        for line in file:
            whole = line.endswith("\n")
            found = LINE.search(COLOUR.sub("", line.rstrip("\r\n")))
            if not found:
                continue
            if not whole:
                cut.append(path)
                return
            data = dict(_pairs(found.group(2)))
            if data:
                yield Entry.of(int(found.group(1)), data)


def _pairs(text: str) -> Iterator[tuple[str, float]]:
    pending = ""
    for piece in text.split(" - "):
        # A name may hold " - " itself: a piece without a value belongs to the next.
        pending = f"{pending} - {piece}" if pending else piece
        if found := VALUE.match(pending):
            yield found.group(1), float(found.group(2))
            pending = ""
        elif re.search(r":(True|False|None)$", pending):
            pending = ""


def event_entries(path: Path, cut: list[Path]) -> Iterator[Entry]:
    """Yields the steps of a TensorBoard event file; its values have single precision.

    Args:
        path: the file.
        cut: unused; the package's reader passes over a record cut short without a word.

    Raises:
        RunLogError: no event file.
        ImportError: the package tensorboard isn't installed.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.compat import tf
    except ImportError as error:
        raise ImportError(
            f"{path}: reading TensorBoard's events needs its package ({error}); pip install 'verl-drmas[report]'"
        ) from None
    step, data = -1, {}
    try:
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.WhichOneof("value") != "simple_value":
                    continue  # verl's validation texts
                if data and (event.step != step or value.tag in data):
                    yield Entry.of(step, data)
                    data = {}
                step = event.step
                data[value.tag] = _double(value.simple_value)
    except tf.errors.OpError as error:
        raise RunLogError(f"{path}: not TensorBoard's ({error}); give a file written by verl's logger") from None
    if data:
        yield Entry.of(step, data)


def _double(value: float) -> float:
    """The shortest decimal that is the same in single precision: 0.1 stays 0.1."""
    return float(str(np.float32(value)))
