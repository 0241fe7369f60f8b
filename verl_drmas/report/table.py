"""The table that closes a run: each metric's mean over the first and the last fifth of the training steps."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.table import Table

from verl_drmas.report.runlog import RunLog, mean

MISSING = "-"


@dataclass(frozen=True)
class Metric:
    """A metric and how to show it.

    Attributes:
        name: as logged, such as ``actor/grad_norm``.
        label: for people, with its unit where it has one.
        digits: after the point.
    """

    name: str
    label: str
    digits: int = 3


@dataclass(frozen=True)
class Row:
    """One line of the table; a value is None where the metric was not logged in that fifth."""

    name: str
    label: str
    first: float | None
    last: float | None
    change: float | None


# What the bundled workflows measure; a run shows those that its own logged.
OUTCOMES = (
    Metric("drmas/workflow/solver_success", "solver success"),
    Metric("drmas/workflow/em", "exact match"),
    Metric("drmas/workflow/f1", "token F1"),
    Metric("drmas/workflow/searches", "searches per session", 2),
    Metric("drmas/workflow/delegations", "delegations per session", 2),
    Metric("drmas/workflow/judge_score", "judge's score"),
    Metric("drmas/workflow/gold_in_evidence", "gold in the evidence"),
    Metric("drmas/workflow/verifier_balanced_accuracy", "verifier balanced accuracy"),
    Metric("drmas/workflow/verifier_accuracy_right", "verifier accuracy, right"),
    Metric("drmas/workflow/verifier_accuracy_wrong", "verifier accuracy, wrong"),
)


def team_metrics(log: RunLog) -> list[Metric]:
    """Returns what the closing table of a team shows: outcomes, each agent's own, the optimiser and the clock."""
    names = log.names()
    agents = [
        metric
        for agent in log.agents()
        for metric in (
            Metric(f"drmas/agent/{agent}/reward/mean", f"{agent}: reward"),
            Metric(f"drmas/agent/{agent}/activations_per_session", f"{agent}: activations per session", 2),
            Metric(f"drmas/agent/{agent}/valid_share", f"{agent}: valid share"),
            Metric(f"drmas/agent/{agent}/inflation_factor/mean", f"{agent}: inflation factor", 2),
        )
    ]
    return [
        *(metric for metric in OUTCOMES if metric.name in names),
        *agents,
        *gradient_metrics(log),
        Metric("timing_s/step", "seconds per step", 2),
    ]


def gradient_metrics(log: RunLog) -> list[Metric]:
    """Returns the gradient norm of each model that logged one, named where there are several."""
    found = log.by_model("grad_norm")
    return [Metric(name, f"{model}: grad norm" if len(found) > 1 else "grad norm") for model, name in found.items()]


def rows(log: RunLog, metrics: Iterable[Metric] | None = None) -> list[Row]:
    """Returns one row a metric, in the order given (`team_metrics` by default)."""
    first, last = log.fifths()
    out = []
    for metric in team_metrics(log) if metrics is None else metrics:
        start, end = mean(first, metric.name), mean(last, metric.name)
        change = None if start is None or end is None else end - start
        out.append(Row(metric.name, metric.label, start, end, change))
    return out


def as_dict(log: RunLog, metrics: Iterable[Metric] | None = None) -> dict[str, dict[str, float | str | None]]:
    """Returns the table as plain data: metric name to ``label``, ``first``, ``last``, ``change`` (None: not logged)."""
    return {row.name: {key: value for key, value in asdict(row).items() if key != "name"} for row in rows(log, metrics)}


def table(log: RunLog, metrics: Iterable[Metric] | None = None) -> Table:
    """Returns the table for `rich`; what was not logged is ``-``, never 0."""
    chosen = team_metrics(log) if metrics is None else list(metrics)
    first, last = log.fifths()
    out = Table(title=f"{log.name}: mean over the first and the last fifth of its steps")
    out.add_column("metric")
    out.add_column(_span("first", first), justify="right")
    out.add_column(_span("last", last), justify="right")
    out.add_column("change", justify="right")
    for metric, row in zip(chosen, rows(log, chosen), strict=True):
        out.add_row(
            metric.label,
            _number(row.first, metric.digits),
            _number(row.last, metric.digits),
            _number(row.change, metric.digits, sign="+"),
        )
    return out


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return MISSING if value is None else f"{value:{sign}.{digits}f}"


def _span(word: str, steps: list) -> str:
    return f"{word} ({steps[0].step}–{steps[-1].step})" if steps else word
