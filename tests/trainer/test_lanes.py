"""Models of one pool work in turn, pools at the same time, and driver code is one thread's at a time."""

import threading
import time

import pytest

from verl_drmas.placement import Pool
from verl_drmas.trainer.lanes import Driver, Lanes, WaitingGroup

SPLIT = {"left": Pool("left", 1, 1, ("a", "b")), "right": Pool("right", 1, 1, ("c",))}


class Log:
    """Which calls were busy at the same time."""

    def __init__(self):
        self.busy, self.together, self.order, self.guard = set(), set(), [], threading.Lock()

    def work(self, name, driver, seconds=0.1):
        def call():
            self.order.append(name)
            with driver.released():
                with self.guard:
                    self.busy.add(name)
                    self.together |= {frozenset((name, other)) for other in self.busy - {name}}
                time.sleep(seconds)
                with self.guard:
                    self.busy.discard(name)
            return name.upper()

        return call


def test_pools_work_at_the_same_time_and_their_models_in_turn():
    lanes, log = Lanes(SPLIT), Log()
    began = time.monotonic()
    results = lanes.run({name: log.work(name, lanes.driver) for name in ("a", "b", "c")})
    took = time.monotonic() - began
    assert results == {"a": "A", "b": "B", "c": "C"}
    assert list(results) == ["a", "b", "c"]
    assert frozenset("ab") not in log.together
    assert frozenset("ac") in log.together or frozenset("bc") in log.together
    assert log.order.index("a") < log.order.index("b")
    assert took < 0.29  # three tenths in turn


def test_one_pool_runs_in_the_callers_thread():
    seen = []
    Lanes({"run": Pool("run", 1, 1, ("a", "b"))}).run(
        {m: lambda: seen.append(threading.current_thread()) for m in "ab"}
    )
    assert seen == [threading.current_thread()] * 2


def test_driver_code_of_two_pools_never_overlaps():
    lanes, inside, worst = Lanes(SPLIT), [], []

    def call():
        for _ in range(20):
            inside.append(1)
            worst.append(len(inside))
            time.sleep(0.001)
            inside.pop()
            with lanes.driver.released():
                time.sleep(0.001)

    lanes.run({"a": call, "c": call})
    assert max(worst) == 1


def test_an_error_is_raised_when_every_lane_has_ended():
    ended = []

    def fail():
        raise RuntimeError("left is broken")

    def slow():
        time.sleep(0.05)
        ended.append("c")

    with pytest.raises(RuntimeError, match="left is broken"):
        Lanes(SPLIT).run({"a": fail, "b": lambda: ended.append("b"), "c": slow})
    assert ended == ["c"]  # b waited behind a, c is another pool's


class Group:
    world_size = 2

    def __init__(self, driver):
        self.driver, self.held = driver, None

    def update_actor(self, batch):
        self.held = self.driver._lock.locked()
        return batch

    save_checkpoint = update_actor


@pytest.mark.parametrize(("name", "held"), [("update_actor", False), ("save_checkpoint", True)])
def test_only_the_long_calls_let_go_of_the_driver(name, held):
    driver = Driver()
    group = Group(driver)
    waiting = WaitingGroup(group, driver)
    with driver.held():
        assert getattr(waiting, name)("rows") == "rows"
        assert driver._lock.locked()
    assert group.held is held
    assert waiting.world_size == 2


def test_the_driver_is_taken_back_after_an_error():
    driver = Driver()
    with driver.held():
        with pytest.raises(RuntimeError), driver.released():
            raise RuntimeError("a worker died")
        assert driver._lock.locked()
    assert not driver._lock.locked()
