"""Several workers on one queue."""

from __future__ import annotations

import asyncio

import pytest

from verl_drmas.evaluation.workers import work_off


class Work:
    """Counts who is at work; item 3 breaks where it is told to."""

    def __init__(self, breaks: bool = False):
        self.breaks, self.begun, self.ended, self.now, self.most = breaks, [], [], 0, 0

    async def __call__(self, item: int) -> None:
        self.begun.append(item)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            if item == 3 and self.breaks:
                raise OSError("three")
            await asyncio.sleep(0)
        finally:
            self.now -= 1
        self.ended.append(item)


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_every_item_is_done_once_by_as_many_as_there_are(concurrency):
    work = Work()
    asyncio.run(work_off(iter(range(8)), work, concurrency))
    assert work.begun == list(range(8)) and sorted(work.ended) == list(range(8))
    assert work.most == min(concurrency, 8)


def test_the_first_error_ends_the_others():
    work = Work(breaks=True)

    async def whole() -> int:
        with pytest.raises(OSError, match="three"):
            await work_off(iter(range(8)), work, 2)
        return work.now

    assert asyncio.run(whole()) == 0, "a worker still runs"
    assert 3 not in work.ended and len(work.begun) < 8
