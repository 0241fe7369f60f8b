"""Where a job that plays no sessions gets its steps from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from transfer_queue import KVBatchMeta

from verl_drmas.store.consumer import Consumer
from verl_drmas.store.records import ClaimedStep
from verl_drmas.trainer.feed import POLL, SAY

logger = logging.getLogger(__name__)


class Finished(Exception):
    """The job that plays the sessions is done, and so is this one."""


class NoData:
    """Stands for a data loader: a checkpoint saves and loads its state, and there is none."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take over."""


class ClaimBuffer:
    """Stands where verl samples finished sessions: hands out the next step of the store.

    Args:
        consumer: The store.
        put: Puts a claimed step's rows where verl looks for them.
        check: Called between looks; raises to end the run.
    """

    def __init__(
        self, consumer: Consumer, put: Callable[[ClaimedStep], KVBatchMeta], check: Callable[[], None] = lambda: None
    ):
        self.consumer, self.put, self.check = consumer, put, check
        self.waited = 0.0

    def sample(self, *args: Any, **kwargs: Any) -> tuple[KVBatchMeta, dict[str, float]]:
        """The next step's rows, whenever there is one.

        Raises:
            Finished: There will be none.
        """
        began = time.monotonic()
        claimed = self.wait()
        if claimed is None:
            raise Finished
        self.waited = time.monotonic() - began
        return self.put(claimed), {}

    def wait(self) -> ClaimedStep | None:
        """The next step; None: the other job is done and everything is trained."""
        said = time.monotonic()
        while True:
            done = self.consumer.finished() is not None  # asked first: a step may be closed between the two questions
            claimed = self.consumer.claim()
            if claimed is not None or done:
                return claimed
            self.check()
            if time.monotonic() - said > SAY:
                said = time.monotonic()
                logger.warning("waiting for the next step of the job that plays the sessions")
            time.sleep(POLL)
