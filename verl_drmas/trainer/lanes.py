"""Who works when: the models of one pool in turn, the pools at the same time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

from verl_drmas.placement import Pool, pool_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Driver:
    """The right to run driver code, held by one thread at a time and let go while it waits for workers.

    TransferQueue's client is used from verl's stages, and nobody has shown that it may be used by two threads at once.
    """

    def __init__(self):
        self._lock = Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run driver code."""
        with self._lock:
            yield

    @contextmanager
    def released(self) -> Iterator[None]:
        """Wait for workers, inside `held`, while another thread runs driver code."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class WaitingGroup:
    """A worker group whose long calls let go of the driver.

    Args:
        group: verl's worker group.
        driver: Held by whoever calls.
    """

    LONG = ("compute_log_prob", "compute_ref_log_prob", "update_actor")

    def __init__(self, group: Any, driver: Driver):
        self._group, self._driver = group, driver

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for their hooks
            raise AttributeError(name)
        member = getattr(self._group, name)
        if name not in self.LONG:
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._driver.released():
                return member(*args, **kwargs)

        return call


class Lanes:
    """Makes a call for each of several models: one after another where they share a pool, else at the same time.

    Args:
        pools: The run's pools, by name.
    """

    def __init__(self, pools: Mapping[str, Pool]):
        self.pools, self.driver = pools, Driver()

    def run(self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Make the calls, each holding the driver.

        Args:
            calls: By model id.

        Returns:
            What they returned, by model id, in the order of `calls`.

        Raises:
            Exception: The first error, when every lane has ended; a lane ends at its first error.
        """
        lanes: dict[str, list[str]] = {}
        for model_id in calls:
            lanes.setdefault(pool_of(self.pools, model_id).name, []).append(model_id)
        results: dict[str, T] = {}

        def lane(models: list[str]) -> None:
            for model_id in models:
                with self.driver.held():
                    results[model_id] = calls[model_id]()

        if len(lanes) <= 1:
            for models in lanes.values():
                lane(models)
        else:
            with ThreadPoolExecutor(len(lanes), thread_name_prefix="pool") as threads:
                ended = [threads.submit(lane, models) for models in lanes.values()]
                wait(ended)
            errors = [error for future in ended if (error := future.exception()) is not None]
            for other in errors[1:]:
                logger.error("another pool failed too: %s: %s", type(other).__name__, other)
            if errors:
                raise errors[0]
        return {model_id: results[model_id] for model_id in calls}
