"""The names on docs/metrics.md as patterns, for tests that hold what the code logs against the page."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
OURS = re.compile(r"drmas/|val/")
# What one placeholder stands for; every other one stands for an id or a name of somebody else's.
KNOWN = {
    "<estimator>": "(?:grpo_team|grpo_activation|drmas)",
    "<stage>": "(?:balance_batch|compute_old_log_prob|compute_ref_log_prob|update_actor)",
    "<state>": "(?:open|ready|empty|claimed|trained|saved|dead|dropped)",
    "<d>": r"\d+",
    "<n>": r"\d+",
    "<k>": r"\d+",
    "<status>": r"\d{3}",
}


def names_on_the_page() -> list[str]:
    """The first column of every table."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    found = []
    for name in names_on_the_page():
        parts = re.split(r"(<\w+>)", name)
        pattern = "".join(KNOWN.get(p, "[^/]+") if p.startswith("<") else re.escape(p) for p in parts)
        found.append((name, re.compile(pattern)))
    return found


def page_names_of(name: str) -> list[str]:
    """The names on the page that a logged name is one of."""
    name = re.sub(r"^val/(?=drmas/(sessions|tools)/)", "", name)
    name = re.sub(r"^val/drmas/", "drmas/workflow/", name)
    return [shown for shown, pattern in _patterns() if pattern.fullmatch(name)]


def undocumented(names: Iterable[str], verls: Iterable[str] | None = ()) -> list[str]:
    """Names of ours that the page doesn't have.

    Args:
        names: As they were logged; those of verl's own are passed over.
        verls: What verl's stages measured, by verl's names, which stand under `drmas/model/<model>` as well; None:
            nobody knows, and all that the page doesn't have there is taken for it.
    """
    kept = None if verls is None else {re.sub(r"^(actor|training|perf)/", "", name) for name in verls}

    def of_verl(name: str) -> bool:
        return name.startswith("drmas/model/") and (kept is None or name.split("/", 3)[3] in kept)

    return sorted(n for n in set(names) if OURS.match(n) and not page_names_of(n) and not of_verl(n))


def of_run(steps: Mapping[int, Mapping[str, float]], own: Iterable[str] = ()) -> list[str]:
    """Names of ours in a run's log that the page doesn't have.

    Args:
        steps: What was logged, by step.
        own: Numbers of a workflow that isn't bundled.
    """
    theirs = {f"{place}/{name}" for place in ("drmas/workflow", "val/drmas") for name in own}
    logged = {name for step in steps.values() for name in step}
    assert any(name.startswith("drmas/agent/") for name in logged)
    return undocumented(logged - theirs, verls=None)
