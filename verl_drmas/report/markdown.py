"""Writes a report as GitHub's Markdown; names in it stay names, whatever characters they have."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

from verl_drmas.report.blocks import Block, Bullets, Heading, Paragraph, Picture, Report, Table, clean

SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
LINE_START = re.compile(r"^(\d+)?([-+.)]|#+|=+)(?=\s|$)")  # of a list, a heading or a rule


def to_markdown(report: Report, folder: Path) -> str:
    """Returns the text.

    Args:
        report: the report.
        folder: that the text will lie in; pictures are named from there.
    """
    parts = [f"# {escape(report.title)}"]
    parts += [_block(block, folder) for block in report.blocks]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Returns a text that Markdown shows as it is."""
    text = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return LINE_START.sub(r"\1\\\2", SPECIAL.sub(lambda found: "\\" + found[0], text))


def _block(block: Block, folder: Path) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape(text)}"
        case Paragraph(text):
            return escape(text)
        case Bullets(items):
            return "\n".join(f"- {escape(item)}" for item in items)
        case Picture(path, says, caption):
            return f"![{escape(says)}]({quote(path.relative_to(folder).as_posix())})\n\n{escape(caption)}"
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    head = list(table.head)
    if table.spans:  # Markdown has one line of heads
        over = [title for title, n in table.spans for _ in range(n)]
        head = [f"{title}: {name}" if title and name else title or name for title, name in zip(over, head, strict=True)]
    rule = [":--" if i == 0 or i in table.words else "--:" for i in range(len(head))]
    lines = [_line(head), _line(rule, plain=True), *(_line(row) for row in table.rows)]
    return "\n".join([f"**{escape(table.title)}**\n"] if table.title else []) + "\n".join(
        ["", *lines] if table.title else lines
    )


def _line(cells: list[str] | tuple[str, ...], *, plain: bool = False) -> str:
    return "| " + " | ".join(cell if plain else escape(cell) for cell in cells) + " |"
