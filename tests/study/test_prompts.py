"""Single agents are asked what the bundled workflows ask, from the data files of the teams."""

import asyncio

import pytest
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import get_dataset_class

from verl_drmas.data.parquet import prompt_row, write_rows
from verl_drmas.study.prompts import SearcherPrompts, SolverPrompts, question_of
from verl_drmas.workflows import Task
from verl_drmas.workflows.delegate import Delegate
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.solver_verifier import SolverVerifier

QUESTION = "What is 2 + 2?"


class Tokenizer:
    """Counts words; verl's filter asks for no more."""

    def apply_chat_template(self, messages, **_):
        return [0 for _ in messages[0]["content"].split()]


@pytest.fixture
def file(tmp_path):
    rows = [
        prompt_row(q, "4", data_source="sums", split="train", index=i) for i, q in enumerate((QUESTION, "And 1+3?"))
    ]
    return write_rows(rows, tmp_path / "rows.parquet")


def dataset(name, file, tmp_path):
    """As verl opens it, from the keys of a shipped configuration."""
    config = {
        "custom_cls": {"path": "pkg://verl_drmas.study.prompts", "name": name},
        "cache_dir": str(tmp_path / "cache"),
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": 1,
        "max_prompt_length": 64,
    }
    config = OmegaConf.create(config)
    return get_dataset_class(config)(str(file), Tokenizer(), config)


def asked(workflow, script):
    """The first messages that a workflow sends for the question."""
    team = ScriptedTeam(script)
    asyncio.run(workflow.run(Task(question=QUESTION, answer="4"), team))
    return team.seen[0][1]


def test_the_solver_is_asked_as_the_team_asks_it_first(file, tmp_path):
    rows = dataset("SolverPrompts", file, tmp_path)
    assert isinstance(rows, SolverPrompts) and len(rows) == 2
    workflow = SolverVerifier(SolverVerifier.Settings(max_rounds=1))  # as an evaluation has it
    assert rows[0]["raw_prompt"] == asked(workflow, {"solver": [r"\boxed{4}"]})
    assert rows[0]["reward_model"]["ground_truth"] == "4" and rows[1]["index"] == 1
    assert "1+3" in rows[1]["raw_prompt"][0]["content"] and QUESTION not in rows[1]["raw_prompt"][0]["content"]


def test_the_searcher_is_asked_as_delegates_main_agent(file, tmp_path):
    rows = dataset("SearcherPrompts", file, tmp_path)
    assert isinstance(rows, SearcherPrompts)
    assert rows[0]["raw_prompt"] == asked(Delegate(Delegate.Settings()), {"main": ["<result>4</result>"]})


def test_the_question_is_the_last_user_message():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": QUESTION},
    ]
    assert question_of(messages) == QUESTION
    with pytest.raises(ValueError, match=r"a row without a user message.*build the file with `verl-drmas data`"):
        question_of(messages[:1])
