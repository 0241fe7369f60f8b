"""One run of the math study of Dr. MAS: `python run.py --size 4b --mapping shared --estimator drmas --seed 0`.

Prints the command and becomes it; `--dry-run` prints it, `--list` prints the runs of the paper's tables. The values are
in the shipped configurations; what each is and where it comes from stands in README.md.
"""

from pathlib import Path
from typing import Annotated

import typer

from verl_drmas.config import ConfigError
from verl_drmas.study.cells import Cell, Study, chosen_estimator, columns

STUDY = Study(
    project="drmas_math",
    models={"4b": "qwen3_4b", "8b": "qwen3_8b"},
    configs={"single": "drmas_math_single", "shared": "drmas_math", "separate": "drmas_math_separate"},
    teams={"four_agents": {"shared": "drmas_math_four_agents", "separate": "drmas_math_four_agents_separate"}},
    tables={
        "table1": columns("4b", "8b"),
        # Beyond the paper: statistics over activations, of all agents together, which parts its two changes.
        "control": [Cell(size, name, "grpo_activation") for size in ("4b", "8b") for name in ("shared", "separate")],
        # The reference code's variants, on its scripts' models. Each goes with any size, mapping and estimator.
        "dapo": [Cell("4b", "separate", name, "dapo") for name in ("grpo_team", "drmas")],
        "gspo": [Cell("4b", "separate", name, "gspo") for name in ("grpo_team", "drmas")],
        "four_agents": [
            Cell("4b", mapping, name, "four_agents")
            for mapping in ("shared", "separate")
            for name in ("grpo_team", "drmas")
        ],
    },
)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for verl.")] = None,
    size: Annotated[str, typer.Option(help="4b or 8b (Qwen3).")] = "4b",
    mapping: Annotated[str, typer.Option(help="single, shared or separate.")] = "shared",
    estimator: Annotated[
        str | None,
        typer.Option(help="drmas, grpo_team, drmas_mean, drmas_std or grpo_activation; grpo for a single agent."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the data's order and the engines' sampling.")] = 0,
    engine: Annotated[str, typer.Option(help="fsdp2 or megatron.")] = "fsdp2",
    variant: Annotated[str | None, typer.Option(help="dapo, gspo or four_agents.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, start nothing.")] = False,
    list_: Annotated[
        str | None, typer.Option("--list", metavar="TABLE", help="Print the runs of a table, or of `all`.")
    ] = None,
) -> None:
    """Train one cell of the study."""
    try:
        if list_ is not None:
            typer.echo(STUDY.listed(None if list_ == "all" else list_))
            return
        cell = Cell(size, mapping, chosen_estimator(mapping, estimator), variant, engine)
        run = STUDY.launch(cell, seed=seed, runs=runs, further=overrides or [])
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(run.shown())
    if not dry_run:
        run.start()


if __name__ == "__main__":
    typer.run(main)
