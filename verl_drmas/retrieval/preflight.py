"""One look at each search server before a run: is it there, and does it answer a search as the run will ask it?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import aiohttp
import orjson

from verl_drmas.retrieval.answers import AtFault, Passing, Refusal, read_body, verdict
from verl_drmas.retrieval.settings import RetrievalSettings
from verl_drmas.retrieval.wire import GarbageAnswer, read_answer, write_request

QUERY = "the capital of a country"
SECONDS = 5.0  # a server, all in all
HEALTH_SECONDS = 2.0  # of them


@dataclass(frozen=True)
class Look:
    """What one server showed.

    Attributes:
        url: Of the server.
        there: It answers HTTP.
        works: It answers a search; one that is only busy or slow counts as working.
        said: What came, in a few words.
    """

    url: str
    there: bool
    works: bool
    said: str

    def __str__(self) -> str:
        return f"{self.url} ({self.said})" if self.works else f"{self.url}: {self.said}"


def look_at(urls: Sequence[str], settings: RetrievalSettings, k: int) -> list[Look]:
    """Ask all servers at once, whether or not this thread has an event loop; each gets 5 seconds.

    Args:
        urls: Servers, without a path.
        settings: How the run will ask.
        k: Passages the run will ask for.
    """

    async def all_of_them() -> list[Look]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(_look(session, url, settings, k) for url in urls))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, all_of_them()).result()


async def _look(session: aiohttp.ClientSession, url: str, settings: RetrievalSettings, k: int) -> Look:
    end = time.monotonic() + SECONDS
    alive, about = await _health(session, url)
    try:
        status, body = await _search(session, url, settings, k, end - time.monotonic())
        if status != 200:
            raise verdict(status, body, dialect=settings.dialect, k=k, answered=False)
        read_answer(body, k)
    except asyncio.TimeoutError:
        if alive:  # it may be loading, or large
            return Look(url, True, True, f"{about}; slow: no answer to a search within {SECONDS:g} s")
        return Look(url, False, False, f"no answer within {SECONDS:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Look(url, alive, False, " ".join(f"{type(error).__name__}: {error}".split()))
    except GarbageAnswer as error:
        return Look(url, True, False, f"garbage: {error}; is it a search server? check retrieval.urls")
    except Passing as passing:
        return Look(url, True, status == 429, f"{about}; busy: {passing}" if status == 429 else str(passing))
    except AtFault as fault:  # of a query that no search server minds
        return Look(url, True, False, f"{fault}; is it a search server? check retrieval.urls")
    except Refusal as refusal:
        return Look(url, True, False, str(refusal))
    return Look(url, True, True, about)


async def _search(
    session: aiohttp.ClientSession, url: str, settings: RetrievalSettings, k: int, seconds: float
) -> tuple[int, bytes]:
    async with session.post(
        f"{url}/retrieve",
        data=write_request(QUERY, k, settings.dialect),
        headers={"content-type": "application/json"},
        timeout=aiohttp.ClientTimeout(total=min(max(seconds, 0.1), settings.timeout)),
        allow_redirects=False,
    ) as response:
        return response.status, await read_body(response)


async def _health(session: aiohttp.ClientSession, url: str) -> tuple[bool, str]:
    """Whether there is an HTTP server, and a word on it; those of other makes have no such page."""
    try:
        async with session.get(
            f"{url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS), allow_redirects=False
        ) as response:
            if response.status != 200:
                return True, f"status {response.status} on /health"
            told = orjson.loads(await read_body(response))
            return True, f"{told['kind']}, {told['passages']:,} passages"
    except (asyncio.TimeoutError, aiohttp.ClientError, OSError):
        return False, "nothing on /health"
    except (ValueError, KeyError, TypeError):  # garbage, too, is a ValueError
        return True, "another make"
