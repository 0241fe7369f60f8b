"""The CPU pair's command: what it starts, what its exit status says, and what becomes of an earlier run."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from recipes.cpu_delegate.warm_start import WarmStart
from recipes.cpu_pair import train

app = typer.Typer()
app.command()(train.main)

MADE = WarmStart(
    models={"main": Path("/s/main"), "finder": Path("/s/finder")},
    train=Path("/s/train"),
    val=Path("/s/val"),
    index=Path("/s/index"),
    report=Path("/s/report"),
    measured={},
)


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Runs the command over programs that end with these statuses; returns its result and what was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRMAS_STORE", raising=False)

    def run(*arguments, pair=0, verify=0):
        started = []

        class Popen(subprocess.Popen):
            def __init__(self, command, env, **options):
                started.append((command[len(train.CLI) :], env))
                super().__init__([sys.executable, "-c", f"raise SystemExit({pair})"], env=env, **options)

        def done(command, env, check):
            started.append((command[len(train.CLI) :], env))
            return subprocess.CompletedProcess(command, verify if command[-1] == "verify" else 0)

        monkeypatch.setattr(train, "warm_start", lambda *_: MADE)
        monkeypatch.setattr(train.subprocess, "Popen", Popen)
        monkeypatch.setattr(train.subprocess, "run", done)
        return CliRunner().invoke(app, list(arguments)), started

    return run


def options(command, name):
    return [value for key, value in pairwise(command) if key == name]


def test_both_jobs_share_what_they_must_agree_on(job, tmp_path):
    result, started = job("--seed", "3", "--steps", "4", "--restarts", "2", "trainer.save_freq=1")
    assert result.exit_code == 0, result.output
    assert started[0][0][:3] == ["pair", "cpu_delegate_main", "cpu_delegate_sub"]
    assert [command for command, _ in started[1:]] == [["store", "status"], ["store", "verify"]]
    command, environment = started[0]
    run = tmp_path / "runs/cpu_pair"
    assert options(command, "--run-dir") == [str(run)] and options(command, "--restarts") == ["2"]
    main, sub = (options(command, f"--{name}") for name in ("main", "sub"))
    shared = [o for o in main if o in sub]
    assert shared == [
        "drmas.workflow.tools.search.retrieval.local=/s/index",
        "drmas.workflow.max_turns=4",
        "drmas.request_seed=3",
        "trainer.total_training_steps=4",
        "trainer.save_freq=1",
    ]
    assert [o for o in sub if o not in main] == ["actor_rollout_ref.model.path=/s/finder"]
    assert "data.train_files=/s/train" in main and "drmas.models.sub.actor_rollout_ref.model.path=/s/finder" in main
    assert environment["VERL_PLATFORM"] == "cpu"
    assert {env["DRMAS_STORE"] for _, env in started} == {f"sqlite:///{run / 'store.db'}"}


def test_another_store_is_on_no_command_line(job):
    _, started = job("--store", "postgresql+psycopg://me:pa55@db/x")
    assert all(env["DRMAS_STORE"] == "postgresql+psycopg://me:pa55@db/x" for _, env in started)
    assert not any("pa55" in word for command, _ in started for word in command)


@pytest.mark.parametrize(("pair", "verify", "status"), [(0, 0, 0), (1, 0, 1), (130, 0, 130), (0, 1, 1)])
def test_the_exit_status_needs_both_jobs_and_a_clean_store(job, pair, verify, status):
    result, started = job(pair=pair, verify=verify)
    assert result.exit_code == status
    assert len(started) == (1 if pair else 3)


def test_a_fresh_run_resumes_nothing_and_loses_nothing(job, tmp_path):
    for number in (1, 2):
        run = tmp_path / "runs/cpu_pair"
        run.mkdir(parents=True)
        (run / "store.db").write_text(str(number))
        job()
        assert not run.exists()
    assert [(tmp_path / f"runs/cpu_pair.{n}/store.db").read_text() for n in (1, 2)] == ["1", "2"]
    run.mkdir()
    job("--resume")
    assert run.exists()


@pytest.mark.process
def test_a_pair_that_takes_too_long_is_told_to_end_and_waited_for(tmp_path):
    ended = tmp_path / "ended"
    code = f"""
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path({str(ended)!r}).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""
    with pytest.raises(typer.BadParameter, match="longer than 5 s"):
        train.run_pair([sys.executable, "-c", code], dict(os.environ), 5)
    assert ended.exists()


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks for Linux's parent-death signal")
def test_a_pair_ends_with_the_command_that_started_it(tmp_path):
    pid_file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    root = Path(train.__file__).parents[2]
    code = "import os, sys; from recipes.cpu_pair.train import run_pair; "
    code += f"run_pair([sys.executable, '-c', {child!r}], dict(os.environ), 600)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root)
    deadline = time.monotonic() + 240
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    pair = psutil.Process(int(pid_file.read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    pair.wait(60)
