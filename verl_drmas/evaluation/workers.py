"""Works off a queue with several workers at once; the first error ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def work_off(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], concurrency: int) -> None:
    """Do the work of each item; returns or raises when no worker runs any more.

    Args:
        items: Taken one by one, in their order, as workers become free.
        work: Of one item; what it raises ends the others where they wait, and is raised here.
        concurrency: Workers.
    """
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
