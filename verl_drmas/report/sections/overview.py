"""Which runs a report is of, what configurations they are, and in what these differ."""

from __future__ import annotations

import os
from collections.abc import Sequence

from verl_drmas.report.blocks import Block, Bullets, Heading, Paragraph, table_of
from verl_drmas.report.groups import Group, differences, seeds_of
from verl_drmas.report.settings import IGNORED
from verl_drmas.report.stats import steps_shown

MOST = 40  # keys that are shown where configurations differ


def overview_blocks(groups: Sequence[Group]) -> list[Block]:
    """Returns the section of runs and configurations."""
    runs = []
    for group in groups:
        for (label, run), seed in zip(group.labelled(), seeds_of(group), strict=True):
            steps = [step.step for step in run.log.training]
            tests = [step.step for step in run.log.steps if not step.trained and step not in run.log.training]
            shown = steps_shown(steps, 3) if steps else "none"
            runs.append(
                (
                    label,
                    run.name,
                    seed,
                    shown + (f"; test alone at {steps_shown(tests, 3)}" if tests else ""),
                    run.kind.value,
                    ", ".join(str(file) for file in run.files),
                    os.path.relpath(run.settings.path, run.files[0].parent) if run.settings else "none found",
                )
            )
    head = ("run", "name", "seed", "training steps", "logger", "log", "configuration beside it")
    blocks: list[Block] = [
        Heading("Runs and configurations"),
        table_of(head, runs, title="Runs", words=frozenset(range(1, 7))),
        Paragraph(
            f"Runs with one configuration are seeds of it: the same but for {IGNORED}. A run without Hydra's "
            "configuration beside its log is grouped by its name without its seed."
        ),
        _configurations(groups),
    ]
    return [*blocks, *_differences(groups)]


def _configurations(groups: Sequence[Group]) -> Block:
    rows = []
    for group in groups:
        settings = group.settings
        if settings is None:
            rows.append((group.label, str(len(group.runs)), *["unknown"] * 5, "by name"))
            continue
        agents = ", ".join(f"{agent} on {model}" for agent, model in settings.agents.items())
        rows.append(
            (
                group.label,
                str(len(group.runs)),
                settings.workflow or "none",
                settings.estimator,
                settings.mapping,
                agents or "one agent",
                ", ".join(
                    f"{m}: {name}{' (frozen)' if m in settings.frozen else ''}" for m, name in settings.models.items()
                ),
                "by configuration",
            )
        )
    head = ("", "runs", "workflow", "estimator", "mapping", "agents", "models", "grouped")
    return table_of(head, rows, title="Configurations", words=frozenset(range(2, 8)))


def _differences(groups: Sequence[Group]) -> list[Block]:
    known = [group for group in groups if group.settings is not None]
    apart = differences([group.settings for group in known])
    if len(known) < 2:
        return []
    if not apart:
        return [Paragraph("The configurations differ in nothing else.")]
    head = ("key", *(group.label for group in known))
    rows = [(key, *values) for key, values in list(apart.items())[:MOST]]
    words = frozenset(range(1, len(head)))
    blocks: list[Block] = [table_of(head, rows, title="Where the configurations differ", words=words)]
    if len(apart) > MOST:
        blocks.append(Bullets((f"{len(apart) - MOST} further keys differ.",)))
    return blocks
