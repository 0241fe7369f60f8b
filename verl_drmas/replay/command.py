"""`verl-drmas replay`: a dumped step's advantages by its own estimator or by others, beside those trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from verl_drmas.dumps import DumpError, find_dumps, listed, read_step


def main(
    run: Path, step: int, names: Sequence[str] = (), settings: Sequence[str] = (), file: Path | None = None
) -> int:
    """Replay a step and print it as Markdown.

    Args:
        run: A run's folder, its rollout dumps, or one file of them.
        step: Which.
        names: Estimators; empty: the step's own.
        settings: `key=value` texts of what shall differ from the run's settings, for all estimators.
        file: Also write everything, rows too, as JSON.

    Returns:
        The exit status: 0; 1 with one line on what can't be replayed; 2 if the step's own estimator with its own
        settings gives other advantages than were trained.
    """
    console, errors = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    try:
        from verl_drmas.replay.arms import arm_of, check_read, read_changes

        files = find_dumps(run.expanduser())
        if step not in files:
            raise DumpError(f"{run}: step {step} was not dumped; there are {listed(list(files))}")
        dumped, changes = read_step(files[step]), read_changes(settings)
        arms = [arm_of(dumped, name, changes) for name in (dict.fromkeys(names) or [None])]
        check_read(arms, changes)

        from verl_drmas.replay.compare import as_json, compare  # with verl, which takes seconds
        from verl_drmas.replay.run import Trained, replay
        from verl_drmas.replay.text import to_markdown

        trained = Trained.of(dumped)
        comparisons = [compare(trained, replay(trained, arm)) for arm in arms]
        if file is not None:
            text = json.dumps(as_json(trained, comparisons), indent=1, ensure_ascii=True)
            file.expanduser().write_text(text + "\n", encoding="utf-8")
    except (DumpError, OSError) as error:
        errors.print(f"refused: {error}", style="bold red", markup=False, highlight=False)
        return 1
    console.print(to_markdown(trained, comparisons), markup=False, highlight=False)
    if any(one.broken for one in comparisons):
        errors.print(
            "the step's own estimator gives other advantages than were trained; please report it with --json's file",
            style="bold red",
            markup=False,
            highlight=False,
        )
        return 2
    return 0
