"""Runs one training job on a CPU through verl's own command, and shows the first session and the steps as they come."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from verl_drmas.quoting import quoted
from verl_drmas.report.curves import draw
from verl_drmas.report.runlog import read_run
from verl_drmas.report.table import as_dict, table
from verl_drmas.report.verdict import Criterion, learned

# Two cores serve a trainer, an engine and Ray's daemons: more threads than that only wait for each other.
QUIET = {
    "VERL_PLATFORM": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "TQ_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # With the first log-probs vLLM would compile a function that counts: many seconds for what is a moment without.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
SESSION = re.compile(r"first session .*?\n[^\n]* session: [^\n]*", re.DOTALL)
RAY_PREFIX = re.compile(r"^\x1b\[\d+m\(.*? pid=\d+\)\x1b\[0m ")


def log_plainly() -> None:
    """Show what the warm starts log, as it is."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")


def train(config: str, run: Path, overrides: Sequence[str], timeout: float) -> None:
    """Train with verl's own command; its output goes to `run/verl.log`, the first session to the terminal as well.

    Args:
        config: Hydra file, below ``configs``.
        run: folder of the run's files.
        overrides: Hydra's.
        timeout: seconds that verl may take.

    Raises:
        typer.Exit: verl ended with another status than 0; the end of its log was printed.
    """
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").unlink(missing_ok=True)
    environment = {**os.environ, **QUIET, "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl")}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # an empty one crashes vLLM, and the config sets the size in bytes
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", config]
    command += [f"hydra.run.dir={quoted(run / 'hydra')}"]
    command += [f"trainer.default_local_dir={quoted(run / 'checkpoints')}", *overrides]
    (run / "command.json").write_text(json.dumps(command, indent=2) + "\n")
    with (run / "verl.log").open("w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        status = _follow(job, run, timeout)
    if status:
        tail = (run / "verl.log").read_text(errors="replace")[-3000:]
        Console(stderr=True).print(f"verl ended with status {status}:\n{tail}", markup=False, highlight=False)
        raise typer.Exit(status)


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


def close(run: Path, name: str, criterion: Criterion | None = None) -> bool:
    """Print the closing table of the run so named, draw the curves, and say whether the team learned.

    Args:
        run: folder of the run's files.
        name: of the run in the table and the figure.
        criterion: what counts as learning; the solver-verifier team's by default.
    """
    console = Console()
    log = read_run(run / "metrics.jsonl", name=name)
    console.print(table(log))
    picture = draw(log, run / "curves.png")
    passed, tests = learned(log, criterion)
    (run / "result.json").write_text(json.dumps({"learned": passed, "tests": tests, "table": as_dict(log)}, indent=2))
    console.print("the team learned" if passed else f"the team did not learn: {tests}", highlight=False)
    console.print(f"curves {picture}\nmetrics {run / 'metrics.jsonl'}\nlog {run / 'verl.log'}", highlight=False)
    return passed
