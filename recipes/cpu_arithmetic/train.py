"""The CPU job as one command: warm start, training through stock verl and vLLM, a closing table and a picture.

``--mapping`` says how the agents are spread over models (`mappings.py`); everything else is the same.
Exit status 0 only if the team learned: solver success and the verifier's balanced accuracy both rose by 0.1 from the
first to the last fifth of the run, and the verifier is better than chance on right and on wrong proposals.
"""

from pathlib import Path
from typing import Annotated

import typer

from recipes import cpu_job
from recipes.cpu_arithmetic.mappings import MAPPINGS, Name, prepare


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for verl.")] = None,
    mapping: Annotated[Name, typer.Option(help="How the agents are spread over models.")] = Name.SHARED,
    run: Annotated[Path | None, typer.Option(help="Folder of the run's files; runs/<config> by default.")] = None,
    start: Annotated[Path, typer.Option(help="Cache of warm starts.")] = Path("runs/warm_start"),
    seed: Annotated[int, typer.Option(help="Of weights, data split and every request.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds the training may take.")] = 1800,
) -> None:
    """Warm-start tiny models and train the solver-verifier team on them with Dr. MAS."""
    cpu_job.log_plainly()
    team = MAPPINGS[mapping]
    run = (run or Path("runs") / team.config).resolve()
    starts = prepare(start.resolve(), team.models, seed)
    own = [*team.overrides(starts), f"drmas.request_seed={seed}", *(overrides or [])]
    cpu_job.train(team.config, run, own, timeout)
    raise typer.Exit(0 if cpu_job.close(run, team.config) else 1)


if __name__ == "__main__":
    typer.run(main)
