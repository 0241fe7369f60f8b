"""Draws groups of runs: thin lines for seeds, a thick one for their mean, the same colour for one configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from verl_drmas.report.groups import Group
from verl_drmas.report.runlog import RunLog

# Okabe and Ito's colours without yellow, which is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
SEEDS = ((0, ()), (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1.2)))  # line styles of a group's runs
INK, GRID = "#333333", "#dddddd"
AT_ONCE = len(COLOURS)  # groups in one picture
DPI = 130
WIDE = 40.0  # a range of values above this is drawn on a logarithmic scale
STYLE = {"text.parse_math": False, "font.size": 10, "axes.unicode_minus": True}  # a name's $ is no formula


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        title: above it.
        metrics: the metric's name, by run; a run that isn't among them doesn't have it.
        share: values lie in 0..1, and the axis shows all of it.
        spread: values may take a logarithmic axis, and none is smoothed away (gradient norms).
        marks: steps to mark, by run.
        dots: few values, each of them shown.
    """

    title: str
    metrics: Mapping[str, str]
    unit: str = ""
    share: bool = False
    spread: bool = False
    marks: Mapping[str, Sequence[int]] | None = None
    dots: bool = False

    def has(self, group: Group) -> bool:
        """True if any run of the group logged it."""
        return any(self.metrics.get(run.name) in run.log.columns for run in group.runs)


def batches(groups: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yields as many groups at once as there are colours."""
    for first in range(0, len(groups), AT_ONCE):
        yield groups[first : first + AT_ONCE]


def draw_curves(
    title: str, panels: Sequence[Panel], groups: Sequence[Group], path: Path, *, alike: bool = False
) -> tuple[Path, int]:
    """Writes the panels that have values, with a legend of every run below them.

    Args:
        title: of the figure.
        panels: in order; at least one has values.
        groups: at most `AT_ONCE`.
        path: PNG file to write.
        alike: one scale for all panels, unless one of them would be flat on it.

    Returns:
        The path, and over how many steps values were smoothed (1: not at all).
    """
    chosen = [panel for panel in panels if any(panel.has(group) for group in groups)]
    window = _window(groups)
    columns = min(3, len(chosen)) if len(chosen) != 4 else 2
    rows = -(-len(chosen) // columns)
    width = {1: 8.5, 2: 10.0, 3: 12.0}[columns]
    with rc_context(STYLE):
        figure = Figure(figsize=(width, 2.9 * rows + 0.6), dpi=DPI)
        FigureCanvasAgg(figure)
        below = _legend(figure, chosen, groups)
        figure.set_size_inches(width, 2.9 * rows + 0.6 + below)
        figure.set_layout_engine("constrained")
        figure.suptitle(title, fontsize=13, color=INK, x=0.01, ha="left")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis, panel in zip(axes, chosen, strict=False):
            _panel(axis, panel, groups, 1 if panel.spread or panel.dots else window)
        for axis in axes[len(chosen) :]:
            axis.set_axis_off()
        if alike:
            _align(axes[: len(chosen)])
        _save(figure, path)
    return path, window


def _window(groups: Sequence[Group]) -> int:
    longest = max((len(run.log.training) for group in groups for run in group.runs), default=0)
    return max(1, longest // 40)


def _legend(figure: Figure, panels: Sequence[Panel], groups: Sequence[Group]) -> float:
    """Names every run below the axes, a group below its mean; returns the legend's height in inches."""
    blocks = []
    for group, colour in zip(groups, COLOURS, strict=False):
        if not any(panel.has(group) for panel in panels):
            continue
        several = len(group.runs) > 1
        block = (
            [(Line2D([], [], color=colour, lw=2.6), _short(f"{group.label} mean: {group.title}"))] if several else []
        )
        for i, (label, run) in enumerate(group.labelled()):
            look = {"lw": 1.1, "alpha": 0.75} if several else {"lw": 1.8}
            block.append(
                (Line2D([], [], color=colour, ls=SEEDS[i % len(SEEDS)], **look), _short(f"{label} {run.name}"))
            )
        blocks.append(block)
    if any(steps for panel in panels for steps in (panel.marks or {}).values()):
        blocks.append([(Line2D([], [], color=INK, marker="v", ls="", ms=7, mfc="none"), "spike")])
    height = max(map(len, blocks))
    blank = (Line2D([], [], color="none"), "")
    room = figure.bbox.width
    for columns in range(len(blocks), 0, -1):
        # Columns are filled from the top: with blocks of one height and whole columns of them, none is torn apart.
        padded = [block + [blank] * (height - len(block)) for block in blocks]
        padded += [[blank] * height] * (-len(blocks) % columns)
        handles, labels = zip(*(entry for block in padded for entry in block), strict=True)
        legend = figure.legend(
            handles, labels, loc="outside lower left", ncols=columns, fontsize=9, frameon=False, handlelength=3.2
        )
        size = legend.get_window_extent(figure.canvas.get_renderer())
        if size.width <= room or columns == 1:
            return size.height / figure.dpi
        legend.remove()
    return 0.0


def _short(text: str, most: int = 64) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _panel(axis: Axes, panel: Panel, groups: Sequence[Group], window: int) -> None:
    shown: list[float] = []
    for place, (group, colour) in enumerate(zip(groups, COLOURS, strict=False)):
        several = len(group.runs) > 1
        # Later lines are narrower, so that those that lie on each other show as bands.
        width = (2.2 if panel.spread else 3.4) * (1 - 0.09 * place)
        lines = []
        for i, run in enumerate(group.runs):
            steps, values = run.log.series(panel.metrics.get(run.name, ""))
            if not steps:
                continue
            smooth = running_mean(np.asarray(values), window)
            lines.append((np.asarray(steps), smooth))
            marker = "o" if panel.dots or len(steps) == 1 else ""
            look = {"lw": 0.9, "alpha": 0.55} if several else {"lw": 0.6 * width}
            axis.plot(steps, smooth, color=colour, ls=SEEDS[i % len(SEEDS)], marker=marker, ms=3.5, **look)
            _mark(axis, (panel.marks or {}).get(run.name, ()), dict(zip(steps, values, strict=True)), colour)
            shown += values
        if several:
            steps, values = common_mean(lines)
            marker = "o" if panel.dots or len(steps) == 1 else ""
            axis.plot(steps, values, color=colour, lw=width, solid_capstyle="round", marker=marker, ms=5)
    _dress(axis, panel, shown)


def _mark(axis: Axes, steps: Sequence[int], values: Mapping[int, float], colour: str) -> None:
    if steps:
        axis.plot(steps, [values[s] for s in steps], "v", ms=8, mfc="none", mec=colour, mew=1.4, ls="", zorder=5)


def _dress(axis: Axes, panel: Panel, shown: Sequence[float]) -> None:
    axis.set_title(_short(panel.title, 48), fontsize=11, loc="left", color=INK)
    axis.set_xlabel("step", fontsize=9, color=INK)
    axis.set_ylabel(panel.unit, fontsize=9, color=INK)
    axis.tick_params(labelsize=9, colors=INK)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.share:
        axis.set_ylim(-0.02, 1.02)
    elif panel.spread and shown and min(shown) > 0 and max(shown) > WIDE * min(shown):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(shown) < 1000 * min(shown) else (1,)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # matplotlib's own is a formula
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif shown and min(shown) >= 0:
        axis.set_ylim(bottom=0)
        if max(shown) == 0:
            axis.set_ylim(0, 1)


def _align(axes: Sequence[Axes]) -> None:
    limits = [axis.get_ylim() for axis in axes]
    low, high = min(a for a, _ in limits), max(b for _, b in limits)
    if all(b - a > (high - low) / 5 for a, b in limits) and all(axis.get_yscale() == "linear" for axis in axes):
        for axis in axes:
            axis.set_ylim(low, high)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of each value and those before it, up to `window` in all (n,)."""
    if window <= 1:
        return values
    sums = np.cumsum(np.insert(values.astype(float), 0, 0.0))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - window)
    return (sums[last] - sums[first]) / (last - first)


def common_mean(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and mean of lines where all of them have a value; of none of them, nothing."""
    if not lines:
        return np.empty(0), np.empty(0)
    common = lines[0][0]
    for steps, _ in lines[1:]:
        common = np.intersect1d(common, steps)
    values = [values[np.searchsorted(steps, common)] for steps, values in lines]
    return common, np.mean(values, axis=0) if len(common) else np.empty(0)


PHASE_COLOURS = {
    "rollout": "#0072B2",
    "reward": "#56B4E9",
    "old log-probs": "#009E73",
    "reference": "#7BCBB0",
    "critic": "#A6A6A6",
    "advantages": "#F0E442",
    "update": "#D55E00",
    "weight sync": "#E69F00",
    "save": "#CC79A7",
    "other": "#E4E4E4",
    "test": "#555555",
}


def draw_phases(seconds: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """Writes a bar a group: seconds a step by phase, one after the other.

    Args:
        seconds: by group name, then by phase in order.
        path: PNG file to write.
    """
    names = list(seconds)
    phases = list(dict.fromkeys(phase for of in seconds.values() for phase in of))
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 0.62 * len(names) + 1.55), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        left = np.zeros(len(names))
        widest = max(math.fsum(of.values()) for of in seconds.values())
        for phase in phases:
            lengths = np.array([seconds[name].get(phase, 0.0) for name in names])
            axis.barh(range(len(names)), lengths, left=left, color=PHASE_COLOURS[phase], edgecolor="white", height=0.66)
            for row, length in enumerate(lengths):
                if length > 0.09 * widest:
                    ink = "white" if phase in ("rollout", "old log-probs", "update", "test") else INK
                    x = left[row] + length / 2
                    axis.text(x, row, f"{length:.3g} s", ha="center", va="center", fontsize=9, color=ink)
            left = left + lengths
        axis.set_yticks(range(len(names)), [_short(name, 44) for name in names], fontsize=9)
        axis.invert_yaxis()
        axis.set_xlabel("seconds a step, mean over steps and runs", fontsize=9, color=INK)
        axis.tick_params(labelsize=9, colors=INK)
        axis.grid(axis="x", color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
        patches = [Patch(facecolor=PHASE_COLOURS[phase], edgecolor="#999999", linewidth=0.4) for phase in phases]
        figure.legend(patches, phases, loc="outside lower left", ncols=min(len(phases), 8), fontsize=9, frameon=False)
        _save(figure, path)
    return path


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, format="png", facecolor="white", metadata={"Software": None})


def metric_of_runs(groups: Sequence[Group], metric: str) -> dict[str, str]:
    """Returns the same metric for every run."""
    return {run.name: metric for group in groups for run in group.runs}


def logs(groups: Sequence[Group]) -> list[RunLog]:
    """Returns the logs of all runs."""
    return [run.log for group in groups for run in group.runs]
