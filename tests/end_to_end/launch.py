"""Starts `python -m verl.trainer.main_ppo` as a user would, under a hard timeout, and reads what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes.cpu_job import QUIET

HERE = Path(__file__).resolve().parent

BASE = (
    "data.dataloader_num_workers=0",
    "data.seed=1",
    "data.train_batch_size=8",
    "data.max_prompt_length=24",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.max_model_len=64",
    "trainer.logger=[file]",
    "trainer.total_epochs=100",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.project_name=e2e",
    "trainer.experiment_name=run",
    "+drmas_runtime=cpu",
)
# Nobody looks at the dashboard, and its dozen processes start while the job's own do.
NO_DASHBOARD = ("++ray_kwargs.ray_init.include_dashboard=false",)


@dataclass
class Run:
    """A finished or running job."""

    folder: Path
    process: subprocess.Popen
    returncode: int | None = None
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by global step, as verl's file logger wrote them."""
        path = self.folder / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {r["step"]: r["data"] for r in records}

    def wait(self, timeout: float) -> Run:
        """Wait for the end; a job that outlives `timeout` seconds is killed with all it started."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
        self.returncode, self.seconds = self.process.returncode, time.monotonic() - self.started
        return self

    def kill(self) -> None:
        """End the job's whole process group; Ray's daemons live in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        subprocess.run(["pkill", "-9", "-f", str(self.folder / "ray")], check=False)

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        """Wait until the log matches; fails with the log's tail if it doesn't in time."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log)
            if found:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise AssertionError(f"{pattern!r} is not in the log:\n{self.log[-3000:]}")

    def wait_for_step(self, step: int, timeout: float) -> None:
        """Wait until a step's metrics are written."""
        deadline = time.monotonic() + timeout
        while step not in self.steps:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"step {step} didn't come:\n{self.log[-3000:]}")
            time.sleep(0.1)


def start(
    folder: Path,
    overrides: Sequence[str],
    *,
    steps: int,
    defaults: Sequence[str] = BASE,
    program: Sequence[str] = ("-m", "verl.trainer.main_ppo"),
    **env: str,
) -> Run:
    """Start a job in a folder of its own; `env` adds environment variables, `program` is what takes the overrides."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        **QUIET,
        "OMP_NUM_THREADS": "1",  # two jobs run at a time, on two cores
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "RAY_TMPDIR": str(folder / "ray"),
        "PYTHONPATH": str(HERE),
        "PYTHONUNBUFFERED": "1",
        **env,
    }
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    command = [
        sys.executable,
        *program,
        *defaults,
        *NO_DASHBOARD,
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"hydra.run.dir={folder / 'hydra'}",
        *overrides,
    ]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Run(folder, process)


def run(folder: Path, overrides: Sequence[str], *, steps: int, timeout: float = 420, **kwargs) -> Run:
    """Start a job, wait for its end and check that it ended well."""
    job = start(folder, overrides, steps=steps, **kwargs).wait(timeout)
    assert job.returncode == 0, f"exit status {job.returncode} after {job.seconds:.0f} s:\n{job.log[-4000:]}"
    return job
