"""The pages' configurations pass our whole check and verl's; verl is imported here, once for all of them."""

import copy
import re
import sys

import pytest
from doc_config import composed
from doc_pages import blocks, text_of
from omegaconf import OmegaConf

from verl_drmas.check import check_team, prepare_keys, read_section, validate_with_verl
from verl_drmas.config import parse
from verl_drmas.placement import placement
from verl_drmas.workflows import Workflow, registry

pytestmark = pytest.mark.long

MODELS = text_of("docs/models.md")


class Panel(Workflow):
    """Has the agents of docs/models.md."""

    agents = ("solver", "verifier", "judge")

    async def run(self, task, team):
        raise NotImplementedError


class Duo(Panel):
    """Those of the README."""

    agents = ("solver", "verifier")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", registry._REGISTERED | {"panel": Panel, "duo": Duo})


def checked(config):
    prepared = prepare_keys(config)
    validate_with_verl(config, prepared.policies)
    return prepared


@pytest.fixture(scope="module")
def base():
    return composed("+drmas=base", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=org/model")


def with_block(base, text, *overrides):
    """verl's configuration with a page's block laid over it, as a file of the user's would be."""
    config = copy.deepcopy(base)
    OmegaConf.set_struct(config, False)
    return OmegaConf.merge(config, OmegaConf.create(text), OmegaConf.from_dotlist(list(overrides)))


def test_the_table_of_models(base):
    (block,) = blocks(MODELS, "yaml")
    prepared = checked(with_block(base, block, "drmas.workflow.name=panel"))
    paths = {m: policy.actor_rollout_ref.model.path for m, policy in prepared.policies.items()}
    assert paths == {"large": "org/model", "small": "Qwen/Qwen3-1.7B", "judge": "Qwen/Qwen3-14B"}
    assert {name: (pool.gpus, pool.models) for name, pool in prepared.pools.items()} == {
        "run": (8, ("large",)),
        "right": (4, ("small", "judge")),
    }
    small = prepared.policies["small"].actor_rollout_ref
    assert small.actor.optim.lr == 2e-6 and small.actor.fsdp_config.param_offload is True  # shares its pool
    assert prepared.policies["judge"].actor_rollout_ref.rollout.load_format == "auto"
    assert prepared.section.updates("small") == 2


def test_a_partly_shared_team(base):
    agents = "{solver: {model: one}, verifier: {model: one}, judge: {model: two}}"
    block = f"drmas: {{workflow: {{name: panel}}, agents: {agents}, models: {{one: {{}}, two: {{}}}}}}"
    prepared = checked(with_block(base, block, "actor_rollout_ref.rollout.gpu_memory_utilization=0.4"))
    assert {m: prepared.section.agents_of(m) for m in prepared.policies} == {
        "one": ["solver", "verifier"],
        "two": ["judge"],
    }
    assert prepared.pools["run"].shared


def test_the_readmes_table_of_models(base):
    (block,) = blocks(text_of("README.md"), "yaml")
    config = with_block(base, block, "drmas.workflow.name=duo")
    section = read_section(config)
    check_team(section)
    assert {name: pool.models for name, pool in placement(config, section).items()} == {
        "run": ("large",),
        "right": ("small",),
    }


def test_the_order_desk(tmp_path, monkeypatch):
    page = text_of("docs/workflows.md")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/desk.py").write_text(blocks(page, "python")[0])
    (tmp_path / "order_desk.yaml").write_text(blocks(page, "yaml")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        prepared = checked(composed(name="order_desk", folder=tmp_path))
    finally:
        for name in ("shop.desk", "shop"):
            sys.modules.pop(name, None)
    assert prepared.agents() == ("clerk", "auditor")
    assert prepared.activations() == {"clerk": (1, 1), "auditor": (1, 1)}
    assert "actor_rollout_ref.rollout.agent.default_agent_loop" in prepared.filled


def test_the_translated_script():
    (_, block) = blocks(text_of("docs/migration.md"), "bash")
    words = re.findall(r"(?:'([^']+)'|(\S+))", block.replace("\\\n", " ").replace("$HOME/", "/home/"))
    prepared = checked(composed(*[a or b for a, b in words][3:]))
    assert {m: prepared.section.updates(m) for m in prepared.policies} == {"solver": 1, "verifier": 1}
    assert prepared.pools["run"].models == ("solver", "verifier") and prepared.pools["run"].gpus == 8


def columns(block, at):
    """The two configurations that stand side by side."""
    lines = block.splitlines()
    return ["\n".join(line[:at].rstrip() for line in lines), "\n".join(line[at:].rstrip() for line in lines)]


def test_the_two_jobs():
    (block,) = (b for b in blocks(text_of("docs/pair.md"), "yaml") if b.startswith("# main"))
    main, sub = (OmegaConf.create(text) for text in columns(block, block.index("# sub")))
    main.drmas.agents = {"main": {"model": "main"}, "searcher": {"model": "sub"}}
    of_main = parse(OmegaConf.to_container(main.drmas))
    of_sub = parse(OmegaConf.to_container(sub.drmas))
    assert of_main.remote["sub"].role == of_sub.store.role == "sub"
    assert of_main.remote["sub"].store == of_sub.store.url and of_sub.gateway.port == 8731
    assert sub.trainer.v1.trainer_mode == "drmas_store"
