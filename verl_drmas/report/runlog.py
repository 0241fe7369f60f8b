"""A run's log: its steps in order, whatever logger wrote them and however often the run was resumed.

`read_run` reads what verl's ``file`` logger leaves, one JSON object a step. verl writes it when ``trainer.logger``
holds ``file`` (`verl/utils/tracking.py`, class ``FileLogger``), to ``$VERL_FILE_LOGGER_PATH``, else to
``$VERL_FILE_LOGGER_ROOT/<project_name>/<experiment_name>.jsonl``. The other loggers are read by `readers.py`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

TRAINING = "training/global_step"  # verl logs it with every training step, and with nothing else


class RunLogError(ValueError):
    """A run's log is absent, empty or not verl's; the message names the file and what to do."""


@dataclass(frozen=True)
class Step:
    """The metrics of one training step.

    Attributes:
        step: verl's global step; 0 holds only the validation before training.
        metrics: name to finite value; what is no number is left out.
        lost: names that were logged as NaN or infinite (verl's file logger writes both as null).
    """

    step: int
    metrics: Mapping[str, float]
    lost: frozenset[str] = frozenset()

    @property
    def trained(self) -> bool:
        """True if it is a training step, not a validation alone."""
        return TRAINING in self.metrics or "timing_s/step" in self.metrics


@dataclass(frozen=True)
class RunLog:
    """A run: its name and its steps in rising order, one entry a step.

    Attributes:
        name: of the run in tables and figures.
        steps: in rising order.
        again: steps that were logged more than once (after a resume) or given up by a resume; the later entry counts.
        cut: the last line was cut short and is left out.
    """

    name: str
    steps: tuple[Step, ...]
    again: tuple[int, ...] = ()
    cut: bool = False

    @cached_property
    def columns(self) -> dict[str, tuple[list[int], list[float]]]:
        """Every metric's steps and values, two lists of equal length."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for step in self.steps:
            for name, value in step.metrics.items():
                steps, values = found.setdefault(name, ([], []))
                steps.append(step.step)
                values.append(value)
        return found

    def names(self) -> set[str]:
        """Returns the names of all metrics that occur in the run."""
        return set(self.columns)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps that logged the metric and its values there: two lists of equal length, maybe empty."""
        steps, values = self.columns.get(name, ([], []))
        return list(steps), list(values)

    @cached_property
    def training(self) -> tuple[Step, ...]:
        """The training steps; in a log that marks none, those above 0 that are no validation alone."""
        marked = tuple(step for step in self.steps if step.trained)
        return marked or tuple(
            step for step in self.steps if step.step > 0 and any(not name.startswith("val") for name in step.metrics)
        )

    def agents(self) -> list[str]:
        """Returns the agents named by ``drmas/agent/<agent_id>/...``, sorted."""
        return self._named("agent")

    def models(self) -> list[str]:
        """Returns the models named by ``drmas/model/<model_id>/...``, sorted."""
        return self._named("model")

    def by_model(self, quantity: str) -> dict[str, str]:
        """Returns the metric that holds a quantity of each model's actor, such as ``grad_norm``; may be empty.

        A model whose every value was NaN is among them. A run of stock verl has one model, `model`.
        """
        everything = self.names() | {name for step in self.steps for name in step.lost}
        parts = (name.split("/") for name in everything)
        own = sorted({p[2] for p in parts if p[:2] == ["drmas", "model"] and p[3:] == [quantity]})
        if own:
            return {model: f"drmas/model/{model}/{quantity}" for model in own}
        return {"model": f"actor/{quantity}"} if f"actor/{quantity}" in everything else {}

    def _named(self, kind: str) -> list[str]:
        parts = (name.split("/") for name in self.names())
        return sorted({part[2] for part in parts if part[:2] == ["drmas", kind] and len(part) > 3})

    def fifths(self) -> tuple[list[Step], list[Step]]:
        """Returns the first and the last fifth of the training steps, rounded up; step 0 is no training step."""
        training = [step for step in self.steps if step.step > 0]
        size = math.ceil(len(training) / 5)
        return training[:size], training[len(training) - size :]


@dataclass(frozen=True)
class Entry:
    """What was logged at once: a training step, or a validation."""

    step: int
    metrics: Mapping[str, float]
    lost: frozenset[str] = frozenset()

    @classmethod
    def of(cls, step: int, data: Mapping[str, Any]) -> Entry:
        """Sorts what was logged into numbers, numbers that are not finite (None among them), and the rest."""
        metrics: dict[str, float] = {}
        lost = set()
        for name, value in data.items():
            if value is None:  # so orjson writes NaN and infinities
                lost.add(name)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                if math.isfinite(value):
                    metrics[name] = float(value)
                else:
                    lost.add(name)
        return cls(step, metrics, frozenset(lost))

    @property
    def trained(self) -> bool:
        """True if it is a training step."""
        return TRAINING in self.metrics


def mean(steps: Iterable[Step], name: str) -> float | None:
    """Returns a metric's mean over the steps that logged it, or None where none did (never 0)."""
    values = [step.metrics[name] for step in steps if name in step.metrics]
    return math.fsum(values) / len(values) if values else None


def log_path(project: str, experiment: str) -> Path:
    """Returns where verl's file logger writes a run, by the same two environment variables that it reads."""
    path = os.environ.get("VERL_FILE_LOGGER_PATH")
    if path is not None:
        return Path(path)
    return Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser() / project / f"{experiment}.jsonl"


def read_run(path: str | Path, *, name: str | None = None) -> RunLog:
    """Reads a run's log.

    Args:
        path: the JSONL file. A last line cut short by a killed run is left out; see `join` for steps logged twice.
        name: of the run in tables and figures; the file's stem by default.

    Raises:
        RunLogError: no such file, a line that isn't verl's, or no step in it.
    """
    path = Path(path)
    cut: list[Path] = []
    return join(json_entries(path, cut), name=name or path.stem, source=str(path), cut=cut)


def join(entries: Iterable[Entry], *, name: str, source: str, cut: list[Path] | None = None) -> RunLog:
    """Makes a run of what was logged, in the order in which it was.

    A validation and a training step of the same number are joined. A training step that comes again, or after a higher
    one, is a run that was resumed from there: what was trained before from that step on is given up.

    Args:
        entries: in the order of logging.
        name: of the run.
        source: for the message.
        cut: files whose last line was cut short, filled by the reader as it goes.

    Raises:
        RunLogError: there is no step.
    """
    steps: dict[int, tuple[dict[str, float], set[str]]] = {}
    trained: dict[int, None] = {}
    again: set[int] = set()
    last = -1
    for entry in entries:
        if entry.trained:
            if entry.step <= last:
                for old in [step for step in trained if step >= entry.step]:
                    del steps[old], trained[old]
                    again.add(old)
            last = entry.step
            trained[entry.step] = None
        metrics, lost = steps.setdefault(entry.step, ({}, set()))
        metrics.update(entry.metrics)
        lost.difference_update(entry.metrics)
        lost.update(entry.lost)
        for gone in entry.lost & metrics.keys():
            del metrics[gone]
    if not steps:
        raise RunLogError(
            f"{source}: holds no step: the run ended before its first one was logged, or this is no log of a run"
        )
    return RunLog(
        name=name,
        steps=tuple(Step(step, steps[step][0], frozenset(steps[step][1])) for step in sorted(steps)),
        again=tuple(sorted(again)),
        cut=bool(cut),
    )


def json_entries(path: Path, cut: list[Path]) -> Iterator[Entry]:
    """Yields what verl's file logger wrote.

    Args:
        path: the file.
        cut: gets the path if its last line was cut short.

    Raises:
        RunLogError: no such file, or a line that isn't verl's.
    """
    try:
        lines = path.read_bytes().split(b"\n")  # a text's own line separators must not end a line
    except FileNotFoundError:
        raise RunLogError(f"{path}: no such file; add 'file' to trainer.logger and see VERL_FILE_LOGGER_PATH") from None
    except OSError as error:
        raise RunLogError(f"{path}: {error.strerror or error}; give a file that can be read") from None
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # no JSON, or cut within a character
            if number == len(lines):
                cut.append(path)
                return
            raise RunLogError(f"{path}:{number}: not JSON ({error}); give the file written by verl's logger") from None
        if not is_record(record):
            raise RunLogError(f'{path}:{number}: not of the form {{"step": 1, "data": {{...}}}}; give verl\'s own log')
        yield Entry.of(record["step"], record["data"])


def is_record(value: Any) -> bool:
    """True for one line of verl's file logger."""
    return isinstance(value, dict) and isinstance(value.get("step"), int) and isinstance(value.get("data"), dict)
