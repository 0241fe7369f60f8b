"""`verl-drmas report`: one or many runs beside the paper's numbers, as Markdown, HTML and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from verl_drmas.report.runlog import RunLogError

TABLES = ("auto", "all", "none")


def main(runs: Sequence[Path], out: Path, *, tables: str = "auto", title: str | None = None) -> int:
    """Write the report and say where it is.

    Args:
        runs: Logs of verl's loggers (file, tensorboard, console), run folders, or folders of them.
        out: Folder to write to.
        tables: Which of the paper's tables: those that a run belongs to (auto), all or none.
        title: Of the report.

    Returns:
        The exit status: 0, or 1 with one line on what is wrong.
    """
    console = Console(soft_wrap=True)
    try:
        try:
            from verl_drmas.report.build import write_report
            from verl_drmas.report.sections.scores import Tables
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'verl-drmas[report]'") from None
        if tables not in TABLES:
            raise RunLogError(f"--tables is {tables!r}; choose {', '.join(TABLES[:-1])} or {TABLES[-1]}")
        written = write_report(runs, out.expanduser(), tables=Tables(tables), title=title)
    except (RunLogError, ImportError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"refused: {error}", style="bold red", markup=False, highlight=False)
        return 1
    for group in written.groups:
        names = ", ".join(f"{label} {run.name}" for label, run in group.labelled())
        console.print(f"{group.name}: {names}", markup=False, highlight=False)
    lines = (written.html, written.markdown, f"{len(written.pictures)} pictures beside them")
    console.print("\n".join(map(str, lines)), markup=False, highlight=False)
    return 0
