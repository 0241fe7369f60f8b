"""An evaluation's sessions: which are asked for, what is kept of each, and which are left."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_drmas.evaluation.journal import Journal, Mixed
from verl_drmas.evaluation.sessions import Session, WorkflowBug
from verl_drmas.workflows.base import Outcome


class Place(NamedTuple):
    """Which session of an evaluation.

    Attributes:
        run: Which of the repeated runs, from 0.
        row: Number of the data row over all files, from 0.
        session: Which of the row's samples, from 0.
    """

    run: int
    row: int
    session: int


@dataclass(frozen=True)
class Asked:
    """How much is asked for; more of it goes on from what is there.

    Attributes:
        rows: The first data rows.
        samples: Sessions of each.
        runs: How often the whole of it.
    """

    rows: int
    samples: int
    runs: int = 1

    def __post_init__(self):
        for name in ("samples", "runs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; give at least 1")
        if self.rows < 1:
            raise ValueError("--limit is below 1; give at least 1")

    def __iter__(self) -> Iterator[Place]:
        """One run after the other, and a row's samples together: a server may have their prompt in its cache."""
        counts = (range(self.runs), range(self.rows), range(self.samples))
        return itertools.starmap(Place, itertools.product(*counts))

    def __len__(self) -> int:
        return self.runs * self.rows * self.samples

    def __contains__(self, place: object) -> bool:
        return isinstance(place, Place) and all(
            0 <= number < most for number, most in zip(place, (self.runs, self.rows, self.samples), strict=True)
        )


class Results:
    """The sessions of a file that are asked for.

    Args:
        path: The file.
        measured: What they are of; see `Journal`.
        asked: How many.
        texts: Keep what the agents said.
        concurrency: Sessions at once, which latency depends on; it is kept with each session.

    Attributes:
        ended: Sessions that came to an end, by place.
        failed: The last failure of those that didn't, by place.
        attempts: All failures, those that a later attempt made good too.
    """

    def __init__(
        self, path: Path, measured: dict[str, Any], asked: Asked, *, texts: bool = False, concurrency: int = 1
    ):
        self.asked, self.texts, self.concurrency = asked, texts, concurrency
        self.ended: dict[Place, dict[str, Any]] = {}
        self.failed: dict[Place, dict[str, Any]] = {}
        self.attempts: list[dict[str, Any]] = []
        self.journal = Journal(path, measured)
        self._weights: dict[str, list[str]] | None = None
        self._unwritten: dict[str, list[str]] | None = None
        for line in self.journal.lines:
            if "weights" in line:
                self._weights = line["weights"]
            else:
                self._take(Place(line["run"], line["row"], line["session"]), line)

    @property
    def path(self) -> Path:
        """The file."""
        return self.journal.path

    def served_from(self, weights: dict[str, list[str]]) -> None:
        """Note where the servers have their weights from: a name may be served from another checkpoint than before.

        Args:
            weights: By model id; empty where no server tells.

        Raises:
            Mixed: The sessions of the file are of other weights.
        """
        if self._weights is None:
            self._unwritten = weights  # with the first session: a file without one binds nobody
            return
        for model_id, roots in weights.items():
            was = self._weights.get(model_id)
            if was and roots and was != roots:
                raise Mixed(self.path, f"origin of model {model_id}", was, roots)

    def left(self) -> list[Place]:
        """What is to be played, what failed too."""
        return [place for place in self.asked if place not in self.ended]

    def add(self, place: Place, session: Session) -> None:
        """Keep a session, on the disk when this returns."""
        if self._unwritten is not None:
            self.journal.add({"weights": self._unwritten})
            self._weights, self._unwritten = self._unwritten, None
        line = line_of(place, session, texts=self.texts)
        line |= {"concurrency": self.concurrency, "asked": asdict(self.asked)}  # so that a reader sees what is missing
        self.journal.add(line)
        self._take(place, line)

    def close(self) -> None:
        """Close the file."""
        self.journal.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, place: Place, line: dict[str, Any]) -> None:
        if place not in self.asked:
            return
        if line["success"] is None:
            self.failed[place] = line
            self.attempts.append(line)
        else:
            self.failed.pop(place, None)
            self.ended[place] = line


def line_of(place: Place, session: Session, *, texts: bool) -> dict[str, Any]:
    """A session as it is kept.

    `success` is what avg@k counts, None where the session failed (`failed`, `detail`); `activations` and `calls` hold
    what the agents did, in the order in which it began and was answered.

    Args:
        place: Which session.
        session: It.
        texts: Keep each activation's last text.

    Raises:
        WorkflowBug: The workflow's reward or a metric is no number.
    """
    task, outcome, team = session.task, session.outcome, session.team
    line: dict[str, Any] = {
        **place._asdict(),
        "index": task.index,
        "data_source": task.data_source,
        "success": session.success,
        "seconds": round(session.seconds, 4),
    }
    if outcome is None:
        line |= {"failed": session.failed, "detail": session.detail[:300]}
    else:
        line |= _plain(outcome)
    line["activations"] = [
        {
            "agent": action.agent_id,
            "turns": action.turns,
            "valid": bool(action.valid),
            "truncated": action.truncated,
            **({"text": action.text} if texts else {}),
        }
        for action in team.actions
    ]
    line["calls"] = [
        {
            "agent": call.agent_id,
            "model": call.model_id,
            "prompt": call.prompt_tokens,
            "response": call.response_tokens,
            "seconds": round(call.seconds, 4),
            "tries": call.tries,
        }
        for call in team.calls
    ]
    return line


def _plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON has it: workflows count with numpy and torch too, whose scalars it can't hold."""
    numbers = _floats({"reward": outcome.reward, **{f"metrics[{key!r}]": v for key, v in outcome.metrics.items()}})
    return {
        "reward": numbers.pop("reward"),
        "answer": None if outcome.answer is None else str(outcome.answer),
        "metrics": dict(zip(map(str, outcome.metrics), numbers.values(), strict=True)),
    }


def _floats(given: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in given.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise WorkflowBug(f"the outcome's {name} is {value!r}; give a number") from error
    return found
