"""Rows of failed sessions leave the batch before anything counts them, and come back for the dump alone."""

import pytest
from transfer_queue import KVBatchMeta

from verl_drmas.rollout.rows import Row
from verl_drmas.trainer import masked as module
from verl_drmas.trainer.masked import MaskedRows


def row(uid, session, order, failed=""):
    return Row(uid, session, order, 0, "solver", "base", failed=failed)


ROWS = {
    "a_0_0": row("a", 0, 0),
    "a_1_0": row("a", 1, 0, "retrieval"),
    "a_1_1": row("a", 1, 1, "retrieval"),
    "b_0_0": row("b", 0, 0),
}


@pytest.fixture
def cleared(monkeypatch):
    keys = []
    monkeypatch.setattr(module.tq, "kv_clear", lambda *, keys, partition_id, seen=keys: seen.extend(keys))
    return keys


def batch(rows=ROWS):
    return KVBatchMeta(
        keys=list(rows), tags=[{"n": i} for i in range(len(rows))], partition_id="train", extra_info={"x": 1}
    )


def test_they_are_taken_out_and_cleared_where_nothing_is_dumped(cleared):
    masked = MaskedRows(dumped=False)
    left, rows = masked.take_out(batch(), ROWS)
    assert (left.keys, left.tags) == (["a_0_0", "b_0_0"], [{"n": 0}, {"n": 3}])
    assert list(rows) == left.keys and masked.sessions == 1
    assert cleared == ["a_1_0", "a_1_1"]
    assert masked.put_back(left) is left


def test_they_come_back_for_the_dump_and_are_cleared_once_after_it(cleared):
    masked = MaskedRows(dumped=True)
    left, _ = masked.take_out(batch(), ROWS)
    assert cleared == []
    whole = masked.put_back(left)
    assert whole.keys == ["a_0_0", "b_0_0", "a_1_0", "a_1_1"] and [t["n"] for t in whole.tags] == [0, 3, 1, 2]
    assert left.keys == ["a_0_0", "b_0_0"]
    masked.clear()
    masked.clear()
    assert cleared == ["a_1_0", "a_1_1"]


def test_a_step_without_failures_is_left_alone(cleared):
    masked = MaskedRows(dumped=True)
    masked.take_out(batch(), ROWS)
    good = {key: r for key, r in ROWS.items() if not r.failed}
    whole = batch(good)
    assert masked.take_out(whole, good) == (whole, good)
    assert masked.put_back(whole) is whole and masked.sessions == 0
