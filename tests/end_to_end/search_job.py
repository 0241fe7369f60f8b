"""What the search team's end-to-end tests share: a barely taught model, its world, and a server in its own process."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from recipes.cpu_search.teaching import Settings
from recipes.cpu_search.warm_start import WarmStart, warm_start


def taught(folder: Path, steps: int = 90) -> WarmStart:
    """A model that knows the form of queries, verdicts and answers, and little else; about half a minute."""
    settings = Settings(
        worlds=20,
        threads=1,  # more would wait for each other beside another job
        clean_steps=steps,
        clean_gate=dict.fromkeys(("verifier", "search", "answer"), 0.0),
        bands=dict.fromkeys(("verifier", "search", "answer"), (0.0, 1.0)),
    )
    return warm_start(folder, settings)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(index: Path, port: int, log: Path, *options: str) -> subprocess.Popen:
    """`verl-drmas retriever serve`, once it answers."""
    command = [sys.executable, "-m", "verl_drmas.cli", "retriever", "serve", str(index), "--port", str(port), *options]
    with log.open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return process
        time.sleep(0.2)
    process.kill()
    raise AssertionError(f"the server doesn't answer:\n{log.read_text()}")


@contextlib.contextmanager
def serving(index: Path, port: int, log: Path, *options: str) -> Iterator[subprocess.Popen]:
    """A server that ends with the block."""
    process = start_server(index, port, log, *options)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def overrides(start: WarmStart, port: int) -> list[str]:
    """The CPU job of the search team against a server."""
    return [
        f"data.train_files={start.train}",
        f"data.val_files={start.val}",
        f"actor_rollout_ref.model.path={start.model}",
        "+drmas=search_hierarchy",
        f"drmas.workflow.retrieval.urls=[http://127.0.0.1:{port}]",
        "drmas.workflow.topk=1",
        "drmas.workflow.evidence_tokens=48",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "data.max_prompt_length=160",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.max_model_len=256",
    ]


def served(port: int) -> dict[str, float]:
    """Counters of a server's /metrics by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+)(?:\{[^}]*\})? ([\d.e+-]+)$", text, re.MULTILINE)}
