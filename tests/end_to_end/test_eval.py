"""`verl-drmas eval` against a real `vllm serve`: killed and resumed, counted as the server counts, its server killed.

The team is that of a training configuration, with a model of its own for each agent; the models are random, so that
nothing is ever right.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(1200)]

DATA = Path(os.environ.get("VERL_DRMAS_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
GSM8K = DATA / "math" / "gsm8k_test_part.jsonl"
ROWS, SAMPLES, CONCURRENCY = 50, 2, 16
TURNS = 3  # of a session in which the verifier never approves: solver, verifier, solver


class Server:
    """A running `vllm serve`."""

    def __init__(self, process, port, log):
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}/v1"

    def get(self, path):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return response.read().decode()

    def counts(self):
        """The server's own counters: tokens read and sampled, and requests that came to their end."""
        counts = Counter()
        for line in self.get("/metrics").splitlines():
            found = re.match(r"vllm:(\w+?)_total\{(.*)\} (\S+)", line)
            if found and 'finished_reason="abort"' not in found[2]:
                counts[found[1]] += int(float(found[3]))
        return counts

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture(scope="module")
def server(assets, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(assets / "chatml")),
        *("--served-model-name", "solver-lm", "verifier-lm", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(2**27), "--gpu-memory-utilization", "0.05"),
        # vLLM 0.27 on a CPU dies of a seeded request whose prompt it reads in parts.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    running = Server(process, port, log)
    try:
        end = time.monotonic() + 400
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            with contextlib.suppress(OSError):
                running.get("/v1/models")
                break
            time.sleep(1)
        yield running
    finally:
        running.kill()


@pytest.fixture
def command(server, tmp_path):
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is not there: set VERL_DRMAS_TEST_DATA to the folder that has math/gsm8k_test_part.jsonl")
    (tmp_path / "endpoints.yaml").write_text(
        f"models:\n  solver: {{urls: ['{server.url}'], model: solver-lm, attempts: 2}}\n"
        f"  verifier: {{urls: ['{server.url}'], model: verifier-lm, attempts: 2}}\n"
    )
    (tmp_path / "prices.yaml").write_text(
        "models: {solver: {prompt: 0.30, response: 0.30}, verifier: {prompt: 0.06, response: 0.06}}\n"
    )

    def make(output, *more):
        return [
            *(
                sys.executable,
                "-m",
                "verl_drmas.cli",
                "eval",
                str(GSM8K),
                "-o",
                str(tmp_path / output),
                "--config",
                "drmas_math_separate",
            ),
            *("--endpoints", str(tmp_path / "endpoints.yaml"), "--prices", str(tmp_path / "prices.yaml")),
            *("--limit", str(ROWS), "-n", str(SAMPLES), "--max-tokens", "24", "--seed", "0"),
            *("--concurrency", str(CONCURRENCY), "--json", str(tmp_path / "numbers.json"), *more),
        ]

    return make


def finished(path):
    """(row, session) of the whole lines of a file that another process writes."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    lines = [json.loads(line) for line in whole.split(b"\n") if line]
    return [(line["row"], line["session"]) for line in lines if line.get("success") is not None]


def until(path, sessions, command, seconds=300):
    """Start a command; returns it when so many sessions are in its file."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + seconds
    while len(finished(path)) < sessions:
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(process.communicate(timeout=30))
        time.sleep(0.05)
    return process


def test_killed_and_resumed_it_repeats_no_finished_session(command, server, tmp_path):
    path, start = tmp_path / "results.jsonl", server.counts()
    process = until(path, 20, command("results.jsonl"))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    before = finished(path)
    assert 20 <= len(before) < ROWS * SAMPLES
    done = subprocess.run(command("results.jsonl"), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    print(f"\nkilled after {len(before)} of {ROWS * SAMPLES} sessions, and resumed:\n{done.stdout}")
    after = finished(path)
    assert after[: len(before)] == before and len(after) == len(set(after)) == ROWS * SAMPLES
    asked = (server.counts() - start)["request_success"]
    assert ROWS * SAMPLES * TURNS <= asked <= (ROWS * SAMPLES + CONCURRENCY) * TURNS  # but for those in flight

    found = json.loads((tmp_path / "numbers.json").read_text())
    assert found["complete"] and found["sessions"] == {"asked": 100, "ended": 100, "failed": {}}
    (scores,) = (source["scores"] for source in found["sources"].values())
    assert {name: (score["value"], score["prompts"]) for name, score in scores.items()} == {
        "avg@2": (0.0, ROWS), "pass@2": (0.0, ROWS),
    }  # fmt: skip
    assert (found["workflow"], found["workflow_metrics"]["rounds"]) == ("solver_verifier", 2.0)
    calls = {agent: use["calls"] for agent, use in found["agents"].items()}
    assert calls == {"solver": 2 * ROWS * SAMPLES, "verifier": ROWS * SAMPLES}


def test_tokens_and_money_are_the_servers_own_counts(command, server, tmp_path):
    start = server.counts()
    done = subprocess.run(command("whole.jsonl", "--limit", "6"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counted = server.counts() - start
    found = json.loads((tmp_path / "numbers.json").read_text())
    uses = found["agents"].values()
    assert sum(use["calls"] for use in uses) == counted["request_success"] == 6 * SAMPLES * TURNS
    assert sum(use["prompt_tokens"] for use in uses) == counted["prompt_tokens"] > 0
    assert sum(use["response_tokens"] for use in uses) == counted["generation_tokens"] > 0
    solver, verifier = found["agents"]["solver"], found["agents"]["verifier"]
    tokens = [use["prompt_tokens"] + use["response_tokens"] for use in (solver, verifier)]
    assert found["cost"] == pytest.approx((0.30 * tokens[0] + 0.06 * tokens[1]) / 1e6)


def test_a_server_that_dies_is_named_and_nothing_counts_as_wrong(command, server, tmp_path):
    path = tmp_path / "dead.jsonl"
    process = until(path, 8, command("dead.jsonl"))
    server.kill()
    try:
        _, told = process.communicate(timeout=120)
    finally:
        process.kill()
    print(told[-800:])
    assert process.returncode == 1
    error = next(line for line in told.splitlines() if line.startswith("error: "))
    assert re.search(rf"error: model solver, verifier: {server.url}: ClientConnectorError", error)
    kept = re.search(r"(\d+) of 100 sessions are kept in", error)
    assert int(kept[1]) == len(finished(path)) >= 8 and "the same command goes on from there" in error
    assert not (tmp_path / "numbers.json").exists()
