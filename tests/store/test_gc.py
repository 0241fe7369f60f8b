"""Rows are freed when nobody needs them, never earlier."""

import os
from dataclasses import replace

import pytest
from played import play, states, tamper, train

from verl_drmas.store.errors import StoreError
from verl_drmas.store.gc import gc
from verl_drmas.store.numbers import numbers
from verl_drmas.store.producer import Producer
from verl_drmas.store.verify import verify


def full(store):
    """Steps whose bytes are there."""
    import sqlalchemy as sa

    text = "SELECT DISTINCT step FROM drmas_row JOIN drmas_step ON id = step_id WHERE data IS NOT NULL ORDER BY step"
    return list(store.read(lambda connection: connection.execute(sa.text(text)).scalars().all()))


@pytest.fixture
def worked(producer, store, attach):
    """Steps 1 to 4 saved, 5 trained, 6 claimed, 7 ready, 8 open, 9 empty, 10 dropped; four rows each."""
    for step in range(1, 8):
        play(producer, step)
    play(producer, 8, close=False)
    play(producer, 9, rows=0)
    consumer = attach()
    for step in range(1, 6):
        assert train(consumer) == step
    consumer.saved(4)
    assert consumer.claim().step == 6
    play(producer, 10)
    tamper(store, "UPDATE drmas_step SET step = step + 100 WHERE step = 7")
    tamper(store, "UPDATE drmas_event SET step = step + 100 WHERE step = 7")
    assert producer.drop_stale(11, 0) == 2
    assert states(store)[10] == "dropped"
    assert verify(store) == []
    return store


def test_the_last_saved_steps_keep_their_rows(worked):
    assert gc(worked, keep_steps=2) == 8
    assert full(worked) == [3, 4, 5, 6, 8, 10, 107]
    assert gc(worked, keep_steps=2) == 0
    assert verify(worked) == []
    assert gc(worked, keep_steps=0) == 8
    assert full(worked) == [5, 6, 8, 10, 107]
    assert verify(worked) == []


def test_unfinished_steps_keep_their_rows_whatever_the_rule(worked):
    assert gc(worked, older_than=0, max_bytes=0, keep_steps=0) == 20
    assert full(worked) == [5, 6, 8, 107]
    assert verify(worked) == []


def test_rows_are_freed_by_age(worked):
    assert gc(worked, older_than=3600) == 0
    tamper(worked, "UPDATE drmas_step SET since = since - 7200 WHERE step IN (2, 5, 10)")
    assert gc(worked, older_than=3600) == 8
    assert full(worked) == [1, 3, 4, 5, 6, 8, 107]


def test_rows_are_freed_by_size_the_oldest_first(worked):
    size = numbers(worked, "sub")["bytes"]
    one = size / 8  # steps 1..7 and 10; the open step's bytes are not known yet
    assert gc(worked, max_bytes=int(size)) == 0
    assert gc(worked, max_bytes=int(size - 1.5 * one)) == 8
    assert full(worked) == [3, 4, 5, 6, 8, 10, 107]
    assert numbers(worked, "sub")["bytes"] == pytest.approx(size - 2 * one, rel=0.05)


def test_one_role_may_be_named(worked):
    other = Producer(worked, "other")
    play(other, 1)
    other.drop_stale(2, 0)
    assert gc(worked, older_than=0, role="other") == 4
    assert gc(worked, keep_steps=0, role="sub") == 16


def test_a_rule_is_needed(store):
    with pytest.raises(StoreError, match="keep_steps, older_than or max_bytes"):
        gc(store)


def test_a_consumer_frees_as_it_saves(producer, store, attach):
    consumer = attach(keep_steps=1)
    for step in range(1, 4):
        play(producer, step)
        train(consumer)
        consumer.saved(step)
        assert full(store) == [step]
    assert verify(store) == []


def test_the_file_shrinks(tmp_path):
    from played import row, session

    from verl_drmas.store.consumer import Consumer
    from verl_drmas.store.database import open_store

    path = tmp_path / "store.db"
    store = open_store(f"sqlite:///{path}")
    producer, consumer = Producer(store, "sub"), Consumer(store, "sub")
    consumer.attach(0)
    producer.open_step(1, range(50), 1)
    long = row(response=20_000)
    for prompt in range(50):
        producer.put_session(replace(session(1, prompt, 0), rows=(long,)))
    producer.close_step(1, {"sessions": [[prompt, 0] for prompt in range(50)]})
    train(consumer)
    consumer.saved(1)
    consumer.detach()

    def size():
        with store.engine.connect() as connection:
            connection.connection.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return os.path.getsize(path)

    before = size()
    assert before > 50 * 160_000
    assert gc(store, keep_steps=0) == 50
    assert size() < before / 10
