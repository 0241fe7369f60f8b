"""Plays what is left of an evaluation, and says which endpoint is to blame where it can't go on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from verl_drmas.evaluation.completions import Completions
from verl_drmas.evaluation.endpoint import EndpointTeam
from verl_drmas.evaluation.results import Place, Results
from verl_drmas.evaluation.sessions import PROMPT_TOO_LONG, Session, TooManyFailed, play_sessions
from verl_drmas.evaluation.team import Evaluated
from verl_drmas.evaluation.workflow import task_of
from verl_drmas.serving.client import Unanswered
from verl_drmas.workflows import Task

GIVE_UP = 8  # failed sessions in a row


class Stopped(RuntimeError):
    """An evaluation that can't go on; one line that names what is to blame, and what to do."""


@dataclasses.dataclass(frozen=True)
class PlacedTask(Task):
    """A task that knows which session of the evaluation it is."""

    place: Place | None = None

    @classmethod
    def of(cls, row: dict[str, Any], place: Place) -> PlacedTask:
        """The task of a data row in verl's RLHF format."""
        return cls(**vars(task_of(row, place.session, validate=True)), place=place)


def open_models(team: Evaluated) -> dict[str, Completions]:
    """The team's models; nothing is asked yet."""
    return {model_id: Completions(served) for model_id, served in team.models.items()}


def look(models: dict[str, Completions]) -> dict[str, list[str]]:
    """Ask all endpoints what they serve.

    Returns:
        Where each model's weights are from, as far as its servers tell: by model id, blank where none does.

    Raises:
        Stopped: One isn't fit; it is named.
    """
    roots, unfit = _unfit(models)
    if unfit:
        raise Stopped(unfit)
    return roots


def play(
    team: Evaluated,
    rows: Sequence[dict[str, Any]],
    results: Results,
    models: dict[str, Completions],
    *,
    seed: int | None,
    timeout: float,
    on_end: Callable[[Session], None],
) -> None:
    """Play every session that is left, and keep each in `results` as it ends.

    Args:
        team: Who plays.
        rows: Data rows, in verl's RLHF format.
        results: What is there, and what is asked for.
        models: By model id.
        seed: Hashed into each request, another for each run; None: none is sent.
        timeout: Seconds that a session may take.
        on_end: Is told of each session when it is kept.

    Raises:
        Stopped: Endpoints stopped answering. What ended is kept.
    """
    tasks = (PlacedTask.of(rows[place.row], place) for place in results.left())

    def team_of(task: PlacedTask) -> EndpointTeam:
        run_seed = None if seed is None else seed + task.place.run
        own = {agent: dataclasses.replace(sampling, seed=run_seed) for agent, sampling in team.sampling.items()}
        return EndpointTeam(models, team.agents, task, own=own)

    def note(session: Session) -> None:
        results.add(session.task.place, session)
        on_end(session)

    async def whole() -> None:
        try:
            await play_sessions(
                team.workflow,
                tasks,
                team_of,
                note,
                concurrency=results.concurrency,
                timeout=timeout,
                give_up=GIVE_UP,
            )
        finally:
            await asyncio.gather(team.workflow.close(), *(model.close() for model in models.values()))

    try:
        asyncio.run(whole())
    except TooManyFailed as error:
        _blame(models, results, str(error))
        raise Stopped(f"{error}; {_kept(results)}") from error
    faults = [line for line in results.failed.values() if line["failed"] != PROMPT_TOO_LONG]
    if faults:
        _blame(models, results, f"{len(faults)} sessions failed; the last: {faults[-1]['detail']}")


def _blame(models: dict[str, Completions], results: Results, told: str) -> None:
    """Name the endpoints that don't answer, if any.

    Raises:
        Stopped: One doesn't.
    """
    dead = _unfit(models)[1]
    if dead:
        raise Stopped(f"{dead}: start it again ({told}); {_kept(results)}")


def _unfit(models: dict[str, Completions]) -> tuple[dict[str, list[str]], str]:
    """Where the models' weights are from, as far as servers tell, and a line on the models whose servers aren't fit."""
    roots: dict[str, list[str]] = {}
    unfit: dict[str, list[str]] = {}
    for model_id, model in models.items():
        try:
            roots[model_id] = sorted({seen.root for seen in model.look() if seen.root is not None})
        except Unanswered as error:
            unfit.setdefault(str(error), []).append(model_id)
    return roots, "; ".join(f"model {', '.join(names)}: {told}" for told, names in unfit.items())


def _kept(results: Results) -> str:
    return (
        f"{len(results.ended)} of {len(results.asked)} sessions are kept in {results.path}, none of the others counts "
        "as wrong: the same command goes on from there"
    )
