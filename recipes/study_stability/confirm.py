"""Confirms the study through stock verl and vLLM: a tiny team whose solver acts 1 to 3 times, two estimators.

The team is `retry.py` on the warm starts of recipes/cpu_arithmetic, a model an agent, so that each agent has a gradient
norm. One job of two tiny models takes some 10 GiB of memory, both cores and several minutes; jobs run one after the
other. What the jobs logged is read as `verl-drmas report` reads it and written to ``confirm.md``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from recipes import cpu_job
from recipes.cpu_arithmetic.mappings import MAPPINGS, Name, TeamModels, prepare
from recipes.cpu_arithmetic.warm_start import WarmStart
from verl_drmas.report.runlog import RunLog, mean, read_run
from verl_drmas.report.spikes import spikes

ESTIMATORS = ("grpo_team", "drmas")
ROUNDS = 3
MODELS = {"solver": "llama", "verifier": "qwen3"}  # of the mapping `separate`
ROOT = Path(__file__).resolve().parents[2]


def own_overrides(team: TeamModels, starts: dict[str, WarmStart], estimator: str, seed: int, steps: int) -> list[str]:
    """Returns the Hydra overrides that make the arithmetic job this team's, with one estimator and one seed."""
    return [
        *team.overrides(starts),
        "drmas.workflow.name=recipes.study_stability.retry:Retry",
        "~drmas.workflow.balanced",
        f"+drmas.workflow.max_rounds={ROUNDS}",
        f"drmas.request_seed={seed}",
        f"data.seed={seed}",
        f"algorithm.adv_estimator={estimator}",
        f"trainer.total_training_steps={steps}",
    ]


def markdown(logs: Sequence[RunLog]) -> str:
    """Returns a table of the runs: success, and for each agent and its model what the study looks at.

    Raises:
        KeyError: a run logged no gradient norm of an agent's model.
    """
    head = ["run", "agent", "success, first and last fifth", "activations a session", "F", "largest F"]
    head += ["median gradient norm", "largest", "spikes"]
    rows = [head, ["---"] * len(head)]
    for log in logs:
        first, last = log.fifths()
        success = " to ".join(_number(mean(steps, "drmas/workflow/solver_success")) for steps in (first, last))
        norms = {norm.model: norm for norm in spikes(log)}
        for agent, model in MODELS.items():
            norm = norms[model]
            values = [
                log.series(f"drmas/agent/{agent}/{name}")[1]
                for name in ("activations_per_session", "inflation_factor/mean", "inflation_factor/max")
            ]
            acts, factor = (sum(v) / len(v) if v else None for v in values[:2])
            rows.append(
                [
                    log.name,
                    agent,
                    success,
                    _number(acts),
                    _number(factor),
                    _number(max(values[2], default=None)),
                    _number(norm.median, 3),
                    _number(norm.highest, 3),
                    f"{len(norm.steps)} of {norm.judged}",
                ]
            )
    return "# Through real verl\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _number(value: float | None, digits: int = 2) -> str:
    return "not logged" if value is None else f"{value:.{digits}f}"


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for verl.")] = None,
    run: Annotated[Path, typer.Option(help="Folder of the jobs' folders.")] = Path("runs/study_confirm"),
    start: Annotated[Path, typer.Option(help="Cache of warm starts.")] = Path("runs/warm_start"),
    seeds: Annotated[int, typer.Option(help="Of each estimator, from 1.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Of each job.", min=5)] = 30,
    timeout: Annotated[float, typer.Option(help="Seconds a job may take.")] = 900,
) -> None:
    """Train the retrying team with both estimators and write what their logs say of the study's claims."""
    cpu_job.log_plainly()
    team = MAPPINGS[Name.SEPARATE]
    # Ray's workers import the workflow by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    logs = []
    for seed in range(1, seeds + 1):
        starts = prepare(start.resolve(), team.models, seed)
        for estimator in ESTIMATORS:
            folder = run.resolve() / f"{estimator}-seed{seed}"
            own = own_overrides(team, starts, estimator, seed, steps)
            cpu_job.train(team.config, folder, [*own, *(overrides or [])], timeout)
            logs.append(read_run(folder / "metrics.jsonl", name=folder.name))
    (run / "confirm.md").write_text(markdown(logs))
    typer.echo(markdown(logs))


if __name__ == "__main__":
    typer.run(main)
