"""`python -m verl_drmas.pair.keeper --parent PID --pid-file FILE -- COMMAND`: runs a job and leaves nothing of it.

Between the launcher and a job stands a process of its own for each job. It adopts whatever the job's processes leave
behind, so that the whole tree ends with the job; it ends the job when it is asked to, or when the launcher is gone; and
its exit status is the job's (128 + n after signal n).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verl_drmas.pair.processes import adopt_orphans, die_with_parent, end_below, reap_adopted

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL = 0.1
REAP = 5.0  # seconds between looks for adopted processes that have ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m verl_drmas.pair.keeper")
    parser.add_argument("--parent", type=int, required=True, help="the launcher's process id")
    parser.add_argument("--pid-file", type=Path, required=True, help="where the job's process id goes")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds the job may take to end when it is asked to")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds its daemons may take to end after it")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    asked: list[int] = []
    for number in STOP:
        signal.signal(number, lambda received, _: asked.append(received))
    adopt_orphans()
    die_with_parent(signal.SIGTERM, options.parent)
    keeper = os.getpid()
    job = subprocess.Popen(
        options.command,
        stdin=subprocess.DEVNULL,
        # Runs in the child before the command; this process has no other thread.
        preexec_fn=lambda: die_with_parent(signal.SIGKILL, keeper),
    )
    options.pid_file.write_text(f"{job.pid}\n")
    try:
        _watch(job, asked)
        _stop(job, asked, options.grace)
    finally:
        left = end_below(keeper, grace=0.0 if len(asked) > 1 else options.settle)
        options.pid_file.unlink(missing_ok=True)
    if left:
        sys.stderr.write(f"verl-drmas: can't end {', '.join(str(process.pid) for process in left)}\n")
    return job.returncode if job.returncode >= 0 else 128 - job.returncode


def _watch(job: subprocess.Popen, asked: list[int]) -> None:
    """Until the job ends or shall end."""
    reap = time.monotonic() + REAP
    while job.poll() is None and not asked:
        time.sleep(POLL)
        if time.monotonic() > reap:
            reap_adopted(but=job.pid)
            reap = time.monotonic() + REAP


def _stop(job: subprocess.Popen, asked: list[int], grace: float) -> None:
    """End the job if it runs; who asks twice doesn't want to wait."""
    if job.poll() is None:
        job.terminate()
    until = time.monotonic() + grace
    while job.poll() is None and len(asked) < 2 and time.monotonic() < until:
        time.sleep(POLL)
    if job.poll() is None:
        job.kill()
        job.wait()


if __name__ == "__main__":
    sys.exit(main())
