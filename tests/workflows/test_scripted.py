"""The back end for tests, and the contract between workflows and back ends that it stands for."""

import asyncio

import pytest

from verl_drmas.workflows import Action, Outcome, SessionFailed, Workflow
from verl_drmas.workflows.scripted import ScriptedTeam

ASK = [{"role": "user", "content": "question"}]


def test_one_turn():
    team = ScriptedTeam({"a": ["one", "two"], "b": ["three"]})

    async def play():
        return [await team[name].act(ASK) for name in ("a", "b", "a")]

    actions = asyncio.run(play())
    assert [(x.agent_id, x.nth, x.text, x.turns) for x in actions] == [
        ("a", 0, "one", 1),
        ("b", 0, "three", 1),
        ("a", 1, "two", 1),
    ]
    assert team.actions == actions
    assert team.seen == [("a", ASK), ("b", ASK), ("a", ASK)]


def test_several_turns_are_one_activation():
    team = ScriptedTeam({"main": ["search", "answer"]})

    async def play():
        async with team["main"].converse(ASK) as conversation:
            first = await conversation.turn()
            assert (first.text, first.turns) == ("search", 1)
            conversation.observe("found")
            conversation.observe("more", role="tool")
            return first, await conversation.turn()

    first, last = asyncio.run(play())
    assert first is last and (last.text, last.turns) == ("answer", 2)
    assert len(team.actions) == 1
    assert team.seen[1][1] == [
        *ASK,
        {"role": "assistant", "content": "search"},
        {"role": "user", "content": "found"},
        {"role": "tool", "content": "more"},
    ]


def test_activations_stand_in_the_order_they_began_and_the_callers_messages_stay():
    team = ScriptedTeam({"outer": ["o"], "inner": ["i"]})
    messages = [dict(m) for m in ASK]

    async def play():
        async with team["outer"].converse(messages) as conversation:
            await team["inner"].act(messages)
            await conversation.turn()

    asyncio.run(play())
    assert [a.agent_id for a in team.actions] == ["outer", "inner"]
    assert messages == ASK


def test_a_script_may_be_a_function_of_what_the_agent_sees():
    team = ScriptedTeam({"a": lambda messages: messages[-1]["content"].upper()})
    assert asyncio.run(team["a"].act(ASK)).text == "QUESTION"


def test_parallel_calls_are_told_apart():
    team = ScriptedTeam({"a": lambda messages: messages[0]["content"]})

    async def play():
        return await asyncio.gather(*(team["a"].act([{"role": "user", "content": str(i)}]) for i in range(3)))

    assert [(a.nth, a.text) for a in asyncio.run(play())] == [(0, "0"), (1, "1"), (2, "2")]


def test_a_reply_that_is_an_exception_is_raised():
    team = ScriptedTeam({"a": [SessionFailed("server", "gone")], "b": []})
    with pytest.raises(SessionFailed, match="server: gone"):
        asyncio.run(team["a"].act(ASK))
    with pytest.raises(SessionFailed, match="no reply left for agent 'b'") as caught:
        asyncio.run(team["b"].act(ASK))
    assert caught.value.reason == "script"
    with pytest.raises(KeyError):
        team["c"]


@pytest.mark.parametrize(("text", "empty"), [("", True), (" \n\t", True), ("x", False)])
def test_an_action_knows_when_it_is_empty(text, empty):
    assert Action("a", text=text).empty is empty


def test_the_default_reward_is_the_outcome_plus_the_activations_own_parts():
    class Plain(Workflow):
        agents = ("a",)

        async def run(self, task, team):
            return Outcome(reward=1.0)

    action = Action("a", reward_parts={"format": 0.25, "length": -0.5})
    assert Plain().reward(action, Outcome(reward=1.0)) == 0.75
    assert Plain().activations() == {} and Plain.setting_names() == ()


def test_a_metric_is_averaged_over_the_sessions_that_have_it():
    sessions = [{"rounds": 1.0, "hit": 1.0}, {"rounds": 3.0}, {}]
    assert Workflow.summarise(sessions) == {"rounds": 2.0, "hit": 1.0}
    assert Workflow.summarise([]) == {}
