import asyncio
import contextlib
import inspect
import json
import logging
import re
import socket
import threading

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_drmas.serving import client
from verl_drmas.workflows.toolbox.reason import Reason, ReasonSettings
from verl_drmas.workflows.tools import ToolError, ToolOutage

KEY = "sk-secret-123"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("REASONER_KEY", KEY)


def says(text="four", end="stop", **more):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": end}
    return lambda request: web.json_response({"choices": [choice], **more})


def status(code, text="", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request: web.Response(status=code, text=text, headers=headers)


def late(seconds):
    return lambda request: asyncio.sleep(seconds, web.Response(text="late"))


class Model:
    """A server that gives these answers in turn, the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.asked, self.keys, self.busy, self.most = list(answers), [], [], 0, 0

    async def complete(self, request):
        self.busy += 1
        self.most = max(self.most, self.busy)
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        made = answer(request)
        made = await made if inspect.isawaitable(made) else made
        self.busy -= 1
        return made


def ask(scenario, *models, urls=(), **own):
    async def whole():
        async with contextlib.AsyncExitStack() as stack:
            served = []
            for model in models:
                app = web.Application()
                app.router.add_post("/v1/chat/completions", model.complete)
                server = await stack.enter_async_context(TestServer(app))
                served.append(f"http://127.0.0.1:{server.port}/v1")
            tool = Reason(ReasonSettings(urls=[*urls, *served], model="m", **{"timeout": 5.0, **own}))
            try:
                return await scenario(tool), tool.report()
            finally:
                await tool.close()

    return asyncio.run(whole())


def one(question="2 + 2?"):
    return lambda tool: tool.call({"question": question})


def fails(error, question="2 + 2?"):
    async def scenario(tool):
        with pytest.raises(error) as raised:
            await tool.call({"question": question})
        return str(raised.value)

    return scenario


def free_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def test_a_question_is_answered():
    model = Model(says("<think>hm</think> four ", usage={"completion_tokens": 7}))
    text, report = ask(one(" 2 + 2? "), model, system="Be brief.", max_tokens=9)
    assert text == "four"
    assert model.asked == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
            "max_tokens": 9,
            "temperature": 0.0,
        }
    ]
    assert model.keys == [None] and report["calls"] == 1 and report["tokens"] == 7


def test_what_isnt_set_isnt_sent():
    model = Model(says())
    ask(one(), model, system="", temperature=None)
    assert set(model.asked[0]) == {"model", "messages", "max_tokens"} and len(model.asked[0]["messages"]) == 1


@pytest.mark.parametrize(
    "answer",
    [status(500), status(429, retry_after="0"), status(200, "no json"), status(200, '{"choices": []}'), says(None),
     says(3), status(200, "[" * 10**5), says("<think>"), lambda request: request.transport.close()],
)  # fmt: skip
def test_what_another_attempt_may_make_good_is_tried_again(answer):
    model = Model(answer, answer, says())
    text, report = ask(one(), model)
    assert text == "four" and len(model.asked) == 3 and report["retries"] == 2 and report["outages"] == 0


def test_an_outage_is_nobodys_fault():
    model = Model(status(503, "overloaded"))
    told, report = ask(fails(ToolOutage), model, attempts=2)
    assert "after 2 attempts" in told and "status 503: overloaded" in told and told.startswith("reason: ")
    assert len(model.asked) == 2 and report["outages"] == 1 and report["errors"] == 0


def test_a_slow_server_is_an_outage():
    told, _ = ask(fails(ToolOutage), Model(late(5)), timeout=0.1, attempts=2)
    assert "no answer within 0.1 s" in told


def test_the_deadline_ends_it_whatever_the_attempts():
    model = Model(late(5))
    told, _ = ask(fails(ToolOutage), model, timeout=5.0, attempts=99, deadline=0.3)
    assert re.search(r"no answer within 0\.(3|2\d*) s", told) and len(model.asked) == 1


def test_another_server_stands_in():
    model = Model(says())
    text, report = ask(one(), model, urls=[free_url()])
    assert text == "four" and report["retries"] == 1


def test_calls_are_spread():
    models = Model(says()), Model(says())

    async def four(tool):
        for _ in range(4):
            await tool.call({"question": "a"})

    ask(four, *models)
    assert [len(model.asked) for model in models] == [2, 2]


def test_no_more_calls_than_allowed_at_a_time():
    model = Model(lambda request: asyncio.sleep(0.05, says()(request)))

    async def many(tool):
        return await asyncio.gather(*(tool.call({"question": "a"}) for _ in range(6)))

    texts, _ = ask(many, model, concurrency=2, timeout=0.2, attempts=1)
    assert texts == ["four"] * 6 and model.most == 2


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_refusal_for_good_is_an_outage_at_once(code):
    model = Model(status(code))
    told, _ = ask(fails(ToolOutage), model)
    assert f"status {code}" in told and len(model.asked) == 1


def test_a_refused_question_is_the_agents_fault_once_others_were_taken():
    refusal = status(400, json.dumps({"error": {"message": "too many tokens"}}))
    told, _ = ask(fails(ToolOutage), Model(refusal))
    assert "status 400: too many tokens" in told

    async def second(tool):
        await tool.call({"question": "a"})
        return await fails(ToolError)(tool)

    told, report = ask(second, Model(says(), refusal))
    assert told == "the reasoner can't take this question (too many tokens)" and report["errors"] == 1


def test_an_answer_without_an_end_is_told():
    assert "came to no end" in ask(fails(ToolError), Model(says("", "length")))[0]
    assert ask(one(), Model(says("so far", "length")))[0] == "so far [...]"


def test_a_long_answer_is_cut_and_counted():
    text, report = ask(one(), Model(says("word " * 100)), characters=50)
    assert len(text) <= 50 and text.endswith(" [...]") and report["cut_characters"] > 400


@pytest.mark.parametrize(
    "arguments", [{}, {"question": 3}, {"question": " "}, {"question": "x" * 21}, {"question": "\ud800"}, {"q": "a"}]
)
def test_a_wrong_call_is_the_agents_fault(arguments):
    model = Model(says())

    async def scenario(tool):
        with pytest.raises(ToolError):
            await tool.call(arguments)

    _, report = ask(scenario, model, question_characters=20)
    assert model.asked == [] and report["errors"] == 1


# -- the key
def test_the_key_goes_to_the_server_and_nowhere_else(caplog):
    caplog.set_level(logging.DEBUG)
    model = Model(says(), status(401, json.dumps({"error": {"message": f"Incorrect API key: {KEY}"}})))

    async def scenario(tool):
        await tool.call({"question": "a"})
        return await fails(ToolOutage)(tool)

    told, _ = ask(scenario, model, api_key_env="REASONER_KEY")
    assert model.keys == [f"Bearer {KEY}"] * 2 and "Incorrect API key: ***" in told
    assert KEY not in told + caplog.text


def test_a_redirect_doesnt_carry_the_key_away():
    other = Model(says())
    told, _ = ask(fails(ToolOutage), Model(status(307, location="http://127.0.0.1:1/")), api_key_env="REASONER_KEY")
    assert "status 307" in told and other.asked == []


@pytest.mark.parametrize("key", ["", "two words", "é"])
def test_a_key_that_isnt_there_is_named(monkeypatch, key):
    monkeypatch.setenv("REASONER_KEY", key)
    with pytest.raises(ValueError, match=r"reason\.api_key_env: the environment variable REASONER_KEY ") as error:
        Reason(ReasonSettings(urls=[free_url()], model="m", api_key_env="REASONER_KEY")).check()
    assert "two words" not in str(error.value)
    assert "REASONER_KEY" in ask(fails(ToolOutage), Model(says()), api_key_env="REASONER_KEY")[0]


# -- the look before a run
@contextlib.contextmanager
def serving(answer):
    """A server with /v1/models, in a thread."""
    loop = asyncio.new_event_loop()
    app = web.Application()

    async def models(request):
        return answer(request)

    app.router.add_get("/v1/models", models)
    server = TestServer(app)
    loop.run_until_complete(server.start_server())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def has(*names):
    return lambda request: web.json_response({"data": [{"id": name} for name in names]})


def test_the_look_finds_the_model():
    with serving(has("m", "n")) as url:
        dead = free_url()
        told = Reason(ReasonSettings(urls=[url, dead], model="m")).check()
    assert told.startswith(f"reason: m at {url}; {dead}: ")


@pytest.mark.parametrize(
    "answer, told",
    [
        (has("mm"), r"reason\.model: .* has no 'm'; did you mean 'mm'\?"),
        (status(401), r"reason\.api_key_env: .* refuses the key \(status 401\)"),
    ],
)
def test_the_look_names_what_is_wrong(answer, told):
    with serving(answer) as url, pytest.raises(ValueError, match=told):
        Reason(ReasonSettings(urls=[url], model="m")).check()


def test_a_server_without_a_list_is_taken_at_its_word():
    with serving(status(404)) as url:
        assert "status 404 on /models" in Reason(ReasonSettings(urls=[f"{url}/chat/completions"], model="m")).check()


def test_no_server_at_all_is_said():
    with pytest.raises(ValueError, match=r"reason\.urls: no server answers"):
        Reason(ReasonSettings(urls=[free_url()], model="m")).check()


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"urls": []}, "urls is empty"),
        ({"urls": ["host:80"]}, "urls: 'host:80' is no address"),
        ({"urls": ["http://me:secret@host/v1"]}, "urls: one holds a user or password"),
        ({"model": ""}, "model is empty"),
        ({"api_key_env": "sk-secret"}, "write the name, not the key"),
        ({"attempts": 0}, "attempts is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_settings_are_checked(wrong, told):
    with pytest.raises(ValueError, match=told) as error:
        ReasonSettings(**{"urls": ["http://host/v1"], "model": "m", **wrong})
    assert "secret" not in str(error.value)
