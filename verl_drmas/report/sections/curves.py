"""The curves of a report: per agent, per model, and of the team."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verl_drmas.report.blocks import Block, Heading, Paragraph, Picture
from verl_drmas.report.figures import Panel, batches, draw_curves, logs, metric_of_runs
from verl_drmas.report.groups import Group
from verl_drmas.report.spikes import FACTOR, WINDOW, Spikes
from verl_drmas.report.table import OUTCOMES

AVERAGE = re.compile(r"^val/(?P<source>.+)/avg@(?P<k>\d+)$")
PER_AGENT = (
    ("reward", "Reward per agent", "reward/mean", "mean a row", "an agent's own reward, mean over its rows of a step"),
    (
        "activations",
        "Activations per session",
        "activations_per_session",
        "a session",
        "how often an agent acted, mean over the sessions of a step",
    ),
    (
        "inflation",
        "Inflation factor",
        "inflation_factor/mean",
        "F",
        "F = [σₖ² + (μₖ − μ)²] / σ², mean over the agent's prompts with a spread; 1: the team's statistics cost it "
        "nothing",
    ),
    ("validity", "Valid actions", "valid_share", "share", "share of an agent's actions that were valid"),
)

SAME_SCALE = frozenset(name for name, *_ in PER_AGENT)


def curve_blocks(groups: Sequence[Group], found: Mapping[str, Sequence[Spikes]], folder: Path) -> list[Block]:
    """Draws all curves and returns their section.

    Args:
        groups: of the report.
        found: each run's spikes, by its name.
        folder: of the report.
    """
    blocks: list[Block] = [Heading("Curves")]
    pictures: list[Block] = []
    for number, part in enumerate(batches(groups)):
        draw = _drawer(part, folder, f"-{number + 1}" if len(groups) > len(part) else "")
        pictures += _agents(part, draw)
        pictures += _models(part, found, draw)
        pictures += _team(part, draw)
    if not pictures:
        return [*blocks, Paragraph("None of the metrics that are drawn was logged.")]
    text = (
        "A colour is a configuration. Thin lines are its runs, each named below the picture; the thick line is "
        "their mean, over the steps that all of them logged. A configuration with one run has one line."
    )
    return [*blocks, Paragraph(text), *pictures]


Draw = Callable[[str, str, Sequence[Panel], str], list[Block]]


def _drawer(groups: Sequence[Group], folder: Path, suffix: str) -> Draw:
    def draw(name: str, title: str, panels: Sequence[Panel], says: str) -> list[Block]:
        if not any(panel.has(group) for panel in panels for group in groups):
            return []
        path, window = draw_curves(title, panels, groups, folder / f"{name}{suffix}.png", alike=name in SAME_SCALE)
        plain = all(panel.spread or panel.dots for panel in panels)
        note = "as logged" if plain or window == 1 else f"each value the mean of the last {window} steps"
        shown = ", ".join(dict.fromkeys(panel.title for panel in panels if any(panel.has(g) for g in groups)))
        return [Picture(path, f"{title}: curves over steps of {shown}", f"{title}: {says} ({note}).")]

    return draw


def _agents(groups: Sequence[Group], draw: Draw) -> list[Block]:
    agents = list(dict.fromkeys(agent for log in logs(groups) for agent in log.agents()))
    pictures: list[Block] = []
    for name, title, quantity, unit, says in PER_AGENT:
        panels = [
            Panel(agent, metric_of_runs(groups, f"drmas/agent/{agent}/{quantity}"), unit, share=name == "validity")
            for agent in agents
        ]
        pictures += draw(name, title, panels, says)
    return pictures


def _models(groups: Sequence[Group], found: Mapping[str, Sequence[Spikes]], draw: Draw) -> list[Block]:
    marks = {(name, one.model): one.steps for name, of in found.items() for one in of}
    runs = [run for group in groups for run in group.runs]
    pictures: list[Block] = []
    for name, title, quantity, says in (
        (
            "grad_norm",
            "Gradient norm per model",
            "grad_norm",
            f"before clipping; a triangle marks a spike, over {FACTOR:g} times the median of the {WINDOW} values "
            "before it",
        ),
        (
            "entropy",
            "Entropy per model",
            "entropy",
            "of a model's token distributions, over the rows of all its agents",
        ),
    ):
        metrics = {run.name: run.log.by_model(quantity) for run in runs}
        panels = [
            Panel(
                _with_agents(groups, model),
                {run: names[model] for run, names in metrics.items() if model in names},
                "norm" if quantity == "grad_norm" else "nats a token",
                spread=quantity == "grad_norm",
                marks={run: marks.get((run, model), ()) for run in metrics} if quantity == "grad_norm" else None,
            )
            for model in dict.fromkeys(model for names in metrics.values() for model in names)
        ]
        pictures += draw(name, title, panels, says)
    return pictures


def _with_agents(groups: Sequence[Group], model: str) -> str:
    """A model's name with the agents on it, where all configurations agree on them."""
    on = {
        tuple(agent for agent, own in group.settings.agents.items() if own == model)
        for group in groups
        if group.settings and model in group.settings.agents.values()
    }
    agents = ", ".join(next(iter(on))) if len(on) == 1 else ""
    return f"{model} ({agents})" if agents and agents != model else model


def _team(groups: Sequence[Group], draw: Draw) -> list[Block]:
    names = {name for log in logs(groups) for name in log.names()}
    outcomes = [
        Panel(metric.label, metric_of_runs(groups, metric.name), "mean of a step")
        for metric in OUTCOMES
        if metric.name in names
    ]
    tests = [
        Panel(f"{found['source']}: avg@{found['k']}", metric_of_runs(groups, found[0]), "share", share=True, dots=True)
        for name in sorted(names)
        if (found := AVERAGE.match(name)) and any(len(log.columns.get(name, ([], []))[0]) > 1 for log in logs(groups))
    ]
    seconds = [Panel("a step", metric_of_runs(groups, "timing_s/step"), "seconds", spread=True)]
    return [
        *draw(
            "outcomes", "The team's outcomes", outcomes, "the workflow's own numbers, mean over the sessions of a step"
        ),
        *draw("validation", "Validation", tests, "avg@k of each data set"),
        *draw("step_time", "Step time", seconds, "verl's step without tests; start-up of engines is in the first"),
    ]
