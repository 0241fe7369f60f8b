"""An evaluation in a process of its own: killed in the middle, and stopped by hand."""

import asyncio
import collections
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_drmas import evaluation
from verl_drmas.data.parquet import prompt_row, write_rows
from verl_drmas.rollout.seeds import call_seed

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

ROWS, SAMPLES, AT_ONCE = 12, 4, 4
ENDED = 5  # sessions, at least, before the server holds its answers


class Held:
    """Answers so many calls and holds all others, so that an evaluation stands in its middle; `open` lets them out.

    A session has two calls, and of `AT_ONCE` sessions that are held each has had one answer at most.
    """

    def __init__(self):
        self.open = threading.Event()
        self.left = 2 * ENDED + AT_ONCE

    async def __call__(self, body):
        self.left -= 1
        held = self.left < 0
        while held and not self.open.is_set():
            await asyncio.sleep(0.01)
        return "y" if body["messages"][0]["content"].startswith("V:") else "2"


@pytest.fixture
def server(serve):
    served = serve(Held())
    yield served
    served.reply.open.set()


@pytest.fixture
def command(server, tmp_path):
    rows = [prompt_row("1+1", "2", data_source="sums", split="test", index=i) for i in range(ROWS)]
    prompts = write_rows(rows, tmp_path / "prompts.parquet")
    return [
        *(sys.executable, "-m", "verl_drmas.cli", "eval", str(prompts), "-o", str(tmp_path / "results.jsonl")),
        *("--workflow", "arithmetic", "--url", server.url, "--model", "tiny", "--seed", "1"),
        *("--concurrency", str(AT_ONCE), "-n", str(SAMPLES)),
        *("--json", str(tmp_path / "numbers.json")),
    ]  # fmt: skip


def start(command):
    env = {**os.environ, "COLUMNS": "150"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(path):
    """(row, session) of the whole lines of a file that another process writes."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    lines = [json.loads(line) for line in whole.split(b"\n") if line]
    return [(line["row"], line["session"]) for line in lines if "row" in line]


def wait_for(condition, process, seconds=150):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=10)
        time.sleep(0.005)


def seeds_of(row, session):
    """The seeds of a session's two calls."""
    return [
        call_seed(1, index=row, session=session, step=0, path=f"{agent}.0/turn.0", validate=True)
        for agent in ("solver", "verifier")
    ]


def test_a_kill_in_the_middle_loses_no_finished_session(command, server, tmp_path):
    path = tmp_path / "results.jsonl"
    process = start(command)
    try:
        wait_for(lambda: len(finished(path)) >= ENDED, process)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate(timeout=30)
    before = finished(path)
    assert ENDED <= len(before) <= ENDED + AT_ONCE / 2
    server.reply.open.set()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"note: {len(before)} sessions are in" in done.stderr
    after = finished(path)
    assert after[: len(before)] == before and len(after) == len(set(after)) == ROWS * SAMPLES
    asked = collections.Counter(body["seed"] for body in server.asked)
    assert [asked[seed] for place in before for seed in seeds_of(*place)] == [1] * (2 * len(before))
    # What was in flight may be asked twice, and nothing else.
    assert len(asked) == 2 * ROWS * SAMPLES and sum(asked.values()) - len(asked) <= 2 * AT_ONCE
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert found["sources"]["sums"]["scores"]["avg@4"]["value"] == 1.0
    assert found["agents"]["solver"]["calls"] == ROWS * SAMPLES
    for unwanted in ("Traceback", "Unclosed", "never awaited"):
        assert unwanted not in done.stderr


def test_control_c_keeps_what_ended(command, tmp_path):
    path = tmp_path / "results.jsonl"
    process = start(command)
    try:
        wait_for(lambda: len(finished(path)) >= ENDED, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    kept = re.search(r"stopped; (\d+) sessions are kept in", err)
    assert int(kept[1]) == len(finished(path)) >= ENDED
    assert "Traceback" not in err and "Unclosed" not in err and out == ""


def test_help_needs_nothing_heavy():
    code = (
        "import sys, typer.testing as t\n"
        "from verl_drmas.evaluation.command import eval_app\n"
        "told = t.CliRunner().invoke(eval_app, ['--help'], env={'COLUMNS': '200'}).output\n"
        "assert '--endpoints' in told, told\n"
        "assert not {'aiohttp', 'hydra', 'pyarrow', 'verl', 'ray', 'torch', 'pydantic'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_evaluation_imports_neither_ray_nor_verl():
    modules = sorted(file.stem for file in Path(evaluation.__file__).parent.glob("*.py"))
    assert len(modules) > 10
    code = (
        f"import sys\nfor name in {modules}:\n    __import__('verl_drmas.evaluation.' + name)\n"
        "assert not {'verl', 'ray', 'torch', 'vllm'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
