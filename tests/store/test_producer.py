"""The main job's side: idempotent writes, closing, the gate and what is given up."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from played import play, row, session, states, tamper, train

from verl_drmas.store.errors import StoreError
from verl_drmas.store.numbers import numbers
from verl_drmas.store.records import Gate
from verl_drmas.store.verify import verify


def pairs(*found):
    return {"sessions": [list(pair) for pair in found]}


def test_a_step_goes_through(producer, attach):
    played = play(producer, 1, prompts=(7, 3), rows=2)
    claimed = attach().claim()
    assert (claimed.step, claimed.sessions) == (1, played)
    assert claimed.manifest == pairs((3, 0), (3, 1), (7, 0), (7, 1))


def test_a_session_is_there_once(producer, store, attach):
    producer.open_step(1, [0], 1)
    first = session(1, 0, 0, rows=2)
    assert producer.put_session(first)
    assert not producer.put_session(first)
    assert not producer.put_session(session(1, 0, 0, rows=3, outcome=9.0))
    producer.close_step(1, pairs((0, 0)))
    assert attach().claim().sessions == (first,)
    assert numbers(store, "sub")["count/duplicate"] == 2


def test_a_failed_session_gives_way_to_one_that_ended_and_to_no_other(producer, store, attach):
    producer.open_step(1, [0], 1)
    failed = session(1, 0, 0, rows=3, ended=False, reason="time\0out \ud800", outcome=None)
    assert producer.put_session(failed)
    assert not producer.put_session(replace(failed, reason="again"))
    again = session(1, 0, 0, rows=1)
    assert producer.put_session(again)
    assert not producer.put_session(failed)
    producer.close_step(1, pairs((0, 0)))
    assert attach().claim().sessions == (again,)
    found = numbers(store, "sub")
    assert (found["count/replayed"], found["count/duplicate"], found["sessions/failed"]) == (1, 2, 0)
    assert verify(store) == []


def test_a_failed_session_keeps_its_reason(producer, attach):
    producer.open_step(1, [0], 2)
    producer.put_session(session(1, 0, 0, rows=0, ended=False, reason="bad \0 text", outcome=None))
    producer.put_session(session(1, 0, 1))
    producer.close_step(1, pairs((0, 0), (0, 1)))
    first = attach().claim().sessions[0]
    assert (first.ended, first.reason, first.outcome, first.rows) == (
        False,
        "bad \N{REPLACEMENT CHARACTER} text",
        None,
        (),
    )


def test_a_session_needs_its_group(producer):
    with pytest.raises(StoreError, match="step 1 was never opened"):
        producer.put_session(session(1, 0, 0))
    producer.open_step(1, [0], 2)
    with pytest.raises(StoreError, match="prompt 5 of step 1 was never opened"):
        producer.put_session(session(1, 5, 0))
    with pytest.raises(StoreError, match=r"sessions 0\.\.1"):
        producer.put_session(session(1, 0, 2))
    with pytest.raises(ValueError, match="the outcome is nan"):
        producer.put_session(session(1, 0, 0, outcome=float("nan")))


def test_nothing_of_a_session_is_written_if_a_row_is_wrong(producer, store):
    producer.open_step(1, [0], 1)
    bad = session(1, 0, 0, rows=2)
    with pytest.raises(ValueError, match="prompt_ids"):
        producer.put_session(replace(bad, rows=(bad.rows[0], replace(bad.rows[1], prompt_ids=[-1]))))
    assert producer.put_session(bad)


def test_numbers_of_numpy_are_taken(producer, attach):
    producer.open_step(np.int64(1), np.array([4, 2]), np.int32(1))
    one = session(1, 4, 0)
    strange = replace(one, step=np.int64(1), prompt=np.int64(4), session=np.int32(0), ended=np.bool_(True))
    assert producer.put_session(replace(strange, outcome=np.float32(0.5), main_version=np.int64(0)))
    producer.close_step(np.int64(1), pairs((4, 0)))
    assert attach().claim().sessions == (one,)


def test_opening_again_adds_prompts_and_changes_nothing_else(producer, store):
    producer.open_step(1, [0], 2)
    producer.open_step(1, [0, 1], 2)
    producer.open_step(1, [], 2)
    assert producer.put_session(session(1, 1, 1))
    with pytest.raises(StoreError, match="open with 2 sessions, not 3"):
        producer.open_step(1, [2], 3)
    with pytest.raises(StoreError, match="prompt 2 of step 1 was never opened"):  # the refused call opened nothing
        producer.put_session(session(1, 2, 0))
    producer.close_step(1, pairs((1, 1)))
    producer.open_step(1, [9], 3)
    assert states(store) == {1: "ready"}
    assert numbers(store, "sub")["groups/left_out"] == 1


def test_a_second_close_gives_the_first_manifest(producer, store):
    play(producer, 1, close=False)
    first = pairs((0, 0), (1, 1)) | {"note": "é", "seed": 3}
    assert producer.manifest(1) is None
    assert producer.close_step(1, first) == first
    assert producer.close_step(1, pairs((0, 1))) == first
    assert producer.manifest(1) == first
    assert not producer.put_session(session(1, 0, 1))
    assert verify(store) == []


def test_a_manifest_lists_what_was_played(producer):
    with pytest.raises(StoreError, match="step 1 was never opened"):
        producer.close_step(1, pairs())
    producer.open_step(1, range(8), 1)
    with pytest.raises(StoreError, match=r"never put: 0 of prompt 0, .* and 1 more"):
        producer.close_step(1, pairs(*((prompt, 0) for prompt in range(6))))
    for wrong in ({}, {"sessions": [[1]]}, {"sessions": 3}, {"sessions": [["a", 0]]}):
        with pytest.raises(StoreError, match="'sessions'"):
            producer.close_step(1, wrong)
    assert producer.gate(2, 0).unfinished == (1,)


def test_what_is_not_listed_is_left_out_and_counted(producer, store, attach):
    play(producer, 1, prompts=(0, 1, 2), close=False)
    producer.open_step(1, [3], 2)  # nothing of it is played
    producer.close_step(1, pairs((0, 0), (2, 1)))
    found = numbers(store, "sub")
    assert (found["groups/ready"], found["groups/left_out"], found["sessions/left_out"]) == (2, 2, 4)
    assert found["count/left_out"] == 2
    assert [(one.prompt, one.session) for one in attach().claim().sessions] == [(0, 0), (2, 1)]
    assert verify(store) == []


def test_a_step_without_rows_is_empty_and_holds_nobody_back(producer, store, attach):
    play(producer, 1, rows=0)
    play(producer, 2, close=False)
    producer.close_step(2, pairs())
    assert states(store) == {1: "empty", 2: "empty"}
    assert producer.gate(3, 0) == Gate((), 0)
    assert attach().claim() is None
    assert verify(store) == []


def test_many_sessions_in_one_manifest(producer, attach):
    played = play(producer, 1, prompts=range(130), sessions=4, rows=0, close=False)
    last = session(1, 999, 3)
    producer.open_step(1, [999], 4)
    producer.put_session(last)
    producer.close_step(1, pairs(*((one.prompt, one.session) for one in (*played, last))))
    assert attach().claim().sessions == (*played, last)


def test_the_gate_waits_for_what_is_beyond_the_lag(producer, attach):
    assert producer.gate(1, 0) == Gate((), 0)
    for step in (1, 2, 3):
        play(producer, step)
    producer.open_step(4, [0], 1)
    assert producer.gate(5, 0) == Gate((1, 2, 3, 4), 3)
    assert producer.gate(5, 2) == Gate((1, 2), 2)
    consumer = attach()
    assert train(consumer) == 1
    assert producer.gate(5, 2) == Gate((2,), 2)
    consumer.saved(1)
    assert train(consumer) == 2
    assert producer.gate(5, 2) == Gate((), 2)
    assert producer.gate(4, 2) == Gate((), 1)
    assert producer.gate(2, 4) == Gate((), 0)


def test_a_consumer_that_falls_back_still_owes_the_weights_that_were_promised(producer, attach):
    play(producer, 1)
    play(producer, 2)
    consumer = attach()
    assert (train(consumer), train(consumer)) == (1, 2)
    assert producer.gate(3, 0) == Gate((), 2)
    consumer.detach()
    consumer.attach(1)  # its checkpoint is of step 1
    assert producer.gate(3, 0) == Gate((2,), 2)  # sessions of step 3 that are being played wait for version 2
    assert train(consumer) == 2
    assert producer.gate(3, 0) == Gate((), 2)


def test_stale_steps_are_dropped_but_not_the_one_in_training(producer, store, attach):
    for step in (1, 2, 3, 4):
        play(producer, step)
    consumer = attach()
    assert consumer.claim().step == 1
    assert producer.drop_stale(5, 1) == 4  # groups of steps 2 and 3
    assert states(store) == {1: "claimed", 2: "dropped", 3: "dropped", 4: "ready"}
    assert producer.gate(5, 1) == Gate((1,), 1)
    assert producer.drop_stale(5, 1) == 0
    consumer.trained(1)
    assert consumer.claim().step == 4
    assert numbers(store, "sub")["count/dropped"] == 4
    assert verify(store) == []


def test_what_a_dead_consumer_had_claimed_is_dropped_too(producer, store, attach):
    play(producer, 1)
    consumer = attach()
    consumer.claim()
    tamper(store, "UPDATE drmas_role SET lease_until = 0")
    assert producer.drop_stale(2, 0) == 2
    with pytest.raises(StoreError, match="step 1 of role 'sub' is dropped"):
        consumer.trained(1)
    assert verify(store) == []


def test_marks_and_counters(producer, store, attach):
    assert (producer.last_saved(), producer.contract()) == (0, None)
    producer.saved(4)
    producer.count("retries")
    producer.count("retries", 4)
    consumer = attach()
    assert consumer.finished() is None
    producer.finish(9)
    assert consumer.finished() == 9
    producer.begin(10)
    assert consumer.finished() is None
    producer.finish(0)
    assert consumer.finished() == 0
    producer.put_contract({"a": 1})
    producer.put_contract({"b": ["é"]})
    assert producer.contract() == consumer.contract() == {"b": ["é"]}
    assert producer.last_saved() == 4
    assert numbers(store, "sub")["count/retries"] == 5


def test_roles_are_strangers(producer, store, attach):
    from verl_drmas.store.producer import Producer

    other = Producer(store, "other")
    play(producer, 1)
    assert other.gate(5, 0) == Gate((), 0)
    play(other, 2, rows=3)
    consumer = attach()
    assert train(consumer) == 1
    assert train(consumer) is None
    assert other.gate(5, 0) == Gate((2,), 2)
    assert not other.consumer().alive
    assert verify(store) == []


def test_the_same_session_from_many_threads_is_written_once(producer, store):
    producer.open_step(1, [0], 8)
    records = [session(1, 0, number, rows=2) for number in range(8)]
    answers, errors = [], []
    start = threading.Barrier(24)

    def put():
        try:
            start.wait()
            answers.extend([producer.put_session(record) for record in records])
        except Exception as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=put) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(answers) == 8
    producer.close_step(1, pairs(*((0, number) for number in range(8))))
    assert numbers(store, "sub")["count/duplicate"] == 23 * 8
    assert verify(store) == []


def test_long_rows(producer, attach):
    long = row(1, prompt=1024, response=3072)
    producer.open_step(1, [0], 1)
    producer.put_session(replace(session(1, 0, 0), rows=(long,)))
    producer.close_step(1, pairs((0, 0)))
    assert attach().claim().sessions[0].rows == (long,)
