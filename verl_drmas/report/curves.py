"""Draws a run: one small panel a quantity, on the same steps, as a PNG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from verl_drmas.report.runlog import RunLog
from verl_drmas.report.table import gradient_metrics

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK = "#333333"


@dataclass(frozen=True)
class Line:
    """A metric in a panel; `style` is matplotlib's line style."""

    name: str
    label: str
    colour: str = COLOURS[0]
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        title: above the axes.
        unit: beside them.
        lines: later ones lie above earlier ones.
        share: the values lie between 0 and 1; the axis shows all of that and a line at one half.
        smooth: draw a running mean over the logged values.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    share: bool = False
    smooth: bool = True


def team_panels(log: RunLog) -> list[Panel]:
    """Returns one reward panel an agent, then the outcomes, the activations, the gradient and the clock."""
    agents = log.agents()
    colours = {agent: COLOURS[i % len(COLOURS)] for i, agent in enumerate(agents)}
    rewards = [
        Panel(f"{a}: reward", "mean per activation", (Line(f"drmas/agent/{a}/reward/mean", "reward", colours[a]),))
        for a in agents
    ]
    solver, verifier = colours.get("solver", COLOURS[0]), colours.get("verifier", COLOURS[1])
    norms = gradient_metrics(log)
    gradients = tuple(
        Line(norm.name, norm.label, COLOURS[i % len(COLOURS)] if len(norms) > 1 else INK)
        for i, norm in enumerate(norms)
    )
    right, wrong = "drmas/workflow/verifier_accuracy_right", "drmas/workflow/verifier_accuracy_wrong"
    return [
        *rewards,
        Panel(
            "Solver success",
            "share of sessions",
            (Line("drmas/workflow/solver_success", "success", solver),),
            share=True,
        ),
        Panel(
            "Answers",
            "per session",
            (
                Line("drmas/workflow/em", "exact match", COLOURS[2]),
                Line("drmas/workflow/f1", "token F1", COLOURS[5], ":"),
                Line("drmas/workflow/gold_in_evidence", "gold in the evidence", COLOURS[4], "--"),
            ),
            share=True,
        ),
        Panel("Searches", "per session", (Line("drmas/workflow/searches", "searches", COLOURS[1]),)),
        Panel("Delegations", "per session", (Line("drmas/workflow/delegations", "delegations", COLOURS[1]),)),
        Panel("Judge", "score", (Line("drmas/workflow/judge_score", "score", COLOURS[3]),), share=True),
        Panel(
            "Verifier accuracy",
            "share of verdicts",
            (
                Line(right, "right", COLOURS[2], "--"),
                Line(wrong, "wrong", COLOURS[3], ":"),
                Line("drmas/workflow/verifier_balanced_accuracy", "balanced", verifier),
            ),
            share=True,
        ),
        Panel(
            "Activations",
            "per session",
            tuple(
                Line(f"drmas/agent/{a}/activations_per_session", a, colours[a], ("-", "--")[i % 2])
                for i, a in enumerate(agents)
            ),
        ),
        Panel(
            "Inflation factor",
            "F",
            tuple(Line(f"drmas/agent/{a}/inflation_factor/mean", a, colours[a]) for a in agents),
        ),
        Panel("Gradient norm", "before clipping", gradients),
        Panel("Step time", "seconds", (Line("timing_s/step", "step", INK),), smooth=False),
    ]


def draw(log: RunLog, path: str | Path, *, panels: Sequence[Panel] | None = None, columns: int = 4) -> Path:
    """Writes the curves of a run.

    Thin lines are the logged values, thick ones their running mean over a tenth of the run. A panel none of whose
    metrics was logged is left out.

    Args:
        log: the run; its name and number of steps head the figure.
        path: PNG file; its folder is made where absent.
        panels: `team_panels` by default.
        columns: panels in a row.

    Returns:
        The path.

    Raises:
        ValueError: none of the metrics was logged.
    """
    names = log.names()
    chosen = [
        p for p in (team_panels(log) if panels is None else panels) if any(line.name in names for line in p.lines)
    ]
    if not chosen:
        raise ValueError(f"run {log.name!r}: logged none of the metrics to draw; it has {', '.join(sorted(names)[:8])}")
    columns = min(columns, len(chosen))
    height = -(-len(chosen) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * height + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    last = log.steps[-1].step
    window = max(1, last // 10)
    note = f"thin: logged, thick: mean of the last {window} steps" if window > 1 else "as logged"
    figure.suptitle(f"{log.name}, {last} steps ({note})", fontsize=12, color=INK)
    axes = figure.subplots(height, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, chosen, strict=False):
        _panel(axis, panel, log, window=window if panel.smooth else 1)
        axis.set_xlim(0, last + 1)
    for axis in axes[len(chosen) :]:
        axis.set_axis_off()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png", facecolor="white")
    return path


def _panel(axis: Axes, panel: Panel, log: RunLog, window: int) -> None:
    drawn = 0
    for line in panel.lines:
        steps, values = log.series(line.name)
        if not steps:
            continue
        drawn += 1
        width = 1.8 if panel.smooth else 1.0
        if panel.smooth:
            axis.plot(steps, values, color=line.colour, linewidth=0.8, alpha=0.3)
        axis.plot(steps, _running_mean(values, window), color=line.colour, ls=line.style, lw=width, label=line.label)
    axis.set_title(panel.title, fontsize=10, loc="left", color=INK)
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.share:
        axis.set_ylim(0, 1)
        axis.axhline(0.5, color="#999999", linewidth=0.8)
    else:
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    if drawn > 1:
        axis.legend(fontsize=7, frameon=False, loc="best")


def _running_mean(values: list[float], window: int) -> list[float]:
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]
