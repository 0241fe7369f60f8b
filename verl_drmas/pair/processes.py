"""Ends whole trees of processes: a training job leaves daemons, workers and engines behind when it dies."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL = 0.05


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none gets out of sight; Linux only."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int, parent: int | None = None) -> None:
    """Get a signal when the thread that started this process ends; Linux only.

    Args:
        number: The signal.
        parent: The parent's id, where it may have died before this call.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_below(pid: int, *, grace: float = 0.0, deadline: float = 30.0) -> list[psutil.Process]:
    """End every descendant of a process, also those that start meanwhile.

    Args:
        pid: The process; it lives on.
        grace: Seconds that the descendants may take to end by themselves before they are killed.
        deadline: Seconds after which to give up.

    Returns:
        What can't be killed.
    """
    return _end_all(lambda: _below(pid), grace, deadline)


def end_session(sid: int, *, deadline: float = 30.0) -> list[psutil.Process]:
    """Kill every process of a session but this one, whoever its parent is by now; returns what can't be killed."""
    return _end_all(lambda: _of_session(sid), 0.0, deadline)


def reap_adopted(but: int) -> None:
    """Collect adopted children that have ended.

    Args:
        but: A child that somebody else waits for.
    """
    for child in psutil.Process().children():
        if child.pid != but:
            _alive(child)


def _end_all(find: Callable[[], list[psutil.Process]], grace: float, deadline: float) -> list[psutil.Process]:
    until = time.monotonic() + deadline
    _wait(find, grace)
    while (left := find()) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.Error):
                process.kill()  # looks at its start time too: the id may be another's by now
        _wait(find, 1.0)
    return left


def _wait(find: Callable[[], list[psutil.Process]], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and find():
        time.sleep(POLL)


def _below(pid: int) -> list[psutil.Process]:
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if _alive(process)]


def _of_session(sid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if process.pid != os.getpid() and os.getsid(process.pid) == sid and _alive(process):
                found.append(process)
    return found


def _alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended and is this process's child is collected on the way."""
    with suppress(psutil.Error, ChildProcessError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.is_running()
        if process.ppid() == os.getpid():
            os.waitpid(process.pid, os.WNOHANG)
    return False
