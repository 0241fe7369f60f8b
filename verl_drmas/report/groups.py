"""Which runs are seeds of one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from verl_drmas.report.find import Run
from verl_drmas.report.settings import Settings, without_seed


@dataclass(frozen=True)
class Group:
    """Runs of one configuration.

    Attributes:
        label: a letter, `A`; its runs are `A1`, `A2`, in the order of their names.
        title: what sets the configuration apart.
        runs: at least one.
    """

    label: str
    title: str
    runs: tuple[Run, ...]

    @property
    def settings(self) -> Settings | None:
        """The first run's configuration; None: the runs have none, and were grouped by name."""
        return self.runs[0].settings

    @property
    def name(self) -> str:
        """Label and title."""
        return f"{self.label}: {self.title}"

    def labels(self) -> list[str]:
        """Returns the runs' labels."""
        return [f"{self.label}{i}" for i in range(1, len(self.runs) + 1)]

    def labelled(self) -> list[tuple[str, Run]]:
        """Returns the runs with their labels."""
        return list(zip(self.labels(), self.runs, strict=True))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Returns the runs by configuration (`Settings.identity`); those without one by their name without its seed."""
    members: dict[object, list[Run]] = {}
    for run in runs:
        if run.settings is None:
            key: object = without_seed(run.name)
        else:
            key = frozenset(run.settings.identity.items())
        members.setdefault(key, []).append(run)
    parts = [sorted(part, key=_order) for part in members.values()]
    titles = _titles(parts)
    order = sorted(range(len(parts)), key=lambda i: (parts[i][0].settings is None, titles[i], parts[i][0].name))
    return [Group(_letter(n), titles[i], tuple(parts[i])) for n, i in enumerate(order)]


def _order(run: Run) -> tuple:
    """Names with their numbers as numbers: seed10 comes after seed9."""
    pieces: list[tuple[int, int, str]] = []
    digits = text = ""
    for character in run.name + "\0":
        if character.isdigit() and character.isascii():
            digits += character
            continue
        if digits:
            pieces += [(1, 0, text), (0, int(digits), "")]
            digits = text = ""
        text += character
    return (*pieces, (1, 0, text))


def _letter(n: int) -> str:
    letters = ""
    n += 1
    while n:
        n, rest = divmod(n - 1, 26)
        letters = ascii_uppercase[rest] + letters
    return letters


def _titles(parts: Sequence[Sequence[Run]]) -> list[str]:
    """What sets each group apart: its estimator, and of the rest what isn't the same in all of them."""
    words = [_words(part[0].settings) for part in parts]
    known = [own for own in words if own]
    varying = [i for i in range(4) if i == 0 or len(known) < 2 or len({own[i] for own in known}) > 1]
    plain = [
        ", ".join(own[i] for i in varying) if own else without_seed(part[0].name)
        for own, part in zip(words, parts, strict=True)
    ]
    titles = []
    for title, part in zip(plain, parts, strict=True):
        alike = [other[0].settings for other, same in zip(parts, plain, strict=True) if same == title]
        own = part[0].settings
        if len(alike) > 1 and own is not None:
            apart = differences([s for s in alike if s is not None])
            values = [f"{key.split('.')[-1]} {own.identity.get(key, 'unset')}" for key in list(apart)[:3]]
            title = ", ".join([title, *values])
        titles.append(title)
    return titles


def _words(settings: Settings | None) -> tuple[str, ...]:
    if settings is None:
        return ()
    team = settings.workflow or ("team" if settings.agents else "one agent")
    return settings.estimator, settings.mapping, team, settings.model


def differences(settings: Sequence[Settings]) -> dict[str, list[str]]:
    """Returns the keys in which configurations differ, each with the value of every one (`unset` where it has none)."""
    keys = dict.fromkeys(key for one in settings for key in one.identity)
    values = {key: [one.identity.get(key, "unset") for one in settings] for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def seeds_of(group: Group) -> list[str]:
    """Returns each run's seed: what its seeds that differ in the group are; of one run, those of data and requests."""
    each = [run.settings.seeds if run.settings else {} for run in group.runs]
    keys = dict.fromkeys(key for seeds in each for key in seeds)
    varying = [key for key in keys if len({seeds.get(key) for seeds in each}) > 1]
    return [_seed(seeds, varying or ["drmas.request_seed", "data.seed"]) for seeds in each]


def _seed(seeds: dict[str, Any], keys: Sequence[str]) -> str:
    own = {key: seeds[key] for key in keys if key in seeds}
    if not own:
        return "unknown"
    if len(set(own.values())) == 1:
        return str(next(iter(own.values())))
    return ", ".join(f"{'.'.join(key.split('.')[-2:])} {value}" for key, value in own.items())
