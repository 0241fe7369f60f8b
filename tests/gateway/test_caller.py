import asyncio
import logging
import pickle
import socket

import orjson
import pytest
from fastapi import FastAPI, Request, Response

from verl_drmas.gateway.bearer import as_token
from verl_drmas.gateway.caller import Caller
from verl_drmas.gateway.errors import Busy, Failed, Rejected, Unreachable
from verl_drmas.gateway.serve import Serving
from verl_drmas.gateway.wire import write_request
from verl_drmas.store.settings import GatewayConfig

BODY = write_request("a", "sub", [918273645], {"max_tokens": 4}, 0)
ANSWER = {"token_ids": [1], "log_probs": None, "stop_reason": "completed", "min_version": 1, "max_version": 2}
SAID = orjson.dumps(ANSWER)
PASSING = [(500, Failed), (501, Failed), (429, Failed), (502, Unreachable), (504, Unreachable)]


def run(test):
    asyncio.run(asyncio.wait_for(test, 60))


class Told:
    """A server that says what it was told to; `async with` gives its address."""

    def __init__(self, status=200, content=SAID, headers=None, pause=0.0):
        self.status, self.content, self.headers, self.pause = status, content, headers or {}, pause
        self.got, self.now, self.most = [], 0, 0

    async def __aenter__(self):
        app = FastAPI()

        @app.post("/v1/generate")
        async def generate(request: Request) -> Response:
            self.got.append((dict(request.headers), await request.body()))
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(self.pause)
            self.now -= 1
            return Response(self.content, self.status, headers=self.headers)

        self.serving = await Serving.start(app, GatewayConfig(), 0)
        return f"http://127.0.0.1:{self.serving.port}"

    async def __aexit__(self, *_):
        await self.serving.stop()


async def ask(server, token, **options):
    caller = Caller(as_token(token), **options)
    try:
        async with server as url:
            return await caller.generate(url, BODY)
    finally:
        await caller.close()


def test_a_call_carries_token_and_body_and_brings_the_answer(token):
    async def test():
        server = Told()
        answer = await ask(server, token)
        assert (answer.token_ids, answer.min_version, answer.max_version) == ([1], 1, 2)
        ((headers, body),) = server.got
        assert headers["authorization"] == f"Bearer {token}" and body == BODY

    run(test())


def test_a_busy_gateway_says_how_long(token):
    async def test(waits, seconds):
        with pytest.raises(Busy, match="status 503") as busy:
            await ask(Told(503, b"", {"retry-after": waits} if waits else {}), token)
        assert busy.value.retry_after == seconds

    for waits, seconds in [("3", 3.0), (None, 1.0), ("soon", 1.0), ("99999", 60.0), ("9" * 99, 1.0), ("-1", 1.0)]:
        run(test(waits, seconds))


@pytest.mark.parametrize(("status", "kind"), PASSING)
def test_a_status_that_may_pass(token, status, kind):
    with pytest.raises(kind, match=f"status {status}"):
        run(ask(Told(status, b"no"), token))


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        (401, "token_env"),
        (403, "refuses the token"),
        (404, r"drmas\.store\.role"),
        (409, "fault of ours"),
        (413, r"drmas\.gateway\.max_body"),
        (422, "same version"),
        (301, "check the endpoint"),
        (405, "check the endpoint"),
    ],
)
def test_a_status_that_stays_names_the_fix(token, status, fix):
    with pytest.raises(Rejected, match=f"status {status}.*{fix}"):
        run(ask(Told(status, b"", {"location": "http://127.0.0.1:1/"}), token))


def test_what_our_gateway_says_is_told_and_what_others_repeat_is_not(token):
    told = orjson.dumps({"error": "malformed", "detail": "sampling.best_of: not permitted"})
    with pytest.raises(Rejected, match=r"\(malformed: sampling\.best_of: not permitted\)"):
        run(ask(Told(422, told), token))
    for repeated in (f"you sent 918273645 and {token}".encode(), orjson.dumps({"detail": [{"input": [918273645]}]})):
        with pytest.raises(Rejected) as refused:
            run(ask(Told(422, repeated), token))
        assert "918273645" not in str(refused.value) and token not in str(refused.value)
    with pytest.raises(Rejected) as refused:
        run(ask(Told(422, orjson.dumps({"error": "x", "detail": token})), token))
    assert token not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"<html>918273645</html>", orjson.dumps({**ANSWER, "token_ids": None})])
def test_garbage_is_a_failure_and_is_not_repeated(token, content):
    with pytest.raises(Failed, match="garbage") as failed:
        run(ask(Told(200, content), token))
    assert "918273645" not in str(failed.value)


def test_nobody_there(token):
    async def test():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        caller = Caller(as_token(token))
        with pytest.raises(Unreachable, match="ConnectError") as unreachable:
            await caller.generate(url, BODY)
        assert not unreachable.value.silent and unreachable.value.__cause__ is None
        assert not await caller.lives(url)
        await caller.close()

    run(test())


def test_a_server_that_hangs_up(token):
    async def test():
        async def hang_up(reader, writer):
            await reader.read(10)
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        caller = Caller(as_token(token))
        with pytest.raises(Unreachable):
            await caller.generate(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", BODY)
        await caller.close()
        server.close()

    run(test())


def test_silence_is_told_from_absence(token):
    with pytest.raises(Unreachable, match=r"nothing within 0\.2 s") as unreachable:
        run(ask(Told(pause=5.0), token, read=0.2))
    assert unreachable.value.silent


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://a", "http://", "http://a:b", "http://[::1"])
def test_what_is_no_address_is_no_use(token, url):
    async def test():
        caller = Caller(as_token(token))
        with pytest.raises((Rejected, Unreachable)) as refused:
            await caller.generate(url, BODY)
        assert isinstance(refused.value, Rejected) or url == "http://"
        assert not await caller.lives(url)
        await caller.close()

    run(test())


def test_the_wait_for_a_connection_is_no_part_of_a_calls_time(token):
    """Ten calls of 0.25 s through one connection, with 2 s for each."""

    async def test():
        server, caller = Told(pause=0.25), Caller(as_token(token), connections=1, read=2.0)
        async with server as url:
            answers = await asyncio.gather(*(caller.generate(url, BODY) for _ in range(10)))
        assert len(answers) == 10 and server.most == 1
        await caller.close()

    run(test())


def test_a_call_that_is_cancelled_gives_its_connection_back(token):
    async def test():
        server, caller = Told(pause=5.0), Caller(as_token(token), connections=1)
        async with server as url:
            for _ in range(3):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(caller.generate(url, BODY), 0.3)
            server.pause = 0.0
            assert (await caller.generate(url, BODY)).token_ids == [1]
        await caller.close()

    run(test())


def test_it_goes_through_pickle_and_works_in_loop_after_loop(token):
    caller = Caller(as_token(token), connections=3, read=7.0)

    async def test():
        async with Told() as url:
            assert (await caller.generate(url, BODY)).token_ids == [1]
        assert len(caller._open) == 1  # those of loops that are closed are let go

    for _ in range(3):
        asyncio.run(test())
        pickle.dumps(caller)  # also with connections open
    again = pickle.loads(pickle.dumps(caller))
    assert (again._connections, again._read, again._open) == (3, 7.0, {})
    assert token not in repr(vars(again))


def test_a_proxy_of_the_environment_is_not_asked(token, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    run(ask(Told(), token))


def test_the_logs_hold_neither_token_nor_prompt(token, caplog):
    """Also at the loudest: httpx and its parts say what they do."""
    httpx_logger = logging.getLogger("httpx")
    before = httpx_logger.level
    httpx_logger.setLevel(logging.DEBUG)
    try:
        with caplog.at_level(logging.DEBUG):
            run(ask(Told(), token))
            with pytest.raises(Busy):
                run(ask(Told(503), token))
    finally:
        httpx_logger.setLevel(before)
    assert "send_request_headers" in caplog.text  # they do speak
    assert token not in caplog.text and "918273645" not in caplog.text


def test_a_call_is_no_line_in_the_log(token, caplog):
    with caplog.at_level(logging.INFO):
        run(ask(Told(), token))
    assert "HTTP Request" not in caplog.text
