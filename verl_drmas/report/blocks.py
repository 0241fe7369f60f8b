"""A report as plain data, before it is written as Markdown or HTML."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heading:
    """Of a section (level 2) or a part of one (level 3)."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list without order."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table; the first column names its rows.

    Attributes:
        head: of the columns.
        rows: cells, each as long as `head`.
        title: above it.
        spans: titles over neighbouring columns, with how many each covers; the sum is that of the columns. Empty: none.
        words: columns, beside the first, that hold words; the others are numbers, to the right.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    spans: tuple[tuple[str, int], ...] = ()
    words: frozenset[int] = frozenset()

    def __post_init__(self):
        wrong = [row for row in self.rows if len(row) != len(self.head)]
        if wrong or (self.spans and sum(n for _, n in self.spans) != len(self.head)):
            raise ValueError(
                f"table {self.title!r}: {len(self.head)} columns, and not as many cells or spans: {wrong[:1]}"
            )


@dataclass(frozen=True)
class Picture:
    """A PNG beside the report.

    Attributes:
        path: of the file.
        says: what it shows, for those who don't see it.
        caption: below it.
    """

    path: Path
    says: str
    caption: str


Block = Heading | Paragraph | Bullets | Table | Picture


@dataclass(frozen=True)
class Report:
    """What is written.

    Attributes:
        title: above all.
        blocks: from top to bottom.
    """

    title: str
    blocks: tuple[Block, ...]

    def sections(self) -> list[Heading]:
        """Returns the headings of level 2, which the table of contents names."""
        return [block for block in self.blocks if isinstance(block, Heading) and block.level == 2]


def clean(text: str) -> str:
    """Returns a text on one line, without characters that control a terminal or turn the direction of writing."""
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in " ".join(text.split()))


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], **options: object) -> Table:
    """Returns a table of sequences."""
    return Table(tuple(head), tuple(tuple(row) for row in rows), **options)
