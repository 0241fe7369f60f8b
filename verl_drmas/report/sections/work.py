"""What the runs worked through and how long each phase took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from verl_drmas.report.blocks import Block, Heading, Paragraph, Picture, Table, table_of
from verl_drmas.report.figures import draw_phases
from verl_drmas.report.groups import Group
from verl_drmas.report.stats import NOT_LOGGED, Estimate, number, whole
from verl_drmas.report.totals import ALL_PHASES, TEST, Totals, phases, tokens_of, totals


def work_blocks(groups: Sequence[Group], folder: Path) -> list[Block]:
    """Returns the section of time and tokens.

    Args:
        groups: of the report.
        folder: of the report, for its picture.
    """
    sums = {run.name: totals(run.log) for group in groups for run in group.runs}
    seconds = {run.name: phases(run.log) for group in groups for run in group.runs}
    text = (
        "Sums over the training steps in the logs. Sessions: those that ended, of those asked for. Rows: "
        "activations that entered statistics. Sampled tokens: what agents wrote in those rows. Tokens: prompts and "
        "responses of all rows of the batches, as verl counts them."
    )
    blocks: list[Block] = [Heading("Time and tokens"), Paragraph(text), _totals(groups, sums), _per_step(groups, sums)]
    if any(seconds.values()):
        blocks += [*_phases(groups, sums, seconds, folder), _by_run(groups, seconds)]
        if models := _by_model(groups):
            blocks.append(models)
    return blocks


def _totals(groups: Sequence[Group], sums: dict[str, Totals]) -> Table:
    rows = []
    for group in groups:
        for label, run in group.labelled():
            one = sums[run.name]
            sessions = NOT_LOGGED if one.ended is None else f"{one.ended:,} of {one.asked:,}"
            rows.append(
                (
                    f"{label} {run.name}",
                    whole(one.steps),
                    sessions,
                    *(whole(value) for value in (one.rows, one.sampled, one.tokens)),
                    number(one.seconds, 1),
                )
            )
    head = ("run", "steps", "sessions", "rows", "sampled tokens", "tokens", "seconds")
    return table_of(head, rows, title="In total")


def _per_step(groups: Sequence[Group], sums: dict[str, Totals]) -> Table:
    rows = []
    for group in groups:
        for label, run in group.labelled():
            one = sums[run.name]
            rows.append(
                (
                    f"{label} {run.name}",
                    *(_over(value, one.steps) for value in (one.ended, one.rows, one.sampled, one.tokens)),
                    _over(one.seconds, one.steps, 2),
                    _over(one.rows, one.ended, 2),
                    _over(one.tokens, one.seconds),
                    _over(None if one.ended is None else 3600 * one.ended, one.seconds),
                    number(one.rate, 1),
                )
            )
    head = (
        *("run", "sessions", "rows", "sampled tokens", "tokens", "seconds", "rows a session"),
        *("tokens a second", "sessions an hour", "tokens a second and GPU (verl)"),
    )
    return table_of(head, rows, title="Per step", spans=(("", 1), ("a step", 5), ("", 1), ("throughput", 3)))


def _over(value: float | None, by: float | None, digits: int = 1) -> str:
    return NOT_LOGGED if value is None or not by else f"{value / by:,.{digits}f}"


def _phases(
    groups: Sequence[Group], sums: dict[str, Totals], seconds: dict[str, dict[str, float]], folder: Path
) -> list[Block]:
    rows, drawn = [], {}
    for group in groups:
        runs = [run for run in group.runs if seconds[run.name]]
        if not runs:
            continue
        means: dict[str, float] = {}
        for phase in ALL_PHASES:
            each = [seconds[r.name][phase] / sums[r.name].steps for r in runs if phase in seconds[r.name]]
            estimate = Estimate.of(each)
            if estimate is None:
                continue
            means[phase] = estimate.mean
            tokens = Estimate.of(
                [n / sums[r.name].steps for r in runs if (n := tokens_of(phase, sums[r.name])) is not None]
            )
            speed = f"{tokens.mean / estimate.mean:,.0f}" if tokens and estimate.mean else "none"
            rows.append([group.name, phase, estimate.shown(2), "", f"{tokens.mean:,.0f}" if tokens else "none", speed])
        whole_step = math.fsum(means.values())
        for row in rows[-len(means) :]:
            row[3] = f"{means[row[1]] / whole_step:.1%}" if whole_step else "none"
        drawn[group.name] = means
    picture = draw_phases(drawn, folder / "phases.png")
    text = (
        "Seconds of each phase are means over all training steps of a run, the first among them (where engines and "
        "compilers start), then over runs with the standard error; a test's are spread over all steps. Other: what "
        "a step took beyond verl's timers. Tokens: rollout samples its own; log-probs, advantages and updates take "
        "the whole batch (with agents that are frozen, or trained by another job, log-probs and updates take less)."
    )
    head = ("configuration", "phase", "seconds a step", "share", "tokens a step", "tokens a second")
    return [
        Heading("Phases", 3),
        Paragraph(text),
        Picture(
            picture, "Bars of the seconds that each phase of a step takes, by configuration", "Seconds a step by phase."
        ),
        table_of(head, rows, words=frozenset({1})),
    ]


def _by_run(groups: Sequence[Group], seconds: dict[str, dict[str, float]]) -> Table:
    used = [phase for phase in ALL_PHASES if any(phase in of for of in seconds.values())]
    rows = []
    for group in groups:
        for label, run in group.labelled():
            own = seconds[run.name]
            cells = [number(own.get(phase), 1, "none" if own else NOT_LOGGED) for phase in used]
            rows.append((f"{label} {run.name}", *cells))
    note = "" if TEST not in used else "; test lies outside of verl's step"
    return table_of(("run", *used), rows, title=f"Seconds of each phase in total{note}")


def _by_model(groups: Sequence[Group]) -> Table | None:
    """Where there are several models: they may work at the same time, so that their seconds don't add up."""
    rows = []
    stages: dict[str, None] = {}
    for group in groups:
        for label, run in group.labelled():
            models = run.log.models()
            if len(models) < 2:
                continue
            for model in models:
                prefix = f"drmas/model/{model}/seconds/"
                own = {
                    name.removeprefix(prefix): math.fsum(values)
                    for name, (_, values) in run.log.columns.items()
                    if name.startswith(prefix)
                }
                stages |= dict.fromkeys(own)
                rows.append((f"{label} {run.name}", model, own))
    if not rows:
        return None
    words = {stage: stage.replace("_", " ") for stage in stages}
    cells = [(name, model, *(number(own.get(stage), 1, "none") for stage in stages)) for name, model, own in rows]
    title = "Seconds of each model's stages in total; models on pools of their own work at the same time"
    return table_of(("run", "model", *words.values()), cells, title=title, words=frozenset({1}))
