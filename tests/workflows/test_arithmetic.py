"""The CPU job's team: a verifier's task is balanced by construction, and the control's rewards are nobody's merit."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_drmas.workflows import SessionFailed, Task, scripted
from verl_drmas.workflows.arithmetic import Arithmetic, ArithmeticRival, near_miss
from verl_drmas.workflows.scripted import ScriptedTeam


def play(solution="7", verdict="y", *, rival=None, index=0, session=0, step=0, question="3+4", answer="7", **settings):
    """Outcome, the agents' actions, the proposal the verifier saw, and the workflow; `rival` adds a third agent."""
    cls, scripts = (Arithmetic, {}) if rival is None else (ArithmeticRival, {"rival": [rival]})
    workflow = cls(cls.Settings(**settings))
    team = ScriptedTeam({"solver": [solution], "verifier": [verdict], **scripts})
    task = Task(question=question, answer=answer, index=index, session=session, step=step)
    outcome = asyncio.run(workflow.run(task, team))
    *asked, (_, shown) = team.seen
    assert [agent for agent, _ in team.seen] == list(cls.agents)
    assert all(messages == [{"role": "user", "content": f"S:{question}="}] for _, messages in asked)
    head, tail = f"V:{question}=", "?"
    text = shown[0]["content"]
    assert text.startswith(head) and text.endswith(tail)
    return outcome, *team.actions, text[len(head) : -len(tail)], workflow


SOLUTIONS = st.sampled_from(["7", "8", "17", "07", "", "x", "7 ", "-7", "7y", "²", "\n"])


@settings(deadline=None)  # two busy cores
@given(
    st.lists(SOLUTIONS, min_size=8, max_size=8), st.sampled_from(["7", "0"]), st.integers(0, 1000), st.integers(0, 1000)
)
def test_a_group_of_eight_holds_four_right_proposals_whatever_the_solver_says(solutions, truth, index, step):
    shown = [play(text, answer=truth, index=index, session=s, step=step)[3] for s, text in enumerate(solutions)]
    assert sum(proposal == truth for proposal in shown) == 4


@settings(deadline=None)  # two busy cores
@given(
    st.lists(st.tuples(SOLUTIONS, SOLUTIONS), min_size=8, max_size=8),
    st.sampled_from(["7", "0"]),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_a_group_with_a_rival_is_as_balanced(said, truth, index, step):
    shown = [
        play(text, rival=other, answer=truth, index=index, session=s, step=step)[-2]
        for s, (text, other) in enumerate(said)
    ]
    assert sum(proposal == truth for proposal in shown) == 4


@settings(deadline=None)  # two busy cores
@given(st.integers(0, 1000))
def test_validation_with_one_session_a_prompt_is_balanced_over_the_prompts(step):
    shown = [play("7", index=index, step=step)[3] for index in range(16)]
    assert sum(proposal == "7" for proposal in shown) == 8


@settings(deadline=None)  # two busy cores
@given(st.integers(0, 10_000), st.integers())
def test_a_near_miss_is_close_never_the_truth_and_never_negative(truth, seed):
    miss = near_miss(truth, random.Random(seed))
    assert miss.isdigit() and 1 <= abs(int(miss) - truth) <= 10


def test_every_near_miss_occurs():
    draw = random.Random(0)
    assert {int(near_miss(50, draw)) for _ in range(200)} == {40, 48, 49, 51, 52, 60}


@pytest.mark.parametrize(("session", "solution", "kept"), [(0, "7", True), (1, "9", True), (0, "9", False)])
def test_the_solvers_own_answer_is_shown_where_its_class_is_wanted(session, solution, kept):
    assert (play(solution, session=session)[3] == solution) is kept


@pytest.mark.parametrize(("solution", "shown"), [("7", "7"), ("9", "9"), ("", "0"), ("no", "0")])
@pytest.mark.parametrize("session", [0, 1])
def test_without_balance_the_solvers_own_answer_is_shown(solution, shown, session):
    assert play(solution, session=session, balanced=False)[3] == shown


@pytest.mark.parametrize(
    ("solution", "valid", "correct"),
    [("7", True, 1.0), (" 7\n", True, 1.0), ("8", True, 0.0), ("", False, 0.0), ("seven", False, 0.0)],
)
def test_the_solver(solution, valid, correct):
    outcome, action, _, _, workflow = play(solution)
    assert (action.valid, outcome.correct, outcome.reward) == (valid, correct, correct)
    assert workflow.reward(action, outcome) == correct == outcome.metrics["solver_success"]


@pytest.mark.parametrize(
    ("session", "verdict", "valid", "hit"),
    [
        (0, "y", True, 1.0),  # a right proposal is shown
        (0, "n", True, 0.0),
        (1, "y", True, 0.0),  # a wrong one
        (1, " n\n", True, 1.0),
        (0, "", False, 0.0),
        (1, "", False, 0.0),  # silence is no rejection
        (1, "Y", False, 0.0),
        (1, "nn", False, 0.0),
    ],
)
def test_the_verifier_answers_for_its_verdict_alone(session, verdict, valid, hit):
    outcome, _, action, _, workflow = play("8", verdict, session=session)
    assert action.valid is valid
    assert workflow.reward(action, outcome) == hit
    assert outcome.metrics == {
        "solver_success": 0.0,
        "approved": float(verdict == "y"),
        f"verifier_accuracy_{'wrong' if session else 'right'}": hit,
    }


@pytest.mark.parametrize(("verdict", "accuracy"), [("y", 0.5), ("n", 0.5), ("?", 0.0)])
def test_one_word_for_everything_is_worth_half_over_a_group(verdict, accuracy):
    sessions = [play("7", verdict, session=s)[0].metrics for s in range(8)]
    assert Arithmetic.summarise(sessions)["verifier_balanced_accuracy"] == accuracy


def test_a_session_repeats_itself():
    shown = {play("7", session=1, step=5)[3] for _ in range(5)}
    assert len(shown) == 1
    assert len({play("7", index=i, session=1, step=0)[3] for i in range(0, 60, 2)}) > 1


@pytest.mark.parametrize("agent", ["solver", "verifier"])
def test_a_failing_call_fails_the_session(agent):
    scripts = {"solver": ["7"], "verifier": ["y"]} | {agent: [SessionFailed("server")]}
    with pytest.raises(SessionFailed, match="server"):
        asyncio.run(Arithmetic().run(Task(question="3+4", answer="7"), ScriptedTeam(scripts)))


def test_one_turn_each():
    assert Arithmetic().activations() == {"solver": (1, 1), "verifier": (1, 1)}


# -- with a rival ------------------------------------------------------------------------------------------------------

FAR = ("30", "40")  # no near misses of 7: only an agent can have said them


@pytest.mark.parametrize(
    ("session", "solution", "rival", "shown"),
    [
        (1, "7", FAR[0], {FAR[0]}),  # a wrong one is wanted, and only the rival is wrong
        (1, FAR[0], "7", {FAR[0]}),  # only the solver is
        (1, FAR[0], FAR[1], set(FAR)),
        (1, "7", "7", {"5", "6", "8", "9", "17"}),  # neither is: a near miss
        (1, "7", "x", {"5", "6", "8", "9", "17"}),  # what is no number isn't shown
        (0, *FAR, {"7"}),
    ],
)
def test_an_answer_of_the_wanted_class_is_shown_whoever_gave_it(session, solution, rival, shown):
    seen = {play(solution, rival=rival, session=session, step=2 * i)[-2] for i in range(40)}
    assert seen == shown


def test_without_balance_the_rivals_answer_is_shown_as_often():
    seen = [play(FAR[0], rival=FAR[1], step=i, balanced=False)[-2] for i in range(100)]
    assert 30 < seen.count(FAR[1]) < 70 and set(seen) == set(FAR)


@pytest.mark.parametrize(("solution", "rival"), [("7", "8"), ("8", "7"), ("x", "7"), ("7", "x")])
def test_the_teams_outcome_is_the_solvers_and_each_answers_for_itself(solution, rival):
    outcome, first, other, _, _, workflow = play(solution, rival=rival)
    scores = [workflow.reward(action, outcome) for action in (first, other)]
    assert scores == [float(text == "7") for text in (solution, rival)]
    assert [action.valid for action in (first, other)] == [text != "x" for text in (solution, rival)]
    assert (outcome.reward, outcome.correct, outcome.answer) == (scores[0], scores[0], solution)
    assert (outcome.metrics["solver_success"], outcome.metrics["rival_success"]) == tuple(scores)


@pytest.mark.parametrize(("verdict", "accuracy"), [("y", 0.5), ("n", 0.5), ("?", 0.0)])
@pytest.mark.parametrize(("solution", "rival"), [("7", "7"), ("8", "8"), ("7", "8")])
def test_one_word_for_everything_is_worth_half_with_a_rival_too(verdict, accuracy, solution, rival):
    sessions = [play(solution, verdict, rival=rival, session=s)[0].metrics for s in range(8)]
    assert ArithmeticRival.summarise(sessions)["verifier_balanced_accuracy"] == accuracy


def test_the_rival_is_asked_while_the_solver_thinks(monkeypatch):
    speak, asked = scripted._ScriptedConversation.turn, []

    async def turn(conversation):
        asked.append(conversation.action.agent_id)
        while len(asked) < 2:
            await asyncio.sleep(0)
        return await speak(conversation)

    monkeypatch.setattr(scripted._ScriptedConversation, "turn", turn)
    team = ScriptedTeam({"solver": ["7"], "rival": ["8"], "verifier": ["y"]})
    session = ArithmeticRival().run(Task(question="3+4", answer="7"), team)

    async def in_time():
        return await asyncio.wait_for(session, timeout=10)

    assert asyncio.run(in_time()).correct == 1.0
    assert asked == ["solver", "rival", "verifier"]


def test_a_failing_rival_fails_the_session():
    team = ScriptedTeam({"solver": ["7"], "rival": [SessionFailed("server")], "verifier": ["y"]})
    with pytest.raises(SessionFailed, match="server"):
        asyncio.run(ArithmeticRival().run(Task(question="3+4", answer="7"), team))


def test_a_rival_adds_one_turn():
    assert ArithmeticRival().activations() == {"solver": (1, 1), "rival": (1, 1), "verifier": (1, 1)}
