"""docs/workflows.md: its class plays, its tests pass, its configuration parses, and its evaluation runs."""

import ast
import asyncio
import json
import shlex
import sys

import pytest
from doc_config import composed
from doc_pages import blocks, text_of
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_drmas.config import ConfigError, parse
from verl_drmas.data.parquet import check_prompts
from verl_drmas.evaluation.command import eval_app
from verl_drmas.workflows import SessionFailed, Task, load_workflow, registry
from verl_drmas.workflows.scripted import ScriptedTeam

PAGE = text_of("docs/workflows.md")
DESK, ROWS, TEST = blocks(PAGE, "python")
(YAML,) = blocks(PAGE, "yaml")
LOOK = '<tool_call>{"name": "price", "arguments": {"article": "%s"}}</tool_call>'
ORDER = Task(question="two pears and a plum", answer="5")
APPROVE, REJECT = "<verdict>approve</verdict>", "<verdict>reject</verdict>"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's files, in the working folder."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/desk.py").write_text(DESK)
    (tmp_path / "order_desk.yaml").write_text(YAML)
    (tmp_path / "prices.json").write_text('{"pear": 2, "plum": 1}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    yield tmp_path
    for name in ("shop.desk", "shop"):
        sys.modules.pop(name, None)


@pytest.fixture
def desk(folder):
    cls = load_workflow("shop.desk:OrderDesk")
    return cls(cls.Settings(prices="prices.json"))


def play(desk, clerk, auditor=(APPROVE,), task=ORDER):
    team = ScriptedTeam({"clerk": clerk, "auditor": auditor})
    return asyncio.run(desk.run(task, team)), team


def test_the_test_beside_it_passes(folder):
    code = compile(TEST, "docs/workflows.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    namespace = {}
    asyncio.run(eval(code, namespace))
    assert namespace["outcome"].answer == "5"


def test_the_rows_are_what_verl_reads(folder):
    exec(compile(ROWS, "docs/workflows.md", "exec"), {})
    assert check_prompts("orders.parquet") == 2


def test_an_answer_outside_its_tag_is_invalid(desk):
    outcome, team = play(desk, ["It is 5."], [REJECT])
    assert outcome.reward == 0.0 and [a.valid for a in team.actions] == [False, True]
    assert desk.reward(team.actions[1], outcome) == 0.2  # the auditor was right


def test_a_wrong_call_is_told_to_the_agent(desk):
    outcome, team = play(desk, [LOOK % "melon", "<answer>5</answer>"])
    assert "There is no such article" in team.seen[1][1][-1]["content"]
    assert outcome.reward == 1.0 and desk.report() == {"price/calls": 1.0} and desk.report() == {"price/calls": 0.0}


def test_an_outage_fails_the_session(desk, folder):
    (folder / "prices.json").unlink()
    team = ScriptedTeam({"clerk": [LOOK % "pear"], "auditor": []})
    with pytest.raises(SessionFailed) as failure:
        asyncio.run(desk.run(ORDER, team))
    assert failure.value.reason == "price" and team.actions[0].fault == "price"
    with pytest.raises(OSError):
        desk.preflight()


def test_a_verdict_that_says_nothing_is_invalid(desk):
    outcome, team = play(desk, ["<answer>5</answer>"], ["Hm."])
    assert not team.actions[1].valid and desk.reward(team.actions[1], outcome) == 1.0


def test_turns_are_bounded_and_what_is_told_of_it_is_true(desk):
    _, team = play(desk, [LOOK % "pear"] * 4, [REJECT])
    assert team.actions[0].turns == desk.settings.max_turns == 4
    assert desk.activations() == {"clerk": (1, 1), "auditor": (1, 1)}
    assert desk.preflight() == "prices.json: 2 articles"


def test_the_configuration_is_a_team(folder):
    config = composed(name="order_desk", folder=folder)
    section = parse(OmegaConf.to_container(config.drmas, resolve=True))
    cls = load_workflow(section.workflow["name"])
    assert set(section.agents) == set(cls.agents)
    settings = {key: value for key, value in section.workflow.items() if key != "name"}
    assert parse(settings, cls.Settings, "drmas.workflow", strict=True).prices == "prices.json"
    with pytest.raises(ConfigError, match="max_turns is 0"):
        parse({**settings, "max_turns": 0}, cls.Settings, "drmas.workflow", strict=True)
    assert config.algorithm.adv_estimator == "drmas" and config.trainer.v1.trainer_mode == "drmas_sync"


def test_the_evaluation_plays_the_same_class(folder, serve):
    def reply(body):
        said = body["messages"]
        if "Is this sum right?" in said[-1]["content"]:
            return APPROVE
        return "<answer>5</answer>" if said[-1]["role"] == "tool" else LOOK % "pear"

    served = serve(reply)
    served.models = ["Qwen/Qwen3-4B"]
    exec(compile(ROWS, "docs/workflows.md", "exec"), {})
    (command,) = (block for block in blocks(PAGE, "bash") if "verl-drmas eval" in block)
    line = command.replace("\\\n", " ").splitlines()[-1].replace("http://127.0.0.1:8001/v1", served.url)
    arguments = shlex.split(line)
    assert arguments[:2] == ["verl-drmas", "eval"]
    result = CliRunner().invoke(eval_app, [*arguments[2:], "--json", "numbers.json"])
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "numbers.json").read_text())
    assert found["sessions"] == {"asked": 8, "ended": 8, "failed": {}}
    assert found["sources"]["orders"]["scores"]["avg@4"]["value"] == 0.5  # 5 is right for the first row alone
    assert found["workflow_metrics"]["lookups"] == 1.0
