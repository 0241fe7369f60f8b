"""A small seeded world to search: people, relations between them, a passage on each, and questions over several hops.

Every relation leads from a person to exactly one other, so a question has one answer. A question of h hops is only
asked where no passage before the last one on its path names the answer: a team that finds one passage a search has to
search h times, and to read each passage to know what to search for next. More passages a search find some by chance.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_drmas.data.search import question_row

RELATIONS = ("mentor", "rival", "neighbour", "cousin", "captain", "tailor", "landlord", "doctor")
MAX_HOPS = 4
# Two syllables with endings that a stemmer leaves alone, so that two names never become one word of an index.
_HEADS = ("ba", "de", "fi", "go", "ka", "lu", "me", "no", "pu", "ra", "so", "ti", "va", "zu")
_TAILS = ("bo", "da", "go", "ka", "lo", "ma", "no", "pa", "ro", "ta", "vo", "za")


@dataclass(frozen=True)
class Question:
    """A question over the world.

    Attributes:
        start: The person it starts from.
        path: Relations, in the order in which they are followed.
        people: The persons on the way, `start` first and the answer last.
    """

    start: str
    path: tuple[str, ...]
    people: tuple[str, ...]

    @property
    def text(self) -> str:
        """For example `Who is the rival of the mentor of Bado?`: the last relation stands first."""
        return f"Who is the {' of the '.join(reversed(self.path))} of {self.start}?"

    @property
    def answer(self) -> str:
        """The last person."""
        return self.people[-1]

    @property
    def support(self) -> tuple[str, ...]:
        """Titles of the passages that lead to the answer, in order."""
        return self.people[:-1]


@dataclass(frozen=True)
class World:
    """People and who is whose what.

    Attributes:
        people: Their names.
        relations: The relations' names.
        facts: The person that a relation of a person leads to.
    """

    people: tuple[str, ...]
    relations: tuple[str, ...]
    facts: dict[tuple[str, str], str]

    @classmethod
    def build(cls, *, people: int = 40, relations: int = 3, seed: int = 0) -> World:
        """A world in which all relations of a person lead to different people.

        Args:
            people: How many; the same number has the same names in every world.
            relations: How many, of `RELATIONS`.
            seed: Of the facts.

        Raises:
            ValueError: A number is out of range.
        """
        most = len(_HEADS) * len(_TAILS)
        if not 1 <= relations <= len(RELATIONS):
            raise ValueError(f"relations is {relations}: give 1 to {len(RELATIONS)}")
        if not relations + 2 <= people <= most:
            raise ValueError(f"people is {people}: give {relations + 2} to {most} with {relations} relations")
        draw = random.Random(f"world/{seed}")
        names = tuple((head + tail).capitalize() for head, tail in itertools.product(_HEADS, _TAILS))
        step = len(names) // people  # spread over the list
        chosen = names[::step][:people]
        facts = {}
        for person in chosen:
            others = draw.sample([other for other in chosen if other != person], relations)
            facts |= {(person, RELATIONS[i]): other for i, other in enumerate(others)}
        return cls(chosen, RELATIONS[:relations], facts)

    def passage(self, person: str) -> str:
        """The text of a person's passage."""
        return " ".join(f"{person}'s {relation} is {self.facts[person, relation]}." for relation in self.relations)

    def passages(self) -> list[dict[str, str]]:
        """One passage a person, as a corpus has it: `id`, `title`, `text`."""
        return [{"id": str(i), "title": person, "text": self.passage(person)} for i, person in enumerate(self.people)]

    def questions(self, hops: int) -> list[Question]:
        """All questions of so many hops, in a fixed order.

        Raises:
            ValueError: hops is out of range.
        """
        if not 1 <= hops <= MAX_HOPS:
            raise ValueError(f"hops is {hops}: give 1 to {MAX_HOPS}")
        found = []
        for start in self.people:
            for path in itertools.product(self.relations, repeat=hops):
                people = [start]
                for relation in path:
                    people.append(self.facts[people[-1], relation])
                if len(set(people)) == len(people) and not self._shortcut(people):
                    found.append(Question(start, path, tuple(people)))
        return found

    def _shortcut(self, people: list[str]) -> bool:
        """True if a passage before the last on the path names the answer, or one names a later one on it."""
        return any(
            self.facts[person, relation] in people[i + 2 :]
            for i, person in enumerate(people[:-2])
            for relation in self.relations
        )


def world_rows(
    world: World, *, hops: Sequence[int] = (2,), count: int | None = None, held_out: int = 64, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Questions over a world, split into training and held-out prompts; every number of hops has its share of both.

    Args:
        world: What is asked about.
        hops: Numbers of searches that questions take; each is a `type` of the rows (`2-hop`).
        count: Questions in all, an equal share of each number of hops; None for all there are.
        held_out: How many of them are kept for the test file.
        seed: Fixes choice, split and order.

    Returns:
        Training and held-out rows in verl's RLHF format (`data/search.py`), data source `world`, the passages that lead
        to the answer as `support_titles`, and an index that is unique over both.

    Raises:
        ValueError: The world has not so many questions, or the split would leave one side empty.
    """
    draw = random.Random(f"questions/{seed}")
    kinds = sorted(set(hops))
    if count is not None and count < len(kinds):
        raise ValueError(f"count is {count}: ask for at least one question of each of {len(kinds)} numbers of hops")
    drawn: list[list[Question]] = []
    for place, kind in enumerate(kinds):
        found = world.questions(kind)
        share = len(found) if count is None else count // len(kinds) + (place < count % len(kinds))
        if share > len(found):
            raise ValueError(
                f"{share} questions of {kind} hops are asked for, and this world has {len(found)}: lower the number of "
                "questions, or take more people or relations"
            )
        drawn.append(draw.sample(found, share))
    own = [held_out // len(kinds) + (place < held_out % len(kinds)) for place in range(len(kinds))]
    if held_out < len(kinds) or any(n >= len(questions) for n, questions in zip(own, drawn, strict=True)):
        raise ValueError(
            f"held_out is {held_out} of {sum(map(len, drawn))} questions: leave both sides at least one of each number "
            "of hops"
        )
    tested = [question for n, questions in zip(own, drawn, strict=True) for question in questions[:n]]
    kept = [question for n, questions in zip(own, drawn, strict=True) for question in questions[n:]]
    draw.shuffle(tested)
    draw.shuffle(kept)
    rows = [
        question_row(
            question.text,
            [question.answer],
            data_source="world",
            split="test" if index < held_out else "train",
            index=index,
            type=f"{len(question.path)}-hop",
            support_titles=question.support,
            facts=question.people[1:],
        )
        for index, question in enumerate([*tested, *kept])
    ]
    return rows[held_out:], rows[:held_out]
