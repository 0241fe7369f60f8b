"""The delegating team's CPU job as a pair (M-GRPO's decoupled pipeline): a job for the main agent, one for its finder.

Models, world and data are those of `recipes/cpu_delegate`. Each job has its own Ray cluster; they meet at the finder's
gateway and in a store, SQLite in the run's folder unless `--store` names another. Exit status 0 only if both jobs ended
well and `verl-drmas store verify` finds that no session was lost or trained twice.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from recipes import cpu_job
from recipes.cpu_delegate.lessons import FINDER
from recipes.cpu_delegate.warm_start import TEAM, WarmStart, turns_of, warm_start
from recipes.cpu_search.teaching import Settings
from verl_drmas.aside import keep_aside
from verl_drmas.pair.processes import die_with_parent

NAME = "cpu_pair"
CONFIGS = ("cpu_delegate_main", "cpu_delegate_sub")
CLI = [sys.executable, "-m", "verl_drmas.cli"]
STORE = "DRMAS_STORE"  # the variable that both commands read, so that no password is on a command line


def shared_overrides(start: WarmStart, seed: int, hops: int, steps: int) -> list[str]:
    """Returns the overrides that both jobs need alike."""
    return [
        f"drmas.workflow.tools.search.retrieval.local={start.index}",
        f"drmas.workflow.max_turns={turns_of(hops)}",
        f"drmas.request_seed={seed}",
        f"trainer.total_training_steps={steps}",
    ]


def main_overrides(start: WarmStart) -> list[str]:
    """Returns those of the job that plays the sessions; of the finder's model it needs the tokenizer."""
    models = {"main": "main", FINDER: "sub"}
    return [
        f"data.train_files={start.train}",
        f"data.val_files={start.val}",
        *(f"drmas.models.{m}.actor_rollout_ref.model.path={start.models[agent]}" for agent, m in models.items()),
        f"actor_rollout_ref.model.path={start.models['main']}",
    ]


def sub_overrides(start: WarmStart) -> list[str]:
    """Returns those of the job that trains the finder: no data files."""
    return [f"actor_rollout_ref.model.path={start.models[FINDER]}"]


def run_pair(command: list[str], environment: dict[str, str], timeout: float) -> int:
    """Run the pair; returns its exit status. It ends with all it started when this process does.

    Raises:
        typer.BadParameter: It took longer than `timeout` seconds.
    """
    pair = subprocess.Popen(command, env=environment, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    try:
        return pair.wait(timeout)
    except subprocess.TimeoutExpired:
        pair.terminate()
        raise typer.BadParameter(f"the pair took longer than {timeout:g} s") from None
    finally:
        pair.wait()  # Ctrl-C reaches it too


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for both jobs.")] = None,
    run: Annotated[Path, typer.Option(help="Folder of the run's files.")] = Path("runs") / NAME,
    start: Annotated[Path, typer.Option(help="Cache of warm starts.")] = Path("runs/warm_start"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    store: Annotated[str | None, typer.Option(envvar=STORE, help="URL of the store; default SQLite.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of both jobs.")] = 6,
    restarts: Annotated[int, typer.Option(help="How often, in all, a job that dies is started again.")] = 0,
    hops: Annotated[int, typer.Option(help="Delegations a question takes.")] = 2,
    seed: Annotated[int, typer.Option(help="Of weights, world, data split and every request.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds the pair may take.")] = 1800,
) -> None:
    """Warm-start two tiny models and train them in two jobs, with M-GRPO."""
    cpu_job.log_plainly()
    run = run.resolve()
    if not resume:
        keep_aside(run)  # it would be resumed
    made = warm_start(start.resolve(), Settings(team=TEAM, seed=seed, hops=hops))
    command = [*CLI, "pair", *CONFIGS, "--run-dir", str(run), "--restarts", str(restarts)]
    for job, own in (("main", main_overrides(made)), ("sub", sub_overrides(made))):
        for override in [*own, *shared_overrides(made, seed, hops, steps), *(overrides or [])]:
            command += [f"--{job}", override]
    # Two trainers and two engines on two cores: a thread each.
    environment = {**os.environ, **cpu_job.QUIET, "OMP_NUM_THREADS": "1"}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # an empty one crashes vLLM; the config sets the size in bytes
    environment[STORE] = store or f"sqlite:///{run / 'store.db'}"
    status = run_pair(command, environment, timeout)
    if status:
        raise typer.Exit(status)
    subprocess.run([*CLI, "store", "status"], env=environment, check=True)
    raise typer.Exit(subprocess.run([*CLI, "store", "verify"], env=environment, check=False).returncode)


if __name__ == "__main__":
    typer.run(main)
