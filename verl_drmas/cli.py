"""The command `verl-drmas`. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # among them may be a token or a key
    help="Teams of language-model agents on stock verl. Training itself is verl's: python -m verl.trainer.main_ppo",
)

# The arguments after these commands belong to someone else: Hydra overrides, or an app of its own.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command()
def doctor() -> None:
    """Check this environment; exit 1 with a fix for each problem."""
    from verl_drmas.doctor import main as run

    raise typer.Exit(run())


@app.command(context_settings=PASS_ON)
def check(context: typer.Context) -> None:
    """Check a training configuration without starting Ray; takes the arguments of verl.trainer.main_ppo."""
    from verl_drmas.check_command import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings=PASS_ON)
def plan(context: typer.Context) -> None:
    """Estimate what a configuration needs of each GPU, without one; main_ppo's arguments and --gpu-memory GIB (80)."""
    from verl_drmas.plan.command import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings=PASS_ON, add_help_option=False)
def data(context: typer.Context) -> None:
    """Build the parquet files that training and validation read."""
    from verl_drmas.data.commands import data_app

    data_app(args=context.args, prog_name="verl-drmas data")


@app.command(context_settings=PASS_ON, add_help_option=False)
def retriever(context: typer.Context) -> None:
    """Build an index of passages, and serve it to rollout workers."""
    from verl_drmas.retrieval.commands import retriever_app

    retriever_app(args=context.args, prog_name="verl-drmas retriever")


@app.command("eval", context_settings=PASS_ON, add_help_option=False)
def evaluate(context: typer.Context) -> None:
    """Play a workflow on served models over a data set: avg@k, pass@k, tokens, latency and cost per agent."""
    from verl_drmas.evaluation.command import eval_app

    eval_app(args=context.args, prog_name="verl-drmas eval")


@app.command(context_settings=PASS_ON, add_help_option=False)
def judge(context: typer.Context) -> None:
    """Let a model judge the answers of an evaluation: the mean over its runs per benchmark, level and type."""
    from verl_drmas.evaluation.judge_command import judge_app

    judge_app(args=context.args, prog_name="verl-drmas judge")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Logs of verl's loggers, run folders, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.", metavar="DIR")] = Path("report"),
    tables: Annotated[str, typer.Option(help="The papers' tables: auto (those that a run belongs to), all, none.")] = (
        "auto"
    ),
    title: Annotated[str | None, typer.Option(help="Of the report.")] = None,
) -> None:
    """Lay runs beside the papers' numbers: tables, curves, spikes, time and tokens, as Markdown, HTML and PNG."""
    from verl_drmas.report.command import main as run

    raise typer.Exit(run(runs, out, tables=tables, title=title))


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="A run's folder, its trainer.rollout_data_dir, or one file of that.")],
    step: Annotated[
        list[int] | None, typer.Option(help="Which, several times; default: the one written last.", metavar="N")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every step that was dumped.")] = False,
    sessions: Annotated[
        int, typer.Option(help="Most sessions on a page; prompts are taken whole where they fit.", metavar="K")
    ] = 32,
    prompt: Annotated[
        list[int] | None, typer.Option(help="Show this prompt whole, by dataset index; several times.", metavar="INDEX")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sample of prompts.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder to write to.", metavar="DIR")] = Path("trace"),
) -> None:
    """Show what the team said in a step: sessions as conversations, with rewards and advantages, as one HTML file."""
    from verl_drmas.trace.command import main as run_it

    options = {"steps": step or (), "every": every, "sessions": sessions, "prompts": prompt or (), "seed": seed}
    raise typer.Exit(run_it(run, out, **options))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run's folder, its trainer.rollout_data_dir, or one file of that.")],
    step: Annotated[int, typer.Option(help="Of the run.", metavar="N")],
    estimator: Annotated[
        list[str] | None, typer.Option(help="As algorithm.adv_estimator, several times; default: the step's own.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting that shall differ, such as drmas.advantage.ddof=0.", metavar="KEY=VALUE"),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--json", help="Write everything, rows too, to this file.", metavar="FILE")
    ] = None,
) -> None:
    """Recompute a dumped step's advantages, by its own estimator or others, and compare them with those trained."""
    from verl_drmas.replay.command import main as run_it

    raise typer.Exit(run_it(run, step, estimator or (), settings or (), file))


@app.command(context_settings=PASS_ON, add_help_option=False)
def pair(context: typer.Context) -> None:
    """Start two decoupled jobs on this machine, or print how to start them on two."""
    from verl_drmas.pair.command import pair_app

    pair_app(args=context.args, prog_name="verl-drmas pair")


@app.command(context_settings=PASS_ON, add_help_option=False)
def store(context: typer.Context) -> None:
    """Look at, check and clean up the database that two decoupled jobs meet in."""
    from verl_drmas.store.commands import store_app

    store_app(args=context.args, prog_name="verl-drmas store")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A global_step_N folder, or one model's: .../actor/<model id>.")],
    out: Annotated[Path, typer.Option(help="Folder to write; of a global_step_N, DIR/<model id>.", metavar="DIR")],
    model: Annotated[str | None, typer.Option(help="Only this model of a global_step_N folder.", metavar="ID")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let transformers run code that comes with a model.")
    ] = False,
) -> None:
    """Write the models of a checkpoint in Hugging Face format."""
    from verl_drmas.export import main as run

    raise typer.Exit(run(checkpoint, out, model, trust_remote_code=trust_remote_code))


def main() -> None:
    """Entry point of the console script."""
    # Workflows and tools of the user's own are imported from the working folder, which `python -m` has on its path.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    app()


if __name__ == "__main__":
    main()
