import asyncio
import contextlib
import json
import pickle
import re
import socket
import sys
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_drmas.retrieval import (
    Hit,
    Passage,
    QueryRejected,
    RetrievalOutage,
    RetrievalSettings,
    Retriever,
    answers,
    client,
    open_retriever,
    preflight,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)


def right(body):
    """Search-R1's answer, with the query in it."""
    queries = body.get("queries") or [body["query"]]
    document = {"id": "1", "title": queries[0], "text": "text"}
    hits = [{"document": document, "score": 1.0}] * body["topk"]
    return web.json_response({"result": [hits for _ in queries]})


class Script:
    """A server that gives these answers in turn, then right ones; an answer is made by a function of the request."""

    def __init__(self, *answers):
        self.answers, self.asked, self.times = list(answers), [], []

    async def retrieve(self, request):
        self.asked.append(await request.json())
        self.times.append(time.monotonic())
        make = self.answers.pop(0) if self.answers else right
        answer = make(self.asked[-1])
        return await answer if asyncio.iscoroutine(answer) else answer


def status(code, text="", **headers):
    return lambda body: web.Response(
        status=code, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def always(make):
    class Forever(Script):
        async def retrieve(self, request):
            self.answers = [make]
            return await super().retrieve(request)

    return Forever()


def ask(scenario, *scripts, urls=(), **settings):
    """Run `scenario(client)` against servers with these scripts and, before them, these urls."""

    async def whole():
        async with contextlib.AsyncExitStack() as stack:
            all_urls = list(urls)
            for script in scripts:
                app = web.Application()
                app.router.add_post("/retrieve", script.retrieve)
                server = await stack.enter_async_context(TestServer(app))
                all_urls.append(f"http://127.0.0.1:{server.port}")
            settings.setdefault("timeout", 5.0)
            asking = client.RetrievalClient(RetrievalSettings(urls=all_urls, **settings))
            try:
                return await scenario(asking)
            finally:
                await asking.close()

    return asyncio.run(whole())


def one(query="who", k=2):
    return lambda asking: asking.search(query, k)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("dialect, body", [("queries", {"queries": ["who"]}), ("query", {"query": "who"})])
def test_each_dialect_is_spoken(dialect, body):
    script = Script()
    assert ask(one(), script, dialect=dialect) == [Hit(Passage("1", "who", "text"), 1.0)] * 2
    assert script.asked == [{**body, "topk": 2, "return_scores": True}]


def test_a_client_needs_no_event_loop():
    asking = open_retriever(RetrievalSettings(urls=["http://127.0.0.1:1/retrieve/"]))
    assert isinstance(asking, client.RetrievalClient) and isinstance(asking, Retriever)


def test_a_client_in_use_can_be_pickled():
    async def scenario(asking):
        await asking.search("a", 1)
        other = pickle.loads(pickle.dumps(asking))
        try:
            return await other.search("b", 1), other.report()
        finally:
            await other.close()

    hits, report = ask(scenario, Script())
    assert hits[0].passage.title == "b" and report["calls"] == 1


@pytest.mark.parametrize("path", ["", "/", "/retrieve", "/retrieve/"])
def test_a_url_may_have_the_path_that_others_write(path):
    with pytest.raises(RetrievalOutage, match=r"no answer from http://127\.0\.0\.1:1 after"):
        ask(one(), urls=[f"http://127.0.0.1:1{path}"], attempts=1)


def test_one_client_works_in_one_event_loop_after_the_other():
    class Reply(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            body = b'{"result": [[]]}'
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    port = free_port()
    asking = client.RetrievalClient(RetrievalSettings(urls=[f"http://127.0.0.1:{port}"]))

    async def once():
        server = await asyncio.get_running_loop().create_server(Reply, "127.0.0.1", port)
        try:
            return await asking.search("a", 1)
        finally:
            await asking.close()
            server.close()

    assert asyncio.run(once()) == asyncio.run(once()) == []
    assert asking.report()["retries"] == 0


def hit(score):
    return json.dumps({"result": [[{"document": {"id": "1", "contents": "text"}, "score": score}]]})


FAULTS = {
    "500": status(500, '{"detail": "broken"}'),
    "503": status(503),
    "429": status(429),
    "no json": status(200, "<html>"),
    "wrong shape": status(200, "[]"),
    "two lists": status(200, '{"result": [[], []]}'),
    "nan": status(200, hit(float("nan"))),
    "no score": status(200, hit(None)),
    "202": status(202, '{"result": [[]]}'),
    "no content": status(204),
    "not utf-8": lambda body: web.Response(body=b"\xff\xfe"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_passing_fault_is_made_good_by_another_attempt(fault):
    script = Script(fault, fault)

    async def scenario(asking):
        hits = await asking.search("who", 1)
        return hits, asking.report(), asking.report()

    hits, report, empty = ask(scenario, script)
    assert hits[0].passage.title == "who"
    assert len(script.asked) == 3
    assert {**report, "seconds": 0} == {"calls": 1, "retries": 2, "outages": 0, "rejected": 0, "seconds": 0}
    assert report["seconds"] > 0
    assert set(empty.values()) == {0}


def test_an_answer_that_is_too_long_is_garbage(monkeypatch):
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(RetrievalOutage, match="garbage: a body of more than 1000 bytes"):
        ask(one(), always(status(200, " " * 5000 + '{"result": [[]]}')), attempts=2)


@pytest.mark.parametrize(
    "fault, named",
    [("500", "status 500: broken"), ("no json", "garbage: not JSON"), ("429", "status 429: (empty)")],
)
def test_a_fault_that_stays_is_an_outage_that_says_all(fault, named):
    script = always(FAULTS[fault])

    async def scenario(asking):
        with pytest.raises(RetrievalOutage) as outage:
            await asking.search("who", 1)
        return str(outage.value), asking.report()

    line, report = ask(scenario, script, attempts=3, deadline=20.0)
    assert len(script.asked) == 3
    assert named in line and "http://127.0.0.1:" in line
    assert "after 3 of 3 attempts in 0." in line and "of 20 s" in line and "\n" not in line
    assert (report["outages"], report["retries"]) == (1, 2)


def test_nobody_listening_is_an_outage_after_all_attempts():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RetrievalOutage, match=r"after 4 of 4 attempts.*ClientConnectorError"):
        ask(one(), urls=[url], attempts=4)


async def late(body, seconds=8.0):
    await asyncio.sleep(seconds)
    return right(body)


def test_a_slow_server_is_cut_off_and_asked_again():
    script = Script(late)
    start = time.monotonic()
    assert ask(one(), script, timeout=0.2)
    assert len(script.asked) == 2 and time.monotonic() - start < 4


def test_the_deadline_bounds_everything():
    start = time.monotonic()
    with pytest.raises(RetrievalOutage, match=r"attempts in 0[.][56] of 0.5 s; last: .*: no answer within"):
        ask(one(), always(late), timeout=0.2, deadline=0.5, attempts=100)
    assert time.monotonic() - start < 4


def test_retry_after_is_honoured():
    script = Script(status(429, '{"detail": "full"}', retry_after="1"))
    assert ask(one(), script)
    assert 1.0 <= script.times[1] - script.times[0] < 5


def test_a_retry_after_beyond_the_deadline_is_an_outage_at_once():
    script = always(status(429, "full", retry_after="3600"))
    start = time.monotonic()
    with pytest.raises(RetrievalOutage, match=r"after 1 of 6 attempts.*status 429: full"):
        ask(one(), script, deadline=10.0)
    assert time.monotonic() - start < 4


def test_a_date_in_retry_after_is_passed_over():
    script = Script(status(503, retry_after="Wed, 21 Oct 2065 07:28:00 GMT"))
    assert ask(one(), script) and len(script.asked) == 2


def test_where_another_server_is_fit_it_is_asked_at_once(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 5.0)
    start = time.monotonic()
    assert ask(one(), Script(status(500)), Script())
    assert time.monotonic() - start < 4


def test_another_server_is_asked_while_one_is_busy():
    busy, idle = always(status(429, retry_after="60")), Script()

    async def scenario(asking):
        return [await asking.search(f"q{i}", 1) for i in range(6)]

    start = time.monotonic()
    answers = ask(scenario, busy, idle)
    assert [hits[0].passage.title for hits in answers] == [f"q{i}" for i in range(6)]
    assert len(busy.asked) == 1 and len(idle.asked) == 6 and time.monotonic() - start < 5


def test_calls_go_to_the_server_with_the_fewest_in_flight_else_in_turn():
    scripts = [Script(), Script(), Script()]

    async def in_turn(asking):
        for i in range(9):
            await asking.search(f"q{i}", 1)

    ask(in_turn, *scripts)
    assert [len(script.asked) for script in scripts] == [3, 3, 3]

    slow, quick = always(lambda body: late(body, 0.3)), Script()

    async def uneven(asking):
        first = asyncio.ensure_future(asking.search("first", 1))
        await asyncio.sleep(0.1)
        for i in range(4):
            await asking.search(f"q{i}", 1)
        await first

    ask(uneven, slow, quick)
    assert (len(slow.asked), len(quick.asked)) == (1, 4)


def test_a_dead_server_rests_and_is_tried_again_by_one_call_at_a_time(monkeypatch):
    monkeypatch.setattr(client, "FIRST_REST", 50.0)
    flaky, steady = Script(status(500)), Script()

    async def scenario(asking):
        for i in range(8):
            await asking.search(f"q{i}", 1)
        before = len(flaky.asked)
        assert 40 < asking._servers[0].rests_until - time.monotonic() <= 50
        asking._servers[0].rests_until = time.monotonic()
        flaky.answers = [lambda body: late(body, 0.2)]
        await asyncio.gather(*(asking.search(f"r{i}", 1) for i in range(8)))
        trial = len(flaky.asked)
        await asyncio.gather(*(asking.search(f"s{i}", 1) for i in range(8)))
        return before, trial, len(flaky.asked)

    assert ask(scenario, flaky, steady) == (1, 2, 6)


@pytest.mark.parametrize("code", [413, 422])
def test_the_query_is_at_fault_where_the_server_says_so(code):
    script = Script(right, status(code, '{"detail": "too long"}'))

    async def scenario(asking):
        await asking.search("fine", 1)
        with pytest.raises(QueryRejected, match=f"status {code}: too long"):
            await asking.search("who", 1)
        await asking.search("fine", 1)
        return asking.report()

    report = ask(scenario, script)
    assert len(script.asked) == 3
    assert (report["rejected"], report["retries"], report["outages"]) == (1, 0, 0)


@pytest.mark.parametrize("query", ["", " \n\t", "\ud800"])
def test_a_query_that_can_be_none_is_rejected_without_a_call(query):
    script = Script()
    with pytest.raises(QueryRejected):
        ask(one(query), script)
    assert script.asked == []


REFUSALS = [401, 403, 404, 405, 301]


@pytest.mark.parametrize("code", REFUSALS)
def test_a_wrong_address_is_an_outage_at_once_and_names_the_setting(code):
    scripts = [always(status(code)), always(status(code))]
    for number in (1, 2):
        with pytest.raises(RetrievalOutage, match=f"status {code}.*check retrieval.urls"):
            ask(one(), *scripts[:number])
    assert [len(script.asked) for script in scripts] == [2, 1]


@pytest.mark.parametrize("code", REFUSALS)
def test_one_wrong_address_of_two_takes_no_searches_from_the_other(code):
    wrong, slow = always(status(code)), always(lambda body: late(body, 0.02))

    async def scenario(asking):
        for turn in range(10):
            await asyncio.gather(*(asking.search(f"q{turn} {i}", 1) for i in range(4)))
        return asking.report()

    report = ask(scenario, wrong, slow)
    assert report["outages"] == 0 and report["retries"] <= 4
    assert len(slow.asked) == 40


def test_a_server_that_refused_may_be_right_later(monkeypatch):
    monkeypatch.setattr(client, "FIRST_REST", 0.05)
    starting, other = Script(status(404)), Script()

    async def scenario(asking):
        for i in range(4):
            await asking.search(f"q{i}", 1)
        await asyncio.sleep(0.1)
        for i in range(4):
            await asking.search(f"r{i}", 1)

    ask(scenario, starting, other)
    assert len(starting.asked) >= 3


def test_where_no_server_is_fit_one_that_refuses_is_the_last_to_be_asked():
    refuses, busy = always(status(404)), Script(*[status(500)] * 3)
    assert ask(one(), refuses, busy, attempts=5)
    assert len(refuses.asked) == 1 and len(busy.asked) == 4


@pytest.mark.parametrize("code", [408, 425])
def test_a_time_out_told_by_a_proxy_is_a_passing_fault(code):
    assert ask(one(), Script(status(code)))


def test_a_server_of_the_other_dialect_is_no_fault_of_the_query():
    script = Script(status(422, '{"detail": [{"loc": ["body", "query"], "msg": "Field required"}]}'))
    with pytest.raises(RetrievalOutage, match=r"is retrieval.dialect: queries its own"):
        ask(one(), script)


def refusal(code, reason, detail="told"):
    return status(code, json.dumps({"detail": detail, "reason": reason}))


@pytest.mark.parametrize(("code", "reason"), [(422, "blank"), (413, "query_chars"), (413, "body")])
def test_our_servers_reasons_that_lie_in_the_query_are_its_fault_from_the_first_call_on(code, reason):
    with pytest.raises(QueryRejected, match=f"status {code}: told"):
        ask(one(), Script(refusal(code, reason)))


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [(422, "topk", r"topk is 500; 100 at most; lower topk \(2\), or raise the server's --max-topk"),
     (422, "malformed", "check retrieval.urls"), (413, "queries", "check retrieval.urls")],
)  # fmt: skip
def test_what_our_server_refuses_of_every_query_is_an_outage(code, reason, said):
    async def scenario(asking):
        await asking.search("fine", 2)
        with pytest.raises(RetrievalOutage, match=f"status {code}: {said}|status {code}: .*{said}"):
            await asking.search("who", 2)
        return asking.report()

    report = ask(scenario, Script(right, refusal(code, reason, "topk is 500; 100 at most")))
    assert (report["rejected"], report["outages"], report["retries"]) == (0, 1, 0)


def test_failures_of_calls_in_flight_together_count_as_one():
    both = [always(lambda body: late_status(0.1)), always(lambda body: late_status(0.1))]

    async def scenario(asking):
        calls = (asking.search(f"q{i}", 1) for i in range(60))
        await asyncio.gather(*calls, return_exceptions=True)
        now = time.monotonic()
        return [(server.failures, server.rests_until - now) for server in asking._servers]

    for failures, rests in ask(scenario, *both, attempts=1):
        assert failures == 1 and rests <= client.FIRST_REST


async def late_status(seconds):
    await asyncio.sleep(seconds)
    return web.Response(status=500)


def test_waiting_for_a_free_connection_is_no_part_of_a_calls_time():
    # The last of these calls waits longer than a call may take, and a call itself is short: a busy machine that makes a
    # call many times slower lengthens the wait with it.
    timeout, calls, seconds = 3.0, 280, 0.025
    most, now = [0], [0]

    async def counted(body):
        now[0] += 1
        most[0] = max(most[0], now[0])
        await asyncio.sleep(seconds)
        now[0] -= 1
        return right(body)

    async def scenario(asking):
        start = time.monotonic()
        await asyncio.gather(*(asking.search(f"q{i}", 1) for i in range(calls)))
        return asking.report(), time.monotonic() - start

    report, took = ask(scenario, always(counted), connections=2, timeout=timeout, attempts=1)
    assert took > timeout
    assert (report["retries"], report["outages"], most[0]) == (0, 0, 2)


def test_the_deadline_bounds_the_wait_for_a_free_connection():
    async def scenario(asking):
        slots = asking._pool().slots
        await slots.acquire()
        start = time.monotonic()
        with pytest.raises(RetrievalOutage, match=r"after 0 of 6 attempts.*all 1 connections were taken.*connections"):
            await asking.search("second", 1)
        took = time.monotonic() - start
        slots.release()
        return took, await asking.search("third", 1)

    took, hits = ask(scenario, Script(), connections=1, deadline=0.4)
    assert took < 2 and hits


def test_a_cancelled_search_leaves_no_trace_in_the_counts_of_what_is_in_flight():
    async def scenario(asking):
        call = asyncio.ensure_future(asking.search("who", 1))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return [server.in_flight for server in asking._servers]

    assert ask(scenario, Script(late)) == [0]


def check(*scripts, urls=(), k=1, **settings):
    return ask(lambda asking: asyncio.to_thread(asking.check, k), *scripts, urls=urls, **settings)


def test_a_check_asks_every_server_a_search_as_the_run_will():
    scripts = [Script(), Script()]
    line = check(*scripts, k=7, dialect="query")
    assert line.startswith("2 of 2 search servers answer: ") and "\n" not in line
    assert line.count("status 404 on /health") == 2  # as other makes have it
    for script in scripts:
        (asked,) = script.asked
        assert asked["topk"] == 7 and asked["query"] and "queries" not in asked


def test_a_check_with_nobody_there_says_how_to_start_a_server():
    dead = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RetrievalOutage, match=r"no server answers .*verl-drmas retriever serve") as outage:
        check(urls=[dead])
    assert dead in str(outage.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(404, "nope"), "status 404: nope; .*check retrieval.urls"),
        (status(200, "<html>"), "garbage: not JSON.*check retrieval.urls"),
        (status(500, "broken"), "status 500: broken"),
        (status(422, '{"detail": "query: field required"}'), "is retrieval.dialect: queries its own"),
        (refusal(422, "topk", "topk is 5; this server gives 3 at most"), r"gives 3 at most; lower topk \(5\)"),
        (status(413), "check retrieval.urls"),
    ],
)
def test_a_check_says_of_each_server_what_came(answer, said):
    with pytest.raises(RetrievalOutage, match=f"no server answers a search .*{said}") as outage:
        check(always(answer), k=5)
    assert "\n" not in str(outage.value)
    line = check(always(answer), Script(), k=5)
    assert line.startswith("1 of 2 search servers answer: ") and re.search(said, line)


def test_a_server_that_is_busy_or_slow_in_a_check_is_no_reason_to_stop(monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 0.5)
    assert "busy: status 429" in check(always(status(429)))
    assert "slow: no answer to a search within 0.5 s" in check(always(late))


def test_a_check_looks_at_all_servers_at_once(monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 0.5)
    start = time.monotonic()
    check(*(always(late) for _ in range(20)))
    assert time.monotonic() - start < 4


def test_a_check_works_beside_a_running_event_loop_too():
    with pytest.raises(RetrievalOutage, match="no server answers"):
        asyncio.run(inside(f"http://127.0.0.1:{free_port()}"))


async def inside(url):
    return client.RetrievalClient(RetrievalSettings(urls=[url])).check()


@pytest.mark.parametrize("library", ["aiohttp", "orjson", "tenacity"])
def test_a_library_that_is_missing_is_named_with_the_extra(monkeypatch, library):
    for name in ("answers", "client"):
        monkeypatch.delitem(sys.modules, f"verl_drmas.retrieval.{name}")  # so that they are imported anew
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=rf"{library}.*pip install 'verl-drmas\[search\]'"):
        open_retriever(RetrievalSettings(urls=["http://127.0.0.1:1"]))
