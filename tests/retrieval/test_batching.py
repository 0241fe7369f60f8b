import asyncio
import threading
import time

import pytest

from verl_drmas.retrieval import Hit, Passage
from verl_drmas.retrieval.batching import Batcher, Overloaded, SearchFailed, Stopping
from verl_drmas.retrieval.limits import ServerSettings
from verl_drmas.retrieval.measures import Measures


class Index:
    """Answers each query by itself; holds each search until it is let go, where `gate` is closed."""

    def __init__(self):
        self.batches = []
        self.gate = threading.Event()
        self.gate.set()

    def search(self, queries, k):
        self.batches.append((list(queries), k))
        assert self.gate.wait(10)
        if "boom" in queries:
            raise RuntimeError("the index\nis broken")
        if "short" in queries:
            return []
        return [[Hit(Passage(f"{query}/{i}", "", query), -float(i)) for i in range(k)] for query in queries]


def ids(answers):
    return [[hit.passage.id for hit in hits] for hits in answers]


def run(scenario, **settings):
    """Run `scenario(batcher, index, measures)` in a loop and close the batcher."""

    async def whole():
        index, measures = Index(), Measures()
        batcher = Batcher(index, ServerSettings(**{"max_wait_ms": 5, "cache": 0, **settings}), measures)
        try:
            await scenario(batcher, index, measures)
        finally:
            index.gate.set()
            await batcher.close(5)

    asyncio.run(whole())


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("never came true")


async def occupy(batcher, index):
    """The index is at work on a query of its own, until its gate opens."""
    index.gate.clear()
    first = batcher.submit(["first"], 1)
    await until(lambda: index.batches)
    index.batches.clear()
    return first


def value(measures, name, **labels):
    return measures.registry.get_sample_value(f"retriever_{name}", labels)


def test_concurrent_requests_become_one_batch_and_keep_their_answers():
    async def scenario(batcher, index, measures):
        answers = await asyncio.gather(*(batcher.submit([f"q{i}", f"r{i}"], 2) for i in range(8)))
        assert [ids(each) for each in answers] == [[[f"q{i}/0", f"q{i}/1"], [f"r{i}/0", f"r{i}/1"]] for i in range(8)]
        assert [len(queries) for queries, _ in index.batches] == [16]
        assert value(measures, "batch_size_sum") == 16 and value(measures, "batch_size_count") == 1

    run(scenario)


def test_a_full_batch_does_not_wait():
    async def scenario(batcher, index, measures):
        await asyncio.wait_for(asyncio.gather(*(batcher.submit([f"q{i}"], 1) for i in range(8))), 10)
        assert [len(queries) for queries, _ in index.batches] == [4, 4]

    run(scenario, max_batch=4, max_wait_ms=60_000)


def test_a_batch_forms_while_the_index_works_and_starts_when_it_has_ended():
    async def scenario(batcher, index, measures):
        index.gate.clear()
        first = [batcher.submit([f"first{i}"], 1) for i in range(4)]
        await until(lambda: index.batches)
        late = [batcher.submit([f"late{i}"], 1) for i in range(3)]
        index.gate.set()
        await asyncio.wait_for(asyncio.gather(*first, *late), 10)
        assert [queries for queries, _ in index.batches][1:] == [["late0", "late1", "late2"]]

    run(scenario, max_batch=4, max_wait_ms=60_000)


def test_an_idle_server_waits_no_longer_than_told():
    async def scenario(batcher, index, measures):
        start = time.perf_counter()
        await batcher.submit(["a"], 1)
        assert 0.2 <= time.perf_counter() - start < 2

    run(scenario, max_wait_ms=200)


def test_numbers_of_passages_are_never_mixed_in_a_batch():
    async def scenario(batcher, index, measures):
        first = await occupy(batcher, index)
        calls = [batcher.submit(["same"], k) for k in (2, 3, 2, 3)]
        index.gate.set()
        answers = await asyncio.gather(first, *calls)
        assert [len(answer[0]) for answer in answers[1:]] == [2, 3, 2, 3]
        assert index.batches == [(["same"], 2), (["same"], 3)]

    run(scenario)


def test_the_same_query_is_computed_once_while_it_waits_or_runs():
    async def scenario(batcher, index, measures):
        first = await occupy(batcher, index)
        running = batcher.submit(["first"], 1)
        waiting = [batcher.submit(["twin", "twin"], 1) for _ in range(3)]
        index.gate.set()
        assert ids(await first) == ids(await running) == [["first/0"]]
        assert [ids(await call) for call in waiting] == [[["twin/0"], ["twin/0"]]] * 3
        assert index.batches == [(["twin"], 1)]
        assert value(measures, "shared_total") == 6

    run(scenario)


def test_answers_are_kept_up_to_the_caches_size_and_the_least_used_goes():
    async def scenario(batcher, index, measures):
        for query in ("a", "b", "a", "c", "a", "b"):
            assert ids(await batcher.submit([query], 1)) == [[f"{query}/0"]]
        assert [queries for queries, _ in index.batches] == [["a"], ["b"], ["c"], ["b"]]
        assert value(measures, "cache_hits_total") == 2
        await batcher.submit(["a"], 2)
        assert index.batches[-1] == (["a"], 2)

    run(scenario, cache=2)


def test_without_a_cache_every_query_is_asked():
    async def scenario(batcher, index, measures):
        await batcher.submit(["a"], 1)
        await batcher.submit(["a"], 1)
        assert len(index.batches) == 2

    run(scenario, cache=0)


def test_a_query_whose_caller_has_gone_is_dropped_unless_another_waits_for_it():
    async def scenario(batcher, index, measures):
        first = await occupy(batcher, index)
        gone = batcher.submit(["alone", "shared"], 1)
        stays = batcher.submit(["shared"], 1)
        gone.cancel()
        await until(lambda: value(measures, "queue_depth") == 1)
        index.gate.set()
        assert ids(await stays) == [["shared/0"]]
        await first
        assert index.batches == [(["shared"], 1)]
        assert value(measures, "dropped_total") == 1

    run(scenario)


def test_a_full_queue_turns_away_whole_requests_and_says_when_to_come_again():
    async def scenario(batcher, index, measures):
        first = await occupy(batcher, index)
        waits = batcher.submit(["a", "b"], 1)
        with pytest.raises(Overloaded, match="2 queries wait, the limit is 3") as refused:
            batcher.submit(["c", "d"], 1)
        assert refused.value.status == 429 and refused.value.retry_after >= 1
        twin = batcher.submit(["a", "b"], 1)  # adds nothing to the queue
        last = batcher.submit(["c"], 1)
        index.gate.set()
        await asyncio.gather(first, waits, twin, last)
        assert {query for queries, _ in index.batches for query in queries} == {"a", "b", "c"}

    run(scenario, max_queue=3, max_queries=2)


def test_the_wait_that_is_named_follows_the_measured_speed():
    async def scenario(batcher, index, measures):
        await occupy(batcher, index)
        batcher._rate = 2.0
        batcher.submit([f"q{i}" for i in range(9)], 1)
        with pytest.raises(Overloaded) as refused:
            batcher.submit(["more"] * 2 + ["other"], 1)
        assert refused.value.retry_after == 5  # (9 waiting + 1 running) / 2

    run(scenario, max_queue=10, max_queries=10)


@pytest.mark.parametrize("query, message", [("boom", "RuntimeError: the index is broken"), ("short", "0 answers to 1")])
def test_an_error_of_the_index_is_an_error_of_that_search_only(query, message):
    async def scenario(batcher, index, measures):
        first = await occupy(batcher, index)
        bad, other_k = batcher.submit([query], 1), batcher.submit(["fine"], 2)
        index.gate.set()
        with pytest.raises(SearchFailed, match=message) as failed:
            await bad
        assert failed.value.status == 500
        await first
        assert ids(await other_k) == [["fine/0", "fine/1"]]
        assert ids(await batcher.submit(["after"], 1)) == [["after/0"]]

    run(scenario)


def test_a_query_that_the_index_cannot_do_fails_alone(caplog):
    async def scenario(batcher, index, measures):
        names = [f"q{i}" if i not in (7, 40) else ("boom", "short")[i == 40] for i in range(64)]
        first = await occupy(batcher, index)
        calls = [batcher.submit([name], 1) for name in names]
        index.gate.set()
        outcomes = await asyncio.gather(first, *calls, return_exceptions=True)
        for name, outcome in zip(names, outcomes[1:], strict=True):
            if name in ("boom", "short"):
                assert isinstance(outcome, SearchFailed)
            else:
                assert ids(outcome) == [[f"{name}/0"]]
        assert len(index.batches) < 30  # halves, and not one by one
        assert value(measures, "batch_size_count") == 2

    run(scenario)
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 2 and all(record.exc_info for record in told)


def test_a_query_that_was_answered_while_its_batch_is_asked_again_in_parts_is_no_longer_joined():
    async def scenario(batcher, index, measures):
        first = await occupy(batcher, index)
        early, bad = batcher.submit(["early"], 1), batcher.submit(["boom"], 1)
        index.gate.set()
        await first
        await early
        again = await asyncio.wait_for(batcher.submit(["early"], 1), 5)
        assert ids(again) == [["early/0"]]
        with pytest.raises(SearchFailed):
            await bad

    run(scenario)


def test_closing_finishes_what_is_queued_and_takes_no_more():
    async def scenario(batcher, index, measures):
        first = await occupy(batcher, index)
        queued = [batcher.submit([f"q{i}"], 1) for i in range(3)]
        closing = asyncio.ensure_future(batcher.close(5))
        await asyncio.sleep(0.01)
        with pytest.raises(Stopping):
            batcher.submit(["late"], 1)
        index.gate.set()
        await closing
        assert ids(await first) == [["first/0"]]
        assert [ids(await call) for call in queued] == [[[f"q{i}/0"]] for i in range(3)]

    run(scenario, max_batch=1)


def test_closing_is_bounded_and_tells_those_it_leaves():
    async def scenario(batcher, index, measures):
        first = await occupy(batcher, index)
        queued = batcher.submit(["q"], 1)
        start = time.perf_counter()
        await batcher.close(0.1)
        assert time.perf_counter() - start < 2
        for call in (first, queued):
            with pytest.raises(Stopping):
                await call

    run(scenario)
