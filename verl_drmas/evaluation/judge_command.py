"""`verl-drmas judge`: which answers of an evaluation are right, by a model's verdict, with the mean over its runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from verl_drmas.evaluation.judged import Verdicts
    from verl_drmas.evaluation.rows import Rows
    from verl_drmas.rewards.judge import Judge

judge_app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@judge_app.command()
def judge(
    sessions: Annotated[Path, typer.Argument(help="JSONL of sessions, the --output of verl-drmas eval.")],
    data: Annotated[list[Path], typer.Argument(help="The files that it was played on, in the same order.")],
    url: Annotated[list[str], typer.Option(help="Server of the judging model, http://host:port/v1; may be repeated.")],
    model: Annotated[str, typer.Option(help="The model's name there.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSONL of verdicts; default beside the sessions.")
    ] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the key.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a verdict; a model that thinks needs many.")] = 2048,
    concurrency: Annotated[int, typer.Option(help="Judgements at once.")] = 32,
    requests_per_minute: Annotated[float | None, typer.Option(help="Most requests; default no limit.")] = None,
    by: Annotated[
        list[str] | None, typer.Option(help="Field of extra_info that groups questions; default level and type.")
    ] = None,
    summary: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers there.")] = None,
    kind: Annotated[str, typer.Option(help="How plain rows are read, as verl-drmas eval was told.")] = "auto",
    question_key: Annotated[str | None, typer.Option(help="Column of the question in plain rows; likewise.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the answer in plain rows; likewise.")] = None,
) -> None:
    """Judge the answers of an evaluation, and show each run, their mean and its standard error per benchmark and group.

    Each verdict is on the disk at once; the same command goes on where it stopped. An answer that couldn't be judged
    is neither right nor wrong, and ends the command with status 1; so does an evaluation that isn't finished.
    """
    try:
        from verl_drmas.data.parquet import whole_file
        from verl_drmas.evaluation.judged import Verdicts, read_sessions, summarise
        from verl_drmas.evaluation.rows import read_files
        from verl_drmas.rewards.answer_rubric import ANSWER
        from verl_drmas.rewards.judge import JudgeProblem, JudgeSettings
        from verl_drmas.rewards.judge_endpoint import EndpointJudge, Names
    except ImportError as error:
        _refuse(ImportError(f"{error}; pip install 'verl-drmas[search]'"))
    try:
        settings = JudgeSettings(
            "endpoint",
            url,
            model,
            api_key_env,
            max_tokens=max_tokens,
            timeout=600.0,
            deadline=1800.0,
            concurrency=concurrency,
            requests_per_minute=requests_per_minute,
        )
        if kind not in ("auto", "math", "search"):
            raise ValueError(f"--kind is {kind!r}; choose auto, math or search")
        rows = read_files(data, kind=kind, question_key=question_key, answer_key=answer_key)
        for note in rows.notes:
            typer.echo(f"note: {note}", err=True)
        played = read_sessions(sessions, rows)
        path = output or sessions.with_name(f"{sessions.stem}.verdicts.jsonl")
        with Verdicts(path.expanduser(), model, rows) as verdicts:
            names = Names("--url", "--model", "--api-key-env", "start one, or correct the address")
            asked = EndpointJudge(settings, ANSWER, names)
            failed, silent = _judge(played.ended, rows, asked, verdicts, concurrency)
            numbers = {"judge": model, **summarise(played, rows, verdicts, tuple(by or ("level", "type")))}
        if summary is not None:
            with whole_file(summary.expanduser()) as partial:
                partial.write_text(json.dumps(numbers, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except (ValueError, ImportError, OSError, JudgeProblem) as error:
        _refuse(error)
    _show(numbers)
    if played.missing:
        typer.echo(
            f"{len(played.ended)} of {len(played.asked)} sessions ended ({len(played.failed)} failed, "
            f"{played.missing - len(played.failed)} not played), and the scores rest on these alone; the same "
            "verl-drmas eval goes on with the others",
            err=True,
        )
    if silent:
        typer.echo(f"error: {silent}", err=True)
    elif failed:
        typer.echo(f"{failed} answers couldn't be judged; the same command asks about them again", err=True)
    if failed or played.missing:
        raise typer.Exit(1)


def _judge(sessions: dict[Any, Any], rows: Rows, judge: Judge, verdicts: Verdicts, concurrency: int) -> tuple[int, str]:
    """Judge what is left, under a bar; returns how many answers couldn't be judged, and how the judge fell silent.

    Raises:
        JudgeProblem: It can't be reached.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from verl_drmas.evaluation.judged import JudgeSilent, judge_sessions

    left = sum(verdicts.get(line) is None for line in sessions.values())
    if not left:
        return 0, ""
    judge.check()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    bar = progress.add_task("answers", total=left)
    try:
        with progress:
            failed = judge_sessions(
                sessions,
                rows,
                judge,
                verdicts,
                concurrency=concurrency,
                on_end=lambda judged: progress.advance(bar, judged),
            )
        return failed, ""
    except JudgeSilent as error:
        left = sum(verdicts.get(line) is None for line in sessions.values())
        return left, f"{error}; verdicts are kept in {verdicts.journal.path}: the same command goes on"
    except KeyboardInterrupt:
        typer.echo(f"stopped; verdicts are kept in {verdicts.journal.path}", err=True)
        raise typer.Exit(130) from None


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from verl_drmas.evaluation.tables import run_table

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(run_table(found))
    table = Table(title=f"what the verdicts of {found['judge']} rest on", title_justify="left")
    for name in ("data source", "prompts", "sessions", "ended", "failed", "without answer", "not judged"):
        table.add_column(name, justify="left" if name == "data source" else "right")
    for source, block in found["sources"].items():
        counts = (block[key] for key in ("prompts", "asked", "ended", "failed", "without_answer", "not_judged"))
        table.add_row(source, *map(str, counts))
    console.print(table)


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1) from error
