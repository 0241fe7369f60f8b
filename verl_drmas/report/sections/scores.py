"""The paper's tables with our numbers beside them, and every data set that the runs validated on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum

from verl_drmas.report.blocks import Block, Bullets, Heading, Paragraph, Table, table_of
from verl_drmas.report.final import Score, by_k, final_scores, unfinished
from verl_drmas.report.groups import Group
from verl_drmas.report.length import shortfall
from verl_drmas.report.paper import AVERAGE, Cell, cell_of, dataset_of, tables, unlike
from verl_drmas.report.stats import NOT_RUN, Estimate

Scores = Mapping[str, Mapping[str, Score]]


class Tables(str, Enum):
    """Which of the paper's tables are shown."""

    AUTO = "auto"  # of the tasks and models that a configuration is on
    ALL = "all"
    NONE = "none"


class Placed:
    """The groups, their final scores, and the paper's cells that they belong to.

    Args:
        groups: of the report.
    """

    def __init__(self, groups: Sequence[Group]):
        self.groups = groups
        self.scores: dict[str, Scores] = {run.name: final_scores(run) for group in groups for run in group.runs}
        self.cells: dict[str, Cell] = {}
        self.why: dict[str, str] = {}
        for group in groups:
            if group.settings is None:
                self.why[group.label] = "no configuration tells its model, mapping, estimator and task"
                continue
            sources = {source for run in group.runs for source in self.scores[run.name]}
            cell, self.why[group.label] = cell_of(group.settings, sources)
            if cell:
                self.cells[group.label] = cell

    def estimate(self, group: Group, dataset: str, name: str) -> Estimate | None:
        """A group's number in a cell, such as `avg@16` on `AIME24`, or of the average over all data sets."""
        task = self.cells[group.label].task
        values = []
        for run in group.runs:
            own = self._of_paper(run.name, task, name)
            if dataset in own:
                values.append(own[dataset])
            elif dataset == AVERAGE and own.keys() == tables()["tables"][task]["datasets"].keys():
                values.append(math.fsum(own.values()) / len(own))
        return Estimate.of(values)

    def _of_paper(self, run: str, task: str, name: str) -> dict[str, float]:
        found = {
            dataset_of(task, source): scores[name].value
            for source, scores in self.scores[run].items()
            if name in scores
        }
        return {dataset: value for dataset, value in found.items() if dataset}


def score_blocks(placed: Placed, wanted: Tables) -> list[Block]:
    """Returns the sections of the paper's tables and of the final validations.

    Args:
        placed: the groups with their scores.
        wanted: which tables.
    """
    return [*([] if wanted is Tables.NONE else _paper(placed, wanted)), *_final(placed)]


def _paper(placed: Placed, wanted: Tables) -> list[Block]:
    blocks: list[Block] = [Heading("The paper's tables"), Bullets(tuple(_places(placed)))]
    shown: list[Block] = []
    for task, table in tables()["tables"].items():
        for model in table["models"]:
            if wanted is Tables.ALL or any((c.task, c.model) == (task, model) for c in placed.cells.values()):
                shown += [_table(placed, task, model, kind) for kind in ("avg", "pass")]
    if wanted is Tables.ALL or any(cell.ablation for cell in placed.cells.values()):
        shown.append(_ablation(placed))
    if not shown:
        text = "No configuration is of a task and a model of the paper; --tables all shows its tables all the same."
        return [*blocks, Paragraph(text)]
    text = (
        f"{tables()['source']}. Ours: percent, mean ± standard error over runs (seeds); the paper gives no "
        f"errors. “{NOT_RUN}”: no run of that cell validated the data set with {tables()['k']} sessions a "
        "prompt. The average is over data sets, and ours needs all of them."
    )
    return [*blocks, Paragraph(text), *shown]


def _places(placed: Placed) -> list[str]:
    lines = []
    for group in placed.groups:
        cell = placed.cells.get(group.label)
        lines.append(f"{group.name}: {placed.why[group.label] if cell else 'in no table: ' + placed.why[group.label]}.")
        if cell and group.settings:
            other = unlike(group.settings, cell.task)
            if other:
                lines.append(f"{group.label} isn't the paper's run: {'; '.join(other)}.")
            lines += _other_ks(placed, group, cell)
        lines += _lengths(group)
        for run in group.runs:
            for name in unfinished(run):
                lines.append(f"{run.name}: the evaluation {name} isn't complete, and is in no table.")
    return lines


def _lengths(group: Group) -> list[str]:
    """Runs that are shorter than they were to be, or than others of their group, are in its means all the same."""
    short = {run.name: told for run in group.runs if (told := shortfall(run))}
    lines = [
        f"{name} isn't whole: it {told}, and the means of {group.label} have it in." for name, told in short.items()
    ]
    ends = sorted({run.log.training[-1].step for run in group.runs if run.log.training})
    if len(ends) > 1:
        shown = ", ".join(map(str, ends))
        lines.append(f"The means of {group.label} are over runs of different length: they end at steps {shown}.")
    return lines


def _other_ks(placed: Placed, group: Group, cell: Cell) -> list[str]:
    k = tables()["k"]
    names = {
        name
        for run in group.runs
        for source, scores in placed.scores[run.name].items()
        if dataset_of(cell.task, source)
        for name in scores
    }
    if not names or {f"avg@{k}", f"pass@{k}"} <= names:
        return [] if names else [f"{group.label} validated on none of the table's data sets."]
    others = ", ".join(sorted(names, key=by_k))
    return [f"{group.label} has {others}, which is not the tables' avg@{k} and pass@{k}; see the final validation."]


def _table(placed: Placed, task: str, model: str, kind: str) -> Table:
    table, k = tables()["tables"][task], tables()["k"]
    column = 0 if kind == "avg" else 1
    methods = tables()["methods"]
    rows = []
    for dataset, theirs in table["models"][model].items():
        cells = [dataset]
        for place, method in enumerate(methods):
            groups = [
                group
                for group in placed.groups
                if (cell := placed.cells.get(group.label))
                and (cell.task, cell.model, cell.method) == (task, model, method)
            ]
            cells += [f"{theirs[place][column]:.1f}", _ours(placed, groups, dataset, f"{kind}@{k}")]
        rows.append(cells)
    return table_of(
        ("", *["paper", "ours"] * len(methods)),
        rows,
        title=f"{table['name']}, {model}: {kind}@{k}",
        spans=(("", 1), *((one["title"], 2) for one in methods.values())),
    )


def _ablation(placed: Placed) -> Table:
    table, k = tables()["ablation"], tables()["k"]
    rows = []
    for estimator, row in table["rows"].items():
        groups = [g for g in placed.groups if g.label in placed.cells and placed.cells[g.label].ablation == estimator]
        cells = [row["title"]]
        for kind, theirs in zip(("avg", "pass"), row["average"], strict=True):
            cells += [f"{theirs:.1f}", _ours(placed, groups, AVERAGE, f"{kind}@{k}")]
        rows.append(cells)
    return table_of(
        ("", "paper", "ours", "paper", "ours"),
        rows,
        title=f"{table['name']}, {table['model']}, {table['task']}, {table['mapping']} models: average over data sets",
        spans=(("", 1), (f"avg@{k}", 2), (f"pass@{k}", 2)),
    )


def _ours(placed: Placed, groups: Sequence[Group], dataset: str, name: str) -> str:
    found = [(group, placed.estimate(group, dataset, name)) for group in groups]
    texts = [(group, estimate.shown(scale=100)) for group, estimate in found if estimate]
    if len(groups) < 2:
        return texts[0][1] if texts else NOT_RUN
    return "; ".join(f"{group.label}: {text}" for group, text in texts) or NOT_RUN


def _final(placed: Placed) -> list[Block]:
    """Every data set of every group, whatever k: for settings of one's own."""
    names: set[str] = set()
    rows: list[tuple[Group, str, dict[str, list[Score]]]] = []
    for group in placed.groups:
        by_source: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
        for run in group.runs:
            for source, scores in placed.scores[run.name].items():
                for name, score in scores.items():
                    if name != "pass@1":  # avg@n over again, where sessions are right or wrong
                        by_source[source][name].append(score)
                        names.add(name)
        rows += [(group, source, by_source[source]) for source in sorted(by_source)]
    blocks: list[Block] = [Heading("Final validation")]
    if not rows:
        text = "No run logged a validation: set trainer.test_freq, or evaluate a checkpoint with verl-drmas eval."
        return [*blocks, Paragraph(text)]
    columns = sorted(names, key=by_k)
    cells = [
        (
            group.name,
            source,
            *(_estimate(scores.get(name, [])) for name in columns),
            ", ".join(sorted({score.where for one in scores.values() for score in one})),
        )
        for group, source, scores in rows
    ]
    head = ("configuration", "data set", *columns, "measured at")
    text = (
        "Percent, mean ± standard error over runs, each at its last validation; pass@k without bias for more than "
        "k sessions. A session that failed counts as neither right nor wrong."
    )
    return [*blocks, Paragraph(text), table_of(head, cells, words=frozenset({1, len(head) - 1}))]


def _estimate(scores: Sequence[Score]) -> str:
    estimate = Estimate.of([score.value for score in scores])
    return estimate.shown(scale=100) if estimate else NOT_RUN
