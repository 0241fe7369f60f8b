"""A team over chat completions, against a real server: what it sends, what it reads, and an outage is no answer."""

import asyncio
import contextlib
import json
import re
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_drmas.evaluation.completions import Completions, ServedModel
from verl_drmas.evaluation.endpoint import EndpointTeam, Sampling, server_calls
from verl_drmas.evaluation.sessions import TooManyFailed, WorkflowBug, play_session, play_sessions
from verl_drmas.rollout.seeds import call_seed
from verl_drmas.serving.client import Unanswered
from verl_drmas.workflows import Outcome, PromptTooLong, SessionFailed, Task, Workflow, load_workflow
from verl_drmas.workflows.base import Action
from verl_drmas.workflows.tools import ToolCall
from verl_drmas.workflows.turns import read_turn

KEY = "sk-Zq93-no-such-key"
TOOLS = [{"type": "function", "function": {"name": "search", "description": "d", "parameters": {"type": "object"}}}]
ASK = [{"role": "user", "content": "Who?"}]


def says(text, end="stop", calls=None, usage=(11, 3)):
    said = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    told = {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}} if usage else {}
    return lambda body: web.json_response({"choices": [{"message": said, "finish_reason": end}], **told})


def call(name, arguments, id="c1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def status(code, text="", **headers):
    return lambda body: web.Response(status=code, text=text, headers=headers)


class Script:
    """A server that gives these answers in turn, and its last one for good."""

    def __init__(self, *answers, models=("m",), delay=0.0):
        self.answers, self.models, self.delay = list(answers), models, delay
        self.asked, self.keys, self.now, self.most = [], [], 0, 0

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.delay)
        self.now -= 1
        return (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(body)

    async def list_models(self, request):
        if self.models is None:
            return web.Response(status=404)
        return web.json_response({"data": [{"id": name} for name in self.models]})


def play(scenario, *scripts, urls=(), **served):
    """Run `scenario(model)` against servers with these scripts and, before them, these urls."""

    async def whole():
        async with contextlib.AsyncExitStack() as stack:
            addresses = list(urls)
            for script in scripts:
                app = web.Application()
                app.router.add_post("/v1/chat/completions", script.complete)
                app.router.add_get("/v1/models", script.list_models)
                server = await stack.enter_async_context(TestServer(app))
                addresses.append(f"http://127.0.0.1:{server.port}/v1")
            model = Completions(ServedModel(tuple(addresses), "m", **{"timeout": 5.0, **served}))
            try:
                return await scenario(model)
            finally:
                await model.close()

    return asyncio.run(whole())


def team_of(model, task=None, sampling=None, own=None, agents=("main",)):
    return EndpointTeam({"base": model}, dict.fromkeys(agents, "base"), task or Task("Who?"), sampling, own)


def dead_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def test_one_turn_asks_and_reads():
    async def scenario(model):
        team = team_of(model, sampling=Sampling(0.5, 0.9, 64))
        action = await team["main"].act(ASK)
        assert team.actions == [action]
        return action

    script = Script(says("Ada", usage=(11, 3)))
    action = play(scenario, script)
    assert script.asked == [{"model": "m", "messages": ASK, "temperature": 0.5, "top_p": 0.9, "max_tokens": 64}]
    assert script.keys == [None]
    expected = Action("main", text="Ada", turns=1, prompt_tokens=11, response_tokens=3)
    assert action == expected


def test_turns_go_on_from_what_was_said_and_count_tokens():
    async def scenario(model):
        async with team_of(model)["main"].converse(ASK) as talk:
            await talk.turn()
            talk.observe("more")
            return await talk.turn()

    script = Script(says("one", usage=(5, 2)), says("two", end="length", usage=(20, 4)))
    action = play(scenario, script)
    assert script.asked[1]["messages"] == [
        *ASK,
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "more"},
    ]
    assert (action.text, action.turns, action.prompt_tokens, action.response_tokens) == ("two", 2, 5, 6)
    assert action.truncated and action.spoken is None


def test_unknown_usage_stays_unknown():
    async def scenario(model):
        async with team_of(model)["main"].converse(ASK) as talk:
            await talk.turn()
            return await talk.turn()

    action = play(scenario, Script(says("one", usage=None), says("two", usage=(9, 4))))
    assert (action.prompt_tokens, action.response_tokens) == (None, None)


def test_calls_that_the_server_read():
    calls = [call("search", '{"query": "Ada"}', "c7"), call("search", {"query": "Bob"}, "c8")]

    async def scenario(model):
        async with team_of(model)["main"].converse(ASK, TOOLS) as talk:
            first = (await talk.turn()).spoken
            text, kind = talk.action.text, read_turn(talk.action).kind
            for i, made in enumerate(first.calls):
                talk.observe(f"found {i}", role="tool", call=made)
            await talk.turn()
            return first, text, kind, talk.action

    script = Script(says(None, end="tool_calls", calls=calls), says("<result>x</result>"))
    spoken, text, kind, action = play(scenario, script)
    assert spoken.calls == [ToolCall("search", {"query": "Ada"}, "c7"), ToolCall("search", {"query": "Bob"}, "c8")]
    assert not spoken.broken and kind == "calls"
    assert '<tool_call>\n{"name": "search", "arguments": {"query": "Ada"}}\n</tool_call>' in text
    assert script.asked[0]["tools"] == TOOLS and script.asked[0]["tool_choice"] == "auto"
    assert script.asked[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "found 0", "name": "search", "tool_call_id": "c7"},
        {"role": "tool", "content": "found 1", "name": "search", "tool_call_id": "c8"},
    ]
    assert read_turn(action).result == "x"  # no call in the second turn


@pytest.mark.parametrize("calls, choice", [("text", "none"), ("server", "auto")])
def test_calls_in_the_text_are_read_too(calls, choice):
    text = 'so\n<tool_call>\n{"name": "search", "arguments": {"query": "Ada"}}\n</tool_call>'

    async def scenario(model):
        async with team_of(model)["main"].converse(ASK, TOOLS) as talk:
            spoken = (await talk.turn()).spoken
            talk.observe("found", role="tool", call=spoken.calls[0])
            await talk.turn()
            return spoken

    script = Script(says(text), says("done"))
    spoken = play(scenario, script, calls=calls)
    assert (spoken.calls, spoken.content) == ([ToolCall("search", {"query": "Ada"})], "so")
    assert script.asked[0]["tool_choice"] == choice
    assert script.asked[1]["messages"][1:] == [
        {"role": "assistant", "content": text},
        {"role": "tool", "content": "found", "name": "search"},
    ]


@pytest.mark.parametrize(
    "entry, calls, broken",
    [
        (call("f", ""), [ToolCall("f", {}, "c1")], False),
        (call("f", "[1]"), [ToolCall("f", None, "c1")], False),
        (call("f", "{"), [ToolCall("f", None, "c1")], False),
        (call(None, "{}"), [], True),
        ({"id": "x"}, [], True),
        ("f", [], True),
    ],
)
def test_odd_calls_of_a_server(entry, calls, broken):
    spoken = server_calls("", [entry])
    assert (spoken.calls, spoken.broken) == (calls, broken)


def test_seeds_are_trainings_and_differ_by_call():
    task = Task("Who?", index=7, session=2)

    async def scenario(model):
        team = team_of(model, task, Sampling(seed=3), agents=("main", "sub"))
        async with team["main"].converse(ASK) as talk:
            await talk.turn()
            await talk.turn()
        async with team["sub"].converse(ASK, path="main/turn.0/call.1/sub") as talk:
            await talk.turn()
        await team["sub"].act(ASK)

    script = Script(says("x"))
    play(scenario, script)
    paths = ["main.0/turn.0", "main.0/turn.1", "main/turn.0/call.1/sub/turn.0", "sub.1/turn.0"]
    assert [b["seed"] for b in script.asked] == [call_seed(3, index=7, session=2, step=0, path=p) for p in paths]


def test_an_agent_may_sample_its_own_way():
    async def scenario(model):
        team = team_of(model, own={"b": Sampling(0.0, max_tokens=9)}, agents=("a", "b"))
        await team["a"].act(ASK)
        await team["b"].act(ASK)

    script = Script(says("x"))
    play(scenario, script)
    assert [(b["temperature"], b.get("max_tokens")) for b in script.asked] == [(1.0, None), (0.0, 9)]


# -- outages


def one(model):
    return team_of(model)["main"].act(ASK)


@pytest.mark.parametrize(
    "bad", [status(500, "oops"), status(429, "slow down"), lambda body: web.Response(text="<html>")]
)
def test_what_may_pass_is_tried_again(bad):
    script = Script(bad, bad, says("Ada"))
    assert play(one, script).text == "Ada"
    assert len(script.asked) == 3


def test_another_server_takes_over():
    script = Script(says("Ada"))

    async def scenario(model):
        texts = [(await one(model)).text for _ in range(4)]
        return texts, model.retries

    texts, retries = play(scenario, script, urls=[dead_url()])
    assert texts == ["Ada"] * 4
    assert retries == 1  # the dead one rests


def test_a_dead_server_fails_the_session_and_scores_nothing():
    with pytest.raises(SessionFailed, match="no completion after 3 attempts") as error:
        play(one, urls=[dead_url()], attempts=3)
    assert error.value.reason == "server"


@pytest.mark.parametrize("code", [400, 401, 404])
def test_a_refusal_is_not_repeated_and_tells_no_key(code, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    script = Script(status(code, f"no: {KEY}"))
    with pytest.raises(SessionFailed, match=f"status {code}") as error:
        play(one, script, api_key_env="THE_KEY")
    assert script.keys == [f"Bearer {KEY}"]
    assert KEY not in str(error.value) and error.value.reason == "server"


def test_a_missing_key_is_said(monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    with pytest.raises(SessionFailed, match="environment variable THE_KEY is not set"):
        play(one, Script(says("x")), api_key_env="THE_KEY")


def test_a_slow_server_is_given_up():
    with pytest.raises(SessionFailed, match=r"no answer within 0.05 s"):
        play(one, Script(says("x"), delay=0.3), timeout=0.05, attempts=2)


FULL = status(400, "This model's maximum context length is 64 tokens. However, you requested 99 tokens")


def test_a_first_prompt_that_does_not_fit_fails_the_session():
    script = Script(FULL)
    with pytest.raises(PromptTooLong, match="maximum context length"):
        play(one, script)
    assert len(script.asked) == 1


def room(body):
    """A context of 64 tokens in which the messages take 40."""
    return FULL(body) if body.get("max_tokens", 0) > 24 else says("Ada", end="length", usage=(40, 24))(body)


def test_an_answer_that_does_not_fit_is_cut_to_what_the_context_leaves():
    async def scenario(model):
        team = team_of(model, sampling=Sampling(max_tokens=50))
        return await team["main"].act(ASK), team.calls

    script = Script(room)
    action, (answered,) = play(scenario, script)
    assert (action.text, action.truncated, action.response_tokens) == ("Ada", True, 24)
    assert [body.get("max_tokens") for body in script.asked] == [50, None]
    assert script.asked[1] == {name: value for name, value in script.asked[0].items() if name != "max_tokens"}
    assert answered.tries == 2


def test_messages_that_do_not_fit_are_asked_for_once_more_and_never_again():
    script = Script(FULL)
    with pytest.raises(PromptTooLong, match="maximum context length"):
        play(lambda model: team_of(model, sampling=Sampling(max_tokens=50))["main"].act(ASK), script)
    assert [body.get("max_tokens") for body in script.asked] == [50, None]


def test_a_later_turn_that_does_not_fit_says_nothing_more():
    async def scenario(model):
        async with team_of(model)["main"].converse(ASK, TOOLS) as talk:
            await talk.turn()
            talk.observe("much " * 99)
            await talk.turn()
            await talk.turn()
            return talk.action

    script = Script(says("one"), FULL)
    action = play(scenario, script)
    assert (action.text, action.truncated, action.turns, action.spoken) == ("", True, 1, None)
    assert read_turn(action).kind == "silent"
    assert len(script.asked) == 2  # a full context stays full


def test_calls_in_flight_are_limited():
    async def scenario(model):
        team = team_of(model, agents=("a",))
        await asyncio.gather(*(team["a"].act(ASK) for _ in range(12)))

    script = Script(says("x"), delay=0.02)
    play(scenario, script, concurrency=3)
    assert (script.most, len(script.asked)) == (3, 12)


# -- before anything is asked


def test_check_looks_at_every_server():
    async def scenario(model):
        return await asyncio.to_thread(model.check)

    assert re.fullmatch(r"http://127.0.0.1:\d+/v1", play(scenario, Script(says("x"))))
    assert "status 404 on /models" in play(scenario, Script(says("x"), models=None))
    with pytest.raises(Unanswered, match="the model 'm' is asked for, it has other"):
        play(scenario, Script(says("x"), models=["other"]))
    with pytest.raises(Unanswered, match="ClientConnectorError"):
        play(scenario, Script(says("x")), urls=[dead_url()])


@pytest.mark.parametrize(
    "given, says",
    [
        ({"urls": ()}, "urls is empty"),
        ({"urls": ("localhost:8000",)}, "'localhost:8000' is no address"),
        ({"calls": "hermes"}, "choose server or text"),
        ({"concurrency": 0}, "concurrency is 0; it must be above 0"),
    ],
)
def test_impossible_settings_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        ServedModel(**{"urls": ("http://h/v1",), "model": "m", **given})


# -- sessions


class Echo(Workflow):
    agents = ("main",)

    async def run(self, task, team):
        action = await team["main"].act([{"role": "user", "content": task.question}])
        return Outcome(reward=0.25, correct=float(action.text == task.answer))


def test_bundled_workflows_play_on_an_endpoint():
    def reply(body):
        asked = body["messages"][-1]["content"]
        return says("7" if asked.startswith("S:") else "y")(body)

    async def scenario(model):
        workflow = load_workflow("arithmetic")()
        team = team_of(model, agents=workflow.agents)
        return await play_session(workflow, Task("3+4", answer="7"), team)

    session = play(scenario, Script(reply))
    assert (session.success, session.failed, session.outcome.answer) == (1.0, "", "7")


def test_a_main_agent_delegates_on_an_endpoint():
    def reply(body):
        said = body["messages"]
        if "You carry out one task" in said[0]["content"]:
            return says("<result>Ada wrote it</result>")(body)
        if len(said) == 1:
            delegation = call("delegate", json.dumps({"agent": "helper", "task": "who wrote it"}))
            return says(None, calls=[delegation])(body)
        return says(f"<result>{said[-1]['content'].split()[0]}</result>")(body)

    async def scenario(model):
        cls = load_workflow("delegate")
        workflow = cls(cls.Settings(subs={"helper": {}}))
        team = team_of(model, agents=workflow.agents)
        return await play_session(workflow, Task("Who wrote it?", answer="Ada"), team), team.actions

    session, actions = play(scenario, Script(reply))
    assert (session.success, session.outcome.answer) == (1.0, "Ada")
    assert [(a.agent_id, a.turns) for a in actions] == [("main", 2), ("helper", 1)]


def test_failed_sessions_have_no_success_and_others_go_on():
    answers = {"a": "A", "b": None, "c": "x"}

    def reply(body):
        said = answers[body["messages"][0]["content"]]
        return status(400, "no")(body) if said is None else says(said)(body)

    async def scenario(model):
        ended = []
        tasks = [Task(q, answer=q.upper(), index=i) for i, q in enumerate(answers)]
        await play_sessions(Echo(), tasks, lambda task: team_of(model, task), ended.append, concurrency=2)
        return sorted(ended, key=lambda session: session.task.index)

    ended = play(scenario, Script(reply))
    assert [(s.success, s.failed) for s in ended] == [(1.0, ""), (None, "server"), (0.0, "")]


def test_many_failures_in_a_row_end_it():
    async def scenario(model):
        ended = []
        tasks = (Task("q", index=i) for i in range(1000))
        with pytest.raises(TooManyFailed, match="5 sessions in a row failed; the last: server"):
            await play_sessions(Echo(), tasks, lambda t: team_of(model, t), ended.append, concurrency=2, give_up=5)
        return ended

    assert 5 <= len(play(scenario, Script(status(400, "no")))) <= 7


def test_long_prompts_are_the_datas_doing():
    async def scenario(model):
        ended = []
        tasks = [Task("q", index=i) for i in range(9)]
        await play_sessions(Echo(), tasks, lambda t: team_of(model, t), ended.append, concurrency=2, give_up=3)
        return [s.failed for s in ended]

    assert play(scenario, Script(FULL)) == ["prompt_too_long"] * 9


def test_a_session_over_its_time_failed_and_a_bug_is_raised():
    async def slow(model):
        return await play_session(Echo(), Task("q"), team_of(model), timeout=0.05)

    session = play(slow, Script(says("x"), delay=0.5))
    assert (session.success, session.failed) == (None, "timeout")

    class Bug(Echo):
        async def run(self, task, team):
            raise KeyError("mine")

    async def buggy(model):
        await play_sessions(Bug(), [Task("q")] * 3, lambda t: team_of(model, t), print, concurrency=2)

    with pytest.raises(WorkflowBug, match=r"Bug raised KeyError in session 0 .*'mine'") as raised:
        play(buggy, Script(says("x")))
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_time_out_inside_a_session_is_a_bug_of_it():
    class Impatient(Echo):
        async def run(self, task, team):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)

    async def scenario(model):
        return await play_session(Impatient(), Task("q"), team_of(model), timeout=60)

    with pytest.raises(WorkflowBug, match="TimeoutError"):
        play(scenario, Script(says("x")))
