"""Fault drills on real servers (`make drills`): an LLM server is killed in rollout and in a weight update."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from launch import Run, start

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

START, END = 420, 60  # seconds until the job trains on a busy machine; seconds a doomed job has to end


def engine_pids(job: Run) -> list[int]:
    """The engine worker processes of the job's servers, in the order in which they were started."""
    table = subprocess.run(["ps", "-eo", "pid,sess,args", "--sort=start_time"], capture_output=True, text=True).stdout
    session = str(job.process.pid)
    rows = [line.split(None, 2) for line in table.splitlines()]
    found = [int(r[0]) for r in rows if len(r) == 3 and "VLLM::" in r[2] and "EngineCore" not in r[2]]
    cores = [int(r[0]) for r in rows if len(r) == 3 and "VLLM::EngineCore" in r[2]]
    assert cores, f"no engine process of session {session}:\n{table[-2000:]}"
    return found or cores


def last_line(job: Run) -> str:
    return next(line for line in reversed(job.log.splitlines()) if line.startswith("RuntimeError"))


@pytest.mark.parametrize("servers", [1, 2])
def test_server_killed_in_rollout(arithmetic, short_tmp, servers):
    job = start(
        short_tmp,
        [*arithmetic, "+drmas=arithmetic", f"trainer.n_gpus_per_node={servers}", "drmas.faults.poll_health=2"],
        steps=400,
    )
    try:
        job.wait_for_step(2, START)
        os.kill(engine_pids(job)[-1], signal.SIGKILL)
        killed = time.monotonic()
        if servers == 1:
            job.process.wait(END)
            print(f"\nrollout, 1 server: ended after {time.monotonic() - killed:.0f} s: {last_line(job)}")
            assert job.process.returncode != 0
            assert "of model 'base' died during" in last_line(job)
        else:
            after = max(job.steps) + 4
            job.wait_for_step(after, START)
            steps = job.steps
            retried = sum(s.get("drmas/sessions/retried_calls", 0) for s in steps.values())
            failed = sum(s["drmas/sessions/failed"] for s in steps.values())
            print(f"\nrollout, 2 servers: on to step {after}, {retried:.0f} calls retried, {failed:.0f} sessions lost")
            assert steps[after]["drmas/sessions/dead_servers"] == 1
            assert failed == 0
    finally:
        job.kill()


@pytest.mark.parametrize("servers", [1, 2])
def test_server_killed_in_a_weight_update(arithmetic, short_tmp, servers):
    job = start(
        short_tmp,
        [
            *arithmetic,
            "+drmas=arithmetic",
            f"trainer.n_gpus_per_node={servers}",
            "drmas.faults.poll_health=2",
            "drmas.faults.sync_timeout=20",
            "actor_rollout_ref.actor.ppo_epochs=60",  # a long update, so that the engine can be stopped during it
        ],
        steps=400,
        VERL_LOGGING_LEVEL="DEBUG",
    )
    try:
        job.wait_for_step(1, START)
        step = max(job.steps)
        job.wait_for(rf"step {step + 1}: the update", 120)
        victim = engine_pids(job)[-1]
        os.kill(victim, signal.SIGSTOP)  # the update will reach a server that doesn't read
        job.wait_for(rf"step {step + 1}: the weight update", 180)
        time.sleep(3)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        if servers == 1:
            job.process.wait(END)
            print(f"\nweight update, 1 server: ended after {time.monotonic() - killed:.0f} s: {last_line(job)}")
            assert job.process.returncode != 0
            assert "of model 'base' died during the weight update" in last_line(job)
        else:
            job.wait_for_step(step + 2, START)
            print(f"\nweight update, 2 servers: went on to step {step + 2} {time.monotonic() - killed:.0f} s later")
            assert job.steps[step + 2]["drmas/sessions/dead_servers"] == 1
            assert job.steps[step + 2]["drmas/sessions/failed"] == 0
    finally:
        job.kill()
