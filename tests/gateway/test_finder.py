import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from verl_drmas.gateway import finder
from verl_drmas.gateway.finder import Finder
from verl_drmas.store.errors import StoreAway


class Store:
    def __init__(self, pause=0.0):
        self.pause, self.error, self.endpoint, self.trained = pause, None, "http://a", 3
        self.asked, self.threads, self.counted = [], set(), []

    def _ask(self, what):
        self.asked.append(what)
        self.threads.add(threading.current_thread())
        time.sleep(self.pause)
        if self.error:
            raise self.error

    def consumer(self):
        self._ask("consumer")
        return SimpleNamespace(endpoint=self.endpoint, alive=True)

    def gate(self, step, max_lag):
        self._ask(("gate", step, max_lag))
        return SimpleNamespace(needed=min(self.trained, step - 1 - max_lag), unfinished=())

    def count(self, name, n=1):
        self._ask("count")
        self.counted.append((name, n))


def run(test):
    return asyncio.run(asyncio.wait_for(test, 60))


def test_it_asks_once_for_all_and_not_in_the_loops_thread():
    store = Store(pause=0.1)
    look = Finder(lambda: store, 0)

    async def test():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.005)

        ticking = asyncio.create_task(tick())
        states = await asyncio.gather(*(look.other_job() for _ in range(50)))
        ticking.cancel()
        assert {state.endpoint for state in states} == {"http://a"}
        assert ticks > 3  # the loop went on meanwhile

    run(test())
    assert store.asked == ["consumer"]
    assert threading.main_thread() not in store.threads


def test_what_it_knows_is_good_for_seconds_and_less_after_a_failure(monkeypatch):
    store, known = Store(), []
    look = Finder(lambda: store, 0)

    async def test():
        known.append((await look.other_job()).endpoint)
        store.endpoint = "http://b"
        known.append((await look.other_job()).endpoint)
        known.append((await look.other_job(again=True)).endpoint)  # asked a moment ago
        monkeypatch.setattr(finder, "SOON", 0.0)
        known.append((await look.other_job(again=True)).endpoint)
        store.endpoint = "http://c"
        monkeypatch.setattr(finder, "FRESH", 0.0)
        known.append((await look.other_job()).endpoint)

    run(test())
    assert known == ["http://a", "http://a", "http://a", "http://b", "http://c"]


def test_the_version_of_a_step_is_asked_for_once_unless_the_gateway_has_an_older_one(monkeypatch):
    store, needed = Store(), []
    look = Finder(lambda: store, 1)

    async def test():
        for step in (6, 6, 5, 6):
            needed.append(await look.needed(step))
        store.trained = 2  # a later step was given up
        needed.append(await look.needed(6))
        monkeypatch.setattr(finder, "FRESH", 0.0)
        needed.append(await look.needed(6, again=True))
        needed.append(await look.needed(6))

    run(test())
    assert needed == [3, 3, 3, 3, 3, 2, 2]
    assert store.asked == [("gate", 6, 1), ("gate", 5, 1), ("gate", 6, 1)]


def test_only_some_steps_are_remembered():
    store = Store()
    look = Finder(lambda: store, 0)

    async def test():
        for step in range(1, 100):
            await look.needed(step)
        await look.other_job()
        assert len(look._known) <= finder.KEPT_STEPS + 1
        await look.needed(99)

    run(test())
    assert len(store.asked) == 100


def test_an_error_reaches_all_who_asked_and_is_not_remembered(caplog):
    store = Store(pause=0.05)
    look = Finder(lambda: store, 0)
    store.error = StoreAway("no database")

    async def test():
        errors = await asyncio.gather(*(look.other_job() for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in errors] == [StoreAway] * 3
        assert look.last is None
        store.error = None
        assert (await look.other_job()).endpoint == "http://a"
        store.error = StoreAway("again")
        with pytest.raises(StoreAway):
            await look.needed(5)
        assert look.last.endpoint == "http://a"

    run(test())
    assert "never retrieved" not in caplog.text


def test_one_who_gives_up_takes_nothing_from_the_others():
    store = Store(pause=0.3)
    look = Finder(lambda: store, 0)

    async def test():
        first = asyncio.create_task(look.other_job())
        await asyncio.sleep(0.05)
        second = asyncio.create_task(look.other_job())
        await asyncio.sleep(0.05)
        first.cancel()
        assert (await second).endpoint == "http://a"

    run(test())
    assert store.asked == ["consumer"]


def test_it_works_in_loop_after_loop_and_counts():
    store = Store()
    look = Finder(lambda: store, 0)
    for _ in range(3):
        run(look.other_job())
        run(look.count("retries", 2))
    assert store.counted == [("retries", 2)] * 3
    assert not look._asking


def test_threads_that_others_keep_waiting_are_not_its_own():
    """A session's rows that wait for the store must not keep the calls of others from the gateway."""
    store, free = Store(), threading.Event()
    look = Finder(lambda: store, 0)

    async def test():
        jam = [asyncio.create_task(asyncio.to_thread(free.wait, 60)) for _ in range(64)]
        await asyncio.sleep(0.05)
        try:
            assert (await asyncio.wait_for(look.other_job(), 30)).endpoint == "http://a"
            assert not all(task.done() for task in jam)
        finally:
            free.set()

    run(test())
