"""Spikes of gradient norms, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_drmas.report.blocks import Block, Heading, Paragraph, table_of
from verl_drmas.report.faults import Faults, faults
from verl_drmas.report.groups import Group
from verl_drmas.report.spikes import FACTOR, LEAST, WINDOW, Spikes
from verl_drmas.report.stats import NOT_LOGGED, Estimate, number, steps_shown, whole


def spike_blocks(groups: Sequence[Group], found: Mapping[str, Sequence[Spikes]]) -> list[Block]:
    """Returns the section of spikes.

    Args:
        groups: of the report.
        found: each run's, by its name.
    """
    rows = []
    for group in groups:
        for label, run in group.labelled():
            name = f"{label} {run.name}"
            for one in found[run.name]:
                rows.append(
                    (
                        name,
                        one.model,
                        str(len(one.steps)),
                        str(one.judged),
                        number(one.worst, 1, "none"),
                        number(one.median, 3),
                        number(one.highest, 3),
                        str(len(one.lost)),
                        steps_shown(one.steps) or "none",
                    )
                )
            if not found[run.name]:
                rows.append((name, "no model", *[NOT_LOGGED] * 7))
    text = (
        f"A spike is a step whose gradient norm, before clipping, is over {FACTOR:g} times its running median: the "
        f"median of the {WINDOW} logged values before the step ({LEAST} at least, so that a run's first {LEAST} "
        "steps are judged by nothing). NaN and infinite norms are no numbers, and are counted apart."
    )
    head = (
        "run",
        "model",
        "spikes",
        "steps judged",
        "largest over its median",
        "median",
        "highest",
        "NaN or inf",
        "at steps",
    )
    blocks: list[Block] = [
        Heading("Spikes of the gradient norm"),
        Paragraph(text),
        table_of(head, rows, words=frozenset({1, 8})),
    ]
    means = _mean_spikes(groups, found)
    if means:
        blocks.append(table_of(("configuration", "model", "spikes a run"), means, words=frozenset({1})))
    return blocks


def _mean_spikes(groups: Sequence[Group], found: Mapping[str, Sequence[Spikes]]) -> list[tuple[str, str, str]]:
    rows = []
    for group in groups:
        if len(group.runs) < 2:
            continue
        models = dict.fromkeys(one.model for run in group.runs for one in found[run.name])
        for model in models:
            counts = [float(len(one.steps)) for run in group.runs for one in found[run.name] if one.model == model]
            estimate = Estimate.of(counts)
            if estimate:
                rows.append((group.name, model, estimate.shown(2)))
    return rows


def fault_blocks(groups: Sequence[Group]) -> list[Block]:
    """Returns the section of failures."""
    found = [(f"{label} {run.name}", faults(run.log)) for group in groups for label, run in group.labelled()]
    reasons = sorted({reason for _, one in found for reason in one.reasons})
    others = list(dict.fromkeys(name for _, one in found for name in (*one.counted, *one.dropped)))
    tests = sorted({reason for _, one in found for reason in one.test_reasons})
    head = (
        *("run", "sessions asked", "failed"),
        *(f"failed: {reason}" for reason in reasons),
        *others,
        "failed in tests",
        *(f"in tests: {reason}" for reason in tests),
    )
    rows = [(name, *_cells(one, reasons, others, tests)) for name, one in found]
    text = (
        "Counts over all training steps, and apart from them over tests. A failed session is neither right nor "
        "wrong: it enters no statistic and no update. What is masked was kept in the rollout dumps; the other "
        "failed sessions were dropped."
    )
    return [Heading("Failures"), Paragraph(text), table_of(head, rows)]


def _cells(one: Faults, reasons: Sequence[str], others: Sequence[str], tests: Sequence[str]) -> list[str]:
    # Reasons and calls are logged when there are any: a run that counts its sessions and logs none has none.
    absent = NOT_LOGGED if one.asked is None else "0"
    failed = NOT_LOGGED if one.failed is None else f"{one.failed:,}"
    if one.failed and one.asked:
        failed += f" ({one.failed / one.asked:.1%})"
    counts = {**one.counted, **one.dropped}
    return [
        whole(one.asked),
        failed,
        *(f"{one.reasons[reason]:,}" if reason in one.reasons else absent for reason in reasons),
        *(f"{counts[name]:,}" if name in counts else NOT_LOGGED for name in others),
        whole(one.tests),
        *(f"{one.test_reasons[reason]:,}" if reason in one.test_reasons else absent for reason in tests),
    ]
