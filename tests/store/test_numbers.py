"""The numbers of a store, each against a run that was counted by hand."""

from played import play, session, train

from verl_drmas.store.numbers import numbers, role_names


def test_numbers_of_a_run(producer, store, attach):
    assert role_names(store) == []
    empty = numbers(store, "sub")
    assert set(empty.values()) == {0.0}
    producer.open_step(1, [0, 1, 2], 2)
    for prompt, rows in ((0, 0), (1, 1), (2, 3)):
        producer.put_session(session(1, prompt, 0, rows))
        producer.put_session(session(1, prompt, 1, rows=0, ended=prompt < 2, reason="" if prompt < 2 else "late"))
    producer.close_step(1, {"sessions": [[0, 0], [1, 0], [1, 1], [2, 0]]})
    play(producer, 2)
    play(producer, 3, close=False)
    consumer = attach()
    train(consumer)
    found = numbers(store, "sub")
    assert role_names(store) == ["sub"]
    expected = {
        "steps/open": 1,
        "groups/open": 2,
        "steps/ready": 1,
        "groups/ready": 2,
        "steps/trained": 1,
        "groups/trained": 3,
        "groups/left_out": 0,
        "last_closed": 2,
        "version": 0,
        "lag": 2,
        "sessions/ended": 9,
        "sessions/failed": 1,
        "sessions/left_out": 2,
        "d/0": 2,
        "d/1": 5,
        "d/3": 1,
    }
    assert {key: found[key] for key in expected} == expected
    assert 0 < found["ready_age"] < 600
    assert found["bytes"] > 0
    assert all(isinstance(value, float) for value in found.values())
    consumer.publish(1, "http://here")
    assert numbers(store, "sub")["lag"] == 1
