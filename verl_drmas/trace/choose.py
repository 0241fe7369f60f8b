"""Which of a step's sessions a page shows: whole prompts, the same ones every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_drmas.advantage.alignment import seed_of
from verl_drmas.dumps import DumpedRow, DumpedStep, DumpError


@dataclass(frozen=True)
class Chosen:
    """Sessions of a step.

    Attributes:
        sessions: Rows of each, prompt by prompt: {(dataset index, prompt): {session: rows}}.
        how: In words, of how many.
    """

    sessions: dict[tuple[int, str], dict[int, list[DumpedRow]]]
    how: str


def choose(step: DumpedStep, *, most: int, prompts: Sequence[int] = (), seed: int = 0) -> Chosen:
    """Choose sessions.

    Prompts are taken whole, since their sessions are compared with each other, in an order that is hashed from the seed
    and the prompt's dataset index: another machine, and a dump of the same step by another run, choose the same.

    Args:
        step: The dump.
        most: Sessions on a page, at least 1; a prompt with more is cut.
        prompts: Dataset indices, all of whose sessions are shown; empty: a sample.
        seed: Of the sample.

    Raises:
        DumpError: A prompt isn't in the dump.
    """
    found: dict[tuple[int, str], dict[int, list[DumpedRow]]] = {}
    for row in step.rows:
        prompt, session, _ = row.place
        found.setdefault((_index(row), prompt), {}).setdefault(session, []).append(row)
    found = {key: dict(sorted(sessions.items())) for key, sessions in sorted(found.items())}
    total = sum(map(len, found.values()))
    if prompts:
        missing = [index for index in prompts if index not in {key[0] for key in found}]
        if missing:
            known = ", ".join(str(key[0]) for key in list(found)[:20]) + (", ..." if len(found) > 20 else "")
            raise DumpError(f"{step.file}: prompt {missing[0]} is not in it; --prompt takes a dataset index: {known}")
        kept = {key: sessions for key, sessions in found.items() if key[0] in prompts}
        return Chosen(kept, _said(kept, found, total, "as asked for"))
    kept, left = {}, most
    for key in sorted(found, key=lambda key: (seed_of(seed, "trace", key[0]), key)):
        sessions = found[key]
        if len(sessions) <= left or not kept:
            kept[key] = dict(list(sessions.items())[:left])
            left -= len(kept[key])
    kept = {key: kept[key] for key in found if key in kept}
    return Chosen(kept, _said(kept, found, total, f"chosen by seed {seed}"))


def indices_of(step: DumpedStep) -> set[int]:
    """Dataset indices of its prompts."""
    return {_index(row) for row in step.rows}


def _index(row: DumpedRow) -> int:
    return int(row.line["index"])


def _said(kept: dict, found: dict, total: int, how: str) -> str:
    shown = sum(map(len, kept.values()))
    if shown == total:
        return f"all {many(total, 'session')} of {many(len(found), 'prompt')}"
    return f"{shown} of {many(total, 'session')}, {len(kept)} of {many(len(found), 'prompt')}, {how}"


def many(n: int, word: str) -> str:
    """A number of things."""
    return f"{n} {word}{'' if n == 1 else 's'}"
