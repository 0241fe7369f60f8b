"""Calls a gateway over HTTP: one attempt a call, and a clear word on what became of it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import orjson
from pydantic import SecretStr

from verl_drmas.gateway.bearer import header
from verl_drmas.gateway.errors import Busy, CallFailed, Failed, Rejected, Unreachable
from verl_drmas.gateway.wire import Answer, read_answer

_httpx = logging.getLogger("httpx")

CONNECTIONS = 512  # of one event loop; a call holds one for as long as its answer takes
CONNECT, WRITE, READ = 10.0, 60.0, 600.0  # seconds; an answer may wait for a whole training step
HEALTH = 5.0  # seconds of a look at the gateway
KEEP_ALIVE = 20.0  # seconds an idle connection is kept; the gateway hangs up later
LONGEST_WAIT = 60.0  # seconds that a gateway may ask a caller to wait
MAX_ANSWER_BYTES = 2**28
# A host that lost its power says nothing, also not that it is gone: the kernel asks it after 30 s, and gives up at 60.
PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
FIXES = {
    401: "the gateway refuses the token: both jobs need the same text in the variable that `token_env` names",
    403: "the gateway, or what stands before it, refuses the token",
    404: "`remote.role` must be the other job's `drmas.store.role`, and its endpoint that job's gateway",
    409: "a call's id was used for another call; this is a fault of ours",
    413: "the prompt is longer than the gateway takes: raise `drmas.gateway.max_body` of the other job",
    422: "the gateway can't read the call: both jobs need the same version of verl-drmas",
}


@dataclass(frozen=True)
class _Open:
    """What belongs to one event loop; `slots` counts its free connections."""

    client: httpx.AsyncClient
    slots: asyncio.Semaphore


class Caller:
    """Calls gateways with one token. Its connections are made anew in every event loop and process that uses it.

    Args:
        token: The bearer token.
        ca: PEM file to check a gateway's certificate with; None: the system's.
        connections: Most calls on their way in one event loop; who waits for one waits as long as it takes.
        read: Seconds without a byte after which a call is given up.
    """

    def __init__(self, token: SecretStr, *, ca: str | None = None, connections: int = CONNECTIONS, read: float = READ):
        self._token, self._ca, self._connections, self._read = token, ca, connections, read
        self._open: dict[asyncio.AbstractEventLoop, _Open] = {}

    def __reduce__(self):
        return _caller, (self._token, self._ca, self._connections, self._read)

    async def generate(self, url: str, body: bytes) -> Answer:
        """One call.

        Args:
            url: The gateway's base address.
            body: From `wire.write_request`.

        Raises:
            Unreachable: No gateway answered.
            Busy: It is closed for now.
            Failed: It could not answer.
            Rejected: Asking again is no use.
        """
        headers = {"authorization": header(self._token), "content-type": "application/json"}
        opened = self._opened()
        async with opened.slots:  # the wait for a connection is ours, and no part of the call's time
            status, waits, answer = await self._post(opened.client, f"{url}/v1/generate", headers, body)
        if status != 200:
            raise self._verdict(url, status, waits, answer)
        try:
            return read_answer(answer)
        except ValueError as error:
            raise Failed(f"{url}: garbage: {error}") from None

    async def lives(self, url: str) -> bool:
        """Whether anything at that address says that it is well."""
        try:
            response = await self._opened().client.get(f"{url}/health", timeout=HEALTH)
        except (httpx.HTTPError, httpx.InvalidURL, OSError):
            return False
        return response.status_code == 200

    async def close(self) -> None:
        """Close this event loop's connections; a later call opens new ones."""
        opened = self._open.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened.client.aclose()

    async def _post(
        self, client: httpx.AsyncClient, url: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, str, bytes]:
        """Status, Retry-After and body of the answer. No error of httpx goes on from here: some repeat headers."""
        try:
            async with client.stream("POST", url, content=body, headers=headers) as response:
                return response.status_code, response.headers.get("retry-after", ""), await _read(response)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise Rejected(f"{url} is no address: check `drmas.gateway.public_url` of the other job") from None
        except httpx.ReadTimeout:
            raise Unreachable(f"{url}: nothing within {self._read:g} s", silent=True) from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            told = f"{type(error).__name__}: {error}" if isinstance(error, httpx.ConnectError) else type(error).__name__
            if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)):
                raise Rejected(
                    f"{url}: {told}; name the PEM file of its certificate, or of who signed it, in `remote.ca`"
                ) from None
            raise Unreachable(f"{url}: {told}") from None

    def _verdict(self, url: str, status: int, waits: str, body: bytes) -> CallFailed:
        """What a status other than 200 means, to raise."""
        told = f"{url}: status {status} {self._told(body)}".rstrip()
        if status == 503:
            seconds = float(waits) if waits.isdecimal() and len(waits) < 6 else 1.0
            return Busy(told, min(seconds, LONGEST_WAIT))
        if status in (502, 504):
            return Unreachable(told)  # said by what stands before a gateway that is away
        if status in (408, 429) or status >= 500:
            return Failed(told)
        return Rejected(f"{told}; {FIXES.get(status, 'asking again is no use: check the endpoint')}")

    def _told(self, body: bytes) -> str:
        """What our gateway says of its refusal. Others may repeat what they were sent, so their words are left out."""
        try:
            told = orjson.loads(body)
            text = f"({told['error']}: {told['detail']})"
        except (ValueError, TypeError, KeyError):
            return ""
        return " ".join(text.split())[:200].replace(self._token.get_secret_value(), "***")

    def _opened(self) -> _Open:
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            self._open = {old: kept for old, kept in self._open.items() if not old.is_closed()}
            # httpx says a line a call at INFO, which a run would have a million of.
            if _httpx.level == logging.NOTSET:
                _httpx.setLevel(logging.WARNING)
            transport = httpx.AsyncHTTPTransport(
                verify=ssl.create_default_context(cafile=self._ca and os.path.expanduser(self._ca)),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE),
                socket_options=_socket_options(),
                trust_env=False,
            )
            client = httpx.AsyncClient(
                transport=transport,
                timeout=httpx.Timeout(connect=CONNECT, write=WRITE, read=self._read, pool=None),
                trust_env=False,  # a proxy that the environment names for others would answer in the gateway's place
                follow_redirects=False,  # the token is for this server
            )
            self._open[loop] = _Open(client, asyncio.Semaphore(self._connections))
        return self._open[loop]


def _caller(token: SecretStr, ca: str | None, connections: int, read: float) -> Caller:
    return Caller(token, ca=ca, connections=connections, read=read)


def _socket_options() -> list[tuple[int, int, int]]:
    probes = [(socket.IPPROTO_TCP, getattr(socket, name), n) for name, n in PROBES.items() if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), *probes]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


async def _read(response: httpx.Response) -> bytes:
    """The body, up to the longest that an answer can be."""
    chunks, size = [], 0
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise httpx.ReadError(f"a body of more than {MAX_ANSWER_BYTES} bytes")
    return b"".join(chunks)
