"""One run of the search study of Dr. MAS: `python run.py --size 3b --mapping shared --estimator drmas --seed 0`.

Prints the command and becomes it; `--dry-run` prints it, `--list` prints the runs of the paper's tables. The values are
in the shipped configurations; what each is and where it comes from stands in README.md.
"""

from pathlib import Path
from typing import Annotated

import typer

from verl_drmas.config import ConfigError
from verl_drmas.quoting import quoted
from verl_drmas.study.cells import SINGLE, Cell, Study, chosen_estimator, columns
from verl_drmas.study.launch import Launch

STUDY = Study(
    project="drmas_search",
    models={"3b": "qwen2.5_3b", "7b": "qwen2.5_7b"},
    configs={
        "single": "drmas_search_single",
        "shared": "drmas_search",
        "separate": "drmas_search_separate",
        "heterogeneous": "drmas_search_heterogeneous",
    },
    sizes={"heterogeneous": ("7b",)},  # the verifier's; search and answer have Llama-3.2-3B-Instruct
    tables={
        "table2": columns("3b", "7b"),
        "table3": [Cell("7b", "separate", name) for name in ("grpo_team", "drmas_mean", "drmas_std", "drmas")],
        "heterogeneous": [Cell("7b", "shared", "drmas"), Cell("7b", "heterogeneous", "drmas")],
        "gradient_norms": [Cell(size, "separate", name) for size in ("3b", "7b") for name in ("grpo_team", "drmas")],
        # Beyond the paper: statistics over activations, of all agents together, which parts its two changes.
        "control": [Cell(size, name, "grpo_activation") for size in ("3b", "7b") for name in ("shared", "separate")],
        # The reference code's variants, on its scripts' models. Each goes with any size, mapping and estimator.
        "dapo": [Cell("7b", "separate", name, "dapo") for name in ("grpo_team", "drmas")],
        "gspo": [Cell("3b", "shared", name, "gspo") for name in ("grpo_team", "drmas")],
    },
)
TOOL = Path(__file__).resolve().parent / "search_tool.yaml"  # the single agent's, for verl's own registry


def plan(cell: Cell, *, seed: int, runs: Path, retriever: str, further: list[str]) -> Launch:
    """The run of a cell, with the address of its search server (several: with commas between)."""
    urls = f"[{retriever}]"
    if cell.mapping == SINGLE:
        overrides = [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={quoted(TOOL)}"]
        variables = {"DRMAS_RETRIEVER_URLS": urls}
        return STUDY.launch(cell, seed=seed, runs=runs, overrides=overrides, environment=variables, further=further)
    return STUDY.launch(
        cell, seed=seed, runs=runs, overrides=[f"drmas.workflow.retrieval.urls={urls}"], further=further
    )


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for verl.")] = None,
    size: Annotated[str, typer.Option(help="3b or 7b (Qwen2.5).")] = "3b",
    mapping: Annotated[str, typer.Option(help="single, shared, separate or (7b) heterogeneous.")] = "shared",
    estimator: Annotated[
        str | None,
        typer.Option(help="drmas, grpo_team, drmas_mean, drmas_std or grpo_activation; grpo for a single agent."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the data's order and the engines' sampling.")] = 0,
    engine: Annotated[str, typer.Option(help="fsdp2 or megatron.")] = "fsdp2",
    variant: Annotated[str | None, typer.Option(help="dapo or gspo.")] = None,
    retriever: Annotated[str, typer.Option(help="Address of the search server; several with commas between.")] = (
        "http://127.0.0.1:8000"
    ),
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
        run = plan(cell, seed=seed, runs=runs, retriever=retriever, further=overrides or [])
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(run.shown())
    if not dry_run:
        run.start()


if __name__ == "__main__":
    typer.run(main)
