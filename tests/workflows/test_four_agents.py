"""Four agents: every path through a session, what each sees, what is invalid, and what a session is measured by."""

import asyncio

import pytest

from verl_drmas.workflows import SessionFailed, Task
from verl_drmas.workflows.four_agents import CRITIC, REFINER, FourAgents
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.solver_verifier import SOLVER, VERIFIER

TASK = Task(question="What is 2 + 2?", answer="4")
RIGHT, WRONG = r"Two and two: \boxed{4}", r"I guess \boxed{5}"
FINE, REMARK = "I find no mistake.", "The sum is off by one."
APPROVE, REJECT = "Fine. <verdict>approve</verdict>", "Wrong sum. <verdict>reject</verdict>"


def play(solver, critic, refiner, verifier=(), task=TASK, **settings):
    """Outcome and team of one session, and the workflow."""
    workflow = FourAgents(FourAgents.Settings(**settings))
    team = ScriptedTeam({"solver": solver, "critic": critic, "refiner": refiner, "verifier": verifier})
    return asyncio.run(workflow.run(task, team)), team, workflow


@pytest.mark.parametrize(
    ("rounds", "solver", "refiner", "verifier", "order", "answer", "reward"),
    [
        (1, [WRONG], [], [], "s", "5", 0.0),  # nobody could act on remarks or a verdict
        (2, [WRONG], [RIGHT], [APPROVE], "scrv", "4", 1.0),
        (2, [RIGHT], [WRONG], [APPROVE], "scrv", "5", 0.0),  # the refiner's answer counts, not the draft's
        (2, [WRONG, RIGHT], [WRONG], [REJECT], "scrvs", "4", 1.0),
        (2, [RIGHT, WRONG], [RIGHT], [REJECT], "scrvs", "5", 0.0),  # a rejected solution's successor counts
        (3, [WRONG, RIGHT], [WRONG, RIGHT], [REJECT, APPROVE], "scrvscrv", "4", 1.0),
        (3, [WRONG, WRONG, RIGHT], [WRONG, WRONG], [REJECT, REJECT], "scrvscrvs", "4", 1.0),
    ],
)
def test_every_path(rounds, solver, refiner, verifier, order, answer, reward):
    outcome, team, workflow = play(solver, [REMARK] * len(refiner), refiner, verifier, max_rounds=rounds)
    assert "".join(a.agent_id[0] for a in team.actions) == order
    assert (outcome.answer, outcome.reward, outcome.correct) == (answer, reward, reward)
    assert outcome.metrics["rounds"] == len(solver)
    assert all(workflow.reward(a, outcome) == reward for a in team.actions)  # one outcome for all
    for agent_id, (fewest, most) in workflow.activations().items():
        assert fewest <= sum(a.agent_id == agent_id for a in team.actions) <= most


def test_activations():
    assert FourAgents(FourAgents.Settings(max_rounds=2)).activations() == {
        "solver": (1, 2),
        "critic": (1, 1),
        "refiner": (1, 1),
        "verifier": (1, 1),
    }
    alone = FourAgents(FourAgents.Settings(max_rounds=1)).activations()
    assert alone == {"solver": (1, 1), "critic": (0, 0), "refiner": (0, 0), "verifier": (0, 0)}


def test_everybody_sees_the_problem_and_all_that_was_said_before():
    _, team, _ = play([WRONG, RIGHT], [REMARK, FINE], [WRONG + " still", RIGHT + "."], [REJECT, APPROVE], max_rounds=3)
    said = [WRONG, REMARK, WRONG + " still", REJECT, RIGHT, FINE, RIGHT + ".", APPROVE]
    roles = {"solver": SOLVER, "critic": CRITIC, "refiner": REFINER, "verifier": VERIFIER}
    for turn, (agent_id, messages) in enumerate(team.seen):
        text = messages[0]["content"]
        assert text.startswith(roles[agent_id]) and TASK.question in text
        assert [part for part in said[:turn] if part not in text] == []
    assert "Remarks by the critic:\n" + REMARK in team.seen[2][1][0]["content"]
    assert len(team.seen) == len(said)


def test_thinking_is_nobody_elses():
    _, team, _ = play([f"<think>secret</think>{WRONG}"], [f"<think>hidden</think>{REMARK}"], [RIGHT], [APPROVE])
    shown = "".join(messages[0]["content"] for _, messages in team.seen)
    assert REMARK in shown and "secret" not in shown and "hidden" not in shown


@pytest.mark.parametrize("text", ["", "No box here.", r"\boxed{4", r"<think>\boxed{4}"])
def test_solutions_without_a_box_are_invalid(text):
    outcome, team, _ = play([text], [FINE], [text], [APPROVE])
    assert [a.valid for a in team.actions] == [False, True, False, True]
    assert (outcome.reward, outcome.answer) == (0.0, None)


@pytest.mark.parametrize("text", ["", "  \n", "<think>it is", "<think>all in here</think>"])
def test_remarks_that_say_nothing_are_invalid_and_the_refiner_goes_on(text):
    outcome, team, _ = play([WRONG], [text], [RIGHT], [APPROVE])
    assert [a.valid for a in team.actions] == [True, False, True, True]
    assert outcome.reward == 1.0


def test_remarks_cut_at_their_limit_are_invalid(monkeypatch):
    def cut(self, agent_id):
        agent = original(self, agent_id)
        if agent_id == "critic":
            act = agent.act

            async def truncated(messages):
                action = await act(messages)
                action.truncated = True
                return action

            agent.act = truncated
        return agent

    original = ScriptedTeam.__getitem__
    monkeypatch.setattr(ScriptedTeam, "__getitem__", cut)
    _, team, _ = play([WRONG], [REMARK], [RIGHT], [APPROVE])
    assert [a.valid for a in team.actions] == [True, False, True, True]


@pytest.mark.parametrize(("on_invalid", "order"), [("reject", "scrvs"), ("approve", "scrv")])
def test_an_invalid_verdict_counts_as_the_setting_says(on_invalid, order):
    _, team, _ = play([RIGHT] * 2, [FINE], [RIGHT], ["I agree."], on_invalid=on_invalid)
    assert "".join(a.agent_id[0] for a in team.actions) == order
    assert team.actions[3].valid is False


def test_a_verdict_reward_is_the_verifiers_own():
    outcome, team, workflow = play([RIGHT] * 2, [FINE], [WRONG], [REJECT], verdict_reward=0.5)
    rewards = [(a.agent_id, workflow.reward(a, outcome)) for a in team.actions]
    assert rewards[3] == ("verifier", 0.5)
    assert {r for agent_id, r in rewards if agent_id != "verifier"} == {1.0}


@pytest.mark.parametrize(
    ("solver", "refiner", "expected"),
    [
        ([WRONG, WRONG, RIGHT], [WRONG, RIGHT], {"mended": 0.5}),
        ([RIGHT, WRONG, WRONG], [WRONG, RIGHT], {"mended": 1.0, "spoilt": 1.0}),
        ([RIGHT, RIGHT, RIGHT], [RIGHT, RIGHT], {"spoilt": 0.0}),
    ],
)
def test_what_the_refiner_made_of_the_drafts(solver, refiner, expected):
    metrics = play(solver, [FINE, FINE], refiner, [REJECT, REJECT], max_rounds=3)[0].metrics
    assert {name: metrics[name] for name in ("mended", "spoilt") if name in metrics} == expected
    assert metrics["solver_success"] == (solver[-1] == RIGHT)
    assert metrics["refiner_success"] == (refiner[-1] == RIGHT)
    assert metrics["first_success"] == (refiner[0] == RIGHT)
    # The verdicts were on the refined solutions.
    for judged, text in (("right", RIGHT), ("wrong", WRONG)):
        assert metrics.get(f"verifier_accuracy_{judged}") == ((judged == "wrong") if text in refiner else None)
    assert metrics["approved"] == 0.0


def test_a_refiner_that_never_spoke_has_no_numbers():
    metrics = play([RIGHT], [], [], max_rounds=1)[0].metrics
    assert metrics == {"rounds": 1.0, "solver_success": 1.0, "first_success": 1.0}


@pytest.mark.parametrize("failing", ["solver", "critic", "refiner", "verifier"])
def test_a_failing_call_fails_the_session(failing):
    failure = SessionFailed("server", "gone")
    scripts = {"solver": [WRONG], "critic": [FINE], "refiner": [RIGHT], "verifier": [APPROVE]}
    with pytest.raises(SessionFailed) as caught:
        play(**scripts | {failing: [failure]})
    assert caught.value is failure


def test_a_task_without_a_gold_is_an_error():
    with pytest.raises(ValueError, match="every row needs one"):
        play([RIGHT], [FINE], [RIGHT], [APPROVE], task=Task(question="?"))
