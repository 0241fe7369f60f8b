"""Rows of failed sessions (`drmas.faults.failed_sessions: mask`): out of the batch at once, back for the dump alone."""

from __future__ import annotations

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_drmas.rollout.rows import Row


def take(batch: KVBatchMeta, rows: list[int]) -> KVBatchMeta:
    """Some rows of a batch."""
    return KVBatchMeta(
        keys=[batch.keys[i] for i in rows],
        tags=[batch.tags[i] for i in rows],
        partition_id=batch.partition_id,
        extra_info=batch.extra_info,
    )


class MaskedRows:
    """The step's rows that nothing trains on or averages over.

    Args:
        dumped: Whether the run writes its rollouts; if not, the rows are cleared away at once.
    """

    def __init__(self, dumped: bool):
        self.dumped = dumped
        self.rows: dict[str, Row] = {}
        self._batch: KVBatchMeta | None = None

    @property
    def sessions(self) -> int:
        """How many sessions the rows are of."""
        return len({(row.uid, row.session) for row in self.rows.values()})

    def take_out(self, batch: KVBatchMeta, rows: dict[str, Row]) -> tuple[KVBatchMeta, dict[str, Row]]:
        """The batch and its rows without those of failed sessions, which are kept here."""
        self.rows = {key: row for key, row in rows.items() if row.failed}
        self._batch = None
        if not self.rows:
            return batch, rows
        parts: dict[bool, list[int]] = {False: [], True: []}
        for i, key in enumerate(batch.keys):
            parts[key in self.rows].append(i)
        self._batch = take(batch, parts[True])
        if not self.dumped:
            self.clear()
        return take(batch, parts[False]), {key: row for key, row in rows.items() if not row.failed}

    def put_back(self, batch: KVBatchMeta) -> KVBatchMeta:
        """The batch with the rows of failed sessions at its end."""
        if self._batch is None:
            return batch
        return KVBatchMeta(
            keys=[*batch.keys, *self._batch.keys],
            tags=[*batch.tags, *self._batch.tags],
            partition_id=batch.partition_id,
            extra_info=batch.extra_info,
        )

    def clear(self) -> None:
        """Clear the rows from the sample store; verl clears those of its own batch only."""
        if self._batch is not None:
            tq.kv_clear(keys=self._batch.keys, partition_id=self._batch.partition_id)
            self._batch = None
