"""`verify` finds every lie that can be told in a store, and tells none itself."""

import json
import re

import pytest
import sqlalchemy as sa
from played import BOTH, play, session, states, train

from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.gc import gc
from verl_drmas.store.producer import Producer
from verl_drmas.store.verify import problems, verify


@pytest.fixture(scope="module", params=BOTH)
def busy(request, tmp_path_factory):
    """A store with a step in each state: 1 and 2 saved (1 rewound once, and freed), 3 trained, 4 claimed, 5 ready,
    6 empty, 7 open, 8 dropped, 9 dead; one group of step 2 is left out.
    """
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('busy') / 'store.db'}"
    else:
        url = request.getfixturevalue("postgres_database")
    store = open_store(url)
    producer = Producer(store, "sub")

    def attach(position=0):
        consumer = Consumer(store, "sub", owner="job", max_attempts=1)
        consumer.attach(position)
        return consumer

    play(producer, 1)
    consumer = attach()
    train(consumer)
    consumer = attach()
    train(consumer)
    consumer.saved(1)
    gc(store, keep_steps=0)
    play(producer, 2, prompts=(0, 1, 2), close=False)
    producer.close_step(2, {"sessions": [[0, 0], [0, 1], [2, 0]]})
    assert train(consumer) == 2
    consumer.saved(2)
    play(producer, 8)
    producer.drop_stale(9, 0)
    play(producer, 9)
    consumer.claim()
    consumer = attach(2)
    assert consumer.claim() is None
    for step in (3, 4, 5):
        play(producer, step)
    assert train(consumer) == 3
    assert consumer.claim().step == 4
    play(producer, 6, rows=0)
    play(producer, 7, close=False)
    return store


def of(step):
    return f"(SELECT id FROM drmas_step WHERE step = {step})"


def test_a_store_with_everything_is_good(busy):
    assert verify(busy) == []
    assert verify(busy, checksums=False) == []
    expected = {1: "saved", 2: "saved", 3: "trained", 4: "claimed", 5: "ready", 6: "empty", 7: "open"}
    assert states(busy) == expected | {8: "dropped", 9: "dead"}


EVENT = "INSERT INTO drmas_event (role, kind, step, groups, sessions, rows, note, at) SELECT role, "
ROLE = "'', 0 FROM drmas_role"
FIRST = "prompt = 1 AND session = 0"
LIES = [
    (f"{EVENT} 'trained', 3, 2, 4, 4, {ROLE}", "step 3 .* while it was trained: .* twice"),
    (f"{EVENT} 'claimed', 2, 2, 3, 3, {ROLE}", "step 2 .* while it was saved: .* twice"),
    (f"{EVENT} 'saved', 5, 2, 4, 4, {ROLE}", "step 5 .* was saved .* while it was ready"),
    (f"{EVENT} 'closed', 77, 0, 0, 0, {ROLE}", "step 77 .* has events and no record"),
    ("DELETE FROM drmas_event WHERE kind = 'trained' AND step = 3", "step 3 .* is trained; its events say claimed"),
    ("DELETE FROM drmas_event WHERE kind = 'rewound'", "step 1 .* was claimed .* while it was trained: .* twice"),
    ("UPDATE drmas_event SET rows = 5 WHERE kind = 'trained' AND step = 3", "step 3 .* and 5 rows; it has"),
    ("UPDATE drmas_step SET state = 'saved' WHERE step = 3", "step 3 .* is saved; its events say trained"),
    ("UPDATE drmas_step SET state = 'ready' WHERE step = 2", "step 2 .* is ready; its events say saved"),
    ("UPDATE drmas_step SET state = 'dropped' WHERE step = 5", "step 5 .* is dropped; its events say ready"),
    ("UPDATE drmas_step SET freed = NOT freed WHERE step = 5", "step 5 .* is ready, and its rows' bytes are deleted"),
    (f"DELETE FROM drmas_session WHERE step_id = {of(5)} AND {FIRST}", "step 5 .* manifest lists"),
    (f"DELETE FROM drmas_session WHERE step_id = {of(5)}", "step 5 .* has no sessions; 4 were closed"),
    (f"UPDATE drmas_session SET listed = NOT listed WHERE step_id = {of(2)} AND {FIRST}", "step 2 .* manifest"),
    (f"UPDATE drmas_session SET listed = NULL WHERE step_id = {of(2)} AND {FIRST}", "step 2 .* neither lists"),
    (f"UPDATE drmas_session SET prompt = 9 WHERE step_id = {of(7)} AND {FIRST}", "prompt 9 in step 7 .*: no group"),
    (f"DELETE FROM drmas_manifest WHERE step_id = {of(5)}", "step 5 .* manifest lists"),
    (f"DELETE FROM drmas_group WHERE step_id = {of(5)} AND prompt = 1", "step 5 .* has groups"),
    (f"DELETE FROM drmas_group WHERE step_id = {of(5)}", "step 5 .* has no groups; expected 2"),
    (f"UPDATE drmas_group SET state = 'listed' WHERE step_id = {of(2)}", "step 2 .* has groups"),
    (f"DELETE FROM drmas_row WHERE step_id = {of(7)} AND {FIRST}", "0 rows; 1 were written"),
    (f"UPDATE drmas_row SET session = 5 WHERE step_id = {of(7)} AND session = 0", "holds no such session"),
    (f"UPDATE drmas_row SET data = checksum WHERE step_id = {of(4)}", "row 0 of session 0 .* not those that were"),
    (f"UPDATE drmas_row SET data = NULL WHERE step_id = {of(4)}", "row 0 .* its bytes are deleted"),
    (f"UPDATE drmas_row SET data = checksum WHERE step_id = {of(1)}", "row 0 .* its bytes are still there"),
    (f"DELETE FROM drmas_step WHERE id = {of(5)}", "a step without a record"),
]


class UndoError(Exception):
    """Rolls a lie back."""


def told(store, lie, checksums=True):
    """What is found of a lie, which is undone."""
    found = []

    def work(connection):
        assert connection.execute(sa.text(lie)).rowcount > 0
        found.extend(problems(connection, checksums))
        raise UndoError

    with pytest.raises(UndoError):
        store.write(work)
    return found


@pytest.mark.parametrize(("lie", "problem"), LIES)
def test_every_lie_is_found(busy, lie, problem):
    found = told(busy, lie)
    assert any(re.search(problem, line) for line in found), found


def test_without_checksums_the_bytes_are_not_read(busy):
    assert told(busy, f"UPDATE drmas_row SET data = checksum WHERE step_id = {of(4)}", checksums=False) == []
    found = told(busy, f"UPDATE drmas_row SET data = NULL WHERE step_id = {of(4)}", checksums=False)
    assert any("deleted" in line for line in found)


def test_two_roles_with_the_same_steps(producer, store):
    play(producer, 1)
    other = Producer(store, "other")
    other.open_step(1, [5], 1)
    other.put_session(session(1, 5, 0))
    other.close_step(1, {"sessions": [[5, 0]], "note": json.dumps({"a": 1})})
    assert verify(store) == []
