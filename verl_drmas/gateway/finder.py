"""What a caller asks the store: where the other job's gateway is, whether that job lives, and what weights it needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

FRESH = 3.0  # seconds an answer of the store is good for, unless a call failed since
THREADS = 2
KEPT_STEPS = 8  # steps whose versions are remembered
SOON = 1.0  # seconds between questions while calls fail


class Store(Protocol):
    """What is used of `store.producer.Producer`; its methods block."""

    def consumer(self) -> Any: ...

    def gate(self, step: int, max_lag: int) -> Any: ...

    def count(self, name: str, n: int = 1) -> None: ...


class Finder:
    """Asks in a thread, once for all who want to know at the same time, and remembers for a little while.

    Args:
        open_store: Gives the store's producer; called in the thread, where it may block.
        max_lag: Steps that the other job's training may be behind.
    """

    def __init__(self, open_store: Callable[[], Store], max_lag: int):
        self._open_store, self._max_lag = open_store, max_lag
        # Of its own: whoever else waits for a store that is away must not keep calls from a gateway that is well.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="drmas-store")
        self._known: dict[Hashable, tuple[float, Any]] = {}
        self._asking: dict[Hashable, asyncio.Task] = {}

    @property
    def last(self) -> Any:
        """The `ConsumerState` heard last, however old; None: none yet."""
        known = self._known.get("consumer")
        return None if known is None else known[1]

    async def other_job(self, *, again: bool = False) -> Any:
        """The store's `ConsumerState`.

        Args:
            again: A call failed: don't trust what is remembered.

        Raises:
            StoreError: The store is away, or refuses.
        """
        return await self._ask("consumer", lambda: self._open_store().consumer(), SOON if again else FRESH)

    async def needed(self, step: int, *, again: bool = False) -> int:
        """The version that calls of a step need at least.

        Args:
            step: The main job's.
            again: The gateway has an older one: perhaps no step needs it any more.

        Raises:
            StoreError: The store is away, or refuses.
        """

        def ask() -> Any:
            return self._open_store().gate(step, self._max_lag)

        return (await self._ask(("gate", step), ask, FRESH if again else None)).needed

    async def count(self, name: str, n: int) -> None:
        """Add to a counter in the store.

        Raises:
            StoreError: The store is away, or refuses.
        """
        await self._in_thread(lambda: self._open_store().count(name, n))

    async def _ask(self, question: Hashable, ask: Callable[[], Any], good_for: float | None) -> Any:
        """Ask, or take what is known for no longer than `good_for` seconds (None: for ever)."""
        known = self._known.get(question)
        if known is not None and (good_for is None or time.monotonic() - known[0] < good_for):
            return known[1]
        key = (asyncio.get_running_loop(), question)
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._learn(question, ask))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)  # one caller's end is not the others'

    async def _learn(self, question: Hashable, ask: Callable[[], Any]) -> Any:
        answer = await self._in_thread(ask)
        self._known[question] = (time.monotonic(), answer)
        steps = [known for known in self._known if known != "consumer"]
        if len(steps) > KEPT_STEPS:
            del self._known[steps[0]]
        return answer

    async def _in_thread(self, ask: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)

    def _forget(self, key: Hashable, done: asyncio.Task) -> None:
        self._asking.pop(key, None)
        if not done.cancelled():
            done.exception()  # all who asked may be gone
