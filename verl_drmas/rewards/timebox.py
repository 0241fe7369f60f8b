"""Calls that end at their deadline, whatever they do: each runs in a child process that is killed when time is up.

Why loky and not another pool: its children do not import the caller's `__main__` (in a Ray worker that is all of Ray,
in a script without a `__main__` guard it is the script again), a stuck child gets SIGKILL at once (pebble waits 3 s
after a SIGTERM that C code never sees), and with one child a pool no lock is shared that a killed child could leave
held.
"""

import concurrent.futures
import logging
import math
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

Fault = Literal["timeout", "crash", "error"]

START_SECONDS = 60.0  # starting a child and its imports take about 1 s; not counted against a call's own time
MEMORY_BYTES = 1 << 30  # what a call may allocate beyond its imports: a hostile power must not take the node's memory


class Boxed(NamedTuple):
    """What a call gave: its value, or why there is none (`timeout`, `crash` of the child, or `error` raised in it)."""

    value: Any = None
    fault: Fault | None = None


class _Child(NamedTuple):
    executor: "ProcessPoolExecutor"
    ready: Future


class TimeBox:
    """A few child processes that run functions under a hard deadline; started at the first call, from any thread.

    Each child belongs to one thread of a small thread pool. That pool's queue is the only queue, so a call's time
    starts when a child takes it, not when it is submitted.

    Args:
        warm_up: importable function run once in every new child (its imports).
        workers: number of children, hence of calls at a time.
    """

    def __init__(self, warm_up: Callable[[], None], *, workers: int = 2) -> None:
        self._warm_up = warm_up
        self._workers = workers
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

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
            threads = self._threads
        return threads.submit(self._call, function, args, timeout)

    def close(self) -> None:
        """Kill the children and wait for them. The box starts again at the next call."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        while self._children:
            self._children.popitem()[1].executor.shutdown(wait=True, kill_workers=True)

    def _reset(self) -> None:
        # In a forked child the threads are gone and the processes are the parent's. The old objects stay referenced:
        # collecting a loky executor writes into a pipe that the parent still reads.
        self._inherited = getattr(self, "_threads", None), getattr(self, "_children", None)
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._children: dict[int, _Child] = {}

    def _call(self, function: Callable[..., Any], args: tuple, timeout: float) -> Boxed:
        for last_try in (False, True):
            future = self._child().executor.submit(_limited, function, args, timeout)
            try:
                error = future.exception(timeout)
            except concurrent.futures.TimeoutError:
                self._replace_child()
                return Boxed(fault="timeout")
            if isinstance(error, BrokenProcessPool):
                self._replace_child()
                if last_try:
                    return Boxed(fault="crash")
                continue  # the child may have died while idle (the kernel short of memory): not this call's doing
            return Boxed(future.result()) if error is None else Boxed(fault="error")
        raise AssertionError("unreachable")

    def _child(self) -> _Child:
        key = threading.get_ident()
        child = self._children.get(key) or self._start_child(key)
        try:
            error = child.ready.exception(START_SECONDS)
        except concurrent.futures.TimeoutError as late:
            error = late
        if error is not None:
            self._children.pop(key).executor.shutdown(wait=True, kill_workers=True)
            raise RuntimeError(f"the process that scores answers did not start within {START_SECONDS:.0f} s: {error!r}")
        return child

    def _start_child(self, key: int) -> _Child:
        from loky import ProcessPoolExecutor

        executor = ProcessPoolExecutor(max_workers=1)
        child = self._children[key] = _Child(executor, executor.submit(_prepare, self._warm_up, os.getpid()))
        return child

    def _replace_child(self) -> None:
        key = threading.get_ident()
        self._children.pop(key).executor.shutdown(wait=True, kill_workers=True)
        self._start_child(key)  # its imports run before the next call needs it


def _prepare(warm_up: Callable[[], None], parent: int) -> None:
    """In a new child: a watch on the parent, imports, then a bound on memory beyond them."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.disable(logging.CRITICAL)  # libraries report each odd expression; the outcome is what is returned
    warm_up()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _bound(resource.RLIMIT_AS, used + MEMORY_BYTES)


def _end_with(parent: int) -> None:
    """Leave no orphan: an idle loky child would outlive a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _limited(function: Callable[..., Any], args: tuple, timeout: float) -> Any:
    """In the child: a bound on processor time, which ends a call stuck in C code whose parent was killed first."""
    _bound(resource.RLIMIT_CPU, math.ceil(time.process_time() + timeout) + 2)
    return function(*args)


def _bound(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
