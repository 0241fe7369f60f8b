"""Fault drills of the search team (`make drills`): its server dies and comes back, dies for good, or is too slow."""

from __future__ import annotations

import json
import time

import pytest
from launch import start
from search_job import free_port, overrides, serving, start_server, taught

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]

START = 420  # seconds until the job trains on a busy machine


@pytest.fixture(scope="module")
def made(assets, tmp_path_factory):
    return taught(tmp_path_factory.mktemp("taught"))


def test_a_server_that_comes_back_costs_no_session(made, short_tmp):
    port, log = free_port(), short_tmp / "server.log"
    server = start_server(made.index, port, log)
    job = start(short_tmp, overrides(made, port), steps=400)
    try:
        job.wait_for_step(2, START)
        server.kill()
        server.wait(30)
        died, before = time.monotonic(), max(job.steps)
        time.sleep(6)
        server = start_server(made.index, port, log)
        job.wait_for_step(before + 4, START)
        steps = {n: s for n, s in job.steps.items() if n > before}
        retries = sum(s["drmas/tools/retrieval/retries"] for s in steps.values())
        failed = sum(s["drmas/sessions/failed"] for s in job.steps.values())
        print(f"\nserver back after {time.monotonic() - died:.0f} s: {retries:.0f} retries, {failed:.0f} sessions lost")
        assert retries > 0 and failed == 0
    finally:
        job.kill()
        server.kill()


def test_a_server_that_stays_away_ends_the_run_by_its_name(made, short_tmp):
    port, log = free_port(), short_tmp / "server.log"
    with serving(made.index, port, log) as server:
        job = start(
            short_tmp,
            [*overrides(made, port), "drmas.workflow.retrieval.deadline=8", "drmas.workflow.retrieval.attempts=3"],
            steps=400,
        )
        try:
            job.wait_for_step(2, START)
            server.kill()
            killed = time.monotonic()
            job.process.wait(120)
            last = next(line for line in reversed(job.log.splitlines()) if line.startswith("RuntimeError"))
            print(f"\nserver gone for good: the run ended after {time.monotonic() - killed:.0f} s: {last}")
            assert job.process.returncode != 0
            assert "failed/retrieval" in last
            assert f"no answer from http://127.0.0.1:{port}" in job.log
        finally:
            job.kill()


def test_masked_sessions_are_in_the_dump_and_nowhere_else(made, short_tmp):
    port, log, dump = free_port(), short_tmp / "server.log", short_tmp / "dump"
    server = start_server(made.index, port, log)
    job = start(
        short_tmp,
        [
            *overrides(made, port),
            "drmas.workflow.retrieval.deadline=2",
            "drmas.workflow.retrieval.attempts=2",
            "drmas.faults.failed_sessions=mask",
            "drmas.faults.max_failed_share=1.0",
            f"trainer.rollout_data_dir={dump}",
        ],
        steps=400,
    )
    try:
        job.wait_for_step(2, START)
        masked = {}
        for _ in range(12):  # until a step has lost some of its sessions and not all of them
            before = max(job.steps)
            server.kill()
            server.wait(30)
            time.sleep(0.3)
            server = start_server(made.index, port, log)
            job.wait_for_step(before + 3, START)
            masked = {n: s for n, s in job.steps.items() if s.get("drmas/sessions/masked")}
            if masked or job.process.poll() is not None:
                break
        assert masked, job.log[-3000:]
        number, step = next(iter(masked.items()))
        rows = [json.loads(line) for line in (dump / f"{number}.jsonl").read_text().splitlines()]
        lost = [row for row in rows if row.get("failed")]
        good = [row for row in rows if not row.get("failed")]
        print(f"\nstep {number}: {step['drmas/sessions/masked']:.0f} sessions masked, {len(lost)} of {len(rows)} rows")
        assert {row["failed"] for row in lost} == {"retrieval"}
        assert step["drmas/sessions/failed"] == step["drmas/sessions/masked"] == step["drmas/sessions/failed/retrieval"]
        rows_by_agent = sum(v for k, v in step.items() if k.startswith("drmas/agent/") and k.endswith("/rows"))
        assert rows_by_agent == len(good)
    finally:
        job.kill()
        server.kill()
