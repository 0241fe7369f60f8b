"""Runs the two jobs of a pair: starts them, starts again what dies, and ends both at the first reason to."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl_drmas.aside import keep_aside
from verl_drmas.pair.jobs import Job, hide
from verl_drmas.pair.logs import JointLog
from verl_drmas.pair.processes import end_session
from verl_drmas.sockets import remove_sockets

SHORT = Path("/tmp")  # a socket's path has at most 107 bytes, and Ray adds about 65 to its folder
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL = 0.2
PAUSE = 2.0  # seconds before a job is started again
REFUSED = "ended with status {} before it had started anything"


@dataclass
class Attempt:
    """One start of a job.

    Attributes:
        keeper: The process that the job is below of (see `keeper.py`); the leader of their session.
        place: Ray's folder; its name is the job's.
        log: The thread that writes what the job says.
    """

    keeper: subprocess.Popen
    place: Path
    log: threading.Thread

    def began(self) -> bool:
        """Whether the job got as far as starting Ray; before that, it looks at its configuration."""
        return any(self.place.glob("session_*"))


class Launcher:
    """The two jobs of a pair.

    Args:
        jobs: The jobs.
        folder: Where logs and process ids go: `<job>.log`, `<job>.pid`, `pair.log`.
        log: The joint log.
        restarts: How often, in all, a job that died is started again.
        grace: Seconds that a job gets to end when it is told to.
        settle: Seconds that Ray's daemons and the rest of a job get to end after it.
        pause: Seconds before a job is started again.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        folder: Path,
        log: JointLog,
        *,
        restarts: int = 0,
        grace: float = 20.0,
        settle: float = 5.0,
        pause: float = PAUSE,
    ):
        self.jobs = {job.name: job for job in jobs}
        self.folder, self.log, self.restarts, self.pause = folder, log, restarts, pause
        self.waits = ["--grace", str(grace), "--settle", str(settle)]
        self.running: dict[str, Attempt] = {}
        self.due: dict[str, float] = {}  # when a job is to be started
        self.asked: list[int] = []  # signals

    def run(self) -> int:
        """Start both and wait; returns 0 if both ended well, 128 + n after signal n, else 1."""
        with self._signals():
            try:
                return self._run()
            finally:
                self._end_all()

    def _run(self) -> int:
        self.due = dict.fromkeys(self.jobs, 0.0)
        while (self.running or self.due) and not self.asked:
            for name in [name for name, when in self.due.items() if time.monotonic() >= when]:
                del self.due[name]
                self._start(self.jobs[name])
            for name, attempt in list(self.running.items()):
                if attempt.keeper.poll() is not None and not self._settle(name):
                    return 1
            time.sleep(POLL)
        if self.asked:
            self.log.say(f"got {signal.Signals(self.asked[0]).name}: ending both jobs")
            return 128 + self.asked[0]
        self.log.say("both jobs ended well")
        return 0

    def _start(self, job: Job) -> None:
        place = Path(tempfile.mkdtemp(prefix=f"drmas-{job.name}-", dir=SHORT))
        job.folder.mkdir(parents=True, exist_ok=True)
        keep_aside(job.folder / "metrics.jsonl")
        command = job.command(place)
        (job.folder / "command.txt").write_text(f"{hide(shlex.join(command))}\n")
        keeper = [sys.executable, "-m", "verl_drmas.pair.keeper", "--parent", str(os.getpid())]
        keeper += ["--pid-file", str(self.folder / f"{job.name}.pid"), *self.waits, "--", *command]
        # Started from the main thread, whose end is what the keeper takes for the launcher's.
        process = subprocess.Popen(
            keeper,
            env=job.environment(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C on a terminal is the launcher's alone
        )
        self.running[job.name] = Attempt(process, place, self.log.follow(job.name, process.stdout))
        self.log.say(f"started {job.name} (Ray's files are in {place})")

    def _settle(self, name: str) -> bool:
        """See to a job that ended; returns whether the pair goes on."""
        attempt = self.running.pop(name)
        status = attempt.keeper.returncode
        if status < 0:  # the keeper itself was killed; the job dies with it
            status = 128 - status
        began = attempt.began()
        self._clear(attempt, keep=status != 0 and began)
        if status == 0:
            self.log.say(f"{name} ended well")
            return True
        what = f"died with status {status}"
        if not began and status < 128:
            self.log.say(f"{name} {REFUSED.format(status)}; see {self.folder / f'{name}.log'}. It is not tried again")
            return False
        if not self.restarts:
            kept = f"; Ray's logs are in {attempt.place}" if began else ""
            self.log.say(f"{name} {what}, and no restart is left{kept}")
            return False
        self.restarts -= 1
        self.due[name] = time.monotonic() + self.pause
        self.log.say(f"{name} {what}; it is started again ({self.restarts} restarts left)")
        return True

    def _clear(self, attempt: Attempt, *, keep: bool) -> None:
        """Leave nothing running of a job, and nothing lying about but the logs of one that died."""
        left = end_session(attempt.keeper.pid)
        if left:
            self.log.say(f"can't end processes {', '.join(str(process.pid) for process in left)}")
        attempt.log.join(10.0)
        remove_sockets(attempt.place.name, SHORT)
        if not keep:
            shutil.rmtree(attempt.place, ignore_errors=True)

    def _end_all(self) -> None:
        """End the jobs that run; the first signal asks them to, a second one doesn't wait."""
        self.due.clear()
        told = dict.fromkeys(self.running, 0)
        for name in told:
            self.log.say(f"ending {name}")
        while self.running:
            wanted = 2 if len(self.asked) > 1 else 1
            for name, attempt in list(self.running.items()):
                while told[name] < wanted and attempt.keeper.poll() is None:
                    attempt.keeper.terminate()
                    told[name] += 1
                    time.sleep(POLL)  # signals of one kind that come at once are one
                if attempt.keeper.poll() is not None:
                    self._clear(self.running.pop(name), keep=False)
            time.sleep(POLL)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, lambda n, _: self.asked.append(n)) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
