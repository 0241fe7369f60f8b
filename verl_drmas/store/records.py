"""What producers hand to a store and consumers get from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_drmas.store.codec import PackedRow


@dataclass(frozen=True)
class SessionRecord:
    """One session of the main job, with the rows of one remote role.

    Attributes:
        step: The main job's step.
        prompt: Index of the prompt in the data set.
        session: Which of the prompt's sessions.
        ended: False if it failed.
        reason: Why it failed; "" if it ended.
        outcome: The session's shared reward; None if there is none.
        main_version: Weights of the main job's own model that played.
        rows: The role's activations, in the order of the session.
    """

    step: int
    prompt: int
    session: int
    ended: bool
    reason: str
    outcome: float | None
    main_version: int
    rows: tuple[PackedRow, ...] = ()


@dataclass(frozen=True)
class Gate:
    """Whether the main job may begin a step.

    Attributes:
        unfinished: Steps that had to be trained, or given up, before; () opens the gate.
        needed: Version that the other job must serve; 0: any.
    """

    unfinished: tuple[int, ...]
    needed: int


@dataclass(frozen=True)
class ConsumerState:
    """What the store knows of the job that trains a role.

    Attributes:
        alive: Its lease has not run out.
        seen: Its last sign of life in seconds since 1970, by the database's clock; None: never.
        version: The version it published last; 0: none.
        endpoint: Where it serves; None: nowhere yet.
        step_in_training: The step that it has claimed.
    """

    alive: bool
    seen: float | None
    version: int
    endpoint: str | None
    step_in_training: int | None


@dataclass(frozen=True)
class ClaimedStep:
    """A step to train on.

    Attributes:
        step: The main job's step.
        manifest: What the main job said when it closed the step.
        sessions: Those that the manifest lists, by prompt and session, also the ones without rows.
    """

    step: int
    manifest: dict[str, Any]
    sessions: tuple[SessionRecord, ...]
