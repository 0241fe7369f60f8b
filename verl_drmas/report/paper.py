"""The tables of Dr. MAS (arXiv 2602.08847), and which of their cells a configuration belongs to.

The cells' numbers are in paper_tables.json, in percent, with the values of the paper's own runs that a configuration is
compared with.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from verl_drmas.report.settings import HETEROGENEOUS, SINGLE, Settings

AVERAGE = "Average"


@cache
def tables() -> Mapping[str, Any]:
    """The tables as the file has them."""
    return json.loads(files(__package__).joinpath("paper_tables.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cell:
    """A column of table 1 or 2, for one model.

    Attributes:
        task: `math` or `search`.
        model: as the paper has it, `Qwen3-4B`.
        method: a key of `methods`; None: only a row of the ablation.
        ablation: the estimator as a row of table 3; None: not in it.
    """

    task: str
    model: str
    method: str | None
    ablation: str | None = None

    def shown(self) -> str:
        """The cell in words."""
        table = tables()["tables"][self.task]
        parts = []
        if self.method:
            parts.append(f"{table['name']}, {self.model}: {tables()['methods'][self.method]['title']}")
        if self.ablation:
            ablation = tables()["ablation"]
            parts.append(f"{ablation['name']}: {ablation['rows'][self.ablation]['title']}")
        return "; ".join(parts)


def cell_of(settings: Settings, sources: Collection[str]) -> tuple[Cell | None, str]:
    """Returns the paper's cell that a configuration belongs to, or None, and why.

    Args:
        settings: the configuration; its task, model, mapping and estimator decide, and nothing else.
        sources: data sources that the runs validated on: a single agent of stock verl has no workflow to tell its task.
    """
    task = _task(settings, sources)
    if task is None:
        if settings.workflow is None:
            return None, "a run of stock verl that validated on none of the paper's data sets"
        known = ", ".join(table["workflow"] for table in tables()["tables"].values())
        return None, f"the workflow {settings.workflow} is none of the paper's ({known})"
    if settings.mapping == HETEROGENEOUS:
        paper = tables()["heterogeneous"]
        return None, (
            f"the paper has no accuracy of its heterogeneous team in a table; its latency is {paper['latency']} % and "
            f"its cost {paper['cost']} % from the other's ({paper['name']})"
        )
    names = {name.split("/")[-1].lower() for name in settings.models.values()}
    model = next((m for m in tables()["tables"][task]["models"] if {m.lower()} == names), None)
    if model is None:
        return None, f"the model {settings.model} is none of the paper's for {task}"
    if settings.frozen:
        return None, f"a frozen model ({', '.join(settings.frozen)}) is in none of the paper's tables"
    method = next(
        (
            key
            for key, one in tables()["methods"].items()
            if one["mapping"] == settings.mapping and settings.estimator in one["estimators"]
        ),
        None,
    )
    ablation = tables()["ablation"]
    place = (ablation["task"], ablation["model"], ablation["mapping"])
    row = (
        settings.estimator
        if place == (task, model, settings.mapping) and settings.estimator in ablation["rows"]
        else None
    )
    if method is None and row is None:
        return None, f"{settings.estimator} with {settings.mapping} models is in none of the paper's tables"
    cell = Cell(task, model, method, row)
    return cell, cell.shown()


def _task(settings: Settings, sources: Collection[str]) -> str | None:
    for task, table in tables()["tables"].items():
        if settings.workflow == table["workflow"]:
            return task
        if settings.workflow is None and settings.mapping == SINGLE and any(dataset_of(task, s) for s in sources):
            return task
    return None


def dataset_of(task: str, source: str) -> str | None:
    """Returns the paper's name of a data source, or None where it isn't one of the task's."""
    plain = source.split("/")[-1].lower().replace("-", "_").removeprefix("searchr1_")
    for dataset, known in tables()["tables"][task]["datasets"].items():
        if plain in known:
            return dataset
    return None


def unlike(settings: Settings, task: str) -> list[str]:
    """Returns where a configuration has another value than the paper's runs: `key value (paper: value)`."""
    found = []
    for key, theirs in tables()["tables"][task]["settings"].items():
        ours = _values(settings, key)
        if theirs is None and ours:
            found.append(f"{key} {', '.join(map(str, ours))} (paper: none)")
        elif other := [value for value in ours if not _equal(value, theirs)]:
            found.append(f"{key} {', '.join(dict.fromkeys(map(str, other)))} (paper: {theirs})")
    return found


def _values(settings: Settings, key: str) -> Sequence[Any]:
    before, star, after = key.partition("*")
    if not star:
        value = settings.values.get(key)
        return [] if value is None else [value]
    return [
        value
        for name, value in settings.values.items()
        if name.startswith(before) and name.endswith(after) and name.count(".") == key.count(".")
    ]


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, bool | str) or isinstance(ours, str):
        return str(ours) == str(theirs)
    return abs(float(ours) - float(theirs)) <= 1e-9 * max(1.0, abs(float(theirs)))
