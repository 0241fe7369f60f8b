"""The job that plays the sessions, and the job that trains on some of their rows: how far apart they may be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_drmas.store.settings import RemoteConfig
from verl_drmas.trainer.contract import check_store

if TYPE_CHECKING:  # SQLAlchemy is needed by runs with a store only
    from verl_drmas.store.producer import Producer

logger = logging.getLogger(__name__)

POLL = 0.2  # seconds between looks at the store
SAY = 60.0  # seconds between lines on what is waited for


class PartnerAway(RuntimeError):
    """The other job shows no sign of life for longer than `remote.patience`."""


class Feed:
    """One remote model's store as this job's trainer uses it.

    Args:
        model_id: The model.
        remote: Its settings.
        producer: The store.
    """

    def __init__(self, model_id: str, remote: RemoteConfig, producer: Producer):
        self.model_id, self.remote, self.producer = model_id, remote, producer
        self.waited = 0.0

    @classmethod
    def of(cls, model_id: str, remote: RemoteConfig) -> Feed:
        """Open the store that the settings name."""
        from verl_drmas.store.database import open_store
        from verl_drmas.store.producer import Producer

        return cls(model_id, remote, Producer(open_store(remote.store, patience=remote.patience), remote.role))

    # -- one run, one store

    def begin(self, contract: dict[str, Any]) -> None:
        """Say what is going to be played, and that an earlier run's end is not this one's.

        Args:
            contract: See `Producer.put_contract`.
        """
        self.producer.put_contract(contract)
        self.producer.begin(self.producer.last_saved() + 1)

    def state(self) -> dict[str, str]:
        """What a checkpoint keeps of the store."""
        return {"id": self.producer.store.id, "role": self.remote.role}

    def resume(self, saved: Mapping[str, str] | None, step: int, *, chosen: bool) -> None:
        """Hold the store against the checkpoint that this run goes on from.

        Args:
            saved: What `state` gave when the checkpoint was saved; None: the run starts anew, or had no such store.
            step: Of the checkpoint; 0 without one.
            chosen: The user named the checkpoint, or named none.

        Raises:
            ConfigError: Another store, or one that knows of a later checkpoint.
        """
        key, known = f"drmas.models.{self.model_id}.remote", self.producer.last_saved()
        check_store(key, saved, self.state(), known=known, step=step, chosen=chosen)

    # -- in step

    def wait(self, step: int, check: Callable[[], None] = lambda: None) -> None:
        """Return when the sessions of a step may be played: the other job has trained what `max_lag` asks for.

        Args:
            step: That is about to begin.
            check: Called between looks; raises to end the run.

        Raises:
            PartnerAway: The other job is away for longer than `remote.patience`.
        """
        began = seen = said = time.monotonic()
        while unfinished := self._unfinished(step):
            check()
            now = time.monotonic()
            if self.producer.consumer().alive:
                seen = now
            elif now - seen > self.remote.patience:
                raise PartnerAway(
                    f"step {step} waits for role {self.remote.role!r} to train step {unfinished[0]}, and the job that "
                    f"trains it has shown no sign of life for {now - seen:.0f} s "
                    f"(drmas.models.{self.model_id}.remote.patience): start it again, and this job after it"
                )
            if now - said > SAY:
                said = now
                logger.warning(
                    "step %d waits for role %s to train step %d; the other job is %s",
                    step,
                    self.remote.role,
                    unfinished[0],
                    "alive" if seen == now else f"away for {now - seen:.0f} s",
                )
            time.sleep(POLL)
        self.waited += time.monotonic() - began

    def _unfinished(self, step: int) -> Sequence[int]:
        unfinished = self.producer.gate(step, self.remote.max_lag).unfinished
        if unfinished and self.remote.stale == "drop":
            dropped = self.producer.drop_stale(step, self.remote.max_lag)
            if dropped:
                logger.warning("%d groups are older than max_lag=%d and dropped", dropped, self.remote.max_lag)
                unfinished = self.producer.gate(step, self.remote.max_lag).unfinished
        return unfinished

    def close(self, step: int, manifest: dict[str, Any]) -> None:
        """Hand a step over to the other job."""
        self.producer.close_step(step, manifest)

    def numbers(self) -> dict[str, float]:
        """The store's numbers, and `waited`: seconds since the last call."""
        from verl_drmas.store.numbers import numbers

        waited, self.waited = self.waited, 0.0
        return {**numbers(self.producer.store, self.remote.role), "waited": waited}
