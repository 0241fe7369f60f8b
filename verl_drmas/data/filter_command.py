"""`verl-drmas data filter`: keep the prompts that a team solves as often as asked for."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import typer

from verl_drmas.data.filter import Band, Kept, Played, indices_of, read_prompts, tallies_of_run, write_band
from verl_drmas.evaluation.journal import digest
from verl_drmas.evaluation.workflow import build_workflow, gold_of, preflight, task_of
from verl_drmas.workflows import Task, Workflow

if TYPE_CHECKING:
    from verl_drmas.evaluation.completions import ServedModel
    from verl_drmas.evaluation.endpoint import Sampling
    from verl_drmas.evaluation.sessions import Session

MODEL = "served"


def filter_command(
    prompts: Annotated[Path, typer.Argument(help="Parquet file of prompts.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.")],
    low: Annotated[float, typer.Option(help="Lowest success rate that is kept.")] = 0.0,
    high: Annotated[float, typer.Option(help="Highest success rate that is kept.")] = 0.5,
    samples: Annotated[int, typer.Option(metavar="K", help="Ended sessions that a prompt's rate needs.")] = 8,
    keep_unmeasured: Annotated[bool, typer.Option(help="Keep prompts with fewer ended sessions.")] = False,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take the rates from a run's trainer.rollout_data_dir.")
    ] = None,
    until_step: Annotated[int | None, typer.Option(help="With --run: the last step to read.")] = None,
    workflow: Annotated[str | None, typer.Option(help="The team: a registry name, or package.module:Class.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of drmas.workflow; may be repeated.")
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="Server of the model, http://host:port/v1; may be repeated.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name there; all agents are on it.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the key.")] = None,
    calls: Annotated[
        str, typer.Option(help="Who reads agents' tool calls: the server, or we in its text (Hermes, Qwen).")
    ] = "server",
    concurrency: Annotated[int, typer.Option(help="Sessions at once, and calls in flight.")] = 32,
    temperature: Annotated[float, typer.Option(help="Of all agents.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="Of all agents.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one turn.")] = None,
    seed: Annotated[int | None, typer.Option(help="Hashed into each request; default none.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a session may take.")] = 1800.0,
) -> None:
    """Keep the prompts whose success rate is within a band, measured with a served model or taken from a run."""
    try:
        if output.suffix != ".parquet":
            raise ValueError(f"--output {output}: give a file that ends in .parquet")
        if output.resolve() == prompts.resolve():
            raise ValueError(f"--output {output}: is the file of prompts; give another")
        band = Band(low, high, samples, keep_unmeasured)
        if run is not None:
            _refuse_both(workflow=workflow, setting=setting, url=url, model=model)
            table = read_prompts(prompts)
            golds = dict(zip(indices_of(table), map(gold_of, _rewards(table)), strict=True))
            kept = write_band(table, tallies_of_run(run, golds, until_step), band, output)
        else:
            if until_step is not None:
                raise ValueError("--until-step: is for --run")
            from verl_drmas.evaluation.completions import ServedModel, patience_of
            from verl_drmas.evaluation.endpoint import Sampling

            name = _given("--workflow", workflow)
            served = ServedModel(
                urls=tuple(url or ()),
                model=_given("--model", model),
                api_key_env=api_key_env,
                calls=calls,
                **patience_of(concurrency, timeout),
            )
            team = build_workflow(name, setting or [])
            table = read_prompts(prompts, needs_answer=team.needs_answer)
            sampling = Sampling(temperature, top_p, max_tokens, seed)
            with _journal(output, table, name, setting or [], served, sampling) as journal:
                _measure(table, team, served, sampling, journal, samples, concurrency, timeout)
            kept = write_band(table, journal.tallies, band, output)
            typer.echo(f"note: sessions are kept in {journal.path}; another band plays none of them again", err=True)
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    _tell(kept, band, output)


def _measure(
    table: pa.Table,
    workflow: Workflow,
    served: ServedModel,
    sampling: Sampling,
    journal: Played,
    samples: int,
    concurrency: int,
    timeout: float,
) -> None:
    """Play what is left to play.

    Raises:
        ValueError: The servers, or what the workflow needs, aren't there, or stopped answering.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from verl_drmas.evaluation.completions import Completions
    from verl_drmas.evaluation.endpoint import EndpointTeam
    from verl_drmas.evaluation.sessions import TooManyFailed, play_sessions
    from verl_drmas.serving.client import Unanswered

    numbers = {index: number for number, index in enumerate(indices_of(table))}
    left = journal.open_sessions(numbers, samples)
    if not left:
        return
    model, agents = Completions(served), dict.fromkeys(workflow.agents, MODEL)
    tasks = (task_of(table.slice(numbers[index], 1).to_pylist()[0], session) for index, session in left)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    total, failed = len(numbers) * samples, 0
    bar = progress.add_task("sessions", total=total, completed=total - len(left))

    def note(session: Session) -> None:
        nonlocal failed
        task = session.task
        journal.add(task.index, task.session, session.success, session.failed, session.detail)
        failed += bool(session.failed)
        progress.update(bar, advance=1, description=f"sessions ({failed} failed)" if failed else "sessions")

    async def play() -> None:
        def team_of(task: Task) -> EndpointTeam:
            return EndpointTeam({MODEL: model}, agents, task, sampling)

        try:
            await play_sessions(workflow, tasks, team_of, note, concurrency=concurrency, timeout=timeout)
        finally:
            await asyncio.gather(workflow.close(), model.close())

    try:
        for line in (model.check(), preflight(workflow)):
            if line:
                typer.echo(f"note: {line}", err=True)
        with progress:
            asyncio.run(play())
    except Unanswered as error:
        raise ValueError(f"--url: {error}") from error
    except TooManyFailed as error:
        raise ValueError(
            f"{error}; what ended is kept in {journal.path}: the same command goes on from there"
        ) from error


def _journal(
    output: Path, table: pa.Table, workflow: str, settings: list[str], served: ServedModel, sampling: Sampling
) -> Played:
    columns = table.select([name for name in ("prompt", "reward_model") if name in table.column_names])
    measured = {
        "file of prompts": digest([indices_of(table), columns.to_pylist()]),
        "workflow": workflow,
        "setting": sorted(settings),
        "model": served.model,
        "sampling": asdict(sampling),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    return Played(output.with_name(f"{output.stem}.partial.jsonl"), measured)


def _rewards(table: pa.Table) -> list[Any]:
    return table["reward_model"].to_pylist() if "reward_model" in table.column_names else [None] * len(table)


def _given(option: str, value: str | None) -> str:
    if value is None:
        raise ValueError(f"{option} is missing; measuring needs --workflow, --url and --model (or give --run)")
    return value


def _refuse_both(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"--{name}: rates come from --run, where nothing is played; drop one of the two")


def _tell(kept: Kept, band: Band, output: Path) -> None:
    if kept.failed:
        typer.echo(f"note: {kept.failed} sessions failed; they count as neither right nor wrong", err=True)
    if kept.unmeasured:
        shown = ", ".join(map(str, kept.unmeasured[:8])) + (", ..." if len(kept.unmeasured) > 8 else "")
        what = "kept" if band.keep_unmeasured else "left out (--keep-unmeasured keeps them)"
        typer.echo(
            f"note: {len(kept.unmeasured)} prompts with fewer than {band.samples} ended sessions are {what}: {shown}",
            err=True,
        )
    typer.echo(
        f"wrote {kept.kept} of {kept.rows} prompts with a success rate from {band.low:g} to {band.high:g} to {output} "
        f"({kept.below} below, {kept.above} above)"
    )
