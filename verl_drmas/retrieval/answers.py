"""What a search server's answer means: hits, a query at fault, a passing fault, or a server that will never do."""

from __future__ import annotations

import aiohttp
import orjson

from verl_drmas.retrieval.wire import GarbageAnswer

MAX_ANSWER_BYTES = 2**24
# Reasons our server gives where another query would be taken; those of other makes give none.
_QUERY_REASONS = ("blank", "body", "query_chars")


class AtFault(Exception):
    """The query is to blame."""


class Passing(Exception):
    """Another attempt may make it good."""


class Refusal(Exception):
    """The server gives no other answer, however often it is asked; the line names the fix."""


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer.

    Raises:
        GarbageAnswer: It is too long for one.
    """
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise GarbageAnswer(f"a body of more than {MAX_ANSWER_BYTES} bytes")
    return b"".join(chunks)


def verdict(status: int, body: bytes, *, dialect: str, k: int, answered: bool) -> AtFault | Passing | Refusal:
    """What an HTTP status other than 200 means, to raise.

    Args:
        status: HTTP status.
        body: Of the answer.
        dialect: What the server was asked in.
        k: Passages asked for.
        answered: Whether it has answered another query: one that has answered none calls none of them malformed.
    """
    detail, reason = _told(body)
    line = f"status {status}: {detail}"
    if status in (408, 425, 429) or status >= 500:
        return Passing(line)
    if status < 300:
        return Passing(f"garbage: status {status}")
    if reason == "topk":
        return Refusal(f"{line}; lower topk ({k}), or raise the server's --max-topk")
    if reason in _QUERY_REASONS or (reason is None and (status == 413 or (status == 422 and answered))):
        return AtFault(line)
    if status == 422 and not answered:
        return Refusal(f"{line}; it has answered nothing yet: is retrieval.dialect: {dialect} its own?")
    return Refusal(f"{line}; no case for another attempt, check retrieval.urls")


def _told(body: bytes) -> tuple[str, str | None]:
    """What the server says of its refusal: `detail` as FastAPI has it, or the body's beginning; and our `reason`."""
    try:
        told = orjson.loads(body)
        detail, reason = told["detail"], told.get("reason")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        detail, reason = body.decode("utf-8", "replace"), None
    return " ".join(str(detail).split())[:200] or "(empty)", reason if isinstance(reason, str) else None
