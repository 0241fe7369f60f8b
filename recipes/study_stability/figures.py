"""The study's pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.study_stability.moments import expected_factor
from recipes.study_stability.penalties import COEFFICIENTS, SIZES, WAYS, predicted
from recipes.study_stability.summary import Run, choose, main_runs
from recipes.study_stability.training import ESTIMATORS, Setting
from recipes.study_stability.worlds import AGENTS
from verl_drmas.report.figures import COLOURS

COLOUR = dict(zip(ESTIMATORS, COLOURS, strict=False))
DASH = dict(zip(ESTIMATORS, ("-", "-", "--", ":", "-"), strict=True))
AGENT_COLOUR = dict(zip(AGENTS, COLOURS, strict=False))
STYLE = {
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
}
DPI = 100

Rows = Sequence[dict[str, Any]]


def draw(folder: Path, runs: Sequence[Run], probe: Rows, moments: Rows, penalty: Rows) -> dict[str, str]:
    """Draws every figure into `folder`; returns each file's name and its caption."""
    pictures: dict[str, tuple[str, Callable[[Path], None]]] = {
        "learning.png": (
            "Success of sampled sessions against actions sampled, and its difference to `grpo_team` of the same seed: "
            "mean and standard error over seeds.",
            lambda path: _learning(path, runs),
        ),
        "norms.png": (
            "Gradient norm of each agent before clipping, smoothed: mean over seeds, and the range of the seeds for "
            "`grpo_team` and `drmas`.",
            lambda path: _norms(path, runs),
        ),
        "factors.png": (
            "Inflation factor F of each agent under `grpo_team`: mean over prompts and seeds, smoothed; the largest "
            "group of any seed in a fortieth of the budget (dots); the bound N - 1.",
            lambda path: _factors(path, runs),
        ),
        "rates.png": (
            "How fast teams learn (mean success over the budget) at each learning rate; standard error over seeds.",
            lambda path: _rates(path, runs),
        ),
        "probe.png": (
            "Cosine of a single batch's gradient with the gradient of the expected reward, at policies held still "
            "after a share of the budget. Black: the cosine of the mean gradient; below 1 an estimator is biased.",
            lambda path: _probe(path, probe),
        ),
        "moments.png": (
            "Left: second moment of the gradient over that of the score, group by group, against F; what lies off the "
            "line is the lemma's Delta. Right: F by the success of the prompt and of the agent's own actions.",
            lambda path: _moments(path, moments),
        ),
        "penalty.png": (
            "Advantage of one malformed row among rows whose outcomes are all equal: points are measured, lines the "
            "formulas.",
            lambda path: _penalty(path, penalty),
        ),
    }
    for name, (_, make) in pictures.items():
        with rc_context(STYLE):
            make(folder / name)
    return {name: caption for name, (caption, _) in pictures.items()}


@contextmanager
def _panels(path: Path, rows: int, columns: int, size: tuple[float, float], **kwargs: Any) -> Iterator[np.ndarray]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
    yield axes
    handles: dict[str, Any] = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 5), frameon=False
        )
    figure.savefig(path, dpi=DPI)


def _learning(path: Path, runs: Sequence[Run]) -> None:
    with _panels(path, 2, 3, (10, 5.2), sharex=True, sharey="row") as axes:
        for above, below, world in zip(*axes, ("search", "rescue", "even"), strict=True):
            base = None
            for estimator in ESTIMATORS:
                chosen = main_runs(runs, world, estimator)
                grid = np.linspace(0, chosen[0].setting.budget, 81)
                values = np.array([_smooth(run.on(grid)) for run in chosen])
                base = values if base is None else base
                _band(above, grid / 1000, values, estimator, error=True)
                _band(below, grid / 1000, values - base, estimator, error=True)
            above.set_title(world)
            below.set_xlabel("actions sampled, thousands")
        axes[0, 0].set_ylabel("success")
        axes[0, 0].set_ylim(0, 1)
        axes[1, 0].set_ylabel(f"less that of {ESTIMATORS[0]}")


def _norms(path: Path, runs: Sequence[Run]) -> None:
    with _panels(path, 2, 3, (10, 5.2), sharex=True) as axes:
        for row, world in zip(axes, ("search", "rescue"), strict=True):
            for ax, agent in zip(row, AGENTS, strict=True):
                for estimator in ESTIMATORS:
                    chosen = main_runs(runs, world, estimator)
                    grid = np.linspace(0, chosen[0].setting.budget, 81)
                    values = np.array([_smooth(np.interp(grid, *run.series(agent, "norm"))) for run in chosen])
                    _band(ax, grid / 1000, values, estimator, shade=estimator in ("grpo_team", "drmas"))
                ax.set_title(f"{world}: {agent}")
                ax.set_ylim(bottom=0)
        for ax in axes[1]:
            ax.set_xlabel("actions sampled, thousands")
        for ax in axes[:, 0]:
            ax.set_ylabel("gradient norm")


def _factors(path: Path, runs: Sequence[Run]) -> None:
    with _panels(path, 1, 3, (10, 3.4), sharey=True) as axes:
        for ax, world in zip(axes[0], ("search", "rescue", "even"), strict=True):
            chosen = main_runs(runs, world, "grpo_team")
            grid = np.linspace(0, chosen[0].setting.budget, 81)
            for agent in AGENTS:
                values = np.array([_smooth(np.interp(grid, *run.series(agent, "f"))) for run in chosen])
                ax.plot(grid / 1000, values.mean(0), color=AGENT_COLOUR[agent], label=agent)
                middles, largest = _largest(chosen, agent)
                ax.plot(middles / 1000, largest, ".", ms=3, color=AGENT_COLOUR[agent], alpha=0.6)
            bound = Setting.sessions - 1
            ax.axhline(bound, color="#333333", lw=1, ls="--", label=f"N - 1 = {bound}")
            ax.set_title(world)
            ax.set_xlabel("actions sampled, thousands")
        axes[0, 0].set_ylabel("inflation factor F")
        axes[0, 0].set_ylim(0, bound + 0.5)


def _rates(path: Path, runs: Sequence[Run]) -> None:
    with _panels(path, 2, 2, (8, 5.6)) as axes:
        for row, world in zip(axes, ("search", "rescue"), strict=True):
            for ax, optimiser in zip(row, ("adamw", "sgd"), strict=True):
                for estimator in ESTIMATORS:
                    chosen = choose(runs, world=world, estimator=estimator, optimiser=optimiser, penalty=None)
                    rates = sorted({run.setting.rate for run in chosen})
                    values = np.array([[run.area for run in choose(chosen, rate=rate)] for rate in rates]).T
                    error = values.std(0, ddof=1) / np.sqrt(len(values))
                    ax.errorbar(
                        rates,
                        values.mean(0),
                        error,
                        color=COLOUR[estimator],
                        ls=DASH[estimator],
                        marker="o",
                        ms=3,
                        capsize=2,
                        label=estimator,
                    )
                ax.set_xscale("log")
                ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
                ax.minorticks_off()
                ax.set_title(f"{world}, {optimiser}")
        for ax in axes[1]:
            ax.set_xlabel("learning rate")
        for ax in axes[:, 0]:
            ax.set_ylabel("mean success over the budget")


def _probe(path: Path, probe: Rows) -> None:
    times = sorted({row["at"] for row in probe})
    with _panels(path, 2, 3, (10, 5.2), sharex=True, sharey=True) as axes:
        for row, world in zip(axes, ("search", "rescue"), strict=True):
            for ax, agent in zip(row, AGENTS, strict=True):
                for place, estimator in enumerate(ESTIMATORS):
                    where = {"world": world, "agent": agent, "estimator": estimator}
                    x = np.arange(len(times)) + (place - 2) * 0.16
                    height = [_mean(probe, "alignment", at=at, **where) for at in times]
                    ax.bar(x, height, 0.16, color=COLOUR[estimator], label=estimator)
                    cosine = np.array([_mean(probe, "cosine", at=at, **where) for at in times])
                    ax.hlines(cosine, x - 0.07, x + 0.07, color="#000000", lw=1.2)
                ax.set_title(f"{world}: {agent}")
                ax.set_xticks(np.arange(len(times)), [f"{at:.0%}" for at in times])
                ax.grid(False, axis="x")
        for ax in axes[1]:
            ax.set_xlabel("of the budget spent")
        for ax in axes[:, 0]:
            ax.set_ylabel("cosine with the true gradient")
        axes[0, 0].set_ylim(0, 1.05)


def _moments(path: Path, moments: Rows) -> None:
    with _panels(path, 1, 2, (9, 3.9)) as axes:
        left, right = axes[0]
        bound = Setting.sessions - 1
        for agent in AGENTS:
            groups = [m for m in moments if m["agent"] == agent and m["world"] != "even"][:600]
            left.plot(
                [m["f"] for m in groups],
                [m["shared"] / m["z2"] for m in groups],
                ".",
                ms=3,
                alpha=0.5,
                color=AGENT_COLOUR[agent],
                label=agent,
            )
        left.plot([0, bound], [0, bound], color="#333333", lw=1)
        left.set_title("dots: groups of one prompt and one agent")
        left.set_xlabel("F of the group")
        left.set_ylabel("second moment of gradient / of score")
        left.set_xlim(0, bound + 0.3)
        left.set_ylim(0, bound + 1.5)
        success = np.linspace(1 / Setting.sessions, 1 - 1 / Setting.sessions, 200)
        for own in (0.0, 0.25, 0.5, 0.75, 1.0):
            line = expected_factor(success, own)
            right.plot(success, line, color=str(0.7 - 0.7 * own), lw=1.5)
            for end, x, side in ((0, success[0], "right"), (-1, success[-1], "left")):
                if line[end] > 1:
                    right.text(x - 0.01 if end == 0 else x + 0.01, line[end], f" {own:.0%} ", ha=side, va="center")
        right.set_xlim(-0.03, 1.03)
        right.set_title("lines: how many of the agent's own actions succeed")
        right.set_xlabel("share of the prompt's sessions that succeed")
        right.set_ylabel("F")
        right.set_ylim(0, bound + 0.3)


def _penalty(path: Path, penalty: Rows) -> None:
    with _panels(path, 1, 2, (9, 3.6)) as axes:
        left, right = axes[0]
        for colour, way in zip(COLOURS, WAYS, strict=False):
            fine = np.geomspace(min(COEFFICIENTS), max(COEFFICIENTS), 200)
            left.plot(fine, [-predicted(8, c, **WAYS[way]) for c in fine], color=colour, lw=1)
            rows = [r for r in penalty if r["way"] == way and r["size"] == 8]
            left.plot(
                [r["coefficient"] for r in rows], [-r["measured"] for r in rows], "o", ms=4, color=colour, label=way
            )
            sizes = range(min(SIZES), max(SIZES) + 1)
            right.plot(sizes, [-predicted(size, 0.01, **WAYS[way]) for size in sizes], color=colour, lw=1)
            rows = [r for r in penalty if r["way"] == way and r["coefficient"] == 0.01]
            right.plot([r["size"] for r in rows], [-r["measured"] for r in rows], "o", ms=4, color=colour)
        left.set_xscale("log")
        left.set_xlabel("coefficient (8 rows)")
        left.set_ylabel("size of the faulty row's advantage")
        right.set_xlabel("rows in the group (coefficient 0.01)")
        right.xaxis.set_major_locator(MaxNLocator(integer=True))


def _band(
    ax: Axes, x: np.ndarray, values: np.ndarray, estimator: str, *, error: bool = False, shade: bool = True
) -> None:
    """The mean of runs (runs, points), with its standard error or else the range of the runs."""
    mean = values.mean(0)
    ax.plot(x, mean, color=COLOUR[estimator], ls=DASH[estimator], lw=1.4, label=estimator)
    if shade:
        width = values.std(0, ddof=1) / np.sqrt(len(values))
        low, high = (mean - width, mean + width) if error else (values.min(0), values.max(0))
        ax.fill_between(x, low, high, color=COLOUR[estimator], alpha=0.15, lw=0)


def _largest(runs: Sequence[Run], agent: str, parts: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """The middles of the parts of the budget, and the largest F of any run in each; parts without one are left out."""
    edges = np.linspace(0, runs[0].setting.budget, parts + 1)
    largest = np.zeros(parts)
    for run in runs:
        actions, values = run.series(agent, "f_max")
        part = np.clip(np.searchsorted(edges, actions) - 1, 0, parts - 1)
        np.maximum.at(largest, part, values)
    found = largest > 0
    return ((edges[:-1] + edges[1:]) / 2)[found], largest[found]


def _smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
    """Running mean; the ends are means of fewer values."""
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


def _mean(rows: Rows, value: str, **where: Any) -> float:
    """Mean of what is there; NaN, which is not drawn, of nothing."""
    found = [row[value] for row in rows if all(row[key] == v for key, v in where.items()) and row[value] is not None]
    return float(np.mean(found)) if found else float("nan")
