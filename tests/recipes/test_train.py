"""The CPU job's command: what it starts, for each mapping, and what its exit status says. verl itself is left out."""

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from recipes import cpu_job
from recipes.cpu_arithmetic import train
from recipes.cpu_arithmetic.mappings import MAPPINGS
from recipes.cpu_arithmetic.warm_start import WarmStart

app = typer.Typer()
app.command()(train.main)

CLASSES = {f"drmas/workflow/verifier_accuracy_{name}": 0.9 for name in ("right", "wrong")}


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Runs the command with a verl that logs the gain it is told to; returns its result and what was started."""
    monkeypatch.chdir(tmp_path)
    started = {}

    def warm(folder, models, seed):
        started["warm"] = (folder, list(models), seed)
        return {m: WarmStart(Path(f"/s/{m}"), Path("/s/train"), Path("/s/val"), Path("/s/report"), {}) for m in models}

    def run(*arguments, gain=0.3, status=0):
        class Verl:
            returncode = status

            def __init__(self, command, env, stdout, stderr):
                started.update(command=command, env=env)
                stdout.write("the last words of verl\n")
                with open(env["VERL_FILE_LOGGER_PATH"], "a") as log:
                    for step in range(1, 11):
                        value = 0.5 + gain * (step - 1) / 8
                        names = ("solver_success", "verifier_balanced_accuracy")
                        data = {**CLASSES, **{f"drmas/workflow/{name}": value for name in names}}
                        log.write(json.dumps({"step": step, "data": data}) + "\n")

            def poll(self):
                return self.returncode

        monkeypatch.setattr(train, "prepare", warm)
        monkeypatch.setattr(cpu_job.subprocess, "Popen", Verl)
        return CliRunner().invoke(app, list(arguments)), started

    return run


MODELS = {
    "shared": ["actor_rollout_ref.model.path=/s/base"],
    "separate": [f"drmas.models.{m}.actor_rollout_ref.model.path=/s/{m}" for m in ("llama", "qwen3")],
    "heterogeneous": [f"drmas.models.{m}.actor_rollout_ref.model.path=/s/{m}" for m in ("large", "small", "frozen")],
}


@pytest.mark.parametrize("mapping", MODELS)
def test_the_command_of_a_mapping(job, tmp_path, mapping):
    result, started = job("--mapping", mapping, "--seed", "3", "trainer.save_freq=10")
    assert result.exit_code == 0, result.output
    config = MAPPINGS[mapping].config
    run = tmp_path / "runs" / config
    assert started["warm"] == (tmp_path / "runs/warm_start", list(MAPPINGS[mapping].models), 3)
    assert started["command"] == [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", config),
        *(f"hydra.run.dir={run / 'hydra'}", f"trainer.default_local_dir={run / 'checkpoints'}"),
        *("data.train_files=/s/train", "data.val_files=/s/val", *MODELS[mapping]),
        *("drmas.request_seed=3", "trainer.save_freq=10"),
    ]
    assert json.loads((run / "command.json").read_text()) == started["command"]
    assert started["env"]["VERL_PLATFORM"] == "cpu"


def test_shared_is_the_mapping_of_old(job):
    assert job()[1] == job("--mapping", "shared")[1]


def test_a_run_has_a_folder_of_its_own(job, tmp_path):
    job("--mapping", "separate", "--run", "mine", "--start", "cache")
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}
    assert {"verl.log", "metrics.jsonl", "command.json", "result.json", "curves.png"} == {
        path.name for path in (tmp_path / "mine").iterdir()
    }


@pytest.mark.parametrize("mapping", MODELS)
@pytest.mark.parametrize(("gain", "status"), [(0.3, 0), (0.05, 1)])
def test_the_exit_status_says_whether_the_team_learned(job, tmp_path, mapping, gain, status):
    result, _ = job("--mapping", mapping, gain=gain)
    assert result.exit_code == status
    run = tmp_path / "runs" / MAPPINGS[mapping].config
    assert json.loads((run / "result.json").read_text())["learned"] is (status == 0)
    assert f"{MAPPINGS[mapping].config}: mean over the first" in " ".join(result.output.split())


def test_a_verl_that_fails_is_shown_and_judged_by_nothing(job, tmp_path):
    result, _ = job("--mapping", "separate", status=7)
    assert result.exit_code == 7
    assert "the last words of verl" in result.output
    assert not (tmp_path / "runs/cpu_separate/result.json").exists()


def test_a_log_of_an_earlier_run_is_not_read_again(job, tmp_path):
    log = tmp_path / "runs/cpu_separate/metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"step": 99, "data": {}}\n')
    job("--mapping", "separate")
    assert '"step": 99' not in log.read_text()


def test_an_unknown_mapping_is_refused_with_the_known_ones(job):
    result, started = job("--mapping", "seperate")
    assert result.exit_code == 2 and not started
    assert all(name in " ".join(result.output.split()) for name in MODELS)
