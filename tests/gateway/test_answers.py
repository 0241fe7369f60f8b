"""One answer an id, in every order of events."""

import asyncio
import logging

import pytest

from verl_drmas.gateway.errors import EngineAway


def run(test):
    asyncio.run(asyncio.wait_for(test, 60))


def test_the_same_call_at_the_same_time_is_one_call_of_the_engine(house):
    async def test():
        here = house()
        here.engine.hold()
        asked = [asyncio.create_task(here.ask()) for _ in range(5)]
        await here.until(lambda: here.answers.counts["joined"] == 4)
        here.engine.let_go()
        answers = await asyncio.gather(*asked)
        assert len(here.engine.calls) == 1
        assert {a.content for a in answers} == {answers[0].content}
        assert answers[0].json()["token_ids"] == [6, 7, 8]

    run(test())


def test_the_same_call_later_gets_what_was_said_although_the_weights_are_others(house):
    async def test():
        here = house()
        first = await here.ask()
        here.engine.version = 4
        here.gate.close()
        again = await here.ask()
        here.gate.open(4)
        later = await here.ask()
        assert first.json() == again.json() == later.json()
        assert first.json()["min_version"] == first.json()["max_version"] == 3
        assert len(here.engine.calls) == 1

    run(test())


@pytest.mark.parametrize("when", ["on its way", "given"])
@pytest.mark.parametrize("change", [{"prompt_ids": [9]}, {"sampling": {"max_tokens": 9}}, {"min_version": 1}])
def test_an_id_with_another_body_is_a_conflict(house, when, change):
    async def test():
        here = house()
        here.engine.hold()
        first = asyncio.create_task(here.ask())
        await here.until(lambda: here.engine.calls)
        if when == "given":
            here.engine.let_go()
            await first
        refused = await here.ask(**change)
        assert (refused.status_code, refused.json()["error"]) == (409, "id")
        here.engine.let_go()
        assert (await first).status_code == 200  # and the first call is none the worse
        assert len(here.engine.calls) == 1

    run(test())


def test_a_failed_call_is_forgotten_and_its_joined_callers_all_hear_of_it(house, caplog):
    async def test():
        here = house()
        here.engine.hold()
        here.engine.error = ValueError("prompt 918273645 is too long")
        asked = [asyncio.create_task(here.ask()) for _ in range(3)]
        await here.until(lambda: here.answers.counts["joined"] == 2)
        here.engine.let_go()
        for answer in await asyncio.gather(*asked):
            assert (answer.status_code, answer.json()) == (500, {"error": "engine", "detail": "ValueError"})
        here.engine.error = None
        assert (await here.ask()).status_code == 200
        assert len(here.engine.calls) == 2

    with caplog.at_level(logging.DEBUG):
        run(test())
    assert "ValueError" in caplog.text and "918273645" not in caplog.text


def test_without_an_engine_the_caller_shall_come_again(house):
    async def test():
        here = house()
        here.engine.error = EngineAway("server")
        refused = await here.ask()
        assert (refused.status_code, refused.json()["error"]) == (503, "engine")
        assert int(refused.headers["retry-after"]) > 0
        here.engine.error = None
        assert (await here.ask()).status_code == 200

    run(test())


def test_a_caller_that_comes_back_finds_its_answer_on_its_way(house):
    async def test():
        here = house()
        here.engine.hold()
        first = asyncio.create_task(here.ask())
        await here.until(lambda: here.engine.calls)
        first.cancel()
        await here.until(lambda: not any(f.waiting for f in here.answers._flights.values()))
        second = asyncio.create_task(here.ask())
        await here.until(lambda: here.answers.counts["joined"] == 1)
        here.engine.let_go()
        assert (await second).status_code == 200
        assert len(here.engine.calls) == 1 and here.engine.cancelled == []

    run(test())


def test_an_answer_that_ends_while_its_caller_is_away_is_kept(house):
    async def test():
        here = house()
        here.engine.hold()
        first = asyncio.create_task(here.ask())
        await here.until(lambda: here.engine.calls)
        first.cancel()
        here.engine.let_go()
        await here.until(lambda: not here.answers.in_flight)
        assert (await here.ask()).status_code == 200
        assert len(here.engine.calls) == 1

    run(test())


def test_an_answer_that_nobody_comes_back_for_is_stopped_and_its_id_is_free(house):
    async def test():
        here = house(linger=0.05)
        here.engine.hold()
        first = asyncio.create_task(here.ask())
        await here.until(lambda: here.engine.calls)
        first.cancel()
        await here.until(lambda: here.engine.cancelled == ["a"])
        assert here.answers.in_flight == 0 and here.answers.counts["abandoned"] == 1
        here.engine.let_go()
        assert (await here.ask(prompt_ids=[1])).status_code == 200  # even for another call
        assert len(here.engine.calls) == 2

    run(test())


def test_one_of_two_callers_that_leaves_stops_nothing(house):
    async def test():
        here = house(linger=0.0)
        here.engine.hold()
        first = asyncio.create_task(here.ask())
        second = asyncio.create_task(here.ask())
        await here.until(lambda: here.answers.counts["joined"] == 1)
        first.cancel()
        await asyncio.sleep(0.1)
        here.engine.let_go()
        assert (await second).status_code == 200
        assert here.engine.cancelled == []

    run(test())


def test_a_duplicate_that_comes_while_the_abandoned_one_still_ends_is_a_call_of_its_own(house):
    """An engine may take its time to stop; the late end must not take the new call's place."""

    async def test():
        here = house(linger=0.0)
        ending, ended = asyncio.Event(), []
        ask = here.answers._ask

        async def stubborn(id, prompt_ids, sampling):
            try:
                return await ask(id, prompt_ids, sampling)
            except asyncio.CancelledError:
                await ending.wait()
                ended.append(id)
                raise

        here.answers._ask = stubborn
        here.engine.hold()
        first = asyncio.create_task(here.ask())
        await here.until(lambda: here.engine.calls)
        first.cancel()
        await here.until(lambda: here.engine.cancelled)
        second = asyncio.create_task(here.ask())
        await here.until(lambda: len(here.engine.calls) == 2)
        ending.set()
        await here.until(lambda: ended)
        third = asyncio.create_task(here.ask())  # joins the second
        await here.until(lambda: here.answers.counts["joined"] == 1)
        here.engine.let_go()
        assert [(await a).status_code for a in (second, third)] == [200, 200]
        assert len(here.engine.calls) == 2

    run(test())


def test_answers_are_kept_up_to_a_number_of_bytes(house):
    async def test():
        here = house()
        here.answers._room = 1000
        for i in range(30):
            assert (await here.ask(id=f"id-{i}")).status_code == 200
        assert 0 <= here.answers._room <= 1000
        assert sum(len(body) for _, body in here.answers._given.values()) == 1000 - here.answers._room
        await here.ask(id="id-29")
        assert len(here.engine.calls) == 30  # the last one is still known
        await here.ask(id="id-0")
        assert len(here.engine.calls) == 31  # the first one isn't

    run(test())


def test_an_answer_longer_than_all_that_is_kept_does_no_harm(house):
    async def test():
        here = house()
        here.answers._room = 10
        assert (await here.ask()).status_code == 200
        assert here.answers._room == 10 and not here.answers._given

    run(test())


# -- labels


def test_an_answer_that_spans_an_update_has_both_versions(house):
    async def test():
        here = house()
        here.engine.hold()
        asked = asyncio.create_task(here.ask())
        await here.until(lambda: here.engine.calls)
        here.gate.close()
        here.engine.version = 4
        here.gate.open(4)
        here.engine.let_go()
        answer = (await asked).json()
        assert (answer["min_version"], answer["max_version"]) == (3, 4)

    run(test())


@pytest.mark.parametrize("missing", ["min_global_steps", "max_global_steps"])
def test_an_engine_without_a_version_gives_no_answer(house, missing):
    """The gate's own version would be a guess: an update may have come in between."""

    async def test():
        here = house()
        ask = here.answers._ask

        async def mute(*args):
            output = await ask(*args)
            del output.extra_fields[missing]
            return output

        here.answers._ask = mute
        refused = await here.ask()
        assert (refused.status_code, refused.json()["detail"]) == (500, "NoVersion")

    run(test())


def test_an_engine_that_missed_an_update_gives_no_answer_to_who_needs_the_new_weights(house, caplog):
    async def test():
        here = house()
        here.gate.open(4)  # and the engine still has 3
        refused = await here.ask(min_version=4)
        assert (refused.status_code, refused.json()["error"]) == (503, "version")
        here.engine.version = 4
        assert (await here.ask(min_version=4)).status_code == 200

    run(test())
    assert "weights of version 3, and the gate is at 4" in caplog.text


def test_a_stopping_gateway_sends_its_callers_away(house):
    async def test():
        here = house()
        here.engine.hold()
        asked = asyncio.create_task(here.ask())
        await here.until(lambda: here.engine.calls)
        here.answers.close()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]) == (503, "stopping")

    run(test())
