"""Copies of trajectories as rows (`drmas.alignment.copies: physical`), for losses where weights are not the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_drmas.rollout.rows import FIRST_COPY, Row
from verl_drmas.trainer.masked import take


def make_copies(batch: KVBatchMeta, rows: dict[str, Row], copies: np.ndarray) -> tuple[KVBatchMeta, dict[str, Row]]:
    """The batch with every row as often as it counts: dropped rows cleared away, copies stored under keys of their own.

    Copies are numbered in the rows' own order, so that nothing depends on which session ended first.

    Args:
        batch: Real rows.
        rows: What is known of them, by key.
        copies: Whole numbers, one a row of the batch (rows,).
    """
    dropped = [i for i, count in enumerate(copies) if count == 0]
    if dropped:
        tq.kv_clear(keys=[batch.keys[i] for i in dropped], partition_id=batch.partition_id)
    kept = take(batch, [i for i, count in enumerate(copies) if count > 0])
    left = {key: rows[key] for key in kept.keys}
    _hand_on_metrics([rows[batch.keys[i]] for i in dropped], left)
    in_order = sorted(range(len(batch)), key=lambda i: rows[batch.keys[i]].order)
    more = [i for i in in_order for _ in range(int(copies[i]) - 1)]
    if not more:
        return kept, left
    sources = [batch.keys[i] for i in more]
    keys = []
    for number, source in enumerate(sources):
        row = replace(rows[source], activation=FIRST_COPY + number, metrics=None)
        key = f"{row.uid}_{row.session}_{row.activation}"
        keys.append(key)
        left[key] = row
    tags = [batch.tags[i] for i in more]
    data = tq.kv_batch_get(keys=sources, partition_id=batch.partition_id)
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=data, tags=tags)
    together = KVBatchMeta(
        keys=[*kept.keys, *keys],
        tags=[*kept.tags, *tags],
        partition_id=batch.partition_id,
        extra_info=batch.extra_info,
    )
    return together, left


def _hand_on_metrics(dropped: list[Row], left: dict[str, Row]) -> None:
    """A dropped row's numbers of its session go to the session's first row that is left."""
    for row in dropped:
        if row.metrics is not None:
            heirs = [key for key, other in left.items() if (other.uid, other.session) == (row.uid, row.session)]
            # There is one: of more than D trajectories D are left.
            heir = min(heirs, key=lambda key: left[key].order)
            left[heir] = replace(left[heir], metrics=row.metrics)
