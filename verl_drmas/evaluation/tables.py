"""An evaluation's tables for a terminal: scores as in the papers, then what each agent took."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.table import Table

MISSING = "-"
FEWER = "* over fewer prompts (in brackets): those with at least k sessions that ended"


def tables_of(summary: Mapping[str, Any]) -> list[Table]:
    """All tables of a summary; what isn't known is `-`, never 0."""
    tables = [score_table(summary)]
    if summary["runs"] > 1:
        tables.append(run_table(summary))
    tables += [agent_table(summary), latency_table(summary)]
    if summary["workflow_metrics"]:
        tables.append(metric_table(summary))
    return tables


def score_table(summary: Mapping[str, Any]) -> Table:
    """Per data source, in percent with the standard error over prompts."""
    names = _names(summary)
    several = f", mean of {summary['runs']} runs" if summary["runs"] > 1 else ""
    table = Table(title=f"{summary['workflow']}: percent ± standard error over prompts{several}", title_justify="left")
    if any(_fewer(found, name) for found in summary["sources"].values() for name in names):
        table.caption, table.caption_justify = FEWER, "left"
    table.add_column("data source")
    for name in ("prompts", *names, "failed sessions"):
        table.add_column(name, justify="right")
    for source, found in summary["sources"].items():
        scores = found["scores"]
        row = [_with_error(scores.get(name), "error") + _fewer(found, name) for name in names]
        table.add_row(source, _prompts(found, names), *row, str(found["failed"]))
    if summary["macro_average"]:
        table.add_section()
        macro = summary["macro_average"]
        failed = sum(found["failed"] for found in summary["sources"].values())
        rows = sum(found["rows"] for found in summary["sources"].values())
        parts = summary["sources"].values()
        marked = {name for name in macro if any(_fewer(part, name) for part in parts)}
        cells = [_with_error(macro.get(name), "error") + "*" * (name in marked) for name in names]
        table.add_row("macro average", str(rows), *cells, str(failed))
    return table


def run_table(summary: Mapping[str, Any]) -> Table:
    """Each run alone, their mean and its standard error.

    The mean is that of the runs, which the error belongs to; where sessions are missing it isn't quite the mean over
    prompts of `score_table`.
    """
    runs = summary["runs"]
    table = Table(title=f"{runs} runs: percent, and mean ± standard error over runs", title_justify="left")
    table.add_column("data source")
    table.add_column("score")
    for run in range(runs):
        table.add_column(f"run {run}", justify="right")
    table.add_column("mean", justify="right")
    blocks = {name: found["scores"] for name, found in summary["sources"].items()}
    if summary["macro_average"]:
        blocks["macro average"] = summary["macro_average"]
    for source, scores in blocks.items():
        for name, score in scores.items():
            there = [value for value in score["runs"] if value is not None]
            mean = {**score, "value": fmean(there)} if there else None
            fewer = f" ({len(there)} of {runs} runs)" if len(there) < runs else ""
            table.add_row(source, name, *map(_percent, score["runs"]), _with_error(mean, "runs_error") + fewer)
    return table


def agent_table(summary: Mapping[str, Any]) -> Table:
    """What each agent did and took, in sessions that ended."""
    ended = summary["sessions"]["ended"]
    table = Table(title=f"agents, over {ended} sessions that ended", title_justify="left")
    for name in ("agent", "model"):
        table.add_column(name)
    priced = any(use["cost"] is not None for use in summary["agents"].values())
    columns = ["activations a session", "valid %", "truncated %", "calls", "prompt tokens", "response tokens"]
    for name in (*columns, *([f"cost ({summary['currency']})", "cost a session"] if priced else [])):
        table.add_column(name, justify="right")
    for agent, use in summary["agents"].items():
        money = [_money(use["cost"]), _money(_share(use["cost"], ended))] if priced else []
        table.add_row(
            agent,
            use["model"],
            _number(_share(use["activations"], ended), 2),
            _percent(_share(use["valid"], use["activations"])),
            _percent(_share(use["truncated"], use["activations"])),
            f"{use['calls']:,}",
            _count(use["prompt_tokens"]),
            _count(use["response_tokens"]),
            *money,
        )
    if priced:
        table.add_section()
        blank = [""] * (len(columns) + 1)
        table.add_row("team", *blank, _money(summary["cost"]), _money(_share(summary["cost"], ended)))
    return table


def latency_table(summary: Mapping[str, Any]) -> Table:
    """Seconds of a session from its first call to its outcome, waits included; of a call, of the answered attempt."""
    at_once = " or ".join(map(str, summary["concurrency"])) or MISSING
    table = Table(title=f"seconds, with {at_once} sessions at once", title_justify="left")
    table.add_column("of a")
    for name in ("mean", "p50", "p95"):
        table.add_column(name, justify="right")
    rows = {"session": summary["session_seconds"]}
    rows |= {f"call of {agent}": use["latency"] for agent, use in summary["agents"].items()}
    for name, seconds in rows.items():
        table.add_row(name, *(_number(None if seconds is None else seconds[key], 3) for key in ("mean", "p50", "p95")))
    return table


def metric_table(summary: Mapping[str, Any]) -> Table:
    """The workflow's own numbers, averaged over the sessions that have them."""
    table = Table(title="the workflow's own numbers", title_justify="left")
    table.add_column("name")
    table.add_column("mean", justify="right")
    for name, value in summary["workflow_metrics"].items():
        table.add_row(name, _number(value, 3))
    return table


def failed_line(summary: Mapping[str, Any]) -> str | None:
    """A line on sessions that failed and on what they took, and one on the first; None: none ever did."""
    failed, lost = summary["sessions"]["failed"], summary["failed_attempts"]
    if not lost["sessions"]:
        return None
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(failed.items()))
    open_ = sum(failed.values())
    told = f"{open_} sessions failed ({reasons}) and count neither as right nor as wrong" if open_ else "none is open"
    spent = f"{_count(lost['prompt_tokens'])} prompt and {_count(lost['response_tokens'])} response tokens"
    money = f", {_money(lost['cost'])} {summary['currency']}" if lost["cost"] is not None else ""
    line = f"{told}; {lost['sessions']} failed attempts took {spent}{money}, which the tables leave out"
    return f"{line}\n{_first(summary['first_failure'])}" if open_ else line


def _first(failure: Mapping[str, Any]) -> str:
    """A failure in a line: most often all have the same cause."""
    where = f"run {failure['run']}, row {failure['row']}, session {failure['session']}"
    return f"the first of them ({where}): {failure['failed']}: {failure['detail']}"


def _names(summary: Mapping[str, Any]) -> list[str]:
    found = (found["scores"] for found in summary["sources"].values())
    return list(dict.fromkeys(name for scores in found for name in scores))


def _prompts(found: Mapping[str, Any], names: list[str]) -> str:
    """How many prompts a score rests on; with those that are asked for where some have no session that ended."""
    average = found["scores"].get(names[0]) if names else None
    measured = average["prompts"] if average else 0
    return str(measured) if measured == found["rows"] else f"{measured} of {found['rows']}"


def _fewer(found: Mapping[str, Any], name: str) -> str:
    """Marks a pass@k that rests on fewer prompts than the average beside it, with their number."""
    scores = found["scores"]
    average, score = next(iter(scores.values()), None), scores.get(name)
    return f"* ({score['prompts']})" if score and score["prompts"] < average["prompts"] else ""


def _share(part: float | None, whole: int) -> float | None:
    return None if part is None or not whole else part / whole


def _with_error(score: Mapping[str, Any] | None, error: str) -> str:
    if score is None:
        return MISSING
    spread = "" if score[error] is None else f" ± {100 * score[error]:.1f}"
    return f"{100 * score['value']:.1f}{spread}"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f}"


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _money(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}" if value < 1 else f"{value:,.2f}"
