"""Makes a report of runs and writes it: report.md, report.html and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_drmas.report.blocks import Picture, Report
from verl_drmas.report.find import Run, find_runs
from verl_drmas.report.groups import Group, group_runs
from verl_drmas.report.markdown import to_markdown
from verl_drmas.report.page import to_html
from verl_drmas.report.sections.curves import curve_blocks
from verl_drmas.report.sections.gaps import gap_blocks
from verl_drmas.report.sections.health import fault_blocks, spike_blocks
from verl_drmas.report.sections.overview import overview_blocks
from verl_drmas.report.sections.scores import Placed, Tables, score_blocks
from verl_drmas.report.sections.work import work_blocks
from verl_drmas.report.spikes import spikes


@dataclass(frozen=True)
class Written:
    """What a report left.

    Attributes:
        markdown: the text.
        html: the page, with all pictures in it.
        pictures: PNG files, which the text shows.
        groups: the configurations.
    """

    markdown: Path
    html: Path
    pictures: tuple[Path, ...]
    groups: tuple[Group, ...]


def write_report(
    paths: Sequence[Path], out: Path, *, tables: Tables = Tables.AUTO, title: str | None = None
) -> Written:
    """Reads runs and writes their report.

    Args:
        paths: logs, run folders, or folders of them.
        out: folder to write to; files of an earlier report are replaced.
        tables: which of the paper's tables to show.
        title: of the report.

    Raises:
        RunLogError: a path holds no log, or one that can't be read.
        ImportError: a package that a log or the pictures need isn't installed.
        OSError: the folder can't be written.
    """
    runs, notes = find_runs(paths)
    groups = group_runs(runs)
    out.mkdir(parents=True, exist_ok=True)
    report = make_report(groups, notes, out, tables=tables, title=title or _title(runs, groups))
    markdown, html = out / "report.md", out / "report.html"
    markdown.write_text(to_markdown(report, out), encoding="utf-8")
    html.write_text(to_html(report), encoding="utf-8")
    pictures = tuple(block.path for block in report.blocks if isinstance(block, Picture))
    return Written(markdown, html, pictures, tuple(groups))


def make_report(groups: Sequence[Group], notes: Sequence[str], folder: Path, *, tables: Tables, title: str) -> Report:
    """Returns a report; draws its pictures.

    Args:
        groups: the configurations.
        notes: of finding the runs.
        folder: of the pictures.
        tables: which of the paper's tables to show.
        title: above all.
    """
    placed = Placed(groups)
    found = {run.name: spikes(run.log) for group in groups for run in group.runs}
    return Report(
        title,
        (
            *overview_blocks(groups),
            *score_blocks(placed, tables),
            *curve_blocks(groups, found, folder),
            *spike_blocks(groups, found),
            *work_blocks(groups, folder),
            *fault_blocks(groups),
            *gap_blocks(placed, notes, tables),
        ),
    )


def _title(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    if len(runs) == 1:
        return f"Report on {runs[0].name}"
    kinds = "one configuration" if len(groups) == 1 else f"{len(groups)} configurations"
    return f"Report on {len(runs)} runs of {kinds}"
