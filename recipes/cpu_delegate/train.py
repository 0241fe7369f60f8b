"""The delegating team's CPU job as one command: warm start, training with M-GRPO through stock verl, a closing table.

A main agent plans and asks a sub-agent for one person after the other; the sub-agent searches a small world and reads.
Both are trained, each on a model of its own. Exit status 0 only if the team learned: exact match and the judge's score
of the sub-agent rose by 0.1 from the first to the last fifth of the run. Neither agent can do it alone: the main agent
has no tool to search with, and the sub-agent never sees the question.
"""

from pathlib import Path
from typing import Annotated

import typer

from recipes import cpu_job
from recipes.cpu_delegate.lessons import FINDER
from recipes.cpu_delegate.warm_start import TEAM, WarmStart, turns_of, warm_start
from recipes.cpu_search.teaching import Settings
from verl_drmas.report.verdict import Criterion

CONFIG = "cpu_delegate"
LEARNED = Criterion(rising=("drmas/workflow/em", "drmas/workflow/judge_score"), classes=())


def own_overrides(start: WarmStart, seed: int, hops: int) -> list[str]:
    """Returns the Hydra overrides that name models, data and index, and leave turns enough for the questions."""
    models = {"main": "main", FINDER: "sub"}
    return [
        f"data.train_files={start.train}",
        f"data.val_files={start.val}",
        *(f"drmas.models.{m}.actor_rollout_ref.model.path={start.models[agent]}" for agent, m in models.items()),
        f"actor_rollout_ref.model.path={start.models['main']}",
        f"drmas.workflow.tools.search.retrieval.local={start.index}",
        f"drmas.workflow.max_turns={turns_of(hops)}",
        f"drmas.request_seed={seed}",
    ]


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for verl.")] = None,
    run: Annotated[Path, typer.Option(help="Folder of the run's files.")] = Path("runs") / CONFIG,
    start: Annotated[Path, typer.Option(help="Cache of warm starts.")] = Path("runs/warm_start"),
    hops: Annotated[int, typer.Option(help="Delegations a question takes.")] = 2,
    seed: Annotated[int, typer.Option(help="Of weights, world, data split and every request.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds the training may take.")] = 1800,
) -> None:
    """Warm-start two tiny models and train a main agent and its sub-agent on them with M-GRPO."""
    cpu_job.log_plainly()
    made = warm_start(start.resolve(), Settings(team=TEAM, seed=seed, hops=hops))
    cpu_job.train(CONFIG, run.resolve(), [*own_overrides(made, seed, hops), *(overrides or [])], timeout)
    raise typer.Exit(0 if cpu_job.close(run.resolve(), CONFIG, LEARNED) else 1)


if __name__ == "__main__":
    typer.run(main)
