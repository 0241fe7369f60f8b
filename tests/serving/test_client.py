"""The client that evaluation, judges and tools share; its users' tests have more of it, each from its own side."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_drmas.serving import client as module
from verl_drmas.serving.client import ChatClient, ContextFull, Unanswered, Unfit, told_of
from verl_drmas.serving.look import look_at
from verl_drmas.serving.settings import Endpoint

KEY = "sk-Zq93-no-such-key"
BODY = {"messages": [{"role": "user", "content": "Who?"}]}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT", 0.01)


class Clock:
    """The client's clock, which only its own waits move: how long they are doesn't hang on the machine."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    async def sleep(self, seconds, result=None, real=asyncio.sleep):
        self.now += seconds
        await real(0)
        return result


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.sleep)  # tenacity's too
    return clock


def says(text, **more):
    return lambda request: web.json_response({"choices": [{"message": {"content": text}, **more}]})


def status(code, text="", **headers):
    return lambda request: web.Response(status=code, text=text, headers=headers)


def late(seconds, answer):
    return lambda request: asyncio.sleep(seconds, answer(request))


def play(scenario, *answers, urls=(), models=None, **endpoint):
    """Run `scenario(client, asked)` against a server that gives these answers in turn, its last one for good."""

    async def whole():
        answers_left, asked = list(answers), []

        async def complete(request):
            asked.append((module.time.monotonic(), await request.json()))
            answer = (answers_left.pop(0) if len(answers_left) > 1 else answers_left[0])(request)
            return await answer if asyncio.iscoroutine(answer) else answer

        async def listed(request):
            return models(request)

        async with contextlib.AsyncExitStack() as stack:
            addresses = list(urls)
            if answers:
                app = web.Application()
                app.router.add_post("/v1/chat/completions", complete)
                if models:
                    app.router.add_get("/v1/models", listed)
                server = await stack.enter_async_context(TestServer(app))
                addresses.append(f"http://127.0.0.1:{server.port}/v1")
            client = ChatClient(Endpoint(tuple(addresses), "m", **{"timeout": 5.0, **endpoint}))
            try:
                return await scenario(client, asked)
            finally:
                await client.close()

    return asyncio.run(whole())


async def one(client, asked):
    answered = await client.ask(BODY, lambda answer: answer["choices"][0]["message"]["content"])
    return answered, [body for _, body in asked]


async def fails(client, asked):
    with pytest.raises(Unanswered) as raised:
        await client.ask(BODY)
    return raised.value, len(asked)


def dead_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def test_an_answer_and_how_long_it_took():
    answered, asked = play(one, status(500), late(0.1, says("Ada")))
    assert (answered.value, answered.tries) == ("Ada", 2) and asked == [{"model": "m", **BODY}] * 2
    assert 0.1 <= answered.seconds < 3  # of the answered attempt


@pytest.mark.parametrize(
    "answer, kind, status_, again, tries",
    [
        (status(503, "full"), "status 503", 503, True, 2),
        (status(429), "status 429", 429, True, 2),
        (status(425), "status 425", 425, True, 2),
        (status(404, "no"), "status 404", 404, False, 1),
        (status(301), "status 301", 301, False, 1),
        (lambda request: web.Response(text="<html>"), "garbage", None, True, 2),
        (lambda request: web.json_response({"choices": []}), "garbage", None, True, 2),
        (lambda request: web.json_response({"choices": [{"message": None}]}), "garbage", None, True, 2),
        (lambda request: web.json_response([1]), "garbage", None, True, 2),
        (says(["a", "list"]), "garbage", None, True, 2),
        (late(1.0, says("x")), "timeout", None, True, 2),
        (lambda request: request.transport.close(), "ServerDisconnectedError", None, True, 2),
    ],
)
def test_failures_tell_their_kind(answer, kind, status_, again, tries):
    error, asked = play(fails, answer, attempts=2, timeout=0.3 if kind == "timeout" else 20.0)
    assert (error.kind, error.status, error.again, error.tries, asked) == (kind, status_, again, tries, tries)
    assert not isinstance(error, ContextFull)


def test_a_full_context_is_told_apart():
    told = json.dumps({"error": {"message": "This model's maximum context length is 64 tokens."}})
    error, asked = play(fails, status(400, told))
    assert isinstance(error, ContextFull) and asked == 1 and error.said.startswith("This model's maximum")
    assert not isinstance(play(fails, status(400, "bad tool"))[0], ContextFull)


def test_an_answer_that_wont_do_is_asked_for_again_and_any_other_error_is_the_callers():
    def strict(answer):
        text = answer["choices"][0]["message"]["content"]
        if text == "bug":
            raise KeyError(text)
        if text != "good":
            raise Unfit("not good", "my kind")
        return text

    async def scenario(client, asked):
        first = await client.ask(BODY, strict)
        with pytest.raises(KeyError):
            await client.ask(BODY, strict)
        with pytest.raises(Unanswered, match=r"after 2 attempts .*: not good") as error:
            await client.ask(BODY, strict)
        return first, error.value.kind, client.retries

    first, kind, retries = play(scenario, says("bad"), says("good"), says("bug"), says("bad"), attempts=2)
    assert (first.tries, kind, retries) == (2, "my kind", 2)


def test_a_body_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "MAX_REPLY_BYTES", 1000)
    assert play(one, says("x" * 900))[0].value == "x" * 900
    error, _ = play(fails, says("x" * 2000), attempts=1)
    assert error.kind == "ClientPayloadError" and "more than 1000 bytes" in error.last


def test_attempts_are_spaced_by_the_limit_of_a_minute(clock):
    async def scenario(client, asked):
        for _ in range(4):
            await client.ask(BODY)
        return [at - asked[0][0] for at, _ in asked]

    assert play(scenario, status(500), says("x"), requests_per_minute=2) == pytest.approx([0, 30, 60, 90, 120])


def test_a_turn_after_the_deadline_isnt_taken_and_is_no_attempt(clock):
    async def scenario(client, asked):
        return *await fails(client, asked), client.retries

    error, asked, retries = play(scenario, status(500), requests_per_minute=2, deadline=20.0)
    assert (error.kind, asked, error.again) == ("deadline", 1, False)
    assert (error.tries, retries) == (1, 0)


def test_a_resting_server_is_asked_last_and_first_again_when_it_works():
    async def scenario(client, asked):
        for _ in range(3):
            await client.ask(BODY)
        return client.retries, len(asked)

    assert play(scenario, says("x"), urls=[dead_url()]) == (1, 3)


def test_retry_after_is_honoured(clock):
    async def scenario(client, asked):
        await client.ask(BODY)
        return asked[1][0] - asked[0][0]

    assert 50 <= play(scenario, status(503, **{"retry-after": "50"}), says("x")) <= 50 + module.FIRST_WAIT


def test_one_client_serves_several_loops():
    client = ChatClient(Endpoint((dead_url(),), "m", attempts=1))

    async def ask():
        with pytest.raises(Unanswered):
            await client.ask(BODY)
        await client.close()

    for _ in range(2):
        asyncio.run(ask())


# -- the key


def test_the_key_is_sent_and_never_told(monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)
    seen = []

    def refuse(request):
        seen.append(request.headers["authorization"])
        return web.Response(status=401, text=f"wrong key {KEY}")

    error, _ = play(fails, refuse, api_key_env="A_KEY")
    assert seen == [f"Bearer {KEY}"] and error.said == "wrong key ***" and KEY not in str(error)


@pytest.mark.parametrize("value, told", [(None, "is not set"), (" ", "is not set"), ("a b", "holds characters")])
def test_a_key_that_is_none_is_named_and_nothing_is_asked(monkeypatch, value, told):
    monkeypatch.delenv("A_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("A_KEY", value)
    error, asked = play(fails, says("x"), api_key_env="A_KEY")
    assert error.kind == "key" and asked == 0 and f"the environment variable A_KEY {told}" in str(error)


@pytest.mark.parametrize(
    "text, told",
    [
        ('{"error": {"message": "too\\n long"}}', "too long"),
        ('{"error": "no"}', "no"),
        ('{"error": {}}', '{"error": {}}'),
        ("plain\ntext", "plain text"),
        ("", "(empty)"),
        ("x" * 400, "x" * 300),
        ("[" * 10**5, "[" * 300),
    ],
)
def test_what_a_server_says_of_its_refusal(text, told):
    assert told_of(text) == told


# -- the look before a run


def lists(*entries):
    return lambda request: web.json_response({"data": list(entries)})


@pytest.mark.parametrize(
    "models, state, said",
    [
        (lists({"id": "m", "root": "/weights"}, {"id": "n"}), "fit", ""),
        (lists({"id": "n"}), "other", ": the model 'm' is asked for, it has n"),
        (status(401), "refused", ": it refuses the key (status 401)"),
        (status(404), "fit", " (status 404 on /models)"),
        (status(200, "garbage"), "fit", " (status 200 on /models)"),
        (lists("m"), "fit", " (status 200 on /models)"),
        (status(302, location="http://127.0.0.1:1/"), "fit", " (status 302 on /models)"),
    ],
)
def test_a_look_at_a_server(models, state, said):
    async def scenario(client, asked):
        (look,) = await asyncio.to_thread(look_at, client)
        return look

    look = play(scenario, says("x"), models=models)
    assert (look.state, look.said) == (state, look.url + said)
    assert look.root == ("/weights" if said == "" else None)


def test_a_look_at_nothing():
    (look,) = look_at(ChatClient(Endpoint((dead_url(),), "m")))
    assert look.state == "silent" and "ClientConnectorError" in look.said


# -- settings


@pytest.mark.parametrize(
    "given, told",
    [
        ({"urls": ()}, "urls is empty"),
        ({"urls": ("host:80",)}, "urls: 'host:80' is no address"),
        ({"urls": ("http://h/v1 ",)}, "is no address"),
        ({"urls": ("http://me:secret@h/v1",)}, "urls: one holds a user or password"),
        ({"model": ""}, "model is empty"),
        ({"api_key_env": "sk-secret"}, "write the name, not the key"),
        ({"attempts": 0}, "attempts is 0"),
        ({"requests_per_minute": 0}, "requests_per_minute is 0"),
    ],
)
def test_impossible_settings_are_refused(given, told):
    with pytest.raises(ValueError, match=told) as error:
        Endpoint(**{"urls": ("http://h/v1",), "model": "m", **given})
    assert "secret" not in str(error.value)


def test_an_endpoint_of_settings_takes_what_they_say_and_else_its_own_defaults():
    settings = SimpleNamespace(urls=["http://h/v1"], model="m", attempts=2, temperature=0.5)
    assert Endpoint.of(settings) == Endpoint(("http://h/v1",), "m", attempts=2)


@pytest.mark.process
def test_nothing_of_ray_or_verl_is_imported():
    code = (
        "import sys, verl_drmas.serving.look\n"
        "sys.exit(str({'ray', 'verl', 'torch', 'pydantic'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""
