"""Plays many sessions of a workflow at once; a session that fails is told apart from one that ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verl_drmas.evaluation.workers import work_off
from verl_drmas.workflows.base import Outcome, Task, Team, Workflow
from verl_drmas.workflows.errors import PromptTooLong, SessionFailed

PROMPT_TOO_LONG = PromptTooLong("").reason


@dataclass(frozen=True)
class Session:
    """One session, played.

    Attributes:
        task: What was played.
        team: Its agents, and what they did.
        outcome: How it ended; None: it failed.
        failed: One word on why it failed; empty: it ended.
        detail: What happened.
        seconds: How long it took.
    """

    task: Task
    team: Team
    outcome: Outcome | None
    failed: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def success(self) -> float | None:
        """What avg@k counts: `Outcome.correct`, or the reward where nothing is right or wrong; None: it failed."""
        if self.outcome is None:
            return None
        return float(self.outcome.reward if self.outcome.correct is None else self.outcome.correct)


class WorkflowBug(Exception):
    """The workflow's own code is wrong: no session would be worth anything. Its cause is what was raised, if anything.

    Neither a ValueError nor an OSError, which commands tell in a line: this one ends them with the traceback.
    """


class TooManyFailed(RuntimeError):
    """So many sessions failed in a row that more would fail too."""


async def play_session(workflow: Workflow, task: Task, team: Team, timeout: float | None = None) -> Session:
    """Play one session; one that can't be carried to its end is marked as failed.

    Args:
        workflow: What is played.
        task: The data row.
        team: Its agents.
        timeout: Seconds it may take; None: no limit.

    Raises:
        WorkflowBug: It raised something else than a `SessionFailed`.
    """
    start = time.monotonic()
    try:
        outcome = await asyncio.wait_for(workflow.run(task, team), timeout)
    except SessionFailed as failure:
        return Session(task, team, None, failure.reason, failure.detail, time.monotonic() - start)
    except Exception as error:
        seconds = time.monotonic() - start
        # A time-out of something inside the session comes sooner.
        if isinstance(error, TimeoutError | asyncio.TimeoutError) and timeout is not None and seconds >= timeout:
            return Session(task, team, None, "timeout", f"no outcome after {timeout:g} s", seconds)
        raise WorkflowBug(
            f"{type(workflow).__name__} raised {type(error).__name__} in session {task.session} of the data row with "
            f"index {task.index} ({task.data_source}): {error}"
        ) from error
    return Session(task, team, outcome, seconds=time.monotonic() - start)


async def play_sessions(
    workflow: Workflow,
    tasks: Iterable[Task],
    team_of: Callable[[Task], Team],
    on_end: Callable[[Session], None],
    *,
    concurrency: int,
    timeout: float | None = None,
    give_up: int = 32,
) -> None:
    """Play a session of each task.

    Args:
        workflow: What is played.
        tasks: Data rows; taken one by one, as places become free.
        team_of: The agents of a session.
        on_end: Is told of each session, in the order in which they end.
        concurrency: Most sessions at once.
        timeout: Seconds that a session may take; None: no limit.
        give_up: So many failed sessions in a row end it all, but for those whose prompt is too long.

    Raises:
        TooManyFailed: They did.
        WorkflowBug: As `play_session`.
    """
    in_a_row = 0

    async def play(task: Task) -> None:
        nonlocal in_a_row
        session = await play_session(workflow, task, team_of(task), timeout)
        on_end(session)
        if session.failed != PROMPT_TOO_LONG:  # the data's doing, and its sessions follow each other
            in_a_row = in_a_row + 1 if session.failed else 0
        if in_a_row >= give_up:
            raise TooManyFailed(f"{in_a_row} sessions in a row failed; the last: {session.failed}: {session.detail}")

    await work_off(tasks, play, concurrency)
