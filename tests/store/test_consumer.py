"""The training job's side: whole steps in order, each trained once, and what a lost or late consumer may not do."""

import logging
import threading
import time

import pytest
from played import play, states, tamper, train

from verl_drmas.store.consumer import Consumer
from verl_drmas.store.errors import LeaseLost, RoleTaken, StoreError
from verl_drmas.store.numbers import numbers
from verl_drmas.store.records import ConsumerState
from verl_drmas.store.verify import verify


@pytest.fixture(autouse=True)
def stays_whole(store):
    """Whatever a test does, the store tells a true story afterwards."""
    yield
    assert verify(store) == []


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def test_steps_come_lowest_first_and_once(producer, store, attach):
    for step in (3, 1, 2):
        play(producer, step)
    producer.open_step(4, [0], 1)
    consumer = attach()
    assert [train(consumer) for _ in range(4)] == [1, 2, 3, None]
    consumer.saved(2)
    assert states(store) == {1: "saved", 2: "saved", 3: "trained", 4: "open"}
    assert consumer.last_saved() == 2
    consumer.saved(2)
    consumer.saved(3)
    assert consumer.last_saved() == 3


def test_calls_need_a_lease(store, producer):
    play(producer, 1)
    consumer = Consumer(store, "sub")
    for call in (consumer.claim, lambda: consumer.trained(1), lambda: consumer.saved(1), consumer.finished):
        with pytest.raises(StoreError, match="call attach first"):
            call()
    with pytest.raises(StoreError, match="call attach first"):
        consumer.publish(1, "http://here")
    assert (consumer.last_saved(), consumer.contract()) == (0, None)
    consumer.detach()


def test_only_what_was_claimed_is_trained(producer, attach):
    play(producer, 1)
    consumer = attach()
    with pytest.raises(StoreError, match="step 1 of role 'sub' was not claimed"):
        consumer.trained(1)
    assert train(consumer) == 1  # the mistake cost nothing
    consumer.trained(1)
    consumer.saved(1)
    consumer.trained(1)


def test_one_consumer_at_a_time(producer, attach, store):
    first = attach(owner="one")
    with pytest.raises(RoleTaken, match="is one's for another") as taken:
        attach(owner="two")
    assert 0 < taken.value.remaining <= 30
    with pytest.raises(StoreError, match="has role 'sub' already"):
        first.attach(0)
    first.detach()
    attach(owner="two")


def test_two_steps_may_be_claimed_before_one_is_trained(producer, attach):
    play(producer, 1), play(producer, 2)
    consumer = attach()
    assert (consumer.claim().step, consumer.claim().step, consumer.claim()) == (1, 2, None)
    assert producer.consumer().step_in_training == 1
    consumer.trained(1), consumer.trained(2)


def test_a_claim_whose_answer_was_lost_is_given_again(producer, store, attach, monkeypatch):
    play(producer, 1), play(producer, 2)
    consumer = attach()
    whole = store.write

    def lossy(work, **options):
        whole(work, **options)
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", lossy)
        with pytest.raises(ConnectionResetError):
            consumer.claim()
    assert states(store)[1] == "claimed"
    assert consumer.claim().step == 1
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", lossy)
        with pytest.raises(ConnectionResetError):
            consumer.trained(1)
    consumer.trained(1)
    assert train(consumer) == 2


def test_a_lease_that_ran_out_lets_another_in_and_the_first_out(producer, store, attach):
    play(producer, 1), play(producer, 2)
    first = attach(owner="first")
    train(first)
    first.claim()
    tamper(store, "UPDATE drmas_role SET lease_until = 0")
    assert not producer.consumer().alive
    second = attach(owner="second")
    for call in (
        lambda: first.trained(2),
        first.claim,
        lambda: first.saved(1),
        lambda: first.publish(1, "http://first"),
        first.finished,
    ):
        with pytest.raises(LeaseLost, match="belongs to second now"):
            call()
    first.detach()  # takes nothing from the second
    assert producer.consumer().alive
    assert [train(second), train(second), train(second)] == [1, 2, None]  # 1 was in no checkpoint
    assert producer.consumer().endpoint is None


def test_a_lease_that_ran_out_and_that_nobody_took_is_good_again(producer, store, attach):
    play(producer, 1)
    consumer = attach()
    consumer.claim()
    tamper(store, "UPDATE drmas_role SET lease_until = 0")
    consumer.trained(1)
    assert producer.consumer().alive


def test_a_consumer_of_the_same_name_takes_over_at_once(producer, attach):
    play(producer, 1)
    first = attach(owner="job")
    first.claim()
    second = attach(owner="job")
    assert train(second) == 1
    with pytest.raises(LeaseLost):
        first.trained(1)


def test_the_lease_is_renewed_in_the_background(producer, store, attach):
    before = set(threading.enumerate())
    consumer = attach(lease=9)  # renewed each 3 s: a busy machine may be late
    first = producer.consumer().seen
    wait_until(lambda: producer.consumer().seen > first)
    assert producer.consumer().alive
    with pytest.raises(RoleTaken):
        attach(owner="other")
    consumer.detach()
    assert not producer.consumer().alive
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "lease of sub"]


def test_a_renewal_that_fails_is_tried_again(producer, store, attach, monkeypatch, caplog):
    consumer = attach(lease=0.6)
    whole, failures = store.write, []

    def broken(work, **options):
        if len(failures) < 3:
            failures.append(work)
            raise StoreError("no disk today")
        return whole(work, **options)

    with caplog.at_level(logging.INFO, "verl_drmas.store"):
        monkeypatch.setattr(store, "write", broken)
        wait_until(lambda: "the lease is renewed again" in caplog.text)
    assert len(failures) == 3
    assert caplog.text.count("could not be renewed") == 1
    wait_until(lambda: producer.consumer().alive)
    assert consumer.finished() is None


def test_the_background_notices_that_the_lease_is_lost(producer, store, attach, caplog):
    consumer = attach(lease=0.6, owner="first")
    tamper(store, "UPDATE drmas_role SET lease = 'x', owner = 'second'")
    with caplog.at_level(logging.ERROR, "verl_drmas.store"):
        wait_until(lambda: "belongs to second now" in caplog.text)
    with pytest.raises(LeaseLost):
        consumer.finished()


def test_a_crash_before_the_checkpoint_trains_again_what_it_lost(producer, store, attach):
    for step in (1, 2, 3, 4):
        play(producer, step)
    first = attach(owner="job")
    assert [train(first) for _ in range(3)] == [1, 2, 3]
    first.saved(1)
    assert first.claim().step == 4
    second = attach(1, owner="job")
    assert states(store) == {1: "saved", 2: "ready", 3: "ready", 4: "ready"}
    found = numbers(store, "sub")
    assert (found["count/rewound"], found["count/released"], found["version"]) == (2, 1, 1)
    assert [train(second) for _ in range(4)] == [2, 3, 4, None]


def test_a_crash_between_checkpoint_and_saved_loses_nothing(producer, store, attach):
    for step in (1, 2, 3):
        play(producer, step)
    first = attach(owner="job")
    assert [train(first) for _ in range(3)] == [1, 2, 3]
    second = attach(2, owner="job")  # its checkpoint of step 2 was written, and nobody said so
    assert states(store) == {1: "saved", 2: "saved", 3: "ready"}
    assert train(second) == 3


def test_an_older_checkpoint_is_refused_or_rewound_as_told(producer, store, attach):
    for step in (1, 2, 3):
        play(producer, step)
    first = attach(owner="job")
    assert [train(first) for _ in range(3)] == [1, 2, 3]
    first.saved(3)
    with pytest.raises(StoreError, match=r"checkpoint is of step 1, but the store says .* saved step 3"):
        attach(1, owner="job")
    assert first.finished() is None  # the refusal took nothing
    second = attach(1, owner="job", rewind_saved=True)
    assert states(store) == {1: "saved", 2: "ready", 3: "ready"}
    assert [train(second) for _ in range(3)] == [2, 3, None]
    second.saved(3)
    assert second.last_saved() == 3


def test_rows_that_are_deleted_cannot_be_rewound(producer, attach):
    for step in (1, 2, 3):
        play(producer, step)
    first = attach(owner="job", keep_steps=1)
    assert [train(first) for _ in range(3)] == [1, 2, 3]
    first.saved(3)
    with pytest.raises(StoreError, match=r"steps 2\.\.2 of role 'sub' can't be trained again"):
        attach(1, owner="job", rewind_saved=True)
    assert train(attach(2, owner="job", rewind_saved=True)) == 3


def test_a_step_that_never_comes_to_be_trained_is_dead(producer, store, attach, caplog):
    play(producer, 1), play(producer, 2)
    for _ in range(3):
        assert attach(owner="job", max_attempts=3).claim().step == 1  # and the job crashes
    last = attach(owner="job", max_attempts=3)
    with caplog.at_level(logging.WARNING, "verl_drmas.store"):
        assert last.claim().step == 2
    assert "step 1 of role 'sub' is left untrained: claimed 3 times" in caplog.text
    assert numbers(store, "sub")["count/dead"] == 2
    assert producer.gate(2, 0).unfinished == ()


def test_a_step_that_was_given_back_or_trained_has_its_attempts_again(producer, attach):
    play(producer, 1)
    for _ in range(4):
        consumer = attach(max_attempts=2)
        assert consumer.claim().step == 1
        consumer.detach()
    for _ in range(4):
        consumer = attach(owner="job", max_attempts=2)
        assert train(consumer) == 1  # and no checkpoint


@pytest.mark.parametrize("damage", ["data = checksum", "data = NULL"])
def test_a_damaged_row_kills_its_step_and_names_itself(producer, store, attach, caplog, damage):
    play(producer, 1, rows=2), play(producer, 2)
    first = "step_id = (SELECT id FROM drmas_step WHERE step = 1)"
    assert tamper(store, f"UPDATE drmas_row SET {damage} WHERE {first} AND prompt = 1 AND session = 0 AND position = 1")
    with caplog.at_level(logging.WARNING, "verl_drmas.store"):
        assert attach().claim().step == 2
    assert "step 1 of role 'sub' is left untrained: row 1 of session 0 of prompt 1" in caplog.text
    assert states(store)[1] == "dead"


def test_a_row_that_vanished_kills_its_step_too(producer, store, attach, caplog):
    play(producer, 1)
    assert tamper(store, "DELETE FROM drmas_row WHERE prompt = 0 AND session = 0") == 1
    consumer = attach()
    assert consumer.claim() is None
    assert "session 0 of prompt 0 has 0 rows; 1 were written" in caplog.text


def test_versions_are_published_and_never_go_back_while_the_role_is_held(producer, attach):
    assert producer.consumer() == ConsumerState(False, None, 0, None, None)
    first = attach(3, owner="job")
    assert (producer.consumer().version, producer.consumer().endpoint) == (3, None)
    first.publish(3, "http://one")
    first.publish(5, "http://two")
    with pytest.raises(StoreError, match="version 4 of role 'sub' can't follow 5"):
        first.publish(4, "http://two")
    state = producer.consumer()
    assert (state.alive, state.version, state.endpoint) == (True, 5, "http://two")
    second = attach(2, owner="job")
    second.publish(2, "http://three")
    assert producer.consumer().version == 2
    second.detach()
    assert producer.consumer().endpoint is None


def test_detaching_gives_back_what_was_claimed(producer, store, attach):
    play(producer, 1), play(producer, 2)
    consumer = attach()
    train(consumer)
    consumer.claim()
    consumer.detach()
    consumer.detach()
    assert states(store) == {1: "trained", 2: "ready"}
    assert numbers(store, "sub")["count/released"] == 1


def test_asking_for_nothing_writes_nothing(producer, store, attach):
    """A job that waits asks several times a second."""
    consumer = attach()
    before = producer.consumer().seen
    for _ in range(5):
        assert consumer.claim() is None
    assert producer.consumer().seen == before  # the lease is its thread's to renew
    play(producer, 1)
    assert consumer.claim().step == 1
    assert producer.consumer().seen > before
