"""The pages as tests read them: tables, blocks of code, spans and links."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": ROOT / "README.md"} | {f"docs/{p.name}": p for p in sorted((ROOT / "docs").glob("*.md"))}


def text_of(name: str) -> str:
    """A page, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a page: rows of cells, the header first, the line below it left out."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]])
        elif rows:
            found.append([rows[0], *rows[2:]])
            rows = []
    return found


def table_with(text: str, *header: str) -> list[list[str]]:
    """The body of the one table whose first columns are these."""
    (found,) = (table[1:] for table in tables(text) if tuple(table[0][: len(header)]) == header)
    return found


def blocks(text: str, language: str) -> list[str]:
    """What stands in the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """Code spans outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def code(cell: str) -> str:
    """A cell that is one code span."""
    return cell.strip("`")
