"""Verifier, search and answer agent: every path through a session, who sees what, rewards, and a retriever's faults."""

import asyncio

import pytest

from verl_drmas.retrieval import Hit, IndexProblem, Passage, QueryRejected, RetrievalOutage, Retriever
from verl_drmas.workflows import SessionFailed, Task
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.search_hierarchy import SearchHierarchy

TASK = Task(question="Who is the rival of Ada's mentor?", answer=["Cleo", "Cleopatra"])
YES, NO = "Enough. <verdict>yes</verdict>", "The mentor is unknown. <verdict>no</verdict>"
FIRST, SECOND = "<search>Ada</search>", "<search>Ben</search>"
RIGHT, WRONG = "<answer>Cleo</answer>", "<answer>Ben</answer>"
LIBRARY = {
    "Ada": Passage("1", "Ada", "Ada's mentor is Ben."),
    "Ben": Passage("2", "Ben", "Ben's rival is Cleo."),
}


class Library(Retriever):
    """Answers with the passage of that title; an exception in its place is raised."""

    def __init__(self, library=LIBRARY):
        self.library, self.asked = library, []

    async def search(self, query, k):
        self.asked.append((query, k))
        found = self.library.get(query)
        if isinstance(found, Exception):
            raise found
        return [Hit(found, 1.0)] if found else []


def play(verifier=(), search=(), answer=(), task=TASK, library=LIBRARY, **settings):
    """Outcome, team and workflow of one session."""
    settings = SearchHierarchy.Settings(retrieval={"local": "unused"}, **settings)
    workflow = SearchHierarchy(settings, retriever=Library(library))
    team = ScriptedTeam({"verifier": verifier, "search": search, "answer": answer})
    return asyncio.run(workflow.run(task, team)), team, workflow


@pytest.mark.parametrize(
    ("settings", "verifier", "search", "answer", "order", "reward"),
    [
        ({}, [NO, NO, YES], [FIRST, SECOND], [RIGHT], "vsvsva", 1.0),
        ({}, [NO, YES], [FIRST], [WRONG], "vsva", 0.0),
        ({}, [YES], [], [RIGHT], "va", 1.0),  # without a search
        ({}, [NO, NO, NO], [FIRST, SECOND, SECOND], [RIGHT], "vsvsvsa", 1.0),  # the last turn must answer
        ({"max_turns": 1}, [], [], [RIGHT], "a", 1.0),
        ({"max_turns": 2}, [NO], [FIRST], [RIGHT], "vsa", 1.0),
        ({"strict_last_turn": True}, [NO, NO, NO, NO], [FIRST, SECOND, SECOND], [], "vsvsvsv", 0.0),
        ({"strict_last_turn": True}, [NO, NO, NO, YES], [FIRST, SECOND, SECOND], [RIGHT], "vsvsvsva", 1.0),
        ({"strict_last_turn": True, "max_turns": 1}, [NO], [], [], "v", 0.0),
    ],
)
def test_every_path(settings, verifier, search, answer, order, reward):
    outcome, team, workflow = play(verifier, search, answer, **settings)
    assert "".join(a.agent_id[0] for a in team.actions) == order
    assert (outcome.reward, outcome.correct) == (reward, reward)
    assert outcome.metrics["searches"] == order.count("s") and outcome.metrics["answered"] == order.count("a")
    assert all(workflow.reward(action, outcome) == reward for action in team.actions)  # the paper's shared outcome
    for agent_id, (fewest, most) in workflow.activations().items():
        assert fewest <= order.count(agent_id[0]) <= most


def test_who_sees_what():
    thinking = "<think>secret plan</think>The mentor is unknown. <verdict>no</verdict>"
    _, team, workflow = play([thinking, YES], [FIRST], [RIGHT])
    texts = [(agent_id, messages[0]["content"]) for agent_id, messages in team.seen]
    (_, first), (_, search), (_, second), (_, answer) = texts
    assert all(TASK.question in text and "secret plan" not in text for _, text in texts)
    assert all(text.startswith(workflow.roles[agent_id]) for agent_id, text in texts)
    assert first.endswith("Evidence: none yet.") and search.count("The mentor is unknown.") == 1
    assert "[1] Ada: Ada's mentor is Ben." in second and "Search 1: Ada" in second
    assert "The mentor is unknown." not in second + answer  # only the search agent hears why
    assert team.actions[1].passages == [("Ada", "Ada's mentor is Ben.")] and not team.actions[0].passages
    assert set(workflow.SEES) == set(workflow.agents) == set(workflow.roles)


@pytest.mark.parametrize(("on_invalid", "order"), [("search", "vsvsvsa"), ("answer", "va")])
@pytest.mark.parametrize("text", ["no idea", "<verdict>maybe</verdict>", f"{YES} {NO}", "<verdict>yes", ""])
def test_a_verdict_that_is_missing_or_unknown_is_invalid(text, on_invalid, order):
    _, team, _ = play([text] * 3, [FIRST] * 3, [RIGHT], on_invalid=on_invalid)
    assert "".join(a.agent_id[0] for a in team.actions) == order
    assert not any(a.valid for a in team.actions if a.agent_id == "verifier")


@pytest.mark.parametrize("text", ["Ada", "<search></search>", f"{FIRST}{SECOND}", "<search>Ada", ""])
def test_a_query_outside_its_tag_is_invalid_and_finds_nothing(text):
    outcome, team, workflow = play([NO, YES], [text], [RIGHT])
    assert not team.actions[1].valid and workflow.retriever.asked == []
    assert outcome.metrics["searches"] == 0
    assert team.seen[2][1][0]["content"].endswith("Evidence: none yet.")


@pytest.mark.parametrize("text", ["Cleo", "<answer> </answer>", RIGHT + RIGHT, ""])
def test_an_answer_outside_its_tag_is_invalid_and_wrong(text):
    outcome, team, _ = play([YES], [], [text])
    assert not team.actions[-1].valid
    assert (outcome.reward, outcome.metrics["answered"], outcome.answer) == (0.0, 0.0, None)


def test_a_query_that_the_retriever_refuses_is_the_agents_fault_and_counted():
    outcome, team, _ = play([NO, YES], [FIRST], [RIGHT], library={"Ada": QueryRejected("too long")})
    assert not team.actions[1].valid and team.actions[1].fault is None
    assert (outcome.metrics["rejected_queries"], outcome.metrics["searches"], outcome.reward) == (1, 0, 1.0)
    outcome, team, workflow = play([NO, YES], [f"<search>{'x' * 10_000}</search>"], [RIGHT])
    assert not team.actions[1].valid and workflow.retriever.asked == []
    assert outcome.metrics["rejected_queries"] == 1


@pytest.mark.parametrize("fault", [RetrievalOutage, IndexProblem])
def test_an_outage_fails_the_session_marks_the_activation_and_is_fed_to_nobody(fault):
    settings = SearchHierarchy.Settings(retrieval={"local": "unused"})
    workflow = SearchHierarchy(settings, retriever=Library({"Ada": fault("503 from everywhere")}))
    team = ScriptedTeam({"verifier": [NO, YES], "search": [FIRST], "answer": [RIGHT]})
    with pytest.raises(SessionFailed) as failure:
        asyncio.run(workflow.run(TASK, team))
    assert failure.value.reason == "retrieval" and "503 from everywhere" in str(failure.value)
    assert [(a.agent_id, a.fault, a.valid) for a in team.actions] == [
        ("verifier", None, True),
        ("search", "retrieval", True),  # the agent did nothing wrong
    ]
    assert not any("503" in m["content"] for _, messages in team.seen for m in messages)


def test_nothing_found_is_no_outage():
    outcome, team, _ = play([NO, YES], ["<search>Zoe</search>"], [RIGHT])
    assert (outcome.metrics["searches"], outcome.metrics["empty_results"], team.actions[1].valid) == (1, 1, True)
    assert "nothing new was found" in team.seen[2][1][0]["content"]


def test_repeated_passages_are_shown_once_and_counted():
    outcome, team, _ = play([NO, NO, YES], [FIRST, FIRST], [RIGHT])
    assert (outcome.metrics["passages"], outcome.metrics["repeated_passages"]) == (1, 1)
    assert team.seen[-1][1][0]["content"].count("Ada's mentor is Ben.") == 1


def test_the_evidence_budget_spares_the_question_and_counts_cuts():
    library = {"Ada": Passage("1", "Ada", "word " * 400), "Ben": LIBRARY["Ben"]}
    outcome, team, _ = play([NO, NO, YES], [FIRST, SECOND], [RIGHT], library=library, evidence_tokens=64)
    last = team.seen[-1][1][0]["content"]
    assert TASK.question in last and "Ben's rival is Cleo." in last and "[...]" in last
    assert outcome.metrics["cut_prompts"] == 4 and outcome.metrics["cut_tokens"] > 0  # all prompts after the first


@pytest.mark.parametrize(
    ("settings", "answer", "reward"),
    [
        ({}, "the Cleo", 1.0),
        ({}, "Cleo Ben", 0.0),
        ({"metric": "f1"}, "Cleo Ben", 2 / 3),
        ({"search_cost": 0.1}, "Cleo", 0.9),
        ({"search_cost": 0.1, "metric": "f1"}, "Ben", -0.1),
    ],
)
def test_the_outcome(settings, answer, reward):
    outcome, *_ = play([NO, YES], [FIRST], [f"<answer>{answer}</answer>"], **settings)
    assert outcome.reward == pytest.approx(reward)
    assert outcome.correct == float(answer in ("the Cleo", "Cleo"))  # what pass@k counts is never shaped


def test_verdicts_are_measured_against_the_evidence():
    outcome, *_ = play([NO, NO, YES], [FIRST, SECOND], [RIGHT])
    assert outcome.metrics["gold_in_evidence"] == 1.0
    assert (outcome.metrics["verifier_accuracy_right"], outcome.metrics["verifier_accuracy_wrong"]) == (1.0, 1.0)
    early, *_ = play([YES], [], [WRONG])
    assert early.metrics["gold_in_evidence"] == 0.0 and early.metrics["verifier_accuracy_wrong"] == 0.0
    mean = SearchHierarchy.summarise([outcome.metrics, early.metrics])
    assert mean["searches"] == 1.0 and mean["verifier_balanced_accuracy"] == 0.75
    closed, *_ = play([YES], [], ["<answer>yes</answer>"], task=Task(question="Is it?", answer="yes"))
    assert "gold_in_evidence" not in closed.metrics and closed.reward == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 0}, "max_turns is 0; it must be at least 1"),
        ({"topk": 0}, "topk is 0"),
        ({"evidence_tokens": 5}, "evidence_tokens is 5; it must be at least 32"),
        ({"retrieval": {}}, "neither is set"),
        ({"retrieval": {"local": "a", "urls": ["http://b"]}}, "both are set"),
        ({"retrieval": {"urls": ["b:80"]}}, "'b:80' is no address"),
        ({"retrieval": {"urls": ["http://b"], "attempts": 0}}, "attempts is 0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SearchHierarchy.Settings(**{"retrieval": {"local": "x"}, **settings})


def test_a_task_without_a_gold_is_refused():
    with pytest.raises(ValueError, match="gold"):
        play([YES], [], [RIGHT], task=Task(question="q", answer=None))


def test_closing_it_closes_the_retriever():
    closed = []

    class Closing(Library):
        async def close(self):
            closed.append(self)

    library = Closing()
    asyncio.run(SearchHierarchy(SearchHierarchy.Settings(retrieval={"local": "x"}), retriever=library).close())
    assert closed == [library]
