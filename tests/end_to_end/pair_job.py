"""Starts `verl-drmas pair` as a user would, under a hard timeout, and reads what both jobs leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from delegate_job import overrides, sizes

from recipes.cpu_job import QUIET


def of_main(start, *more: str) -> list[str]:
    """Overrides of the job that plays the sessions."""
    return overrides(start, *more)


def of_sub(start, *more: str) -> list[str]:
    """Overrides of the job that trains the finder: no data, and the workflow that is played."""
    from recipes.cpu_delegate.warm_start import turns_of

    return [
        f"actor_rollout_ref.model.path={start.models['finder']}",
        f"drmas.workflow.tools.search.retrieval.local={start.index}",
        f"drmas.workflow.max_turns={turns_of(2)}",
        *sizes(),
        *more,
    ]


class Pair:
    """A pair that runs or has run.

    Args:
        folder: Of the run's files.
        main: Overrides of the first job.
        sub: Of the second.
        store: URL of the store; None: SQLite in the folder.
        restarts: Of jobs that die.
        env: Added to the environment.
    """

    def __init__(
        self,
        folder: Path,
        main: Sequence[str],
        sub: Sequence[str],
        *,
        store: str | None = None,
        restarts: int = 0,
        **env: str,
    ):
        self.folder, self.store = folder, store or f"sqlite:///{folder / 'store.db'}"
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1", "DRMAS_STORE": self.store, **env}
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
        command = [sys.executable, "-m", "verl_drmas.cli", "pair", "cpu_delegate_main", "cpu_delegate_sub"]
        command += [f"--run-dir={folder}", f"--restarts={restarts}"]
        command += [f"--main={o}" for o in main] + [f"--sub={o}" for o in sub]
        self.output = folder / "output.txt"
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def log(self) -> str:
        """What the launcher printed: its own lines, and both jobs'."""
        return self.output.read_text(errors="replace")

    def job_log(self, name: str) -> str:
        """One job's log."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def steps(self, name: str) -> dict[int, dict[str, float]]:
        """A job's metrics by step, over all its starts; a later start's count."""
        found: dict[int, dict[str, float]] = {}
        files = sorted(
            (self.folder / name).glob("metrics*.jsonl"), key=lambda p: (p.name == "metrics.jsonl", p.stat().st_mtime)
        )
        for path in files:
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut off by a kill
                    record = json.loads(line)
                    found[record["step"]] = record["data"]
        return found

    def pid(self, name: str) -> int:
        """The process that a job runs in: the driver, below the launcher's keeper."""
        return int((self.folder / f"{name}.pid").read_text())

    def wait(self, timeout: float) -> Pair:
        """Wait for a good end; the pair is stopped in any case."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.stop()
        assert self.process.returncode == 0, f"status {self.process.returncode}:\n{self.log[-6000:]}"
        return self

    def wait_for(self, name: str, pattern: str, timeout: float, after: int = 0) -> int:
        """Wait until a job's log matches beyond a position; returns where the match ends."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = re.compile(pattern).search(self.job_log(name), after)
            if found:
                return found.end()
            assert self.process.poll() is None, self.log[-6000:]
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} is not in {name}'s log:\n{self.log[-6000:]}")

    def stop(self) -> None:
        """End the launcher and all below it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)
