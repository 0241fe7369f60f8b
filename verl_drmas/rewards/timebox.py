"""Calls that end at their deadline, whatever they do: each runs in a child process that is killed when time is up.

Process pools from libraries were tried and did not fit inside a Ray actor: pebble's and the standard library's children
import the caller's `__main__` (all of Ray, or a script without a `__main__` guard again), pebble waits 3 s after a
SIGTERM that C code never sees and breaks for good when an idle child is killed, loky's semaphore tracker fails loudly
when Ray ends an actor, and none starts from a daemonic process. A plain interpreter at the end of a socket has none of
these.
"""

import atexit
import ctypes
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Fault = Literal["timeout", "crash"]

START_SECONDS = 60.0  # starting a child and its imports take about 1 s; not counted against a call's own time
MEMORY_BYTES = 1 << 30  # what a call may allocate beyond its imports: a hostile power must not take the node's memory


class Boxed(NamedTuple):
    """What a call gave: its value, or why there is none (`timeout`, or `crash`: it raised or ended the process)."""

    value: Any = None
    fault: Fault | None = None


class TimeBox:
    """A few child processes that run functions under a hard deadline; started at the first call, from any thread.

    Each child belongs to one thread of a small thread pool. That pool's queue is the only queue, so a call's time
    starts when a child takes it, not when it is submitted. After a fork the forked process starts children of its own.

    Args:
        warm_up: importable function run once in every new child (its imports).
        workers: number of children, hence of calls at a time.
    """

    def __init__(self, warm_up: Callable[[], None], *, workers: int = 2) -> None:
        self._warm_up = warm_up
        self._workers = workers
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.close)

    def submit(self, function: Callable[..., Any], *args: Any, timeout: float) -> "Future[Boxed]":
        """Run `function(*args)` in a child.

        Args:
            function: importable; it and its arguments are pickled.
            timeout: seconds the call may run, > 0.

        Returns:
            A future of `Boxed`. It raises RuntimeError only when no child can be started: the machine's fault, not the
            call's, and therefore never turned into a value.
        """
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}: give a number of seconds above 0")
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="drmas-timebox")
            return self._threads.submit(self._call, function, args, timeout)

    def close(self) -> None:
        """End the children, after the calls they are in. The box starts again at the next call."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        while self._children:
            self._children.popitem()[1].kill()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._children: dict[int, _Child] = {}  # by thread

    def _call(self, function: Callable[..., Any], args: tuple, timeout: float) -> Boxed:
        key = threading.get_ident()
        for _ in range(2):  # a child may have died while idle (a node short of memory): not this call's doing
            child = self._children.get(key) or self._start(key)
            try:
                child.wait_until_ready()
            except RuntimeError:
                del self._children[key]
                raise
            try:
                child.connection.send((function, args))
                if child.connection.poll(timeout):
                    return Boxed(child.connection.recv())
                fault: Fault = "timeout"
            except (EOFError, ConnectionError):
                fault = "crash"
            child.kill()
            self._start(key)  # its imports run before the next call needs it
            if fault == "timeout":
                break
        return Boxed(fault=fault)

    def _start(self, key: int) -> "_Child":
        child = self._children[key] = _Child(self._warm_up)
        return child


class _Child:
    """A Python process that serves calls until its end of the socket closes."""

    def __init__(self, warm_up: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.connection = Connection(ours.detach())
        self.connection.send(warm_up)
        self._ready = False

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            if self.connection.poll(START_SECONDS):
                self.connection.recv()
                self._ready = True
                return
            why = f"was not ready within {START_SECONDS:.0f} s"
        except (EOFError, ConnectionError):
            why = "ended while starting (see its error above)"
        self.kill()
        raise RuntimeError(f"the process that scores answers {why}: {sys.executable}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()


def serve(descriptor: int, parent: int) -> None:
    """Serve a `TimeBox` from its child process. Not for callers."""
    logging.disable(logging.CRITICAL)  # libraries report each odd expression; the outcome is what is returned
    # The kernel ends this process with the thread that started it, even when it is stuck in C code. A closed socket
    # would not: a fork of the parent may hold it open.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    connection = Connection(descriptor)
    try:
        warm_up = connection.recv()
        warm_up()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        connection.send("ready")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a call that raises ends the process; its traceback is noise
        while True:
            function, args = connection.recv()
            connection.send(function(*args))
    except (EOFError, ConnectionError):
        return  # the parent is gone or has closed the box
