"""Hands the rows of another job's model to that job: one transaction a session, before verl has the session."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from verl_drmas.config import DrmasConfig
from verl_drmas.plain import plain_values
from verl_drmas.rollout.activation import Activation
from verl_drmas.store.codec import PackedRow
from verl_drmas.store.errors import StoreError
from verl_drmas.store.records import SessionRecord
from verl_drmas.workflows import SessionFailed

if TYPE_CHECKING:  # SQLAlchemy is needed by runs with a store only
    from verl_drmas.store.producer import Producer

logger = logging.getLogger(__name__)

THREADS = 4  # of their own: calls that wait for a database that is away would keep others from the loop's threads
COLUMNS = ("agent_id", "min_global_steps", "max_global_steps")  # they have a place of their own in a packed row
NO_STORE = "store"  # why a session failed that no store took
NOTE_PATIENCE = 5.0  # seconds that the note of a failed session waits for a store that is away
WHOLE = ("session_metrics",)  # of the session, not of the row: the job that played it reports them


class Delivery:
    """The stores of a run's remote models; of none, it does nothing.

    Args:
        section: The `drmas` section.
    """

    def __init__(self, section: DrmasConfig):
        self.producers: dict[str, Producer] = {}
        self.patience = {model_id: remote.patience for model_id, remote in section.remote.items()}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="delivery") if section.remote else None
        if section.remote:
            from verl_drmas.store.database import open_store
            from verl_drmas.store.producer import Producer

            for model_id, remote in section.remote.items():
                self.producers[model_id] = Producer(open_store(remote.store, patience=remote.patience), remote.role)

    async def put(
        self,
        rows: Sequence[Activation],
        *,
        step: int,
        prompt: int,
        session: int,
        reason: str = "",
        patience: float | None = None,
    ) -> None:
        """Write a session to every store. Every store hears of every session, also of one without a call.

        Args:
            rows: Of all models.
            step: Global step.
            prompt: Dataset index.
            session: Attempt at the prompt.
            reason: Why it failed; empty: it ended.
            patience: Seconds to wait for each store, from now on; None: `remote.patience`.

        Raises:
            SessionFailed: A store is away for longer, or refuses the session (`store`).
        """
        outcome = next((r.extra_fields.get("reward_extra_info", {}).get("outcome") for r in rows), None)
        for model_id, producer in self.producers.items():
            record = SessionRecord(
                step=int(step),
                prompt=int(prompt),
                session=int(session),
                ended=not reason,
                reason=reason,
                outcome=None if outcome is None else float(outcome),
                main_version=int(step) - 1,
                rows=tuple(
                    packed(row, position)
                    for position, row in enumerate(rows)
                    if row.extra_fields.get("model_id") == model_id
                ),
            )
            end = time.monotonic() + (self.patience[model_id] if patience is None else patience)
            # Counted from here: in an outage, all sessions wait for the few threads, and none longer than it must.
            write = partial(_put, producer, record, end)
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, write)
            except StoreError as error:
                raise SessionFailed(NO_STORE, f"session {session} of data row {prompt}: {error}") from error

    async def fail(self, *, step: int, prompt: int, session: int, reason: str) -> None:
        """Say that a session has no outcome. It has failed already, so a store that is away is worth a line only."""
        try:
            await self.put((), step=step, prompt=prompt, session=session, reason=reason, patience=NOTE_PATIENCE)
        except SessionFailed as error:
            logger.warning("a failed session could not be noted: %s", error)


def _put(producer: Producer, record: SessionRecord, end: float) -> None:
    producer.put_session(record, patience=max(0.0, end - time.monotonic()))


def packed(row: Activation, position: int) -> PackedRow:
    """A row as the store has it; `unpacked` in `trainer/claimed.py` is its other half.

    Args:
        row: With the reward it shall be trained with.
        position: Of the row in its session, among the rows of all models.
    """
    extra = {k: v for k, v in row.extra_fields.items() if k not in COLUMNS and k not in WHOLE}
    fields = {"position": position, "num_turns": int(row.num_turns), "extra": plain_values(extra)}
    return PackedRow(
        agent_id=row.extra_fields["agent_id"],
        prompt_ids=np.asarray(row.prompt_ids, dtype=np.int32),
        response_ids=np.asarray(row.response_ids, dtype=np.int32),
        response_mask=np.asarray(row.response_mask, dtype=bool),
        logprobs=None if row.response_logprobs is None else np.asarray(row.response_logprobs, dtype=np.float32),
        reward=None if row.own_reward is None else float(row.own_reward),
        min_version=int(row.extra_fields["min_global_steps"]),
        max_version=int(row.extra_fields["max_global_steps"]),
        fields=fields,
    )
