"""The main agent that delegates: every way a trajectory goes and ends, what each agent sees, and what each earns."""

import ast
import asyncio
import json
from pathlib import Path
from typing import get_args

import pytest

import verl_drmas
from verl_drmas.rewards.judge import Judgement
from verl_drmas.workflows import SessionFailed, Task, load_workflow
from verl_drmas.workflows.delegate import ENDS, LAST_TURN, MAIN_ROLE, SUB_ROLE, Delegate
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.tools import Tool, ToolError, ToolOutage
from verl_drmas.workflows.turns import Kind

TASK = Task(question="Who leads Arvo's town?", answer="Bela", index=3, session=1, step=5)
BARE = "just talk"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def ask(task, agent="finder", **more):
    return call("delegate", agent=agent, task=task, **more)


def result(text):
    return f"<result>{text}</result>"


class Say(Tool):
    """Answers by a function, or a coroutine, of its arguments; notes the arguments."""

    description, parameters = "Says it.", {"type": "object", "properties": {"text": {"type": "string"}}}

    def __init__(self, says=lambda text="": text.upper(), name="say"):
        self.name, self.says, self.asked = name, says, []

    async def call(self, arguments):
        self.asked.append(arguments)
        said = self.says(**arguments)
        return await said if asyncio.iscoroutine(said) else said

    def check(self):
        return f"{self.name} works"

    def report(self):
        return {"calls": float(len(self.asked))}


class Score:
    """A judge that scores by what a result says; None is a failure, `wait` never ends."""

    def __init__(self, **scores):
        self.scores, self.asked, self.cancelled = scores, [], 0

    async def score(self, request):
        self.asked.append(request)
        if request.result == "wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return Judgement(self.scores.get(request.result), "", 0.5)

    def check(self):
        return "the judge works"

    def report(self):
        return {"calls": float(len(self.asked)), "failures": 0.0}


class Watched(ScriptedTeam):
    """Notes with what activations are opened, and counts a token a word."""

    def __init__(self, scripts):
        super().__init__(scripts)
        self.opened = []

    def __getitem__(self, agent_id):
        agent = super().__getitem__(agent_id)
        if not hasattr(agent, "watched"):
            agent.watched, converse = True, agent.converse

            def watched(messages, tools=(), path=""):
                self.opened.append((agent_id, [tool["function"]["name"] for tool in tools], path))
                return converse(messages, tools, path)

            agent.converse, agent.count_tokens = watched, lambda text: len(text.split())
        return agent


def make(tools=None, judge=None, **settings):
    tools = {"say": Say()} if tools is None else tools
    settings = {"subs": {"finder": {"tools": list(tools)}}, "main_tools": list(tools)} | settings
    return Delegate(Delegate.Settings(tools={name: {} for name in tools}, **settings), tools=tools, judge=judge)


def play(workflow, scripts, task=TASK):
    """The outcome, the team, and that nothing is left running."""
    team = Watched(scripts)

    async def session():
        try:
            return await workflow.run(task, team)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    try:
        return asyncio.run(session()), team
    except SessionFailed as failure:
        failure.team = team
        raise


def rewards(workflow, outcome, team):
    return [round(workflow.reward(action, outcome), 12) for action in team.actions]


def last(team, agent_id):
    """What an agent saw before it spoke last."""
    return [messages for name, messages in team.seen if name == agent_id][-1]


# -- the main agent's own way ------------------------------------------------------------------------------------------


def test_a_result_at_once():
    workflow = make()
    outcome, team = play(workflow, {"main": [result("the Bela!")]})
    assert (outcome.reward, outcome.correct, outcome.answer) == (1.0, 1.0, "the Bela!")
    assert team.opened == [("main", ["say", "delegate"], "main")]
    (request,) = team.seen[0][1]
    assert request == {"role": "user", "content": f"{MAIN_ROLE}\n\nQuestion: {TASK.question}"}
    assert outcome.metrics["delegations"] == outcome.metrics["calls"] == outcome.metrics["depth"] == 0.0
    assert "judge_failed" not in outcome.metrics and "sub_format" not in outcome.metrics


def test_calls_and_then_a_result():
    outcome, team = play(make(), {"main": [call("say", text="a"), f"Hm. {call('say', text='b')}", result("Bela")]})
    assert [(m["role"], m.get("name"), m["content"]) for m in last(team, "main")[1:]] == [
        ("assistant", None, call("say", text="a")),
        ("tool", "say", "A"),
        ("assistant", None, f"Hm. {call('say', text='b')}"),
        ("tool", "say", "B"),
    ]
    assert (outcome.reward, outcome.metrics["calls"], outcome.metrics["main_turns"]) == (1.0, 2.0, 3.0)
    assert len(team.actions) == 1 and team.actions[0].turns == 3


@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_calls_of_a_turn_run_at_the_same_time_and_are_observed_in_their_order(first):
    async def wait(text):
        arrived.append(text)
        if len(arrived) == 3:
            events[first].set()
        await events[text].wait()
        ended.append(text)
        for event in events.values():  # whoever is first lets the others go
            event.set()
        return text

    arrived, ended, events = [], [], {text: asyncio.Event() for text in "abc"}
    said = "".join(call("say", text=text) for text in "abc")
    _, team = play(make({"say": Say(wait)}), {"main": [said, result("Bela")]})
    assert arrived == ["a", "b", "c"] and ended[0] == first
    assert [m["content"] for m in last(team, "main")[2:]] == ["a", "b", "c"]


def test_calls_beyond_max_parallel_are_not_carried_out_and_told():
    tool = Say()
    said = "".join(call("say", text=text) for text in "abc")
    outcome, team = play(make({"say": tool}, max_parallel=2), {"main": [said, result("Bela")]})
    assert [asked["text"] for asked in tool.asked] == ["a", "b"]
    assert [m["content"] for m in last(team, "main")[2:]] == ["A", "B", "Not carried out: at most 2 calls in one turn."]
    assert (outcome.metrics["calls"], outcome.metrics["calls_beyond_limit"]) == (2.0, 1.0)
    assert outcome.reward == 1.0  # the harness's refusal is no broken format


def refuse(text):
    raise ToolError(f"{text} isn't allowed")


@pytest.mark.parametrize(
    "said, told",
    [
        (call("sing"), "There is no tool 'sing'; the tools are: say, delegate."),
        (call("say", text="x"), "x isn't allowed"),
        (ask("look", agent="founder"), "There is no agent 'founder' to delegate to; the agents are: finder."),
        (ask("look", agent=["finder"]), "There is no agent ['finder'] to delegate to; the agents are: finder."),
        (ask("look", agent={}), "There is no agent {} to delegate to; the agents are: finder."),
        (ask(" "), "A delegation needs a task, as text."),
        (ask(7), "A delegation needs a task, as text."),
        (call("delegate"), "A delegation needs a task, as text."),
        (ask("look", context={"a": 1}), "The context of a delegation must be text."),
    ],
)
def test_a_wrong_call_is_told_and_costs_nothing(said, told):
    outcome, team = play(make({"say": Say(refuse)}), {"main": [said, result("Bela")]})
    assert [m["content"] for m in last(team, "main")[2:]] == [told]
    assert (outcome.metrics["call_errors"], outcome.metrics["calls"], outcome.metrics["delegations"]) == (1.0, 1.0, 0.0)
    assert outcome.reward == 1.0 and len(team.actions) == 1


def test_the_last_turn_is_announced_and_may_not_call():
    workflow = make(max_turns=3)
    outcome, team = play(workflow, {"main": [call("say", text="a"), call("say", text="b"), result("Bela")]})
    told = [m["content"] for m in last(team, "main") if m["role"] == "user"]
    assert told[1:] == [LAST_TURN] and last(team, "main")[-1]["content"] == LAST_TURN
    assert outcome.reward == 1.0  # the harness's own message breaks no format
    tool = Say()
    workflow = make({"say": tool}, max_turns=2)
    outcome, team = play(workflow, {"main": [call("say", text="a"), call("say", text="b")]})
    assert [asked["text"] for asked in tool.asked] == ["a"]
    assert (outcome.reward, outcome.answer, outcome.metrics["ends/last_turn"]) == (0.0, None, 1.0)
    assert not team.actions[0].valid


@pytest.mark.parametrize(
    "said, why",
    [
        ("Bela", "neither"),
        (call("say", text="a") + result("Bela"), "both"),
        ("<tool_call>say a</tool_call>", "broken_call"),
        ('<tool_call>{"name": "say", "arguments": "a"}</tool_call>', "broken_call"),
        (result("Bela") * 2, "broken_result"),
        ("", "silent"),
    ],
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_turn_that_breaks_the_format_ends_the_trajectory(said, why, before):
    tool = Say()
    workflow = make({"say": tool})
    outcome, team = play(workflow, {"main": [*[call("say", text="a")] * before, said]})
    assert (outcome.reward, outcome.correct, outcome.answer) == (0.0, 0.0, None)
    assert team.actions[0].reward_parts == {"format": 0.0, "correct": 0.0}
    assert not team.actions[0].valid and rewards(workflow, outcome, team) == [0.0]
    assert len(tool.asked) == before
    ends = {name: value for name, value in outcome.metrics.items() if name.startswith("ends/")}
    assert ends == {f"ends/{end}": float(end == why) for end in ENDS}


def test_every_end_is_counted_in_every_session():
    assert set(ENDS) == {*get_args(Kind), "last_turn"} - {"calls"}
    good, bad = (play(make(), {"main": [said]})[0].metrics for said in (result("Bela"), "Bela"))
    assert Delegate.summarise([good, bad])["ends/neither"] == 0.5  # and not 1, of the sessions that have one


def test_a_turn_cut_by_its_limit_is_told_from_one_that_says_nothing():
    class Cuts(Watched):
        def __getitem__(self, agent_id):
            agent = super().__getitem__(agent_id)
            agent.reply = self.cut
            return agent

        def cut(self, messages):
            self.actions[-1].truncated = True
            return "The ans"

    team = Cuts({"main": []})
    outcome = asyncio.run(make().run(TASK, team))
    assert outcome.metrics["ends/cut"] == 1.0 and outcome.reward == 0.0


def test_an_answer_is_right_however_the_prompt_is_worded(monkeypatch):
    for role in ("<result><result></result>{}", "", "</result> <tool_call> <result>Ezra</result>"):
        monkeypatch.setattr("verl_drmas.workflows.delegate.MAIN_ROLE", role)
        monkeypatch.setattr("verl_drmas.workflows.delegate.SUB_ROLE", role)
        scripts = {"main": [ask("look"), result("Bela")], "finder": [result("found")]}
        workflow = make()
        outcome, team = play(workflow, scripts)
        assert (outcome.reward, outcome.answer) == (1.0, "Bela") and all(a.valid for a in team.actions)


# -- delegations -------------------------------------------------------------------------------------------------------


def test_a_sub_works_in_a_fresh_context_and_its_result_comes_back_word_for_word():
    found = "Bela,  who   leads\nÖstby <b>since</b> 1990."
    scripts = {
        "main": [ask("Who leads Östby?", context="Arvo lives in Östby."), result("Bela")],
        "finder": [call("say", text="leads"), result(found)],
    }
    outcome, team = play(make(), scripts)
    assert team.opened == [
        ("main", ["say", "delegate"], "main"),
        ("finder", ["say"], "main/turn.0/call.0/finder"),
    ]
    first, second = (messages for name, messages in team.seen if name == "finder")
    content = f"{SUB_ROLE}\n\nTask: Who leads Östby?\n\nContext: Arvo lives in Östby."
    assert first == [{"role": "user", "content": content}]
    assert second[1:] == [
        {"role": "assistant", "content": call("say", text="leads")},
        {"role": "tool", "name": "say", "content": "LEADS"},
    ]
    assert TASK.question not in json.dumps([first, second])
    assert last(team, "main")[2:] == [{"role": "tool", "name": "delegate", "content": found}]
    assert [(a.agent_id, a.valid, a.parsed, a.turns) for a in team.actions] == [
        ("main", True, "Bela", 2),
        ("finder", True, found, 2),
    ]
    assert outcome.metrics["delegations"] == outcome.metrics["delegations/finder"] == outcome.metrics["depth"] == 1.0
    assert outcome.metrics["ends/result"] == 2.0 and outcome.metrics["sub_format"] == 1.0


@pytest.mark.parametrize("context", [{}, {"context": ""}, {"context": " "}, {"context": None}])
def test_without_context_none_is_told(context):
    _, team = play(make(), {"main": [ask("look", **context), result("Bela")], "finder": [result("x")]})
    assert last(team, "finder")[0]["content"] == f"{SUB_ROLE}\n\nTask: look"


def test_two_delegations_to_one_kind_share_nothing():
    scripts = {"main": [ask("first"), ask("second"), result("Bela")], "finder": [result("one"), result("two")]}
    outcome, team = play(make(), scripts)
    assert "first" not in json.dumps(last(team, "finder")) and len(last(team, "finder")) == 1
    assert [path for _, _, path in team.opened[1:]] == ["main/turn.0/call.0/finder", "main/turn.1/call.0/finder"]
    assert outcome.metrics["delegations/finder"] == 2.0


def test_the_only_kind_needs_no_name_and_several_do():
    _, team = play(make(), {"main": [call("delegate", task="look"), result("Bela")], "finder": [result("x")]})
    assert [a.agent_id for a in team.actions] == ["main", "finder"]
    workflow = make(subs={"finder": {}, "reader": {}})
    outcome, team = play(workflow, {"main": [call("delegate", task="look"), result("Bela")]})
    told = "There is no agent None to delegate to; the agents are: finder, reader."
    assert last(team, "main")[-1]["content"] == told and outcome.metrics["call_errors"] == 1.0


def test_several_kinds_with_tools_of_their_own_at_the_same_time():
    async def meet(text=""):
        here.append(text)
        if len(here) == 2:
            together.set()
        await asyncio.wait_for(together.wait(), 2)
        return text

    here, together = [], asyncio.Event()
    tools = {"look": Say(meet, "look"), "read": Say(meet, "read")}
    workflow = make(
        tools,
        main_tools=[],
        subs={
            "finder": {"tools": ["look"], "description": "finds names"},
            "reader": {"tools": ["read"], "description": "reads pages", "max_turns": 2},
        },
    )
    scripts = {
        "main": [ask("find") + ask("read", agent="reader"), result("Bela")],
        "finder": [call("look", text="a"), call("read"), result("found")],
        "reader": [call("read", text="b"), result("page")],
    }
    outcome, team = play(workflow, scripts)
    assert [opened[:2] for opened in team.opened] == [
        ("main", ["delegate"]),
        ("finder", ["look"]),
        ("reader", ["read"]),
    ]
    assert [m["content"] for m in last(team, "main")[2:]] == ["found", "page"]
    assert last(team, "finder")[-1]["content"] == "There is no tool 'read'; the tools are: look."
    assert last(team, "reader")[-1]["content"] == LAST_TURN  # it has two turns, the finder six
    assert outcome.metrics["delegations/reader"] == 1.0 and outcome.metrics["delegations"] == 2.0


def test_what_the_main_agent_is_told_of_delegations():
    team = Watched({"main": [result("Bela")]})
    schemas = []
    agent = team["main"]
    converse = agent.converse
    agent.converse = lambda messages, tools=(), path="": (schemas.extend(tools), converse(messages, tools, path))[1]
    workflow = make(subs={"finder": {"description": "finds names"}, "reader": {}})
    asyncio.run(workflow.run(TASK, team))
    assert schemas[0] == workflow.tools["say"].schema
    parameters = schemas[1]["function"]["parameters"]
    assert parameters["properties"]["agent"]["enum"] == ["finder", "reader"]
    assert "finder: finds names; reader: carries out a task" in parameters["properties"]["agent"]["description"]
    assert parameters["required"] == ["agent", "task"] and "context" in parameters["properties"]


@pytest.mark.parametrize("bad", ["found", call("say") + result("found"), result(""), ""])
def test_a_sub_of_broken_format_gives_no_result(bad):
    judge = Score()
    workflow = make(judge=judge)
    outcome, team = play(workflow, {"main": [ask("look"), result("Bela")], "finder": [bad]})
    assert last(team, "main")[-1]["content"] == "The agent finder gave no result."
    assert rewards(workflow, outcome, team) == [1.0, 0.0]
    assert [a.valid for a in team.actions] == [True, False]
    assert judge.asked == [] and "judge_failed" not in outcome.metrics  # there was nothing to judge
    assert outcome.metrics["sub_format"] == 0.0 and outcome.metrics["main_format"] == 1.0


@pytest.mark.parametrize("words, limit, shown", [(5, 5, None), (9, 5, 4), (9, 1, 0), (9, None, None)])
def test_a_result_is_cut_to_its_budget_and_that_is_counted(words, limit, shown):
    found = " ".join(f"w{i}" for i in range(words))
    workflow = make(subs={"finder": {"result_tokens": limit}})
    outcome, team = play(workflow, {"main": [ask("look"), result("Bela")], "finder": [result(found)]})
    seen = last(team, "main")[-1]["content"]
    cut = (outcome.metrics["cut_results"], outcome.metrics["cut_tokens"])
    if shown is None:
        assert seen == found and cut == (0.0, 0.0)
    else:
        assert seen.split() == [*found.split()[:shown], "[...]"] and cut == (1.0, float(words - shown))
    assert team.actions[1].parsed == found  # the judge and the log have the whole of it


# -- nesting -----------------------------------------------------------------------------------------------------------

NESTED = {"subs": {"planner": {"subs": ["finder"]}, "finder": {"tools": ["say"]}}, "main_tools": []}


@pytest.mark.parametrize("slow", ["a", "b", None])
def test_paths_of_nested_delegations_are_the_same_whichever_ends_first(slow):
    async def late(text=""):
        await asyncio.sleep(0.02 if text == slow else 0)
        ended.append(text)
        return text

    def planner(messages):
        name = messages[0]["content"][-1]
        return result(name) if messages[-1]["content"] == "end" else ask(name, "finder")

    def finder(messages):
        name = messages[0]["content"][-1]
        return result("end") if messages[-1]["role"] == "tool" else call("say", text=name)

    def main(messages):
        return result("Bela") if len(messages) > 1 else ask("a", "planner") + ask("b", "planner")

    ended = []
    workflow = make({"say": Say(late)}, **NESTED, max_depth=2)
    outcome, team = play(workflow, {"main": main, "planner": planner, "finder": finder})
    assert sorted(path for _, _, path in team.opened) == [
        "main",
        "main/turn.0/call.0/planner",
        "main/turn.0/call.0/planner/turn.0/call.0/finder",
        "main/turn.0/call.1/planner",
        "main/turn.0/call.1/planner/turn.0/call.0/finder",
    ]
    assert ended == (["b", "a"] if slow == "a" else ["a", "b"])
    assert [m["content"] for m in last(team, "main")[2:]] == ["a", "b"]
    assert outcome.metrics["depth"] == 2.0 and outcome.metrics["delegations"] == 4.0
    assert rewards(workflow, outcome, team) == [1.0] * 5


def test_nobody_delegates_below_max_depth():
    scripts = {"main": [ask("plan", "planner"), result("Bela")], "planner": [ask("look", "finder"), result("x")]}
    outcome, team = play(make(**NESTED), scripts)
    assert team.opened[1][:2] == ("planner", [])
    assert outcome.metrics["ends/neither"] == 1.0  # without tools a call is mere text
    nested = NESTED | {"subs": {**NESTED["subs"], "planner": {"subs": ["finder"], "tools": ["say"]}}}
    outcome, team = play(make(**nested), scripts | {"main": scripts["main"], "planner": scripts["planner"]})
    assert team.opened[1][:2] == ("planner", ["say"])
    assert last(team, "planner")[-1]["content"] == "There is no tool 'delegate'; the tools are: say."


def test_the_greatest_depth_counts():
    scripts = {
        "main": [ask("plan", "planner"), ask("look"), result("Bela")],
        "planner": [ask("look"), result("x")],
        "finder": [result("y"), result("z")],
    }
    outcome, _ = play(make(**NESTED, max_depth=2), scripts)
    assert outcome.metrics["depth"] == 2.0 and outcome.metrics["delegations"] == 3.0


def test_a_sub_delegates_only_to_its_own():
    workflow = make(**NESTED, max_depth=2)
    scripts = {"main": [ask("plan", "planner"), result("Bela")], "planner": [ask("plan", "planner"), result("x")]}
    _, team = play(workflow, scripts)
    told = "There is no agent 'planner' to delegate to; the agents are: finder."
    assert last(team, "planner")[-1]["content"] == told


# -- faults ------------------------------------------------------------------------------------------------------------


def outage(text=""):
    raise ToolOutage("say", "503")


def test_an_outage_fails_the_session_after_the_others_came_to_their_end():
    async def slow(text=""):
        await asyncio.sleep(0.02)
        ended.append(text)
        return text

    ended, judge = [], Score()
    tools = {"say": Say(outage), "slow": Say(slow, "slow")}
    scripts = {
        "main": [ask("look"), call("say") + call("slow", text="a") + ask("look")],
        "finder": [result("wait"), call("slow", text="b"), result("found")],
    }
    with pytest.raises(SessionFailed, match="tool: say: 503") as failed:
        play(make(tools, judge), scripts)
    team = failed.value.team
    assert failed.value.reason == "tool" and sorted(ended) == ["a", "b"]
    assert [(a.agent_id, a.fault) for a in team.actions] == [("main", "say"), ("finder", None), ("finder", None)]
    assert [r.result for r in judge.asked] == ["wait", "found"] and judge.cancelled == 1


def test_an_outage_of_a_subs_tool_is_marked_on_the_sub():
    scripts = {"main": [ask("look") + ask("look")], "finder": [call("say"), result("found")]}
    with pytest.raises(SessionFailed, match="tool: say: 503") as failed:
        play(make({"say": Say(outage)}), scripts)
    assert [a.fault for a in failed.value.team.actions] == [None, "say", None]


def test_an_agents_own_outage_is_marked_where_a_sub_failed_before_it():
    scripts = {"main": [ask("look") + call("say")], "finder": [SessionFailed("server", "gone")]}
    with pytest.raises(SessionFailed, match="tool: say") as failed:
        play(make({"say": Say(outage)}), scripts)
    assert failed.value.team.actions[0].fault == "say"


def test_a_sub_that_cant_be_asked_fails_the_session():
    with pytest.raises(SessionFailed, match="server: gone") as failed:
        play(make(), {"main": [ask("look")], "finder": [SessionFailed("server", "gone")]})
    assert failed.value.reason == "server" and failed.value.team.actions[0].fault is None


def test_a_tools_own_bug_is_no_result():
    with pytest.raises(KeyError):
        play(make({"say": Say(lambda text="": {}["x"])}), {"main": [call("say")]})


def test_a_session_that_is_cancelled_leaves_nothing_running():
    async def session():
        judge, event = Score(), asyncio.Event()

        async def never(text=""):
            event.set()
            await asyncio.Event().wait()

        scripts = {"main": [ask("look"), ask("look") + call("say")], "finder": [result("wait"), call("say")]}
        running = asyncio.create_task(make({"say": Say(never)}, judge).run(TASK, Watched(scripts)))
        await event.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert judge.cancelled == 1 and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(session())


# -- rewards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c, e, sub", [(0, 0, 0.1), (0, 1, 0.6), (1, 0, 0.5), (1, 1, 1.0), (1, 0.5, 0.75)])
def test_the_papers_values(c, e, sub):
    workflow = make(judge=Score(found=e))
    scripts = {"main": [ask("look"), result("Bela" if c else "Ezra")], "finder": [result("found")]}
    outcome, team = play(workflow, scripts)
    assert rewards(workflow, outcome, team) == [1.0 if c else 0.1, sub]
    assert (outcome.correct, outcome.metrics["em"], outcome.metrics["judge_score"]) == (c, c, e)
    assert outcome.metrics["judge_failed"] == 0.0 and outcome.metrics["judge_seconds"] == 0.5
    assert team.actions[1].reward_parts == pytest.approx({"format": 0.1, "outcome": 0.4 * c, "judge": 0.5 * e})


def test_subs_earn_nothing_for_an_answer_of_broken_format():
    workflow = make(judge=Score(found=1))
    scripts = {"main": [ask("look"), result("Bela") * 2], "finder": [result("found")]}
    outcome, team = play(workflow, scripts)
    assert rewards(workflow, outcome, team) == [0.0, 0.6] and outcome.reward == 0.0


@pytest.mark.parametrize("c, sub", [(0, 0.2), (1, 1.0)])
def test_a_judge_that_fails_is_counted_and_no_judgement_of_0(c, sub):
    workflow = make(judge=Score(found=1))
    said = ask("look") + ask("look")
    scripts = {"main": [said, result("Bela" if c else "Ezra")], "finder": [result("found"), result("unjudged")]}
    outcome, team = play(workflow, scripts)
    judged = 1.0 if c else 0.6
    assert rewards(workflow, outcome, team) == [1.0 if c else 0.1, judged, sub]
    assert "judge" not in team.actions[2].reward_parts
    assert (outcome.metrics["judge_failed"], outcome.metrics["judge_score"]) == (1.0, 1.0)
    assert outcome.reward == (1.0 if c else 0.1)  # an outage of the judge is no wrong answer


def test_judgements_find_their_own_trajectory_whichever_ends_first():
    async def late(text=""):
        await asyncio.sleep(0.02 if text == "slow" else 0)
        return text

    def finder(messages):
        name = messages[0]["content"].rpartition(" ")[2]
        return result(name) if messages[-1]["role"] == "tool" else call("say", text=name)

    workflow = make({"say": Say(late)}, Score(slow=0.0, quick=1.0))
    outcome, team = play(workflow, {"main": [ask("slow") + ask("quick"), result("Bela")], "finder": finder})
    assert [a.parsed for a in team.actions] == ["Bela", "slow", "quick"]
    assert rewards(workflow, outcome, team) == [1.0, 0.5, 1.0]


def test_a_trajectory_that_is_not_judged_takes_no_others_judgement():
    workflow = make(judge=Score(found=1.0, poor=0.0))
    said = [result("found"), "broken", result("poor")]
    outcome, team = play(workflow, {"main": [ask("look") * 3, result("Bela")], "finder": said})
    assert rewards(workflow, outcome, team) == [1.0, 1.0, 0.0, 0.5]


@pytest.mark.parametrize("facts", [["Bela", "Östby"], ("Bela", "Östby")])
def test_what_a_judge_is_asked(facts):
    judge = Score(found=1)
    task = Task(question="Q?", answer=["Bela", "Béla"], extra={"facts": facts})
    play(make(judge=judge), {"main": [ask("look", context="near"), result("Bela")], "finder": [result("found")]}, task)
    (asked,) = judge.asked
    assert (asked.question, asked.subtask, asked.context, asked.result) == ("Q?", "look", "near", "found")
    assert (asked.gold, asked.facts) == (["Bela", "Béla"], ("Bela", "Östby"))


def test_facts_as_other_readers_of_parquet_give_them():
    import numpy as np

    for facts, wanted in ((np.array(["a", "b"], object), ("a", "b")), ("ab", ("ab",)), (None, ()), ([], ())):
        judge = Score(found=1)
        scripts = {"main": [ask("look"), result("Bela")], "finder": [result("found")]}
        play(make(judge=judge), scripts, Task(question="Q?", answer="Bela", extra={"facts": facts}))
        assert judge.asked[0].facts == wanted


@pytest.mark.parametrize(
    "kind, found, subs", [("none", "x", 1.0), ("contains", "Bela of X", 1.0), ("contains", "x", 0.5)]
)
def test_judges_that_need_no_server(kind, found, subs):
    workflow = Delegate(Delegate.Settings(subs={"finder": {}}, judge={"kind": kind}))
    outcome, team = play(workflow, {"main": [ask("look"), result("Bela")], "finder": [result(found)]})
    assert rewards(workflow, outcome, team) == [1.0, subs]
    assert ("judge_failed" in outcome.metrics) == (kind != "none")


def test_weights_are_settings():
    workflow = make(judge=Score(found=0.5), main={"format": 0.5, "correct": 1.5}, sub={"format": 0.0, "judge": 2.0})
    scripts = {"main": [ask("look"), result("Bela")], "finder": [result("found")]}
    outcome, team = play(workflow, scripts)
    assert rewards(workflow, outcome, team) == [2.0, 1.4] and outcome.reward == 2.0 and outcome.correct == 1.0


@pytest.mark.parametrize("style, correct", [("squad", 1.0), ("wide", 0.0)])
def test_answers_are_compared_as_the_settings_say(style, correct):
    task = Task(question="How many?", answer="30")
    outcome, _ = play(make(normalisation=style), {"main": [result("3.0")]}, task)
    assert (outcome.correct, outcome.metrics["em"], outcome.metrics["f1"]) == (correct,) * 3


def test_a_sub_that_answers_at_once_is_scored_like_any_other():
    """A record of two messages, the request and whatever was said, is no perfect form by itself."""
    for said, reward in ((result("found"), 1.0), ("found", 0.0), ("<result>found", 0.0)):
        workflow = make(judge=Score(found=1))
        outcome, team = play(workflow, {"main": [ask("look"), result("Bela")], "finder": [said]})
        assert rewards(workflow, outcome, team)[1] == reward


def test_the_harnesss_own_messages_break_no_subs_format():
    workflow = make(subs={"finder": {"tools": ["say"], "max_turns": 3, "result_tokens": 1}}, judge=Score(found=1))
    turns = [call("say", text="a") * 5, call("sing"), result("found")]
    outcome, team = play(workflow, {"main": [ask("look"), result("Bela")], "finder": turns})
    seen = [m["content"] for m in last(team, "finder")]
    assert LAST_TURN in seen and "Not carried out: at most 4 calls in one turn." in seen
    assert rewards(workflow, outcome, team) == [1.0, 1.0]


# -- what follows from the settings ------------------------------------------------------------------------------------


def test_agents_follow_from_the_settings():
    workflow = make(subs={"finder": {}, "reader": {}}, max_turns=5, max_parallel=3)
    assert workflow.agents == ("main", "finder", "reader") and workflow.aligned == ("finder", "reader")
    assert workflow.activations() == {"main": (1, 1), "finder": (0, 12), "reader": (0, 12)}
    assert Delegate.agents == ("main",) and make(**NESTED, max_depth=2).activations() == {}
    assert load_workflow("delegate") is Delegate


def test_no_more_activations_than_told():
    workflow = make(max_turns=3, max_parallel=2)
    scripts = {"main": lambda messages: ask("look") * 9, "finder": lambda messages: result("x")}
    _, team = play(workflow, scripts)
    assert sum(a.agent_id == "finder" for a in team.actions) == workflow.activations()["finder"][1] == 4


def test_a_single_agent_with_all_tools():
    workflow = make(subs={}, max_depth=0)
    assert (workflow.agents, workflow.aligned, workflow.activations()) == (("main",), (), {"main": (1, 1)})
    outcome, team = play(workflow, {"main": [ask("look"), call("say", text="a"), result("Ezra")]})
    assert team.opened == [("main", ["say"], "main")]
    assert [m["content"] for m in last(team, "main") if m["role"] == "tool"] == [
        "There is no tool 'delegate'; the tools are: say.",
        "A",
    ]
    assert rewards(workflow, outcome, team) == [0.1]


def test_preflight_and_report():
    workflow = Delegate(
        Delegate.Settings(tools={"say": {}, "look": {}}, main_tools=["say"]),
        tools={"say": Say(), "look": Say(name="look")},
        judge=Score(),
    )
    assert workflow.preflight() == "say works; look works; the judge works"
    play(workflow, {"main": [call("say"), result("Bela")]})
    assert workflow.report() == {"say/calls": 1.0, "look/calls": 0.0, "judge/calls": 0.0, "judge/failures": 0.0}
    bare = make({}, subs={"finder": {}})
    assert bare.preflight() == "" and bare.report() == {}

    class Broken(Say):
        def check(self):
            raise ConnectionError("tools.say.url: nobody answers")

    with pytest.raises(ConnectionError, match="nobody answers"):
        make({"say": Broken()}).preflight()


def test_tools_of_verls_registry_are_brought():
    settings = {"tools": {"look": {"kind": "verl"}, "calculator": {}}, "subs": {"finder": {"tools": ["look"]}}}
    workflow = Delegate(Delegate.Settings(**settings, main_tools=["look", "calculator"]))
    assert list(workflow.tools) == ["calculator"] and "calculator" in workflow.preflight()
    for brought in ({}, {"peek": Say(name="peek")}):
        with pytest.raises(
            ValueError, match=r"workflow\.tools\.look: .*registry has (no tool|peek); name it in actor_"
        ):
            workflow.bring(brought)
    workflow.bring({"look": Say(name="look"), "other": Say(name="other")})
    assert list(workflow.tools) == ["calculator", "look"]
    scripts = {"main": [call("look", text="a") + ask("look"), result("Bela")], "finder": [result("x")]}
    _, team = play(workflow, scripts)
    assert [opened[:2] for opened in team.opened] == [
        ("main", ["look", "calculator", "delegate"]),
        ("finder", ["look"]),
    ]
    assert last(team, "main")[2]["content"] == "A"
    make().bring({"other": Say(name="other")})  # nobody asked for it


# -- dates -------------------------------------------------------------------------------------------------------------

CLOCKS = {"time.time", "datetime.now", "datetime.today", "date.today", "datetime.utcnow", "time.localtime"}


def test_nothing_depends_on_todays_date():
    root, found = Path(verl_drmas.__file__).parent, []
    for path in [
        *(root / "workflows").rglob("*.py"),
        *(root / "rewards").rglob("*.py"),
        *(root / "advantage").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node).removeprefix("datetime.") in CLOCKS:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
