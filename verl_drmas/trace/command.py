"""`verl-drmas trace`: what a team said in a step, as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from verl_drmas.dumps import DumpedStep, DumpError, find_dumps, listed, newest_whole, read_step


def main(
    run: Path,
    out: Path,
    *,
    steps: Sequence[int] = (),
    every: bool = False,
    sessions: int = 32,
    prompts: Sequence[int] = (),
    seed: int = 0,
) -> int:
    """Write one page a step and say where it is.

    Args:
        run: A run's folder, its rollout dumps, or one file of them.
        out: Folder to write to.
        steps: Which; empty: the one that was written last and is whole.
        every: All of them. Steps without the prompts are left out, and those that can't be read are named at the end.
        sessions: Most sessions on a page.
        prompts: Dataset indices to show whole, instead of a sample.
        seed: Of the sample.

    Returns:
        The exit status: 0, or 1 with one line on what is wrong.
    """
    console = Console(soft_wrap=True)
    try:
        try:
            from verl_drmas.trace.page import to_html
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'verl-drmas[report]'") from None
        from verl_drmas.trace.choose import Chosen, choose, indices_of
        from verl_drmas.trace.view import view_of

        if sessions < 1:
            raise DumpError(f"--sessions is {sessions}; a page shows at least 1")
        if every and steps:
            raise DumpError("--all and --step are both given; drop one")
        run, out = run.expanduser(), out.expanduser()
        files = find_dumps(run)
        for number in steps:
            if number not in files:
                raise DumpError(f"{run}: step {number} was not dumped; there are {listed(list(files))}")

        def write(step: DumpedStep, chosen: Chosen, note: str = "") -> None:
            html = to_html(view_of(step, chosen), name_of(run))
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"step_{step.step}.html"
            path.write_text(html, encoding="utf-8")
            console.print(f"{path}: {chosen.how}{note}", markup=False, highlight=False)

        def select(step: DumpedStep, wanted: Sequence[int] = prompts) -> Chosen:
            return choose(step, most=sessions, prompts=wanted, seed=seed)

        if not every:
            if steps:
                found, note = [read_step(files[number]) for number in dict.fromkeys(steps)], ""
            else:
                newest, note = newest_whole(files)
                found = [newest]
            for step, chosen in [(step, select(step)) for step in found]:  # all are looked at before one is written
                write(step, chosen, note)
            return 0
        bad, shown = [], 0
        for number, file in files.items():
            try:
                step = read_step(file)
            except DumpError as error:
                bad.append(str(error))
                continue
            wanted = [index for index in prompts if index in indices_of(step)]
            if prompts and not wanted:
                console.print(f"step {number}: left out, none of its prompts was asked for", highlight=False)
                continue
            write(step, select(step, wanted))
            shown += 1
        if not shown and not bad:
            raise DumpError(f"{run}: prompt {prompts[0]} is in none of its steps ({listed(list(files))})")
        if bad:
            raise DumpError("; ".join(bad))
    except (DumpError, ImportError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"refused: {error}", style="bold red", markup=False, highlight=False)
        return 1
    return 0


def name_of(run: Path) -> str:
    """What a page calls a run: its folder, and the one above where that is a plain word."""
    place = run.resolve()
    place = place.parent if place.is_file() else place
    return "/".join(place.parts[-2:]).lstrip("/")
