"""`verl-drmas pair MAIN SUB`: both jobs on this machine, with one log and one stop."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from verl_drmas.config import ConfigError
from verl_drmas.pair.facts import look
from verl_drmas.pair.jobs import (
    MAIN,
    STORE,
    SUB,
    Job,
    by_hand,
    check_fit,
    choose_store,
    config_flags,
    free_port,
    hide,
    shared_token,
    split_gpus,
)
from verl_drmas.pair.launcher import Launcher
from verl_drmas.pair.logs import JointLog
from verl_drmas.store.database import parse
from verl_drmas.store.errors import StoreError

# A traceback with local variables would show the token.
pair_app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@pair_app.command()
def pair_command(
    main: Annotated[str, typer.Argument(help="YAML file, or name, of the job that plays the sessions.")],
    sub: Annotated[str, typer.Argument(help="Of the job that trains on the rows of its remote model.")],
    run_dir: Annotated[Path, typer.Option(help="Folder of the run's files; a second run in it resumes.")] = Path(
        "runs/pair"
    ),
    restarts: Annotated[int, typer.Option(help="How often, in all, a job that dies is started again.", min=0)] = 0,
    store: Annotated[
        str | None,
        typer.Option(
            envvar=STORE, help="URL of the store; default what the configurations say, else SQLite in the run's folder."
        ),
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds a job gets to end when it is told to.", min=0)] = 20.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how to start the jobs on two machines; start nothing.")
    ] = False,
    main_overrides: Annotated[
        list[str] | None, typer.Option("--main", help="Hydra override of the first job; may be repeated.")
    ] = None,
    sub_overrides: Annotated[list[str] | None, typer.Option("--sub", help="Of the second job.")] = None,
) -> None:
    """Start two jobs that train a team together, each on its own cluster; exit 0 when both ended well."""
    folder = run_dir.expanduser().resolve()
    wanted = {MAIN: (main, main_overrides), SUB: (sub, sub_overrides)}
    try:
        jobs = {
            name: Job(name, folder / name, config_flags(file), tuple(overrides or ()))
            for name, (file, overrides) in wanted.items()
        }
        env = {**os.environ, **({STORE: store} if store else {})}  # a configuration may name the variable
        facts = look({name: [*job.config, *job.overrides] for name, job in jobs.items()}, env)
        check_fit(facts[MAIN], facts[SUB], one_machine=not dry_run)
        url, *stores = choose_store(facts[MAIN], facts[SUB], store, f"sqlite:///{folder / 'store.db'}")
        parsed = parse(url)
        url = parsed.render_as_string(hide_password=False)  # a path is absolute now
        if dry_run:
            for job, own in zip(jobs.values(), stores, strict=True):
                shown = Job(job.name, job.folder, job.config, job.overrides, tuple(own))
                typer.echo(by_hand(shown, facts[job.name], url))
            return
        gpus = split_gpus(facts[MAIN], facts[SUB], os.environ)
        token = shared_token(facts[MAIN], facts[SUB], os.environ)
        port = free_port(facts[SUB].host, facts[SUB].port)
        if port != facts[SUB].port:
            stores[1].append(f"++drmas.gateway.port={port}")
        ready = [
            Job(job.name, job.folder, job.config, job.overrides, tuple(own), {**token, STORE: url, **gpu})
            for job, own, gpu in zip(jobs.values(), stores, gpus, strict=True)
        ]
        with _alone(folder):
            hidden = [*token.values(), parsed.password or "", quote(parsed.password or "", safe=" +")]
            status = _run(ready, folder, hidden, restarts=restarts, grace=grace)
    except (ConfigError, StoreError) as error:
        typer.echo(f"refused: {hide(str(error))}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)


def _run(jobs: list[Job], folder: Path, secrets: list[str], *, restarts: int, grace: float) -> int:
    log = JointLog(folder, [job.name for job in jobs], secrets, sys.stdout)
    try:
        log.say(f"the files of both jobs are in {folder}; Ctrl-C ends both")
        return Launcher(jobs, folder, log, restarts=restarts, grace=grace).run()
    finally:
        log.close()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the run's folder, so that no second pair writes to it.

    Raises:
        ConfigError: Another does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pair.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--run-dir {folder}: another pair runs there; choose another folder") from None
        yield
