"""Fetching one web page, as a tool: from allowed hosts, within bounds of size and time, read as plain text."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential, wait_random
from yarl import URL

from verl_drmas.workflows.toolbox.addresses import AllowList, PublicResolver, checked_url
from verl_drmas.workflows.toolbox.arguments import check_positive, clip, refuse_unknown, text_argument
from verl_drmas.workflows.toolbox.pages import page_text
from verl_drmas.workflows.tools import Tool, ToolError, ToolOutage

FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0  # seconds between attempts
SILENT_HOSTS = 3  # hosts in a row that give no sign of life until the fault is sought on our side
URL_CHARACTERS, GOAL_CHARACTERS = 2048, 500
TYPES = ("text/html", "application/xhtml+xml", "text/plain", "application/json")
HEADERS = {"accept": "text/html, text/plain, application/json", "user-agent": "verl-drmas", "accept-language": "en"}
_NO_SUCH_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


@dataclass
class VisitSettings:
    """Which pages an agent may read.

    Attributes:
        allow: Patterns of hosts: `en.wikipedia.org`, `*.wikipedia.org` (any below it), `*`; each may end with `:port`.
            Redirects must fit as well. Empty: none.
        private: Whether addresses inside the network (private, loopback, link-local) may be asked, if `allow` fits.
        timeout: Seconds of one attempt, redirects included.
        attempts: Fetches of a page that doesn't answer, or answers with a server's error.
        max_bytes: Largest page, unpacked.
        characters: Most characters of an answer.
        redirects: Most redirects followed.
        connections: Most pages fetched at a time.
    """

    allow: list[str] = field(default_factory=list)
    private: bool = False
    timeout: float = 20.0
    attempts: int = 3
    max_bytes: int = 2**20
    characters: int = 12000
    redirects: int = 5
    connections: int = 32

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        check_positive(self, "timeout", "attempts", "max_bytes", "characters", "connections")
        if self.redirects < 0:
            raise ValueError(f"redirects is {self.redirects}; it must be 0 or above")
        AllowList(self.allow)


class _Silent(Exception):
    """One attempt in which nobody answered."""


class _Failing(Exception):
    """One attempt that the host answered with an error of its own."""


@dataclass(frozen=True)
class _Page:
    url: URL
    content_type: str
    charset: str | None
    body: bytes


class Visit(Tool):
    """Reads one page.

    A page that is missing, down or no text is information for the agent (`ToolError`); the next page may be there. When
    `SILENT_HOSTS` different hosts in a row give no sign of life, the fault is our network's, and the call an outage. A
    name that doesn't exist is neither: agents make names up.
    """

    Settings: ClassVar = VisitSettings

    def __init__(self, settings: VisitSettings, name: str = "visit"):
        self.settings, self.name = settings, name
        self.description = "Read a web page. Returns its text."
        self.parameters = {
            "type": "object",
            "properties": {
                "url": {"type": "string", "description": "Address of the page, such as https://host/path"},
                "goal": {"type": "string", "description": "What you hope to find there (optional)."},
            },
            "required": ["url"],
        }
        self._allow = AllowList(settings.allow)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(settings.connections)  # waiting for one takes nothing off an attempt's time
        self._silent: set[str] = set()
        self._backoff = wait_exponential(FIRST_WAIT, LONGEST_WAIT, 3) + wait_random(0, FIRST_WAIT)
        self._counts = _no_counts()

    async def call(self, arguments: dict[str, Any]) -> str:
        """The text of the page at `url`, below a line with its title, address and the `goal`.

        Raises:
            ToolError: The page isn't allowed or can't be read.
            ToolOutage: No host answers.
        """
        self._counts["calls"] += 1
        start = time.monotonic()
        try:
            refuse_unknown(arguments, self.parameters["properties"])
            text = text_argument(arguments, "url", characters=URL_CHARACTERS)
            goal = text_argument(arguments, "goal", characters=GOAL_CHARACTERS) if arguments.get("goal") else ""
            url = checked_url(text, self._allow, private=self.settings.private)
            return await self._written(await self._fetch(url), goal)
        except ToolError:
            self._counts["errors"] += 1
            raise
        except ToolOutage:
            self._counts["outages"] += 1
            raise
        finally:
            self._counts["seconds"] += time.monotonic() - start

    def check(self) -> str:
        """Look whether any page may be visited; no host is asked.

        Raises:
            ValueError: None may.
        """
        if not self.settings.allow:
            raise ValueError(
                f"{self.name}.allow is empty, so no page may be visited; list patterns of hosts, such as "
                f"['*.wikipedia.org'], or leave the tool out"
            )
        return f"{self.name}: pages of {self._allow.told}"

    async def close(self) -> None:
        """Let go of connections; a later call opens new ones."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    def report(self) -> dict[str, float]:
        """Since the last report: calls, errors (of the agent or the page), outages, retries, cut_pages, cut_characters
        and seconds of all calls together.
        """
        counts, self._counts = self._counts, _no_counts()
        return counts

    async def _fetch(self, url: URL) -> _Page:
        """The page, after retries.

        Raises:
            ToolError, ToolOutage: There is none; see `call`.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((_Silent, _Failing)),
            stop=stop_after_attempt(self.settings.attempts),
            wait=self._backoff,
            before_sleep=self._count_retry,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._attempt(url)
        except _Failing as last:
            raise ToolError(f"the page can't be read: {last}") from last
        except _Silent as last:
            self._silent.add(url.raw_host or "")
            if len(self._silent) >= SILENT_HOSTS:
                hosts = ", ".join(sorted(self._silent))
                raise ToolOutage(self.name, f"no answer from any of {hosts}; last: {last}") from last
            raise ToolError(f"the page can't be read: {last}") from last
        raise AssertionError("unreachable: tenacity returns or raises")

    async def _attempt(self, url: URL) -> _Page:
        answered = False

        def note_answer() -> None:
            nonlocal answered
            answered = True
            self._silent.clear()

        seconds = self.settings.timeout
        try:
            session = self._open()
            async with self._slots:
                return await asyncio.wait_for(self._walk(session, url, note_answer), seconds)
        except asyncio.TimeoutError as error:
            told = f"it took more than {seconds:g} s"
            raise (_Failing(told) if answered else _Silent(f"no answer within {seconds:g} s")) from error
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            note_answer()
            raise ToolError("the page can't be read: its host has no valid certificate") from error
        except aiohttp.ClientConnectorDNSError as error:
            if getattr(error.os_error, "errno", None) in _NO_SUCH_HOST:
                raise ToolError(f"the page can't be read: there is no host {url.host}") from error
            raise _Silent(f"the host {url.host} can't be looked up") from error
        except aiohttp.InvalidURL as error:
            raise ToolError("the page can't be read: its address isn't valid") from error
        except (aiohttp.ClientError, OSError) as error:
            told = f"{type(error).__name__}"
            raise (
                _Failing(f"the answer broke off ({told})") if answered else _Silent(f"no answer ({told})")
            ) from error

    async def _walk(self, session: aiohttp.ClientSession, url: URL, note_answer: Callable[[], None]) -> _Page:
        """Follow redirects to the page."""
        for _ in range(self.settings.redirects + 1):
            async with session.get(url, allow_redirects=False) as response:
                note_answer()
                target = response.headers.get("location")
                if response.status not in (301, 302, 303, 307, 308) or not target:
                    return await self._read(url, response)
            try:
                onward = str(url.join(URL(target)))
            except ValueError as error:
                raise ToolError(f"the page can't be read: it leads to {target[:200]!r}, which is no address") from error
            try:
                url = checked_url(onward, self._allow, private=self.settings.private)
            except ToolError as error:
                raise ToolError(f"the page can't be read: it leads on to another address, and {error}") from error
        raise ToolError(f"the page can't be read: more than {self.settings.redirects} redirects")

    async def _read(self, url: URL, response: aiohttp.ClientResponse) -> _Page:
        status, limit = response.status, self.settings.max_bytes
        if status in (408, 425, 429) or status >= 500:
            raise _Failing(f"its host answers with status {status}")
        if status != 200:
            raise ToolError(f"the page can't be read: its host answers with status {status}")
        if response.content_type not in TYPES:
            raise ToolError(f"the page can't be read: it is {response.content_type}, not text")
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise ToolError(f"the page can't be read: it has more than {limit} bytes")
        return _Page(url, response.content_type, response.charset, b"".join(chunks))

    async def _written(self, page: _Page, goal: str) -> str:
        loop = asyncio.get_running_loop()
        title, text = await loop.run_in_executor(None, page_text, page.body, page.content_type, page.charset)
        if not text:
            raise ToolError("the page can't be read: it holds no text")
        shown = clip(title, 200)[0]
        head = f"Page: {shown + ' - ' if shown else ''}{page.url}"
        head = f"{head} - goal: {' '.join(goal.split())}" if goal else head
        told, left_out = clip(f"{head}\n\n{text}", self.settings.characters)
        self._counts["cut_pages"] += left_out > 0
        self._counts["cut_characters"] += left_out
        return told

    def _count_retry(self, state: RetryCallState) -> None:
        self._counts["retries"] += 1

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            connector = aiohttp.TCPConnector(
                limit=0,
                resolver=PublicResolver(private=self.settings.private),
                use_dns_cache=False,
                force_close=True,  # pages of a host are few and far between
            )
            # One agent's cookies are none of another's business, nor is a proxy from the environment: it would look
            # names up by itself.
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=HEADERS,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.timeout),
            )
            self._loop, self._slots = loop, asyncio.Semaphore(self.settings.connections)
        return self._session


def _no_counts() -> dict[str, float]:
    names = ("calls", "errors", "outages", "retries", "cut_pages", "cut_characters", "seconds")
    return dict.fromkeys(names, 0.0)
