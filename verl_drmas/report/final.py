"""What a run's last validation, or an evaluation of its checkpoint, found: avg@k and pass@k by data set."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from verl_drmas.report.find import Run

# Ours (`trainer/validation.py`), and what stock verl logs: its best@k draws sessions with replacement, so it is below
# pass@k and stands under its own name.
OURS = re.compile(r"^val/(?P<source>.+)/(?P<name>(?:avg|pass)@\d+)$")
STOCK = re.compile(r"^val-core/(?P<source>.+)/(?P<variable>[^/]+)/(?P<kind>mean|best)@(?P<k>\d+)(?:/mean)?$")
BOOTSTRAP = "verl's best@"


@dataclass(frozen=True)
class Score:
    """One number of a validation.

    Attributes:
        value: in 0..1 for shares.
        where: `step 100`, or the file of an evaluation.
    """

    value: float
    where: str


def final_scores(run: Run) -> dict[str, dict[str, Score]]:
    """Returns the scores by data source, then by name such as `avg@16`; empty: no validation was logged.

    Of each data source its last validation counts. A whole evaluation in the run's folder (`verl-drmas eval --json`)
    goes before it; of several that have a number, all others are in `doubled`, and the last by name counts.
    """
    logged: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    stock: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    for name, (steps, values) in run.log.columns.items():
        if found := OURS.match(name):
            logged[found["source"]][found["name"]] = (steps[-1], values[-1])
        elif found := STOCK.match(name):
            label = f"avg@{found['k']}" if found["kind"] == "mean" else f"{BOOTSTRAP}{found['k']}"
            stock[found["source"]][label] = (steps[-1], values[-1])
    for source, scores in stock.items():
        if source not in logged:
            logged[source] = scores
    result: dict[str, dict[str, Score]] = {}
    for source, scores in sorted(logged.items()):
        last = max(step for step, _ in scores.values())
        result[source] = {name: Score(value, f"step {step}") for name, (step, value) in scores.items() if step == last}
    for source, evaluated in _evaluated(run).items():
        result.setdefault(source, {}).update({name: found[-1] for name, found in evaluated.items()})
    return result


def doubled(run: Run) -> list[str]:
    """Returns what several evaluations of a run measured, a line each: which counts, and what the others have."""
    lines = []
    for source, evaluated in _evaluated(run).items():
        for name, (*others, last) in evaluated.items():
            if others:
                told = ", ".join(f"{100 * score.value:.1f} in {score.where}" for score in others)
                lines.append(f"{source} {name}: {100 * last.value:.1f} is of {last.where}; {told}, not shown")
    return lines


def _evaluated(run: Run) -> dict[str, dict[str, list[Score]]]:
    """The scores of whole evaluations by data source and name, in the order of their files' names."""
    found: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for path, summary in run.evaluations.items():
        if summary.get("complete"):
            for source, part in summary["sources"].items():
                for name, score in part["scores"].items():
                    found[source][name].append(Score(float(score["value"]), path.name))
    return found


def unfinished(run: Run) -> list[str]:
    """Returns the run's evaluations that aren't whole, which no table shows."""
    return [path.name for path, summary in run.evaluations.items() if not summary.get("complete")]


def by_k(name: str) -> tuple[int, int, str]:
    """Sorts `avg@16` before `pass@2` before `pass@16`."""
    kind, _, k = name.partition("@")
    return (("avg", "pass").index(kind) if kind in ("avg", "pass") else 2, int(k or 0), name)
