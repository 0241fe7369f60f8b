"""`verl-drmas eval`: a team against served models, with the papers' numbers, tokens, latency and cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from verl_drmas.evaluation.results import Results
    from verl_drmas.evaluation.sessions import Session
    from verl_drmas.evaluation.team import Evaluated

eval_app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@eval_app.command()
def evaluate(
    data: Annotated[list[Path], typer.Argument(help="verl's parquet files, or JSONL of questions and answers.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL of sessions; what it holds isn't played.")],
    workflow: Annotated[str | None, typer.Option(help="The team: a registry name, or package.module:Class.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of drmas.workflow; may be repeated.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Training configuration whose team it is: a run's .hydra/config.yaml, or a name of ours."),
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="Server of the model, http://host:port/v1; may be repeated.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name there; all agents are on it.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the key.")] = None,
    calls: Annotated[
        str, typer.Option(help="Who reads agents' tool calls: the server, or we in its text (Hermes, Qwen).")
    ] = "server",
    endpoints: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of several models and of agents; instead of --url.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Sessions of each prompt.")] = 1,
    k: Annotated[
        list[int] | None, typer.Option("--k", help="Of pass@k; may be repeated. Default: powers of two, and n.")
    ] = None,
    runs: Annotated[int, typer.Option(help="How often the whole of it; the mean is reported.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Hashed into each request, in run r as seed + r.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first rows.")] = None,
    temperature: Annotated[float, typer.Option(help="Of all agents.")] = 0.6,
    top_p: Annotated[float, typer.Option(help="Of all agents.")] = 0.95,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one turn.")] = None,
    concurrency: Annotated[int, typer.Option(help="Sessions at once, and calls in flight.")] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds that a session, and so a call, may take.")] = 1800.0,
    prices: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML of prices per million tokens.")] = None,
    texts: Annotated[bool, typer.Option("--texts", help="Keep what the agents said in the sessions' file.")] = False,
    summary: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers there.")] = None,
    kind: Annotated[
        str, typer.Option(help="How plain rows are read: math (one gold), search (several), or auto.")
    ] = "auto",
    question_key: Annotated[str | None, typer.Option(help="Column of the question in plain rows.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the answer in plain rows.")] = None,
) -> None:
    """Evaluate a team against OpenAI-compatible servers: avg@k, pass@k, tokens, latency and cost per agent.

    Each finished session is on the disk at once; the same command goes on where it stopped. A session that fails is
    counted apart and never as wrong, and servers that don't answer end it with status 1.
    """
    try:
        from verl_drmas.data.parquet import whole_file
        from verl_drmas.evaluation.completions import ServedModel, patience_of
        from verl_drmas.evaluation.endpoint import Sampling
        from verl_drmas.evaluation.results import Asked, Results
        from verl_drmas.evaluation.rows import read_files
        from verl_drmas.evaluation.score import usual_ks
        from verl_drmas.evaluation.summary import summarise
        from verl_drmas.evaluation.team import build_team, read_endpoints
        from verl_drmas.evaluation.training import read_training
        from verl_drmas.evaluation.usage import read_prices
    except ImportError as error:
        _refuse(ImportError(f"{error}; pip install 'verl-drmas[search]'"))
    try:
        _check(url=url, model=model, endpoints=endpoints, api_key_env=api_key_env)
        _positive(samples=samples, runs=runs, limit=limit, concurrency=concurrency, timeout=timeout)
        if kind not in ("auto", "math", "search"):
            raise ValueError(f"--kind is {kind!r}; choose auto, math or search")
        ks = sorted(set(k)) if k else usual_ks(samples)
        if ks and not 1 <= ks[0] <= ks[-1] <= samples:
            raise ValueError(f"--k {ks[-1]}: pass@k needs 1 <= k <= --samples ({samples})")
        patience = patience_of(concurrency, timeout)
        one = None
        if endpoints is None and (url or model):
            one = ServedModel(tuple(url or ()), model or "", api_key_env=api_key_env, calls=calls, **patience)
        team = build_team(
            workflow=workflow,
            settings=setting or [],
            training=read_training(config) if config else None,
            endpoints=read_endpoints(endpoints, patience) if endpoints else None,
            one=one,
            sampling=Sampling(temperature, top_p, max_tokens),
        )
        price_file = read_prices(prices) if prices else None
        priced = price_file.of({m: served.model for m, served in team.models.items()}) if price_file else None
        rows = read_files(
            data,
            needs_answer=team.workflow.needs_answer,
            kind=kind,
            question_key=question_key,
            answer_key=answer_key,
        )
        for note in rows.notes:
            typer.echo(f"note: {note}", err=True)
        asked = Asked(min(limit or len(rows.rows), len(rows.rows)), samples, runs)
        measured = {**team.measured(), "seed": seed, **rows.measured()}
        with Results(output.expanduser(), measured, asked, texts=texts, concurrency=concurrency) as results:
            _play(team, rows.rows, results, seed=seed, timeout=timeout)
            currency = price_file.currency if price_file else ""
            found = summarise(team, rows.sources, results, ks, priced, currency)
        if summary is not None:
            with whole_file(summary.expanduser()) as partial:
                partial.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except (ValueError, ImportError, OSError) as error:
        _refuse(error)
    _show(found)
    if not found["sessions"]["ended"]:
        raise typer.Exit(1)


def _play(team: Evaluated, rows: list[dict[str, Any]], results: Results, *, seed: int | None, timeout: float) -> None:
    """Play what is left, under a bar.

    Raises:
        ValueError: Endpoints or tools aren't fit, or stopped answering.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from verl_drmas.evaluation.run import Stopped, look, open_models, play
    from verl_drmas.evaluation.workflow import preflight

    left = len(results.left())
    if not left:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    bar = progress.add_task("sessions", total=len(results.asked), completed=len(results.asked) - left)

    def note(session: Session) -> None:
        failed = len(results.failed)
        progress.update(bar, completed=len(results.ended) + failed)
        progress.update(bar, description=f"sessions ({failed} failed)" if failed else "sessions")

    models = open_models(team)
    try:
        results.served_from(look(models))
        if told := preflight(team.workflow):
            typer.echo(f"note: {told}", err=True)
        if left < len(results.asked):
            kept = len(results.asked) - left
            typer.echo(f"note: {kept} sessions are in {results.path} and aren't played again", err=True)
        with progress:
            play(team, rows, results, models, seed=seed, timeout=timeout, on_end=note)
    except Stopped as error:
        raise ValueError(str(error)) from error
    except KeyboardInterrupt:
        typer.echo(f"stopped; {len(results.ended)} sessions are kept in {results.path}", err=True)
        raise typer.Exit(130) from None


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    from verl_drmas.evaluation.tables import failed_line, tables_of

    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in tables_of(found):
        console.print(table)
    if line := failed_line(found):
        console.print(line, markup=False, soft_wrap=True)


def _check(*, url: list[str] | None, model: str | None, endpoints: Path | None, api_key_env: str | None) -> None:
    if endpoints is not None:
        for option, value in {"url": url, "model": model, "api-key-env": api_key_env}.items():
            if value:
                raise ValueError(f"--{option}: the models are those of --endpoints; drop one of the two")
    elif bool(url) != bool(model):
        raise ValueError(f"--{'model' if url else 'url'} is missing; a served model has both")


def _positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"--{name} is {value:g}; it must be above 0")


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1) from error
