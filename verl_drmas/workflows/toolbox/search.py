"""Search over passages, as a tool: numbered passages with their titles, within limits that agents can read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_drmas.retrieval import (
    Hit,
    IndexProblem,
    Passage,
    QueryRejected,
    RetrievalOutage,
    RetrievalSettings,
    open_retriever,
)
from verl_drmas.workflows.toolbox.arguments import check_positive, clip, proper_text, refuse_unknown, text_argument
from verl_drmas.workflows.tools import Tool, ToolError, ToolOutage

QUERY_CHARACTERS = 2000
TITLE_CHARACTERS = 200


@dataclass
class SearchSettings:
    """How an agent searches.

    Attributes:
        retrieval: Where passages come from, see `RetrievalSettings`.
        topk: Passages asked for a query.
        max_queries: Most queries of one call; 1 offers the agent no list of them.
        passage_characters: Most characters of one passage.
        characters: Most characters of a whole answer.
    """

    retrieval: RetrievalSettings
    topk: int = 3
    max_queries: int = 3
    passage_characters: int = 2000
    characters: int = 12000

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        check_positive(self, "topk", "max_queries", "passage_characters", "characters")


class Search(Tool):
    """Finds passages for one query or several. A passage that several queries find is written once."""

    Settings: ClassVar = SearchSettings

    def __init__(self, settings: SearchSettings, name: str = "search"):
        self.settings, self.name = settings, name
        self.retriever = open_retriever(settings.retrieval)
        self.description = "Search a library of passages. Returns the passages that fit best, each with its title."
        properties = {"query": {"type": "string", "description": "What to search for."}}
        required = ["query"]
        if settings.max_queries > 1:
            about = f"In place of query: up to {settings.max_queries} queries, each searched for by itself."
            properties["queries"] = {"type": "array", "items": {"type": "string"}, "description": about}
            required = []
        self.parameters = {"type": "object", "properties": properties, "required": required}
        self._counts = _no_counts()

    async def call(self, arguments: dict[str, Any]) -> str:
        """Passages for `query`, or for each of `queries`.

        Raises:
            ToolError: There is no proper query.
            ToolOutage: A search has no answer.
        """
        queries = self._queries(arguments)
        searches = (self.retriever.search(query, self.settings.topk) for query in queries)
        found = await asyncio.gather(*searches, return_exceptions=True)
        for error in found:
            if isinstance(error, RetrievalOutage | IndexProblem):
                raise ToolOutage(self.name, str(error)) from error
            if isinstance(error, BaseException) and not isinstance(error, QueryRejected):
                raise error
        rejected = [error for error in found if isinstance(error, QueryRejected)]
        if len(rejected) == len(queries):
            raise ToolError("; ".join(str(error) for error in rejected)) from rejected[0]
        self._counts["searches"] += len(queries)
        return self._written(queries, [str(hits) if isinstance(hits, QueryRejected) else hits for hits in found])

    def check(self) -> str:
        """Look whether searches can work.

        Raises:
            IndexProblem: The index can't be used.
            RetrievalOutage: No server answers.
        """
        return f"{self.name}: {self.retriever.check(self.settings.topk)}"

    async def close(self) -> None:
        await self.retriever.close()

    def report(self) -> dict[str, float]:
        """Since the last report: what the retriever counts (calls, retries, outages, rejected, seconds), and searches,
        passages, empty (searches), cut_passages and cut_characters.
        """
        counts, self._counts = self._counts, _no_counts()
        return {**self.retriever.report(), **counts}

    def _queries(self, arguments: dict[str, Any]) -> list[str]:
        refuse_unknown(arguments, self.parameters["properties"])
        several = arguments.get("queries")
        if several is None or "query" in arguments:
            if several:
                raise ToolError("write either 'query' or 'queries', not both")
            return [text_argument(arguments, "query", characters=QUERY_CHARACTERS)]
        if isinstance(several, str):
            several = [several]
        if not isinstance(several, list) or not several:
            raise ToolError('\'queries\' is no list of texts; write ["first query", "second query"]')
        if len(several) > self.settings.max_queries:
            raise ToolError(f"there are {len(several)} queries; write at most {self.settings.max_queries}")
        queries = [
            proper_text(query, f"query {number}", characters=QUERY_CHARACTERS)
            for number, query in enumerate(several, 1)
        ]
        return list(dict.fromkeys(queries))

    def _written(self, queries: Sequence[str], found: Sequence[list[Hit] | str]) -> str:
        """The answer: for each query its passages, or what is wrong with it."""
        numbers: dict[tuple[str, str], int] = {}
        passages: list[Passage] = []
        sections: list[list[int | str]] = []  # a number stands for a passage that is written here
        for query, hits in zip(queries, found, strict=True):
            section: list[int | str] = [f"Search: {clip(query, TITLE_CHARACTERS)[0]}"] if len(queries) > 1 else []
            if isinstance(hits, str):
                section.append(hits)
            elif not hits:
                section.append("nothing was found")
                self._counts["empty"] += 1
            for hit in hits if not isinstance(hits, str) else ():
                key = (hit.passage.title, hit.passage.text)
                if key in numbers:
                    section.append(f"[{numbers[key]}] (above)")
                else:
                    passages.append(hit.passage)
                    numbers[key] = len(passages)
                    section.append(len(passages))
            sections.append(section)
        heads = [_head(number, passage) for number, passage in enumerate(passages, 1)]
        bodies = [" ".join(passage.text.split()) for passage in passages]
        told = "\n\n".join(
            "\n".join(part if isinstance(part, str) else heads[part - 1] for part in section) for section in sections
        )
        share = _share([len(body) for body in bodies], self.settings.characters - len(told))
        cuts = [clip(body, min(share, self.settings.passage_characters)) for body in bodies]
        self._counts["passages"] += len(passages)
        self._counts["cut_passages"] += sum(left_out > 0 for _, left_out in cuts)
        self._counts["cut_characters"] += sum(left_out for _, left_out in cuts)
        text = "\n\n".join(
            "\n".join(part if isinstance(part, str) else heads[part - 1] + cuts[part - 1][0] for part in section)
            for section in sections
        )
        whole, left_out = clip(text, self.settings.characters)  # only where titles alone are too long
        self._counts["cut_characters"] += left_out
        return whole


def _head(number: int, passage: Passage) -> str:
    title = clip(" ".join(passage.title.split()), TITLE_CHARACTERS)[0]
    return f"[{number}] {title}: " if title else f"[{number}] "


def _share(lengths: Sequence[int], room: int) -> int:
    """The most characters that each text may have, if the room is to hold all of them: short ones leave theirs to long
    ones.
    """
    room = max(room, 0)
    for done, length in enumerate(sorted(lengths)):
        if length * (len(lengths) - done) > room:
            return room // (len(lengths) - done)
        room -= length
    return max(lengths, default=0)


def _no_counts() -> dict[str, float]:
    return dict.fromkeys(("searches", "passages", "empty", "cut_passages", "cut_characters"), 0.0)
