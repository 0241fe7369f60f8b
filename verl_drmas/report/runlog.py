"""Reads what verl's ``file`` logger leaves of a run: one JSON object a step.

verl writes it when ``trainer.logger`` holds ``file`` (`verl/utils/tracking.py`, class ``FileLogger``), to
``$VERL_FILE_LOGGER_PATH``, else to ``$VERL_FILE_LOGGER_ROOT/<project_name>/<experiment_name>.jsonl``.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


class RunLogError(ValueError):
    """A run's log is absent, empty or not verl's; the message names the file and what to do."""


@dataclass(frozen=True)
class Step:
    """The metrics of one training step.

    Attributes:
        step: verl's global step; 0 holds only the validation before training.
        metrics: name to finite or infinite value; a value that is no number, or was NaN, is left out.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class RunLog:
    """A run: its name and its steps in rising order, one entry a step."""

    name: str
    steps: tuple[Step, ...]

    def names(self) -> set[str]:
        """Returns the names of all metrics that occur in the run."""
        return {name for step in self.steps for name in step.metrics}

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps that logged the metric and its values there: two lists of equal length, maybe empty."""
        pairs = [(step.step, step.metrics[name]) for step in self.steps if name in step.metrics]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def agents(self) -> list[str]:
        """Returns the agents named by ``drmas/agent/<agent_id>/...``, sorted."""
        return self._named("agent")

    def gradients(self) -> dict[str, str]:
        """Returns each trained model's gradient norm: label to metric; one model keeps verl's own name."""
        models = [m for m in self._named("model") if f"drmas/model/{m}/grad_norm" in self.names()]
        if len(models) < 2:
            return {"grad norm": "actor/grad_norm"}
        return {f"{model}: grad norm": f"drmas/model/{model}/grad_norm" for model in models}

    def _named(self, kind: str) -> list[str]:
        parts = (name.split("/") for name in self.names())
        return sorted({part[2] for part in parts if part[:2] == ["drmas", kind] and len(part) > 3})

    def fifths(self) -> tuple[list[Step], list[Step]]:
        """Returns the first and the last fifth of the training steps, rounded up; step 0 is no training step."""
        training = [step for step in self.steps if step.step > 0]
        size = math.ceil(len(training) / 5)
        return training[:size], training[len(training) - size :]


def mean(steps: list[Step], name: str) -> float | None:
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
        path: the JSONL file. A last line cut short by a killed run is left out; where a step was logged twice (once for
            validation, once for training, or again after a resume), the metrics are joined and the later value holds.
        name: of the run in tables and figures; the file's stem by default.

    Raises:
        RunLogError: no such file, a line that isn't verl's, or no step in it.
    """
    path = Path(path)
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise RunLogError(f"{path}: no such file; add 'file' to trainer.logger and see VERL_FILE_LOGGER_PATH") from None
    steps: dict[int, dict[str, float]] = {}
    for step, metrics in _records(path, lines):
        steps.setdefault(step, {}).update(metrics)
    if not steps:
        raise RunLogError(f"{path}: holds no step; the run ended before its first step was logged")
    return RunLog(name=name or path.stem, steps=tuple(Step(step, steps[step]) for step in sorted(steps)))


def _records(path: Path, lines: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise RunLogError(f"{path}:{number}: not JSON ({error}); give the file written by verl's logger") from None
        if not (
            isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("data"), dict)
        ):
            raise RunLogError(f'{path}:{number}: not of the form {{"step": 1, "data": {{...}}}}; give verl\'s own log')
        # orjson writes NaN as null; text and tables (validation samples) are no metrics.
        yield (
            record["step"],
            {
                key: float(value)
                for key, value in record["data"].items()
                if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
            },
        )
