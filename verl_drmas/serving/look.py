"""One look at a model's servers before a run: is each there, does it take the key, and does it have the model?"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from verl_drmas.serving.client import ChatClient, headers_of, read_text

CHECK_SECONDS = 10.0


@dataclass(frozen=True)
class Look:
    """What one server showed.

    Attributes:
        url: Of the server.
        state: `fit`; `silent`: it doesn't answer; `refused`: it refuses the key; `other`: it lists its models, and the
            one that is asked for is not among them.
        said: What came, in a line with the url.
        models: The names that it lists; a server without such a list is taken at its word.
        root: Where it has the model's weights from, where it says so, as vLLM does.
    """

    url: str
    state: Literal["fit", "silent", "refused", "other"]
    said: str
    models: tuple[str, ...] = ()
    root: str | None = None


def look_at(client: ChatClient) -> list[Look]:
    """Ask all servers of a model at once, whether or not this thread has an event loop.

    Raises:
        Unanswered: The key's variable isn't set (kind `key`).
    """
    key, model = client.key(), client.endpoint.model

    async def all_of_them() -> list[Look]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CHECK_SECONDS)) as session:
            return await asyncio.gather(*(_look(session, server.url, model, key) for server in client.servers))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, all_of_them()).result()


async def _look(session: aiohttp.ClientSession, url: str, model: str, key: str) -> Look:
    try:
        async with session.get(f"{url}/models", headers=headers_of(key), allow_redirects=False) as response:
            status, text = response.status, await read_text(response, key)
    except asyncio.TimeoutError:
        return Look(url, "silent", f"{url}: no answer within {CHECK_SECONDS:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Look(url, "silent", f"{url}: {type(error).__name__}: {error}")
    if status in (401, 403):
        return Look(url, "refused", f"{url}: it refuses the key (status {status})")
    listed = _listed(text) if status == 200 else {}
    if listed and model not in listed:
        names = tuple(listed)
        return Look(url, "other", f"{url}: the model {model!r} is asked for, it has {', '.join(names[:8])}", names)
    said = url if listed else f"{url} (status {status} on /models)"
    return Look(url, "fit", said, tuple(listed), listed.get(model))


def _listed(text: str) -> dict[str, str | None]:
    """Root by name of the models in a list; empty: it is none."""
    try:
        entries: list[Any] = json.loads(text)["data"]
        roots = {str(entry["id"]): entry.get("root") for entry in entries}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: root if isinstance(root, str) else None for name, root in roots.items()}
