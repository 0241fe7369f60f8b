"""What a team has searched for and found, as text that fits a token budget: oldest passages are shortened first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl_drmas.retrieval import Passage

NOTHING = "nothing new was found"
GAP = "[...]"
_PIECE = re.compile(r"\s*\S{1,24}|\s+")  # a word, or a bit of a text without spaces


@dataclass(frozen=True)
class Cut:
    """What was left out of one rendering.

    Attributes:
        passages: Passages shortened or left out.
        tokens: Tokens by which the text became shorter.
    """

    passages: int = 0
    tokens: int = 0


@dataclass
class Search:
    """One query and the passages it added."""

    query: str
    passages: list[Passage] = field(default_factory=list)


@dataclass
class Evidence:
    """The searches of a session, in order. A passage is kept once, where it was first found."""

    searches: list[Search] = field(default_factory=list)

    def add(self, query: str, found: Sequence[Passage]) -> list[Passage]:
        """Note a search; returns the passages that are new."""
        known = {(p.title, p.text) for s in self.searches for p in s.passages}
        new: list[Passage] = []
        for passage in found:
            if (key := (passage.title, passage.text)) not in known:
                known.add(key)
                new.append(passage)
        self.searches.append(Search(query, new))
        return new

    def render(
        self, count: Callable[[str], int], budget: int | None = None, sizes: dict[str, int] | None = None
    ) -> tuple[str, Cut]:
        """The evidence as an agent reads it. Tokenises much where it is over its budget: not for an event loop.

        Oldest search first, and within a search lowest rank first, a passage loses the end of its text, then all of
        it; where titles alone are too long, passages go in the same order, and then whole searches.

        Args:
            count: Length of a text in tokens.
            budget: Most tokens; None for no limit.
            sizes: Lines' lengths that are known already, added to; of one `count`.

        Returns:
            The text, empty if nothing was searched or nothing fits, and what was cut.
        """
        view = _View(self.searches, count, {} if sizes is None else sizes)
        text = view.text()
        if budget is None or not text or (size := count(text)) <= budget:
            return text, Cut()
        aim = budget
        while True:
            view.fit(aim)
            over = count(shown := view.text()) - budget
            if over <= 0 or not shown:
                return shown, Cut(view.touched, size - (count(shown) if shown else 0))
            aim -= over  # tokens that reach over a line's end made the sum of the lines too small


class _View:
    """How much of each passage is shown: pieces of its text, or None for nothing at all, not even the title.

    Lines are measured one by one and once each: a whole prompt is too long to be tokenised for every step of a search
    for what fits.
    """

    def __init__(self, searches: Sequence[Search], count: Callable[[str], int], sizes: dict[str, int]):
        self.searches, self.count, self.sizes = searches, count, sizes
        self.pieces = {
            (s, p): _PIECE.findall(passage.text)
            for s, search in enumerate(searches)
            for p, passage in enumerate(search.passages)
        }
        self.kept: dict[tuple[int, int], int | None] = {key: len(pieces) for key, pieces in self.pieces.items()}
        self.first = 0  # searches before it are left out

    @property
    def touched(self) -> int:
        return sum(self.kept[key] != len(pieces) or key[0] < self.first for key, pieces in self.pieces.items())

    def text(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        lines: list[str] = []
        number = 0
        for s, search in enumerate(self.searches):
            shown = []
            for p, passage in enumerate(search.passages):
                number += 1  # a passage keeps its number when an older one goes
                if self.kept[s, p] is not None:
                    head = f"[{number}] {passage.title}: " if passage.title else f"[{number}] "
                    shown.append(head + self.body((s, p)))
            if s >= self.first:
                lines += [f"Search {s + 1}: {search.query}", *(shown or ([] if search.passages else [NOTHING]))]
        return lines

    def body(self, key: tuple[int, int]) -> str:
        pieces, kept = self.pieces[key], self.kept[key]
        return "".join(pieces) if kept == len(pieces) else f"{''.join(pieces[:kept])} {GAP}".lstrip()

    def size(self) -> int:
        lines = self.lines()
        for line in lines:
            if line not in self.sizes:
                self.sizes[line] = self.count(line)
        return sum(self.sizes[line] for line in lines) + self.count("\n") * max(0, len(lines) - 1)

    def fit(self, budget: int) -> None:
        """Cut until the lines' sizes add up to the budget at most."""
        order = sorted(self.kept, key=lambda key: (key[0], -key[1]))
        for key in order:
            whole = self.kept[key]
            if not whole:
                continue
            self.kept[key] = 0
            if self.size() <= budget:
                low, high = 0, whole  # the most pieces that fit, by bisection
                while low < high:
                    self.kept[key] = middle = (low + high + 1) // 2
                    low, high = (middle, high) if self.size() <= budget else (low, middle - 1)
                self.kept[key] = low
                return
        for key in order:
            self.kept[key] = None
            if self.size() <= budget:
                return
        while self.first < len(self.searches) and self.size() > budget:
            self.first += 1
