"""What is searched and what is found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that can be found.

    Attributes:
        id: Its id in the corpus.
        title: Of the page it is from; may be empty.
        text: The passage, without its title.
    """

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title in quotes, line break, text: how Search-R1's corpora write a passage in one field."""
        return f'"{self.title}"\n{self.text}' if self.title else self.text

    @classmethod
    def from_contents(cls, id: str, contents: str) -> Passage:
        """Take `contents` apart again; without a quoted first line all of it is text."""
        head, line_break, rest = contents.partition("\n")
        if line_break and len(head) >= 2 and head[0] == head[-1] == '"':
            return cls(id, head[1:-1], rest)
        return cls(id, "", contents)


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found, and its score: higher is better, comparable within one answer only."""

    passage: Passage
    score: float
