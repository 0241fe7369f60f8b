"""What a report can't show, said plainly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from verl_drmas.report.blocks import Block, Bullets, Heading, Paragraph
from verl_drmas.report.final import doubled
from verl_drmas.report.find import Run
from verl_drmas.report.groups import Group, seeds_of
from verl_drmas.report.length import shortfall, unsure
from verl_drmas.report.paper import tables
from verl_drmas.report.readers import Kind
from verl_drmas.report.sections.scores import Placed, Tables
from verl_drmas.report.stats import steps_shown

# What curves and tables are made of; a metric that only some steps have is said.
AGENT = (
    "rows",
    "reward/mean",
    "activations_per_session",
    "valid_share",
    "response_length/mean",
    "inflation_factor/mean",
)
WHY = {
    "inflation_factor/mean": " (a step without any spread between sessions has no F)",
}


def gap_blocks(placed: Placed, notes: Sequence[str], wanted: Tables) -> list[Block]:
    """Returns the section of what is missing.

    Args:
        placed: the groups.
        notes: of finding the runs.
        wanted: which tables of the paper are shown.
    """
    lines = [*notes]
    for group in placed.groups:
        lines += _group(group)
        for label, run in group.labelled():
            lines += [f"{label} {run.name}: {line}." for line in _run(run)]
    if wanted is not Tables.NONE:
        lines += _cells(placed)
    if not lines:
        return [Heading("What is missing"), Paragraph("Nothing: every run is whole and logged what this report shows.")]
    return [Heading("What is missing"), Bullets(tuple(lines))]


def _group(group: Group) -> list[str]:
    lines = []
    if len(group.runs) == 1:
        lines.append(f"{group.name}: one run (n = 1), so there is no standard error.")
    if group.settings is None:
        lines.append(f"{group.name}: grouped by name, because no .hydra/config.yaml beside its logs could be read.")
    else:
        repeated = [seed for seed, n in Counter(seeds_of(group)).items() if n > 1]
        if len(group.runs) > 1 and repeated:
            names = ", ".join(f"{label} {run.name}" for label, run in group.labelled())
            lines.append(
                f"{group.name}: of {names}, several have the same seed ({', '.join(repeated)}); they are "
                "repetitions, and the standard error is not one over seeds."
            )
    ends = {run.log.training[-1].step for run in group.runs if run.log.training}
    if len(ends) > 1:
        lines.append(
            f"{group.name}: its runs end at different steps ({', '.join(map(str, sorted(ends)))}); means in the "
            "curves end with the shortest."
        )
    return lines


def _run(run: Run) -> list[str]:
    log = run.log
    lines = [*run.notes]
    steps = [step.step for step in log.training]
    if not steps:
        lines.append("no training step, validation alone")
    else:
        if short := shortfall(run):
            lines.append(short)
        elif unsure(run):
            lines.append(
                f"was to have trainer.total_epochs {run.settings.epochs}, and its log doesn't tell where they end: "
                "whether it is whole isn't known"
            )
        missing = sorted(set(range(1, steps[-1] + 1)) - set(steps))
        if missing:
            why = (
                "; verl's file logger begins its file anew when a run is resumed, so keep each part under a name "
                "of its own"
                if missing[0] == 1 and run.kind is Kind.FILE
                else ""
            )
            lines.append(f"steps {steps_shown(missing)} are not in the log{why}")
    if log.again:
        lines.append(
            f"steps {steps_shown(log.again)} were logged before a resume and are given up; what came later counts"
        )
    if log.cut:
        lines.append("the last line was cut short and is left out")
    if run.kind is Kind.TENSORBOARD:
        lines.append("read from TensorBoard's events, which have single precision: about seven digits of each number")
    lines += [f"several evaluations; {line}" for line in doubled(run)]
    lines += _lost(run)
    lines += _partly(run)
    if not log.agents() and steps:
        lines.append("no metrics of agents (drmas/agent/...): a run of stock verl, or of another logger's selection")
    if not log.by_model("grad_norm") and steps:
        lines.append("no gradient norm")
    if not log.by_model("entropy") and steps:
        lines.append("no entropy: actor.calculate_entropy, or log-probs that are computed anew, would give it")
    if not any(name.startswith(("val/", "val-core/")) for name in log.names()) and not run.evaluations:
        lines.append("no validation")
    return lines


def _lost(run: Run) -> list[str]:
    counts = Counter(name for step in run.log.steps for name in step.lost)
    if not counts:
        return []
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:6]
    shown = ", ".join(f"{name} in {n}" for name, n in most)
    more = f" and {len(counts) - 6} further metrics" if len(counts) > 6 else ""
    return [f"NaN or infinite, and in no mean: {shown} steps{more}"]


def _partly(run: Run) -> list[str]:
    log = run.log
    whole = len(log.training)
    wanted = [f"drmas/agent/{agent}/{name}" for agent in log.agents() for name in AGENT]
    wanted += [*log.by_model("grad_norm").values(), *log.by_model("entropy").values(), "perf/total_num_tokens"]
    found: dict[tuple[int, str], list[str]] = {}
    for name in wanted:
        steps, _ = log.columns.get(name, ([], []))
        lost = sum(name in step.lost for step in log.training)
        if steps and len(steps) + lost < whole:
            # An agent that wasn't called has none of its metrics: one line for all of them.
            match = re.match(r"drmas/agent/(.+?)/(.*)", name)
            owner, short = match.groups() if match else ("", name)
            found.setdefault((len(steps), owner + "\n" + WHY.get(short, "")), []).append(short)
    lines = []
    for (count, key), names in found.items():
        owner, why = key.split("\n", 1)
        who = f"agent {owner}: " if owner else ""
        lines.append(f"{who}{', '.join(names)} in {count} of {whole} steps{why}")
    return lines


def _cells(placed: Placed) -> list[str]:
    k = tables()["k"]
    lines = []
    for group in placed.groups:
        cell = placed.cells.get(group.label)
        if not cell:
            continue
        empty = [
            dataset
            for dataset in tables()["tables"][cell.task]["datasets"]
            if placed.estimate(group, dataset, f"avg@{k}") is None
        ]
        if empty:
            lines.append(f"{group.name}: not run with {k} sessions a prompt on {', '.join(empty)}.")
    filled = {(cell.task, cell.model, cell.method) for cell in placed.cells.values()}
    for task, model in dict.fromkeys((cell.task, cell.model) for cell in placed.cells.values()):
        absent = [one["title"] for key, one in tables()["methods"].items() if (task, model, key) not in filled]
        if absent:
            lines.append(f"{tables()['tables'][task]['name']}, {model}: no run of {'; '.join(absent)}.")
    return lines
