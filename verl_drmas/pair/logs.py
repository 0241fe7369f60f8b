"""The joint log: what each job says, in a file of its own and, line by line, in one for both and on the terminal."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, BinaryIO

LONGEST = 2**16  # bytes of a line; a longer one is written in pieces


class JointLog:
    """Writes from several threads at once, without what is secret.

    Args:
        folder: Where `<job>.log` and `pair.log` go; they are appended to.
        names: The jobs.
        secrets: Texts that are left out.
        screen: A terminal or pipe that everything is shown on too.
    """

    def __init__(self, folder: Path, names: Sequence[str], secrets: Sequence[str], screen: IO[str] | None):
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._screen, self._lock = screen, threading.Lock()
        self._width = max(map(len, [*names, "pair"]))
        self._joint = (folder / "pair.log").open("ab", buffering=0)
        self._own = {name: (folder / f"{name}.log").open("ab", buffering=0) for name in names}

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._write("pair", f"{text}\n".encode())

    def follow(self, name: str, stream: BinaryIO) -> threading.Thread:
        """Write what a job says, until nobody is left who could say something; returns the thread that does."""
        thread = threading.Thread(target=self._follow, args=(name, stream), name=f"log of {name}", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for file in (self._joint, *self._own.values()):
                file.close()

    def _follow(self, name: str, stream: BinaryIO) -> None:
        with stream:
            while line := stream.readline(LONGEST):
                self._write(name, line)

    def _write(self, name: str, line: bytes) -> None:
        for secret in self._secrets:
            line = line.replace(secret, b"***")
        shown = f"{name:<{self._width}}| ".encode() + line.rstrip(b"\r\n") + b"\n"
        with self._lock:
            if self._joint.closed:
                return
            if name in self._own:
                self._own[name].write(line)
            self._joint.write(shown)
            if self._screen is not None:
                try:
                    self._screen.write(shown.decode(errors="replace"))
                    self._screen.flush()
                except OSError:  # whoever watched is gone; the jobs and the files go on
                    self._screen = None
