"""The CPU job as one command: warm start, training through stock verl and vLLM, a closing table and a picture.

``--mapping`` says how the agents are spread over models (`mappings.py`); everything else is the same.
Exit status 0 only if the team learned: solver success and the verifier's balanced accuracy both rose by 0.1 from the
first to the last fifth of the run, and the verifier is better than chance on right and on wrong proposals.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.cpu_arithmetic.mappings import MAPPINGS, Name, TeamModels, log_plainly, prepare
from verl_drmas.report.curves import draw
from verl_drmas.report.runlog import read_run
from verl_drmas.report.table import as_dict, table
from verl_drmas.report.verdict import learned

# Two cores serve a trainer, an engine and Ray's daemons: more threads than that only wait for each other.
QUIET = {
    "VERL_PLATFORM": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "TQ_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
SESSION = re.compile(r"first session .*?\n[^\n]* session: [^\n]*", re.DOTALL)
RAY_PREFIX = re.compile(r"^\x1b\[\d+m\(.*? pid=\d+\)\x1b\[0m ")


def train(team: TeamModels, run: Path, start: Path, seed: int, overrides: list[str], timeout: float) -> int:
    """Train with verl's own command; its output goes to `run/verl.log`, the first session to the terminal as well.

    Args:
        team: what to train.
        run: folder of the run's files.
        start: cache of warm starts.
        seed: of weights, data split and every request.
        overrides: Hydra's, after the recipe's own.
        timeout: seconds that verl may take.

    Returns:
        verl's exit status.
    """
    starts = prepare(start, team.models, seed)
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").unlink(missing_ok=True)
    environment = {**os.environ, **QUIET, "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl")}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # an empty one crashes vLLM, and the config sets the size in bytes
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", team.config]
    command += [*team.overrides(starts), f"hydra.run.dir={run / 'hydra'}"]
    command += [f"trainer.default_local_dir={run / 'checkpoints'}", f"drmas.request_seed={seed}", *overrides]
    (run / "command.json").write_text(json.dumps(command, indent=2) + "\n")
    with (run / "verl.log").open("w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        return _follow(job, run, timeout)


def _follow(job: subprocess.Popen, run: Path, timeout: float) -> int:
    """Wait for the job, and show the first session and the steps as they come."""
    console, deadline = Console(), time.monotonic() + timeout
    shown, steps = False, 0
    while job.poll() is None:
        if time.monotonic() > deadline:
            job.kill()
            raise typer.BadParameter(f"the job took longer than {timeout:g} s; see {run / 'verl.log'}")
        time.sleep(1)
        log = (run / "verl.log").read_text(errors="replace")
        if not shown and (found := SESSION.search(log)):
            shown = True
            for line in found.group(0).splitlines():
                console.print(RAY_PREFIX.sub("", line), markup=False, highlight=False)
        metrics = run / "metrics.jsonl"
        lines = metrics.read_text().count("\n") if metrics.exists() else 0
        if lines >= steps + 10:
            steps = lines
            console.print(f"step {lines}", highlight=False)
    return job.returncode


def close(run: Path, name: str) -> bool:
    """Print the closing table of the run so named, draw the curves, and say whether the team learned."""
    console = Console()
    log = read_run(run / "metrics.jsonl", name=name)
    console.print(table(log))
    picture = draw(log, run / "curves.png")
    passed, tests = learned(log)
    (run / "result.json").write_text(json.dumps({"learned": passed, "tests": tests, "table": as_dict(log)}, indent=2))
    console.print("the team learned" if passed else f"the team did not learn: {tests}", highlight=False)
    console.print(f"curves {picture}\nmetrics {run / 'metrics.jsonl'}\nlog {run / 'verl.log'}", highlight=False)
    return passed


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for verl.")] = None,
    mapping: Annotated[Name, typer.Option(help="How the agents are spread over models.")] = Name.SHARED,
    run: Annotated[Path | None, typer.Option(help="Folder of the run's files; runs/<config> by default.")] = None,
    start: Annotated[Path, typer.Option(help="Cache of warm starts.")] = Path("runs/warm_start"),
    seed: Annotated[int, typer.Option(help="Of weights, data split and every request.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds the training may take.")] = 1800,
) -> None:
    """Warm-start tiny models and train the solver-verifier team on them with Dr. MAS."""
    log_plainly()
    team = MAPPINGS[mapping]
    run = (run or Path("runs") / team.config).resolve()
    status = train(team, run, start.resolve(), seed, overrides or [], timeout)
    if status:
        tail = (run / "verl.log").read_text(errors="replace")[-3000:]
        Console(stderr=True).print(f"verl ended with status {status}:\n{tail}", markup=False, highlight=False)
        raise typer.Exit(status)
    raise typer.Exit(0 if close(run, team.config) else 1)


if __name__ == "__main__":
    typer.run(main)
