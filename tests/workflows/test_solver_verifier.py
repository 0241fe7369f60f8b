"""Solver and verifier: every path through a session, verdicts, rewards and what a session is measured by."""

import asyncio

import pytest

from verl_drmas.workflows import SessionFailed, Task
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.solver_verifier import SOLVER, VERIFIER, SolverVerifier

TASK = Task(question="What is 2 + 2?", answer="4")
RIGHT, WRONG = r"Two and two: \boxed{4}", r"I guess \boxed{5}"
APPROVE, REJECT = "Fine. <verdict>approve</verdict>", "Wrong sum. <verdict>reject</verdict>"


def play(solver, verifier=(), task=TASK, **settings):
    """Outcome and team of one session, and the workflow."""
    workflow = SolverVerifier(SolverVerifier.Settings(**settings))
    team = ScriptedTeam({"solver": solver, "verifier": verifier})
    return asyncio.run(workflow.run(task, team)), team, workflow


def rewards(outcome, team, workflow):
    return [(a.agent_id, workflow.reward(a, outcome)) for a in team.actions]


@pytest.mark.parametrize(
    ("rounds", "solver", "verifier", "order", "answer", "reward"),
    [
        (2, [RIGHT], [APPROVE], "sv", "4", 1.0),  # approved at once
        (2, [WRONG], [APPROVE], "sv", "5", 0.0),  # approved though wrong
        (2, [WRONG, RIGHT], [REJECT], "svs", "4", 1.0),  # revised; nobody could act on a second verdict
        (2, [RIGHT, WRONG], [REJECT], "svs", "5", 0.0),  # the last text is the answer, also when it was better before
        (1, [RIGHT], [], "s", "4", 1.0),
        (3, [WRONG, WRONG, RIGHT], [REJECT, REJECT], "svsvs", "4", 1.0),
        (3, [WRONG, RIGHT], [REJECT, APPROVE], "svsv", "4", 1.0),
        (4, [RIGHT], [APPROVE], "sv", "4", 1.0),
    ],
)
def test_every_path(rounds, solver, verifier, order, answer, reward):
    outcome, team, workflow = play(solver, verifier, max_rounds=rounds)
    assert "".join(a.agent_id[0] for a in team.actions) == order
    assert (outcome.answer, outcome.reward, outcome.correct) == (answer, reward, reward)
    assert outcome.metrics["rounds"] == len(solver)
    assert all(r == reward for _, r in rewards(outcome, team, workflow))  # the paper's shared outcome
    for agent_id, (fewest, most) in workflow.activations().items():
        assert fewest <= sum(a.agent_id == agent_id for a in team.actions) <= most


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [(1, {"solver": (1, 1), "verifier": (0, 0)}), (2, {"solver": (1, 2), "verifier": (1, 1)})],
)
def test_activations(rounds, expected):
    assert SolverVerifier(SolverVerifier.Settings(max_rounds=rounds)).activations() == expected


def test_rounds_below_one_are_refused():
    with pytest.raises(ValueError, match="max_rounds is 0; it must be at least 1"):
        SolverVerifier.Settings(max_rounds=0)


def test_both_agents_see_the_whole_context():
    solver, verifier = [WRONG, WRONG + " again", RIGHT], [REJECT, "No. <verdict>reject</verdict>"]
    _, team, _ = play(solver, verifier, max_rounds=3)
    said = [solver[0], verifier[0], solver[1], verifier[1], solver[2]]
    for turn, (agent_id, messages) in enumerate(team.seen):
        (message,) = messages
        assert message["role"] == "user"
        text = message["content"]
        assert text.startswith(SOLVER if agent_id == "solver" else VERIFIER)
        places = [text.index(TASK.question), *(text.index(part) for part in said[:turn])]
        assert places == sorted(places) and len(set(places)) == len(places)
        assert not any(part in text.replace(said[turn - 1], "") for part in said[turn:])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I approve.",
        "<verdict>fine</verdict>",
        "<verdict>approve",
        "<verdict>approve</verdict><verdict>approve</verdict>",
    ],
)
@pytest.mark.parametrize(("on_invalid", "order"), [("reject", "svs"), ("approve", "sv")])
def test_an_invalid_verdict_is_an_invalid_action_and_counts_as_the_setting_says(text, on_invalid, order):
    outcome, team, _ = play([RIGHT, RIGHT], [text], on_invalid=on_invalid)
    assert "".join(a.agent_id[0] for a in team.actions) == order
    check = team.actions[1]
    assert check.valid is False and check.parsed is None
    assert outcome.metrics["approved"] == (on_invalid == "approve")


def test_a_known_verdict_is_a_valid_action_whatever_invalid_ones_count_as():
    _, team, _ = play([RIGHT, RIGHT], [REJECT], on_invalid="approve")
    assert [a.valid for a in team.actions] == [True, True, True]
    assert team.actions[1].parsed == "reject"


@pytest.mark.parametrize("text", ["", "The answer is 4.", r"\boxed{4", r"<think>\boxed{4}"])
def test_a_solution_without_a_box_is_invalid_and_wrong(text):
    outcome, team, _ = play([text], [APPROVE])
    assert (team.actions[0].valid, team.actions[0].parsed) == (False, None)
    assert (outcome.reward, outcome.answer) == (0.0, None)


def test_a_wrong_solution_is_still_a_valid_action():
    _, team, _ = play([WRONG], [APPROVE])
    assert (team.actions[0].valid, team.actions[0].parsed) == (True, "5")


def test_agents_that_say_nothing_end_the_session_at_its_last_round():
    outcome, team, _ = play(["", ""], [""])
    assert [a.empty for a in team.actions] == [True, True, True]
    assert not any(a.valid for a in team.actions)
    assert (outcome.reward, outcome.answer) == (0.0, None)


@pytest.mark.parametrize("failing", ["solver", "verifier"])
def test_a_failing_call_fails_the_session(failing):
    failure = SessionFailed("server", "gone")
    scripts = {"solver": [WRONG, failure] if failing == "solver" else [WRONG], "verifier": [REJECT]}
    if failing == "verifier":
        scripts["verifier"] = [failure]
    with pytest.raises(SessionFailed) as caught:
        play(scripts["solver"], scripts["verifier"])
    assert caught.value is failure


@pytest.mark.parametrize("answer", [None, "", " "])
def test_a_task_without_a_gold_is_an_error_and_no_wrong_answer(answer):
    with pytest.raises(ValueError, match="every row needs one"):
        play([RIGHT], [APPROVE], task=Task(question="?", answer=answer))


def test_a_verdict_reward_is_each_verifier_turns_own():
    # The first verdict is right (a wrong solution), the second is not (a right one): one reward each, whatever the
    # outcome of the session; the solver keeps the outcome.
    outcome, team, workflow = play([WRONG, RIGHT, RIGHT], [REJECT, REJECT], max_rounds=3, verdict_reward=0.5)
    assert rewards(outcome, team, workflow) == [
        ("solver", 1.0),
        ("verifier", 0.5),
        ("solver", 1.0),
        ("verifier", 0.0),
        ("solver", 1.0),
    ]


@pytest.mark.parametrize(
    ("solution", "verdict", "expected"),
    [(RIGHT, APPROVE, 0.5), (WRONG, APPROVE, 0.0), (WRONG, REJECT, 0.5), (RIGHT, REJECT, 0.0), (WRONG, "hm", 0.0)],
)
def test_a_verdict_is_rewarded_when_it_is_right_and_valid(solution, verdict, expected):
    outcome, team, workflow = play([solution, WRONG], [verdict], verdict_reward=0.5)
    assert rewards(outcome, team, workflow)[1] == ("verifier", expected)


def test_without_a_verdict_reward_actions_have_no_parts_of_their_own():
    _, team, _ = play([WRONG, RIGHT], [REJECT])
    assert not any(a.reward_parts for a in team.actions)


def test_metrics_of_a_session():
    outcome, _, _ = play([WRONG, RIGHT, RIGHT], [REJECT, APPROVE], max_rounds=3)
    assert outcome.metrics == {
        "rounds": 2.0,
        "solver_success": 1.0,
        "first_success": 0.0,
        "approved": 1.0,
        "verifier_accuracy_right": 1.0,
        "verifier_accuracy_wrong": 1.0,
    }


def test_what_did_not_happen_is_absent_and_not_zero():
    outcome, _, _ = play([RIGHT], max_rounds=1)
    assert outcome.metrics == {"rounds": 1.0, "solver_success": 1.0, "first_success": 1.0}
    outcome, _, _ = play([RIGHT], [APPROVE])
    assert outcome.metrics["verifier_accuracy_right"] == 1.0
    assert "verifier_accuracy_wrong" not in outcome.metrics


@pytest.mark.parametrize("verdict", [APPROVE, REJECT, "no verdict at all"])
@pytest.mark.parametrize("solutions", [[RIGHT, WRONG], [RIGHT, WRONG, WRONG, WRONG]])
def test_a_verifier_with_one_word_for_everything_has_balanced_accuracy_one_half(verdict, solutions):
    sessions = [play([solution, solution], [verdict])[0].metrics for solution in solutions]
    assert SolverVerifier.summarise(sessions)["verifier_balanced_accuracy"] == 0.5


def test_balanced_accuracy_is_the_mean_of_the_two_classes_and_needs_both():
    right = [play([RIGHT, RIGHT], [verdict])[0].metrics for verdict in (APPROVE, APPROVE, APPROVE, REJECT)]
    wrong = [play([WRONG, WRONG], [REJECT])[0].metrics]
    numbers = SolverVerifier.summarise(right + wrong)
    assert numbers["verifier_accuracy_right"] == 0.75 and numbers["verifier_accuracy_wrong"] == 1.0
    assert numbers["verifier_balanced_accuracy"] == 0.875
    assert numbers["solver_success"] == 0.8
    for lone in (right, wrong):
        assert "verifier_balanced_accuracy" not in SolverVerifier.summarise(lone)
