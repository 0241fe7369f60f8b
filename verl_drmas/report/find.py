"""Finds the runs in what a user names: a log, a run's folder, or a folder of runs; with each its configuration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_drmas.dumps import BESIDE
from verl_drmas.report.readers import EVENTS, Kind, kind_of, read_files
from verl_drmas.report.runlog import RunLog, RunLogError, Step
from verl_drmas.report.settings import Settings, read_settings

CONFIG = Path(".hydra/config.yaml")
# Names that tell nothing of a run; the folder's is taken instead.
PLAIN = {
    "metrics",
    "metric",
    "log",
    "logs",
    "verl",
    "train",
    "output",
    "stdout",
    "console",
    "main_ppo",
    "run",
    "hydra",
} | {
    *("tensorboard", "tensorboard_log", "tb", "terminal", "job"),
}
ELSEWHERE = (*BESIDE, "rollouts")  # the dumps' usual folder
TEXT = (".log", ".txt", ".out")
EVALUATION = {"workflow", "samples", "sources", "sessions"}  # keys of what `verl-drmas eval --json` writes
DEEPEST = 6  # folders below the one that is named
LARGE = 1 << 23  # bytes; a summary is far smaller


@dataclass(frozen=True)
class Run:
    """One run of training, or one evaluation of a checkpoint that verl's trainer made.

    Attributes:
        log: its steps, under the run's name.
        kind: which of verl's loggers they come from.
        files: what was read.
        place: file or folder that the run is named after.
        settings: its configuration; None: no ``.hydra/config.yaml`` was found.
        evaluations: summaries of `verl-drmas eval` in the run's folder, by file.
        notes: what was found of it and couldn't be used.
    """

    log: RunLog
    kind: Kind
    files: tuple[Path, ...]
    place: Path
    settings: Settings | None = None
    evaluations: Mapping[Path, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run's name, unlike that of any other run of the report."""
        return self.log.name

    def named(self, name: str) -> Run:
        """The same run under another name."""
        return replace(self, log=replace(self.log, name=name))


def find_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Reads every run in the paths.

    Args:
        paths: Files, run folders (with ``.hydra`` or ``hydra/.hydra`` in them; all logs in one are parts of one run),
            or folders of either, at any depth.

    Returns:
        The runs with names that differ, and notes on what was left out.

    Raises:
        RunLogError: a path doesn't exist or has no log in it, or a log can't be read.
        ImportError: a log needs a package that isn't installed.
    """
    found: list[Run] = []
    notes: list[str] = []
    for path in paths:
        if not path.exists():
            raise RunLogError(f"{path}: no such file or folder; name a run's log, its folder, or a folder of runs")
        places = list(_in_folder(path, 0) if path.is_dir() else _of_file(path))
        if not places:
            raise RunLogError(
                f"{path}: holds no log of verl's; name a file that a logger of trainer.logger wrote (file, "
                "tensorboard, console), or a folder with one"
            )
        for place in places:
            try:
                found.append(place.read())
            except RunLogError as error:
                if len(places) == 1:
                    raise
                notes.append(f"left out: {error}")
    if not found:
        raise RunLogError("; ".join(notes))
    known: dict[tuple[Path, ...], Run] = {}
    for run in found:
        known.setdefault(tuple(file.resolve() for file in run.files), run)
    runs, twins = _without_twins(list(known.values()))
    return _distinct(runs), [*notes, *twins]


@dataclass(frozen=True)
class _Place:
    """Where a run's log lies, before it is read."""

    files: tuple[Path, ...]
    kind: Kind
    folder: Path
    alone: bool  # nobody else's files are in the folder
    named_after: Path

    def read(self) -> Run:
        log = read_files(self.files, self.kind, name=self.named_after.name)
        try:
            settings, notes = _settings(self.files[0], self.folder), ()
        except ValueError as error:
            settings, notes = None, (str(error),)
        evaluations = _evaluations(self.folder) if self.alone else {}
        return Run(log, self.kind, self.files, self.named_after, settings, evaluations, notes)


def _of_file(path: Path) -> Iterator[_Place]:
    kind = kind_of(path)
    if kind is None:
        raise RunLogError(f"{path}: not a log of verl's loggers file, tensorboard or console; give one of those")
    yield _Place((path,), kind, path.parent, False, _named_after(path, kind))


def _in_folder(folder: Path, depth: int) -> Iterator[_Place]:
    if _config_in(folder):
        yield from _run_folder(folder)
        return
    children = sorted(folder.iterdir())
    kinds: dict[Kind | None, list[Path]] = {}
    for child in children:
        if child.is_file() and _may_be_log(child):
            kinds.setdefault(kind_of(child), []).append(child)
    events, records = kinds.get(Kind.TENSORBOARD, []), kinds.get(Kind.FILE, [])
    if events:
        yield _Place(tuple(events), Kind.TENSORBOARD, folder, True, _named_after(events[0], Kind.TENSORBOARD))
    for record in records:
        yield _Place((record,), Kind.FILE, folder, len(records) == 1, _named_after(record, Kind.FILE))
    if not events and not records:
        for text in kinds.get(Kind.CONSOLE, []):
            yield _Place((text,), Kind.CONSOLE, folder, False, _named_after(text, Kind.CONSOLE))
    if depth < DEEPEST:
        for child in children:
            if child.is_dir() and not child.name.startswith((".", *ELSEWHERE)) and not _leads_back(child):
                yield from _in_folder(child, depth + 1)


def _leads_back(folder: Path) -> bool:
    """Whether a link points to a folder that it lies in."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def _run_folder(folder: Path) -> Iterator[_Place]:
    """All logs of one run: the parts that resumes left, of the best kind there is."""
    kinds: dict[Kind, list[Path]] = {}
    for file in _files(folder, 0):
        if _may_be_log(file) and (kind := kind_of(file)):
            kinds.setdefault(kind, []).append(file)
    for kind in Kind:
        if kind in kinds:
            yield _Place(tuple(kinds[kind]), kind, folder, True, folder.resolve())
            return


def _files(folder: Path, depth: int) -> Iterator[Path]:
    for child in sorted(folder.iterdir()):
        if child.is_file():
            yield child
        elif depth < 3 and child.is_dir() and not child.name.startswith((".", *ELSEWHERE)):
            yield from _files(child, depth + 1)


def _may_be_log(path: Path) -> bool:
    return path.name.startswith(EVENTS) or path.suffix in (".jsonl", *TEXT)


def _named_after(file: Path, kind: Kind) -> Path:
    own = file.resolve()
    places = list(own.parents) if kind is Kind.TENSORBOARD else [own.with_suffix(""), *own.parents]
    return next((place for place in places if place.name and place.name.lower() not in PLAIN), own)


def _config_in(folder: Path) -> Path | None:
    return next((path for path in (folder / CONFIG, folder / "hydra" / CONFIG) if path.is_file()), None)


def _settings(file: Path, folder: Path) -> Settings | None:
    """The configuration beside a log, up to two folders above it, or among Hydra's outputs by the run's names."""
    places = [folder, folder / file.stem, *list(folder.resolve().parents)[:2]]
    for place in places:
        if path := _config_in(place):
            return read_settings(path)
    experiment = folder.name if file.name.startswith(EVENTS) else file.stem
    project = folder.resolve().parent.name if file.name.startswith(EVENTS) else folder.resolve().name
    for root in list(folder.resolve().parents)[:3]:
        for path in sorted((root / "outputs").glob(f"*/*/{CONFIG}"), reverse=True):  # the last start first
            text = path.read_text(encoding="utf-8", errors="replace")
            if f"experiment_name: {experiment}\n" not in text:  # reading all of them takes long
                continue
            settings = read_settings(path)
            names = (settings.get("trainer.project_name"), settings.get("trainer.experiment_name"))
            if names == (project, experiment):
                return settings
    return None


def _evaluations(folder: Path) -> dict[Path, Mapping[str, Any]]:
    found: dict[Path, Mapping[str, Any]] = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("eval*/*.json")]):
        if path.stat().st_size > LARGE:
            continue
        try:
            value = json.loads(path.read_bytes())
        except ValueError:
            continue
        if isinstance(value, dict) and value.keys() >= EVALUATION:
            found[path] = value
    return found


def _distinct(runs: list[Run]) -> list[Run]:
    """Names made different by the folders above, as many as it takes, else by numbers."""
    depth = [1] * len(runs)
    for _ in range(3):
        names = ["/".join(run.place.parts[-d:]) for run, d in zip(runs, depth, strict=True)]
        counts = Counter(names)
        depth = [d + (counts[name] > 1) for name, d in zip(names, depth, strict=True)]
    counts, seen = Counter(names), Counter()
    out = []
    for run, name in zip(runs, names, strict=True):
        seen[name] += 1
        out.append(run.named(f"{name} ({seen[name]})" if counts[name] > 1 else name))
    return out


def _without_twins(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """One run given twice, by two loggers perhaps, would count as two seeds; the longer of its logs is kept."""
    kept: list[tuple[Run, dict[int, Step]]] = []
    notes = []
    for run in sorted(runs, key=lambda run: (-len(run.log.training), list(Kind).index(run.kind))):
        steps = {step.step: step for step in run.log.steps if step.trained}
        twin = next((other for other, known in kept if _same(steps, known)), None)
        if twin is None:
            kept.append((run, steps))
        else:
            notes.append(
                f"{run.files[0]} ({run.kind.value} log) is the same run as {twin.files[0]}, number for number; left out"
            )
    chosen = {id(run) for run, _ in kept}
    return [run for run in runs if id(run) in chosen], notes


def _same(steps: Mapping[int, Step], known: Mapping[int, Step]) -> bool:
    """True if the last step of both has the same numbers, its time among them, in TensorBoard's precision."""
    common = steps.keys() & known.keys()
    if not common:
        return False
    one, other = (_rounded(of[max(common)]) for of in (steps, known))
    return one == other


def _rounded(step: Step) -> dict[str, float]:
    return {name: float(np.float32(value)) for name, value in step.metrics.items()}
