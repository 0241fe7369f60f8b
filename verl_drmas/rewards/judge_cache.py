"""Asks once: answers are kept by key, and a question that is being asked already isn't asked again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class AskOnce(Generic[T]):
    """Keeps the answers used last; for one event loop at a time.

    Args:
        size: Most answers kept.
        keep: Whether an answer is worth keeping; one that isn't goes only to those who wait for it.
    """

    def __init__(self, size: int, keep: Callable[[T], bool]):
        self._size, self._keep = size, keep
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._asking: dict[tuple[asyncio.AbstractEventLoop, Hashable], asyncio.Task[T]] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The answer to a question, and whether it was spared asking.

        The asking is nobody's own: it goes on when the one that began it is cancelled, because others may wait for it.

        Args:
            key: Names the question.
            ask: Asks it.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key], True
        loop = asyncio.get_running_loop()
        task = self._asking.get((loop, key))
        spared = task is not None
        if task is None:
            # A loop that was closed in mid-question never ends its tasks.
            self._asking = {at: old for at, old in self._asking.items() if not at[0].is_closed()}
            task = self._asking[loop, key] = loop.create_task(self._ask(loop, key, ask))
        return await asyncio.shield(task), spared

    async def close(self) -> None:
        """Cancel what this event loop is asking; answers stay."""
        loop = asyncio.get_running_loop()
        tasks = [task for (at, _), task in self._asking.items() if at is loop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, loop: asyncio.AbstractEventLoop, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await ask()
        finally:
            self._asking.pop((loop, key), None)
        if self._keep(answer):
            self._kept[key] = answer
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return answer
