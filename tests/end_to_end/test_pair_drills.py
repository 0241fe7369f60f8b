"""Pair drills (`make drills`): kill -9 of either job, both, the gateway and the database, in each phase of a step.

A pair of the delegating team runs until it is done, however often something of it dies; then the store is asked whether
every session was trained exactly once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from pair_job import Pair, of_main, of_sub
from postgres import fresh_database, private_server

from verl_drmas.store.database import open_store
from verl_drmas.store.numbers import numbers
from verl_drmas.store.verify import verify

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1500)]

STEPS = 9
START, END = 420, 1200  # seconds until a phase comes on a busy machine, and for the whole drill
PHASES = {1: "rollout", 2: "the update", 3: "the weight update"}


def tree(pid: int) -> list[psutil.Process]:
    """A job's processes, Ray's daemons and vLLM's among them."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def kill_job(pair: Pair, name: str) -> None:
    found = tree(pair.pid(name))
    assert len(found) > 5, f"{name} has {len(found)} processes"
    kill(found)


def kill_gateway(pair: Pair) -> None:
    found = [p for p in tree(pair.pid("sub")) if any("GatewayActor" in part for part in p.cmdline())]
    assert found, "the sub job has no gateway process"
    kill(found)


def drill(start, target: str, store: str, kill_it, watched: str) -> tuple[str, dict[str, int]]:
    """Run a pair, kill its target in three phases of the watched job, and look at the store afterwards.

    Returns:
        What the launcher logged, and the store's counters.
    """
    folder = Path(tempfile.mkdtemp(prefix="k"))
    main = of_main(
        start, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "+drmas.models.sub.remote.patience=300"
    )
    sub = of_sub(start, "trainer.save_freq=2", "+drmas.store.lease=8")
    pair = Pair(folder, main, sub, store=store, restarts=12, VERL_LOGGING_LEVEL="DEBUG")
    began, seen = time.monotonic(), 0
    try:
        for step, phase in PHASES.items():
            seen = pair.wait_for(watched, rf"step {step}: {phase}", START, after=seen)
            kill_it(pair)
        pair.wait(END - (time.monotonic() - began))
    finally:
        pair.stop()
    opened = open_store(pair.store)
    problems, found = verify(opened), numbers(opened, "sub")
    opened.close()
    assert problems == []
    steps = pair.steps("main")
    assert max(steps) == STEPS
    trained = {name: int(n) for name, n in found.items() if name.startswith("groups/") and n}
    assert set(trained) <= {"groups/saved", "groups/trained", "groups/empty", "groups/left_out"}
    counts = {name.removeprefix("count/"): int(n) for name, n in found.items() if name.startswith("count/") and n}
    sessions = {name.removeprefix("sessions/"): int(n) for name, n in found.items() if name.startswith("sessions/")}
    where = "; ".join(f"step {step}, {phase}" for step, phase in PHASES.items())
    print(
        f"\n{target} killed -9 at {where}: groups {trained}; sessions {sessions}; {counts} "
        f"({time.monotonic() - began:.0f} s)"
    )
    log = pair.log
    shutil.rmtree(folder, ignore_errors=True)
    return log, counts


def deaths(log: str, name: str) -> int:
    return len(re.findall(rf"{name} died with status", log))


@pytest.mark.parametrize("target", ["main", "sub", "both"])
def test_a_killed_job_goes_on_where_it_was(delegate_start, short_tmp, target):
    names = {"main": ["main"], "sub": ["sub"], "both": ["main", "sub"]}[target]

    def kill_it(pair: Pair) -> None:
        for name in names:
            kill_job(pair, name)

    store = f"sqlite:///{short_tmp / 'store.db'}"
    watched = "sub" if target == "sub" else "main"
    log, counts = drill(delegate_start, f"{target} job{'s' * (target == 'both')}", store, kill_it, watched)
    assert {name: deaths(log, name) for name in names} == dict.fromkeys(names, len(PHASES))
    if target == "main":
        assert counts.get("duplicate", 0) > 0  # what was played again is in the store once
        assert deaths(log, "sub") == 0
    if target == "sub":
        assert deaths(log, "main") == 0  # it was held back


def test_a_killed_gateway_comes_back_and_no_job_notices(delegate_start, short_tmp):
    store = f"sqlite:///{short_tmp / 'store.db'}"
    log, counts = drill(delegate_start, "gateway", store, kill_gateway, "sub")
    assert counts["retries"] > 0
    assert deaths(log, "main") == deaths(log, "sub") == 0


def test_a_killed_database_comes_back_and_no_job_notices(delegate_start):
    with private_server() as server, fresh_database(server.url) as url:

        def kill_it(pair: Pair) -> None:
            server.kill()
            time.sleep(5)
            server.start()

        log, _ = drill(delegate_start, "PostgreSQL", url, kill_it, "sub")
        assert deaths(log, "main") == deaths(log, "sub") == 0
