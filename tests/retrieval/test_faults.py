"""The client against real servers that die, come back, drown, lag, or stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import aiohttp
import pytest
import uvicorn

from verl_drmas.retrieval import Hit, Passage, QueryRejected, RetrievalOutage, RetrievalSettings, client
from verl_drmas.retrieval.app import create_app
from verl_drmas.retrieval.client import RetrievalClient
from verl_drmas.retrieval.limits import ServerSettings

pytestmark = pytest.mark.process

SERVER = """
import json, sys, time
from verl_drmas.retrieval import Hit, Passage
from verl_drmas.retrieval.limits import ServerSettings
from verl_drmas.retrieval.serve_command import bind, serve

port, seconds, grace, settings = json.loads(sys.argv[1])

class Index:
    kind = "echo"
    def __len__(self): return 1
    def describe(self): return {}
    def search(self, queries, k):
        time.sleep(seconds)
        return [[Hit(Passage(str(i), query, "text"), -float(i)) for i in range(k)] for query in queries]

serve(Index(), ServerSettings(**settings), bind("127.0.0.1", port), grace=grace)
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.1)


class Index:
    kind = "echo"

    def __init__(self, seconds=0.0):
        self.seconds, self.asked = seconds, []

    def __len__(self):
        return 1

    def describe(self):
        return {}

    def search(self, queries, k):
        self.asked += queries
        time.sleep(self.seconds)
        return [[Hit(Passage(str(i), query, "text"), -float(i)) for i in range(k)] for query in queries]


@contextlib.contextmanager
def thread_server(index, **settings):
    """A real server in a thread; yields its url."""
    bound = socket.create_server(("127.0.0.1", 0))
    app = create_app(index, ServerSettings(**settings))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


class ProcessServer:
    """A real server in a process of its own, so that it can be killed; started again on the same port."""

    def __init__(self, seconds=0.0, grace=5, **settings):
        self.port, self.process, self._given = 0, None, (seconds, grace, settings)

    def start(self):
        if self.process is not None:
            self.process.communicate()
        arguments = json.dumps([self.port, *self._given])
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SERVER, arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self.line = self.process.stdout.readline()
        self.port = int(self.line.rsplit(":", 1)[1].split("/")[0])
        self.url = f"http://127.0.0.1:{self.port}"

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(20)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate()


def settings(*urls, **given):
    return RetrievalSettings(urls=list(urls), **{"timeout": 5.0, **given})


def play(scenario, *urls, **given):
    async def whole():
        asking = RetrievalClient(settings(*urls, **given))
        try:
            return await scenario(asking)
        finally:
            await asking.close()

    return asyncio.run(whole())


async def sessions(asking, count, queries, after=None):
    """So many sessions with queries of their own, one after the other; every answer must be to its query."""
    right = []

    async def session(number):
        for place in range(queries):
            query = f"session {number} query {place}"
            hits = await asking.search(query, 2)
            assert [hit.passage.title for hit in hits] == [query] * 2
            right.append(query)
            if after is not None and len(right) == after[0]:
                await asyncio.to_thread(after[1])

    await asyncio.gather(*(session(number) for number in range(count)))
    return right


def test_256_concurrent_clients_all_get_the_answers_to_their_own_queries():
    index = Index(0.005)
    with thread_server(index) as url:
        right = play(lambda asking: sessions(asking, 256, 3), url)
    assert len(set(right)) == len(right) == 256 * 3
    assert sorted(index.asked) == sorted(right)


def test_256_clients_of_a_server_with_a_short_queue_are_turned_away_and_come_again():
    async def scenario(asking):
        return await sessions(asking, 256, 1), asking.report()

    with thread_server(Index(0.01), max_queue=64, max_queries=64, max_batch=32) as url:
        right, report = play(scenario, url, attempts=30)
    assert len(set(right)) == 256
    assert report["retries"] > 0 and report["outages"] == 0


def test_a_server_that_is_killed_and_comes_back_costs_retries_and_nothing_else():
    with ProcessServer(0.01, max_batch=4) as server:

        def kill_and_restart():
            server.end(signal.SIGKILL)
            server.start()

        async def scenario(asking):
            return await sessions(asking, 16, 6, after=(30, kill_and_restart)), asking.report()

        right, report = play(scenario, server.url, attempts=20, deadline=60.0)
    assert len(set(right)) == 16 * 6
    assert report["retries"] > 0 and report["outages"] == 0 and report["calls"] == 16 * 6


def test_a_server_that_is_killed_for_good_is_an_outage_within_the_deadline():
    with ProcessServer() as server:

        async def scenario(asking):
            await asking.search("before", 2)
            server.end(signal.SIGKILL)
            start = time.monotonic()
            outcomes = await asyncio.gather(*(asking.search(f"q{i}", 2) for i in range(8)), return_exceptions=True)
            return outcomes, time.monotonic() - start, asking.report()

        outcomes, seconds, report = play(scenario, server.url, attempts=100, deadline=1.5)
    assert [type(outcome) for outcome in outcomes] == [RetrievalOutage] * 8
    assert all(server.url in str(outcome) and "of 1.5 s" in str(outcome) for outcome in outcomes)
    assert seconds < 4 and report["outages"] == 8


def test_of_two_servers_one_may_be_dead():
    with ProcessServer() as dead, thread_server(Index()) as url:
        dead.end(signal.SIGKILL)

        async def scenario(asking):
            assert (await asyncio.to_thread(asking.check)).startswith("1 of 2 search servers answer")
            return await sessions(asking, 8, 4), asking.report()

        right, report = play(scenario, dead.url, url)
    assert len(set(right)) == 32 and report["outages"] == 0 and report["retries"] >= 1


def test_a_slow_server_is_an_outage_after_every_attempt_and_its_queue_is_freed():
    async def counters(url):
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}

    async def scenario(asking):
        outcomes = await asyncio.gather(*(asking.search(f"q{i}", 2) for i in range(6)), return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, RetrievalOutage)
            assert "after 2 of 2 attempts" in str(outcome) and "no answer within 0.2 s" in str(outcome)
        for _ in range(50):
            counts = await counters(url)
            if not counts["retriever_queue_depth"]:
                break
            await asyncio.sleep(0.1)
        return counts

    with thread_server(Index(1.5), max_batch=1) as url:
        counts = play(scenario, url, timeout=0.2, attempts=2)
    assert counts["retriever_queue_depth"] == 0
    assert counts["retriever_dropped_total"] >= 4  # those whose callers had gone were never computed


def test_a_query_of_10_000_characters_is_the_queries_fault_and_no_outage():
    async def scenario(asking):
        with pytest.raises(QueryRejected, match="status 413: a query of 10000 characters; the limit is 2048"):
            await asking.search("x" * 10_000, 2)
        assert (await asking.search("fine", 2))[0].passage.title == "fine"
        return asking.report()

    with thread_server(Index()) as url:
        report = play(scenario, url)
    assert (report["rejected"], report["retries"], report["outages"]) == (1, 0, 0)


@pytest.mark.parametrize("dialect", ["queries", "query"])
def test_our_server_speaks_either_dialect_to_our_client(dialect):
    with thread_server(Index()) as url:
        assert len(play(lambda asking: sessions(asking, 4, 2), url, dialect=dialect)) == 8


def test_a_graceful_stop_answers_what_runs_and_ends_with_status_0():
    with ProcessServer(0.5) as server:

        async def scenario(asking):
            await asking.search("warm", 2)
            calls = [asyncio.ensure_future(asking.search(f"q{i}", 2)) for i in range(8)]
            await asyncio.sleep(0.2)
            status = await asyncio.to_thread(server.end, signal.SIGTERM)
            hits = await asyncio.gather(*calls)
            return status, [hit[0].passage.title for hit in hits], asking.report()

        status, titles, report = play(scenario, server.url, attempts=1)
        assert status == 0
        assert titles == [f"q{i}" for i in range(8)] and report["retries"] == 0
        assert server.line == f"serving 1 passages (echo) on {server.url}/retrieve\n"
        assert server.process.communicate() == ("", "")


def test_a_stop_is_bounded_by_its_grace():
    with ProcessServer(30.0, grace=1) as server:

        async def scenario(asking):
            call = asyncio.ensure_future(asking.search("stuck", 2))
            await asyncio.sleep(0.3)
            start = time.monotonic()
            status = await asyncio.to_thread(server.end, signal.SIGTERM)
            with pytest.raises(RetrievalOutage):
                await call
            return status, time.monotonic() - start

        status, seconds = play(scenario, server.url, attempts=1)
    assert status == 0 and seconds < 10
