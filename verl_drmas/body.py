"""What our HTTP servers share: a body that is read up to a limit, and a request that is turned away."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

LONGEST_NUMBER = 18  # digits of a length that is worth turning into a number


class Refused(Exception):
    """A request that is not served.

    Attributes:
        status: HTTP status.
        reason: Short name of the reason, for the metrics and for clients.
        text: One line for the caller.
        retry_after: Seconds after which to come again, if that can help.
    """

    def __init__(self, status: int, reason: str, text: str, retry_after: int | None = None):
        super().__init__(text)
        self.status, self.reason, self.text, self.retry_after = status, reason, text, retry_after


class BodyTooLong(Exception):
    """A body above the limit; how much more there was is not known."""


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body.

    Raises:
        BodyTooLong: It is longer than `limit` bytes. It isn't read further than that, and not at all where the request
            says so itself.
        starlette.requests.ClientDisconnect: The caller hung up.
    """
    said = request.headers.get("content-length", "")
    if said.isdecimal() and (len(said) > LONGEST_NUMBER or int(said) > limit):
        raise BodyTooLong
    chunks, size = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise BodyTooLong
    return b"".join(chunks)
