"""What the README promises about workflows holds for the code it shows."""

import ast
import asyncio
import re
from pathlib import Path

import pytest

from verl_drmas.workflows import Task, load_workflow, registry
from verl_drmas.workflows.scripted import ScriptedTeam

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def shown(monkeypatch):
    """The namespace of the README's workflow, registered for one test."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    namespace = {"__name__": "readme"}
    exec(compile(BLOCKS[0], "README.md", "exec"), namespace)
    return namespace


def test_a_workflow_fits_in_45_lines():
    assert 10 < len(BLOCKS[0].splitlines()) <= 45


def test_the_workflow_registers_itself(shown):
    assert load_workflow("writer_critic") is shown["WriterCritic"]


def test_the_test_beside_it_passes(shown):
    code = compile(BLOCKS[1], "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, shown))
    assert shown["outcome"].metrics == {"revised": 1.0}


@pytest.mark.parametrize(
    ("review", "agents", "valid"),
    [
        ("Yes. <verdict>approve</verdict>", ["writer", "critic"], True),
        ("Hm.", ["writer", "critic", "writer"], False),
    ],
)
def test_the_critic_decides_whether_the_writer_speaks_again(shown, review, agents, valid):
    team = ScriptedTeam({"writer": ["It is 4.", "It is 5."], "critic": [review]})
    outcome = asyncio.run(shown["WriterCritic"]().run(Task(question="What is 2 + 2?", answer="4"), team))
    assert [a.agent_id for a in team.actions] == agents
    assert team.actions[1].valid is valid
    assert outcome.reward == float(valid)


def test_the_switch_is_three_added_lines():
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    added = [line[1:].strip(" \\") for line in diff.splitlines() if line.startswith("+")]
    assert added == ["algorithm.adv_estimator=drmas", "trainer.v1.trainer_mode=drmas_sync", "+drmas=solver_verifier"]
