"""The paragraphs that question files carry, as a corpus to search."""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from verl_drmas.data.hub import flat, is_file
from verl_drmas.data.parquet import read_rows, whole_file

PAGE_KEYS = ("docs", "context", "paragraphs")
TEXT_KEYS = ("text", "paragraph_text", "sentences", "content")


class Corpus(NamedTuple):
    """Passages `{"id", "title", "text"}`, how many paragraphs the files hold, and of how many questions."""

    passages: list[dict[str, str]]
    paragraphs: int
    questions: int


def load_passages(sources: Sequence[str]) -> Corpus:
    """The paragraphs of all files in order, those with the same title and text once, numbered from 0 as `id`.

    Args:
        sources: .json/.jsonl/.parquet files whose rows carry paragraphs under one of `PAGE_KEYS`, or in `metadata`:
            a list of `{"title", "text"}` (or MuSiQue's `paragraph_text`), or HotpotQA's and 2Wiki's `context`, in
            their own form (pairs of title and sentences) or Hugging Face's (a list of titles and one of sentences).

    Raises:
        ValueError: one line that names file, row (counted from 0), key and fix.
    """
    found: dict[tuple[str, str], None] = {}
    paragraphs = questions = 0
    for source in sources:
        if not is_file(source):
            raise ValueError(f"{source}: not a .json, .jsonl or .parquet file; download the data set and give its file")
        for number, row in enumerate(read_rows(source)):
            questions += 1
            for title, text in _paragraphs(row, f"{source}: row {number}"):
                paragraphs += 1
                found[title, text] = None
    passages = [{"id": str(number), "title": title, "text": text} for number, (title, text) in enumerate(found)]
    if not passages:
        raise ValueError(f"{', '.join(sources)}: no paragraph has text")
    return Corpus(passages, paragraphs, questions)


def write_passages(passages: Sequence[dict[str, str]], path: str | os.PathLike) -> Path:
    """Write passages to a JSONL file; an interrupted write leaves no half file."""
    path = Path(path).expanduser()
    with whole_file(path) as partial, partial.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(passage, ensure_ascii=False) + "\n" for passage in passages)
    return path


def _paragraphs(row: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Title and text of each paragraph that has text, white space collapsed."""
    fields = flat(row)
    key = next((key for key in PAGE_KEYS if fields.get(key) is not None), None)
    if key is None:
        raise ValueError(f"{where}: no {', '.join(PAGE_KEYS)} among {', '.join(row)}; give a file with paragraphs")
    for page in _pages(fields[key]):
        title, text = _title_and_text(page)
        if not isinstance(text, str) or not isinstance(title, str | None):
            raise ValueError(
                f"{where}: {key} holds no title and text; write each as {{title, text}} or [title, [sentences]]"
            )
        text = " ".join(text.split())
        if text:
            yield " ".join((title or "").split()), text


def _pages(pages: Any) -> list[Any]:
    if isinstance(pages, dict) and all(isinstance(cells, list) for cells in pages.values()):
        # A column for each field, as Hugging Face stores lists of structs.
        return [dict(zip(pages, cells, strict=True)) for cells in zip_longest(*pages.values())]
    return pages if isinstance(pages, list) else [pages]


def _title_and_text(page: Any) -> tuple[Any, Any]:
    if isinstance(page, dict):
        title, text = page.get("title"), next((page[key] for key in TEXT_KEYS if page.get(key) is not None), None)
    else:
        title, text = page if isinstance(page, list) and len(page) == 2 else (None, None)
    return title, " ".join(map(str, text)) if isinstance(text, list) else text
