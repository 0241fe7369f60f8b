"""The two dialects of `POST /retrieve`: requests and answers as bytes, for the server and for the client.

Search-R1's: `{"queries": [..], "topk": 3, "return_scores": true}`. Dr. MAS' reference: `{"query": "..", ...}`. Both are
answered by `{"result": [[{"document": {..}, "score": 1.5}, ..], ..]}`, one inner list a query; without `return_scores`
the inner lists hold bare documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_drmas.body import Refused
from verl_drmas.retrieval.limits import ServerSettings
from verl_drmas.retrieval.passages import Hit, Passage


class GarbageAnswer(ValueError):
    """An answer that is not of the dialect's shape."""


class RequestBody(BaseModel):
    """A request in either dialect. Keys that other servers know and ours doesn't are let pass."""

    model_config = ConfigDict(strict=True)

    queries: list[str] | None = None
    query: str | None = None
    topk: int | None = Field(default=None, ge=1, le=10**6)
    return_scores: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is within the limits."""

    queries: list[str]
    k: int
    scores: bool


def read_request(body: bytes, settings: ServerSettings) -> Asked:
    """Parse a request's body and hold it to the limits.

    Raises:
        Refused: 422 where it is not of either shape, 413 where it is above a limit.
    """
    try:
        asked = RequestBody.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise Refused(422, "malformed", f"{where}: {_one_line(first['msg'])}") from None
    if (asked.queries is None) == (asked.query is None):
        given = "neither is" if asked.query is None else "both are"
        raise Refused(422, "malformed", f"give one of `queries` (a list) and `query` (a string); {given} there")
    queries = [asked.query] if asked.queries is None else asked.queries
    k = settings.topk if asked.topk is None else asked.topk
    if k > settings.max_topk:
        raise Refused(422, "topk", f"topk is {k}; this server gives {settings.max_topk} at most")
    if len(queries) > settings.max_queries:
        raise Refused(413, "queries", f"{len(queries)} queries; one request may have {settings.max_queries}")
    for query in queries:
        if len(query) > settings.max_query_chars:
            limit = settings.max_query_chars
            raise Refused(413, "query_chars", f"a query of {len(query)} characters; the limit is {limit}")
        if not query or query.isspace():
            raise Refused(422, "blank", "a query is blank; write what to search for")
    return Asked(queries, k, asked.return_scores)


def write_answer(answers: Sequence[Sequence[Hit]], *, scores: bool) -> bytes:
    """The body of an answer, one inner list for each query."""
    if scores:
        result = [[{"document": _document(hit.passage), "score": float(hit.score)} for hit in hits] for hits in answers]
    else:
        result = [[_document(hit.passage) for hit in hits] for hits in answers]
    return orjson.dumps({"result": result})


def write_request(query: str, k: int, dialect: str) -> bytes:
    """The body that asks for one query, with scores.

    Raises:
        TypeError: The query is not text that UTF-8 can carry.
    """
    asked = {"query": query} if dialect == "query" else {"queries": [query]}
    return orjson.dumps({**asked, "topk": k, "return_scores": True})


def read_answer(body: bytes, k: int) -> list[Hit]:
    """The hits in the answer to one query, `k` at most.

    Raises:
        GarbageAnswer: It is not of the dialect's shape.
    """
    try:
        answer = orjson.loads(body)  # numbers that are not finite are no JSON to it
    except orjson.JSONDecodeError as error:
        raise GarbageAnswer(f"not JSON ({error})") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("result"), list):
        raise GarbageAnswer("no list under `result`")
    if len(answer["result"]) != 1:
        raise GarbageAnswer(f"{len(answer['result'])} lists of passages for 1 query")
    (hits,) = answer["result"]
    if not isinstance(hits, list):
        raise GarbageAnswer("`result` holds no list of passages")
    return [_hit(hit) for hit in hits[:k]]


def _document(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "title": passage.title, "text": passage.text, "contents": passage.contents}


def _hit(hit: Any) -> Hit:
    if not isinstance(hit, dict) or not isinstance(hit.get("document"), dict):
        raise GarbageAnswer("a hit without `document`")
    score = hit.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise GarbageAnswer("a hit whose `score` is no number")
    return Hit(_passage(hit["document"]), float(score))


def _passage(document: dict[str, Any]) -> Passage:
    """From our servers' fields, or from others', which may have `contents` alone."""
    title, text, contents, id = (document.get(key) for key in ("title", "text", "contents", "id"))
    if id is not None and not isinstance(id, str | int):
        raise GarbageAnswer("a document whose `id` is neither text nor number")
    if isinstance(title, str) and isinstance(text, str):
        return Passage(_id(id, text), title, text)
    if isinstance(contents, str):
        return Passage.from_contents(_id(id, contents), contents)
    raise GarbageAnswer("a document without `contents`")


def _id(id: str | int | None, text: str) -> str:
    """A document without an id gets one from its text, so that the same passage is known again."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16] if id is None else str(id)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
