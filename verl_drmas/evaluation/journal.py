"""A file of finished sessions, one a line, that a killed process leaves usable and another team's doesn't enter."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGINNING = b'{"measured":'


class Mixed(ValueError):
    """A file that holds sessions of something else.

    Attributes:
        key: What differs.
        was: As it is in the file.
        now: As it would be.
    """

    def __init__(self, path: Path, key: str, was: Any, now: Any):
        super().__init__(
            f"{path}: holds sessions of another {key} ({short(was)}, now {short(now)}); delete it, or give another "
            "--output"
        )
        self.key, self.was, self.now = key, was, now


class Journal:
    """Lines of JSON under a first one that says what they are of. Each is on the disk before the next is written.

    Args:
        path: The file; made with its folder where there is none. A file without a session binds nobody.
        header: What the sessions are of: everything that would change them.

    Attributes:
        lines: All sessions, in the order in which they ended.

    Raises:
        Mixed: It holds sessions of something else.
        ValueError: It is no such file, or another process writes it.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]):
        self.path, self.lines = path, []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{path}: another process writes it; wait for its end") from error
            self._read(json.loads(json.dumps(header)))  # as it will be read again
        except BaseException:
            self.close()
            raise

    def add(self, line: dict[str, Any]) -> None:
        """Write a session and wait until it is on the disk."""
        self._write(line)
        self.lines.append(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, header: dict[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        if content[: len(BEGINNING)] != BEGINNING[: len(content)]:
            raise ValueError(f"{self.path}: is no file of sessions; give another --output")
        whole, newline, _ = content.rpartition(b"\n")
        lines = []
        for number, text in enumerate(whole.split(b"\n") if newline else [], start=1):
            try:
                lines.append(json.loads(text))
            except ValueError as error:  # of the bytes, too
                raise ValueError(f"{self.path}: line {number} is no line of sessions ({error}); delete it") from error
        if len(lines) < 2:  # no session yet
            self._file.truncate(0)
            self._write({"measured": header})
            return
        differing = first_difference(lines[0]["measured"], header)
        if differing is not None:
            raise Mixed(self.path, *differing)
        self._file.truncate(len(whole) + 1)  # without the write that a kill cut off
        self.lines = lines[1:]


def first_difference(was: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> tuple[str, Any, Any] | None:
    """The first key, dotted, that isn't the same in both, with its two values; None: all are."""
    for name in [*now, *(name for name in was if name not in now)]:
        old, new, key = was.get(name), now.get(name), f"{path}{name}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inner = first_difference(old, new, f"{key}.")
            if inner is not None:
                return inner
        elif old != new:
            return key, old, new
    return None


def digest(rows: Sequence[Any]) -> str:
    """A short name of some rows' content."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]


def short(value: Any) -> str:
    """A value in at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
