"""`verl-drmas store ...`: look after the database that two jobs meet in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verl_drmas.store.errors import StoreError

store_app = typer.Typer(no_args_is_help=True, help="Look after the database that two decoupled jobs meet in.")

Url = Annotated[
    str,
    typer.Argument(
        envvar="DRMAS_STORE",
        help="URL of a store, or the path of a SQLite file. A URL with a password belongs into the environment.",
    ),
]
Role = Annotated[str | None, typer.Option(help="Only this role; default all.")]
Patience = Annotated[float, typer.Option(help="Seconds that the database may be away.")]


@store_app.command("status")
def status_command(
    url: Url,
    role: Role = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    patience: Patience = 10.0,
) -> None:
    """Who trains, what waits, and how far behind the versions are."""
    from verl_drmas.store.numbers import numbers, role_names
    from verl_drmas.store.producer import Producer

    with _one_line_errors():
        store = _open(url, patience)
        names = [role] if role else role_names(store)
        found = {name: (numbers(store, name), Producer(store, name).consumer()) for name in names}
    if as_json:
        typer.echo(json.dumps({name: values for name, (values, _) in found.items()}, indent=1))
        return
    console = Console()
    console.print(f"store {store.url}", highlight=False, soft_wrap=True)
    for name, (values, consumer) in found.items():
        console.print(_table(name, values))
        who = f"serves {consumer.endpoint or 'nowhere'}, trains step {consumer.step_in_training or 'none'}"
        console.print(f"its job is {'alive' if consumer.alive else 'not running'}, {who}", highlight=False)
    if not found:
        console.print("no job has used it yet")


def _table(role: str, values: dict[str, float]) -> Table:
    table = Table("what", "steps", "groups", title=f"role {role}", title_justify="left")
    states = [key.removeprefix("groups/") for key in values if key.startswith("groups/")]
    for state in states:
        steps = values.get(f"steps/{state}")
        if values[f"groups/{state}"] or steps:
            table.add_row(state, "" if steps is None else f"{steps:,.0f}", f"{values[f'groups/{state}']:,.0f}")
    table.add_section()
    rest = {key: value for key, value in values.items() if not key.startswith(("steps/", "groups/", "d/"))}
    for key, value in rest.items():
        table.add_row(key, "", f"{value:,.0f}")
    histogram = sorted((int(key[2:]), value) for key, value in values.items() if key.startswith("d/"))
    if histogram:
        table.add_row("sessions by rows", "", ", ".join(f"{d}: {value:,.0f}" for d, value in histogram))
    return table


@store_app.command("verify")
def verify_command(
    url: Url,
    checksums: Annotated[bool, typer.Option(help="Read every row and compare its checksum.")] = True,
    patience: Patience = 10.0,
) -> None:
    """Prove that each session was trained once, is pending, or was given up; exit 1 with what is wrong."""
    from verl_drmas.store.verify import verify

    with _one_line_errors():
        store = _open(url, patience)
        problems = verify(store, checksums=checksums)
    for problem in problems:
        typer.echo(problem)
    if problems:
        typer.echo(f"error: {len(problems)} problems in store {store.url}", err=True)
        raise typer.Exit(1)
    typer.echo(f"store {store.url}: nothing was trained twice, nothing is lost")


@store_app.command("gc")
def gc_command(
    url: Url,
    keep_steps: Annotated[int | None, typer.Option(min=0, help="Last saved steps that keep their rows.")] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Hours since a step was finished.")] = None,
    max_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes of rows that may stay.")] = None,
    role: Role = None,
    patience: Patience = 10.0,
) -> None:
    """Delete the tokens of steps that are saved, dropped or dead; what was done with them stays known."""
    from verl_drmas.store.gc import gc

    with _one_line_errors():
        store = _open(url, patience)
        seconds = None if older_than is None else older_than * 3600
        freed = gc(store, keep_steps=keep_steps, older_than=seconds, max_bytes=max_bytes, role=role)
    typer.echo(f"freed {freed:,} rows")


@store_app.command("export")
def export_command(
    url: Url,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .jsonl or .parquet.")],
    role: Role = None,
    patience: Patience = 10.0,
) -> None:
    """Write the rows that are there to a file that anything reads."""
    from verl_drmas.store.export import export

    with _one_line_errors():
        number = export(_open(url, patience), out, role=role)
    typer.echo(f"wrote {number:,} rows to {out}")


def _open(url: str, patience: float):
    try:
        from verl_drmas.store.database import open_store
    except ImportError as error:
        raise StoreError(f"a store needs libraries ({error}); pip install 'verl-drmas[store]'") from error
    return open_store(url if "://" in url else f"sqlite:///{url}", patience=patience, create=False)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (StoreError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
