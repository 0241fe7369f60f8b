"""The search team's CPU job as one command: warm start, training through stock verl and vLLM, a closing table.

Three agents share one tiny model and search a world of 40 people (`verl-drmas data world`) with the bundled workflow
and its own prompts; the index is loaded into the rollout process. Exit status 0 only if the team learned: exact match
rose by 0.1 from the first to the last fifth of the run, and the verifier is better than chance on evidence with and
without the answer. The answer to a question stands in none of the passages on the way to it but the last, so a team
that doesn't search twice has nothing to copy it from.
"""

from pathlib import Path
from typing import Annotated

import typer

from recipes import cpu_job
from recipes.cpu_search.teaching import DEFAULT_TURNS, Settings
from recipes.cpu_search.warm_start import WarmStart, warm_start
from verl_drmas.report.verdict import Criterion

CONFIG = "cpu_search"
LEARNED = Criterion(rising=("drmas/workflow/em",))


def own_overrides(start: WarmStart, seed: int, hops: int) -> list[str]:
    """Returns the Hydra overrides that name model, data and index, and leave turns enough for the questions."""
    return [
        f"data.train_files={start.train}",
        f"data.val_files={start.val}",
        f"actor_rollout_ref.model.path={start.model}",
        f"drmas.workflow.retrieval.local={start.index}",
        f"drmas.workflow.max_turns={max(DEFAULT_TURNS, hops + 1)}",
        f"drmas.request_seed={seed}",
    ]


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for verl.")] = None,
    run: Annotated[Path, typer.Option(help="Folder of the run's files.")] = Path("runs") / CONFIG,
    start: Annotated[Path, typer.Option(help="Cache of warm starts.")] = Path("runs/warm_start"),
    hops: Annotated[int, typer.Option(help="Searches a question takes.")] = 2,
    seed: Annotated[int, typer.Option(help="Of weights, world, data split and every request.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds the training may take.")] = 1800,
) -> None:
    """Warm-start a tiny model and train the search team on it with Dr. MAS."""
    cpu_job.log_plainly()
    made = warm_start(start.resolve(), Settings(seed=seed, hops=hops))
    cpu_job.train(CONFIG, run.resolve(), [*own_overrides(made, seed, hops), *(overrides or [])], timeout)
    raise typer.Exit(0 if cpu_job.close(run.resolve(), CONFIG, LEARNED) else 1)


if __name__ == "__main__":
    typer.run(main)
