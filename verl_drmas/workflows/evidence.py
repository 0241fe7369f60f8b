"""What a team has searched for and found, as text that fits a token budget: oldest passages are shortened first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl_drmas.retrieval import Passage

NOTHING = "nothing new was found"
GAP = "[...]"


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

    @property
    def passages(self) -> list[Passage]:
        """All passages, oldest search first."""
        return [passage for search in self.searches for passage in search.passages]

    def render(self, count: Callable[[str], int], budget: int | None = None) -> tuple[str, Cut]:
        """The evidence as an agent reads it.

        Oldest search first, and within a search lowest rank first, a passage loses the end of its text, then all of
        it; where titles alone are too long, passages go in the same order, and then whole searches.

        Args:
            count: Length of a text in tokens.
            budget: Most tokens; None for no limit.

        Returns:
            The text, empty if nothing was searched or nothing fits, and what was cut.
        """
        view = _View(self.searches)
        text = view.text()
        if budget is None or not text or (size := count(text)) <= budget:
            return text, Cut()
        shown = _fit(view, count, budget)
        return shown, Cut(view.touched, size - count(shown))


class _View:
    """How much of each passage is shown: words of its text, or None for nothing at all, not even the title."""

    def __init__(self, searches: Sequence[Search]):
        self.searches = searches
        self.words = {(s, p): passage.text.split(" ") for s, p, passage in self._all()}
        self.kept: dict[tuple[int, int], int | None] = {key: len(words) for key, words in self.words.items()}
        self.first = 0  # searches before it are left out

    def _all(self):
        for s, search in enumerate(self.searches):
            for p, passage in enumerate(search.passages):
                yield s, p, passage

    @property
    def oldest_first(self) -> list[tuple[int, int]]:
        return sorted(self.kept, key=lambda key: (key[0], -key[1]))

    @property
    def touched(self) -> int:
        return sum(self.kept[key] != len(words) or key[0] < self.first for key, words in self.words.items())

    def text(self) -> str:
        lines: list[str] = []
        number = 0
        for s, search in enumerate(self.searches):
            shown = []
            for p, passage in enumerate(search.passages):
                number += 1  # a passage keeps its number when an older one goes
                kept = self.kept[s, p]
                if kept is not None:
                    words = self.words[s, p]
                    body = " ".join(words if kept == len(words) else [*words[:kept], GAP])
                    shown.append(f"[{number}] {passage.title}: {body}" if passage.title else f"[{number}] {body}")
            if s >= self.first:
                lines += [f"Search {s + 1}: {search.query}", *(shown or ([] if search.passages else [NOTHING]))]
        return "\n".join(lines)


def _fit(view: _View, count: Callable[[str], int], budget: int) -> str:
    for key in view.oldest_first:
        view.kept[key] = 0
        if count(view.text()) <= budget:
            low, high = 0, len(view.words[key])  # the most words that fit, by bisection
            while low < high:
                view.kept[key] = middle = (low + high + 1) // 2
                low, high = (middle, high) if count(view.text()) <= budget else (low, middle - 1)
            view.kept[key] = low
            return view.text()
    for key in view.oldest_first:
        view.kept[key] = None
        if count(text := view.text()) <= budget:
            return text
    while view.first < len(view.searches):
        view.first += 1
        if count(text := view.text()) <= budget:
            return text
    return ""
