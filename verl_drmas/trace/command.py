"""`verl-drmas trace`: what a team said in a step, as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from verl_drmas.dumps import DumpError, find_dumps, listed, read_step


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
        steps: Which; empty: the last one.
        every: All of them.
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
        from verl_drmas.trace.choose import choose
        from verl_drmas.trace.view import view_of

        if sessions < 1:
            raise DumpError(f"--sessions is {sessions}; a page shows at least 1")
        if every and steps:
            raise DumpError("--all and --step are both given; drop one")
        run = run.expanduser()
        files = find_dumps(run)
        wanted = list(files) if every else list(dict.fromkeys(steps)) or [max(files)]
        for number in wanted:
            if number not in files:
                raise DumpError(f"{run}: step {number} was not dumped; there are {listed(list(files))}")
        pages = []
        for number in wanted:
            step = read_step(files[number])
            chosen = choose(step, most=sessions, prompts=prompts, seed=seed)
            pages.append((number, to_html(view_of(step, chosen), name_of(run)), chosen.how))
        out = out.expanduser()
        out.mkdir(parents=True, exist_ok=True)
        for number, html, how in pages:
            path = out / f"step_{number}.html"
            path.write_text(html, encoding="utf-8")
            console.print(f"{path}: {how}", markup=False, highlight=False)
    except (DumpError, ImportError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"refused: {error}", style="bold red", markup=False, highlight=False)
        return 1
    return 0


def name_of(run: Path) -> str:
    """What a page calls a run: its folder, and the one above where that is a plain word."""
    place = run.resolve()
    place = place.parent if place.is_file() else place
    return "/".join(place.parts[-2:]).lstrip("/")
