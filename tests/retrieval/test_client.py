import asyncio
import contextlib
import json
import pickle
import socket
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
    client,
    open_retriever,
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
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1000)
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


@pytest.mark.parametrize("code", [401, 403, 404, 405, 301])
def test_a_wrong_address_is_an_outage_at_once_and_names_the_setting(code):
    script = Script(status(code))
    with pytest.raises(RetrievalOutage, match=f"status {code}.*check retrieval.urls"):
        ask(one(), script)
    assert len(script.asked) == 1


def test_a_server_of_the_other_dialect_is_no_fault_of_the_query():
    script = Script(status(422, '{"detail": [{"loc": ["body", "query"], "msg": "Field required"}]}'))
    with pytest.raises(RetrievalOutage, match=r"is retrieval.dialect: queries its own"):
        ask(one(), script)


def test_a_cancelled_search_leaves_no_trace_in_the_counts_of_what_is_in_flight():
    async def scenario(asking):
        call = asyncio.ensure_future(asking.search("who", 1))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return [server.in_flight for server in asking._servers]

    assert ask(scenario, Script(late)) == [0]


def test_check_takes_any_http_answer_for_a_sign_of_life():
    foreign, dead = Script(), f"http://127.0.0.1:{free_port()}"  # the foreign one has no /health

    async def scenario(asking):
        return await asyncio.to_thread(asking.check)

    line = ask(scenario, foreign, urls=[dead])
    assert line.startswith("1 of 2 search servers answer: ") and "status 404 on /health" in line
    assert f"{dead}: " in line and "\n" not in line
    with pytest.raises(RetrievalOutage, match=r"no server answers .*verl-drmas retriever serve") as outage:
        ask(scenario, urls=[dead])
    assert dead in str(outage.value)
