"""`verl-drmas pair`: what it starts and with which environment, what it refuses, what it prints; jobs are left out."""

import fcntl
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_drmas.config import ConfigError
from verl_drmas.pair import command
from verl_drmas.pair.facts import Facts
from verl_drmas.pair.jobs import FROM_STORE

MAIN = Facts(mode="drmas_sync", device="cpu", remotes={"sub": {"role": "sub", "store": None}})
SUB = Facts(mode="drmas_store", device="cpu", store={"role": "sub", "url": None}, gateway={"port": 0})
CONFIGS = ["cpu_delegate_main", "cpu_delegate_sub"]


@pytest.fixture
def pair(monkeypatch, tmp_path):
    """Runs the command with these facts; returns its result, and the launcher's arguments if it was started."""
    for name in ("DRMAS_STORE", "DRMAS_GATEWAY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments, main=MAIN, sub=SUB, status=0, says="running"):
        started = {}

        class Launcher:
            def __init__(self, jobs, folder, log, **options):
                started.update(jobs={job.name: job for job in jobs}, folder=folder, log=log, **options)

            def run(self):
                started["log"].say(says)
                return status

        def look(jobs, env):
            started["looked"] = jobs
            if isinstance(main, Exception):
                raise main
            return {"main": main, "sub": sub}

        monkeypatch.setattr(command, "look", look)
        monkeypatch.setattr(command, "Launcher", Launcher)
        return CliRunner().invoke(command.pair_app, [*CONFIGS, *arguments]), started

    return run


def test_both_jobs_get_one_token_one_store_and_their_own_overrides(pair, tmp_path):
    result, started = pair("--main", "a=1", "--main", "b=2", "--sub", "c=3", "--restarts", "4")
    assert result.exit_code == 0, result.output
    jobs, run = started["jobs"], tmp_path / "runs/pair"
    assert (started["folder"], started["restarts"]) == (run, 4)
    assert jobs["main"].overrides == ("a=1", "b=2") and jobs["sub"].overrides == ("c=3",)
    assert started["looked"]["main"] == ["--config-name=cpu_delegate_main", "a=1", "b=2"]
    assert jobs["main"].own == (f"drmas.models.sub.remote.store={FROM_STORE}",)
    assert jobs["sub"].own[0] == f"drmas.store.url={FROM_STORE}"
    assert jobs["sub"].own[1].startswith("++drmas.gateway.port=") and not jobs["sub"].own[1].endswith("=0")
    assert jobs["main"].env == jobs["sub"].env
    assert jobs["main"].env["DRMAS_STORE"] == f"sqlite:///{run / 'store.db'}"
    token = jobs["main"].env["DRMAS_GATEWAY_TOKEN"]
    assert len(token) >= 32
    texts = [result.output, *(path.read_text() for path in run.iterdir())]
    assert "pair| running" in result.output and not any(token in text for text in texts)
    for job in jobs.values():
        assert not any(token in word for word in job.command(Path("/tmp/x")))


@pytest.mark.parametrize("status", [0, 1, 143])
def test_the_exit_status_is_the_launchers(pair, status):
    assert pair(status=status)[0].exit_code == status


def test_a_stores_path_is_made_absolute(pair, tmp_path):
    env = pair("--store", "sqlite:///mine.db")[1]["jobs"]["main"].env
    assert env["DRMAS_STORE"] == f"sqlite:///{tmp_path / 'mine.db'}"


def test_a_password_is_on_no_command_line_and_in_no_log(pair, monkeypatch):
    monkeypatch.setenv("DRMAS_STORE", "postgresql+psycopg://me:pa%2F55@db/drmas")
    said = "with postgresql+psycopg://me:pa%2F55@db/drmas, that is pa/55"
    result, started = pair(says=said)
    assert result.exit_code == 0, result.output
    for job in started["jobs"].values():
        assert job.env["DRMAS_STORE"].endswith("me:pa%2F55@db/drmas")
        assert not any("pa%2F55" in word for word in job.command(Path("/tmp/x")))
    assert "pair| with postgresql+psycopg://me:***@db/drmas, that is ***" in result.output


def test_the_configured_port_stays_if_it_is_free(pair):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    facts = Facts(mode="drmas_store", device="cpu", store={"role": "sub"}, gateway={"port": port})
    assert pair(sub=facts)[1]["jobs"]["sub"].own == (f"drmas.store.url={FROM_STORE}",)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        (_, override) = pair(sub=facts)[1]["jobs"]["sub"].own
    assert override.startswith("++drmas.gateway.port=") and not override.endswith(f"={port}")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"main": SUB}, "refused: main: has no model with"),
        ({"main": ConfigError("main: no such thing")}, "refused: main: no such thing"),
        (
            {"sub": Facts(mode="drmas_store", store={"role": "sub", "url": "mysql://x:pw12@y/z"})},
            "known kind of database",
        ),
    ],
)
def test_refusals_are_one_line_and_start_nothing(pair, options, told):
    result, started = pair(**options)
    assert result.exit_code == 1 and "jobs" not in started
    (line,) = result.output.splitlines()
    assert line.startswith("refused: ") and told in line and "pw12" not in line


def test_an_unknown_configuration_is_refused_before_anything_is_looked_at(pair, monkeypatch):
    monkeypatch.setitem(globals(), "CONFIGS", ["nothing", "cpu_delegate_sub"])
    result, started = pair()
    assert result.exit_code == 1 and "nothing: no such YAML file" in result.output and not started


def test_a_folder_has_one_pair_at_a_time(pair, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    with (folder / "pair.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result, started = pair("--run-dir", "mine")
        assert result.exit_code == 1 and "another pair runs there" in result.output and "jobs" not in started
    assert pair("--run-dir", "mine")[0].exit_code == 0
    assert pair("--run-dir", "mine")[0].exit_code == 0


def test_a_dry_run_prints_both_commands_and_starts_nothing(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("DRMAS_GATEWAY_TOKEN", "s3cret")
    several = Facts(mode="drmas_sync", nodes=4, gpus=8, remotes=MAIN.remotes)
    result, started = pair("--dry-run", "--main", "a=1", main=several)
    assert result.exit_code == 0, result.output
    assert "jobs" not in started and "s3cret" not in result.output
    assert not (tmp_path / "runs").exists() and os.listdir(tmp_path) == []
    commands = [line for line in result.output.splitlines() if line.startswith("python -m verl.trainer.main_ppo")]
    assert [c.split()[3] for c in commands] == ["--config-name=cpu_delegate_main", "--config-name=cpu_delegate_sub"]
    assert commands[0].endswith(" a=1") and result.output.count("DRMAS_GATEWAY_TOKEN:?") == 2
