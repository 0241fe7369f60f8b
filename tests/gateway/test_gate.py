import threading

import pytest

from verl_drmas.body import Refused
from verl_drmas.gateway.gate import Gate, GateState


def turned_away(gate, min_version=0):
    with pytest.raises(Refused) as refused:
        gate.admit(min_version)
    assert (refused.value.status, refused.value.retry_after) == (503, 1)
    return refused.value.reason


def test_it_is_closed_until_somebody_opens_it():
    gate = Gate()
    assert turned_away(gate) == "closed"
    gate.open(4)
    gate.admit(4)
    gate.close()
    assert turned_away(gate) == "closed"
    assert gate.state.version == 4


def test_weights_that_are_too_old_turn_a_call_away():
    gate = Gate()
    gate.open(4)
    gate.admit(0)
    assert turned_away(gate, 5) == "version"
    gate.open(5)
    gate.admit(5)


def test_a_word_that_was_late_on_its_way_changes_nothing():
    gate = Gate()
    gate.take(GateState(True, 4, order=3))
    gate.take(GateState(False, 4, order=4))
    gate.take(GateState(True, 4, order=3))
    assert gate.state == GateState(False, 4, order=4)
    gate.take(GateState(False, 4, order=4))  # said again
    gate.take(GateState(True, 5, order=5))
    assert gate.state.open


def test_of_many_threads_the_last_word_stays():
    gate, words = Gate(), [GateState(i % 2 == 0, i, order=i) for i in range(400)]
    threads = [
        threading.Thread(target=lambda part: [gate.take(w) for w in part], args=(words[i::4],)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gate.state == words[-1]
