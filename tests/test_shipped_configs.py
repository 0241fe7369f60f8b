"""Every shipped configuration composes, passes our checks and verl's, and says what it is named for."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_drmas.check import prepare_keys, validate_with_verl
from verl_drmas.check_command import compose_as_verl

pytestmark = pytest.mark.long

CONFIGS = Path(__file__).parents[1] / "configs"
# Single agents run on verl's own trainer, which isn't ours to check: tests/recipes/test_drmas_recipes.py.
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.endswith("_single"))


# What a configuration leaves to the command line, beside model and data.
OWED = {
    "cpu_search": ["drmas.workflow.retrieval.local=index"],
    "cpu_delegate": ["drmas.workflow.tools.search.retrieval.local=index"],
    "cpu_delegate_main": [
        "drmas.workflow.tools.search.retrieval.local=index",
        "drmas.models.sub.remote.store=sqlite:///store.db",
    ],
    "cpu_delegate_sub": ["drmas.workflow.tools.search.retrieval.local=index", "drmas.store.url=sqlite:///store.db"],
    "mgrpo_main": ["drmas.models.sub.remote.store=sqlite:///store.db"],
    "mgrpo_sub": ["drmas.store.url=sqlite:///store.db"],
}


@pytest.fixture(scope="module", params=NAMES)
def shipped(request):
    name = request.param
    config = compose_as_verl(["--config-name", name, "actor_rollout_ref.model.path=org/model", *OWED.get(name, [])])
    return name, config


def test_it_passes_our_checks_and_verls(shipped):
    name, config = shipped
    prepared = prepare_keys(config)
    validate_with_verl(config, prepared.policies)
    assert prepared.section.workflow is not None
    rollout = config.actor_rollout_ref.rollout
    assert rollout.name == ("sglang" if name.endswith("sglang") else "vllm")
    assert (config.actor_rollout_ref.actor.strategy == "megatron") is name.endswith("megatron")
    assert (config.trainer.device == "cpu") is name.startswith("cpu")


# M-GRPO's arms, as the README names them: overrides, and which agents are trained on which models.
DROP_SUB = ["~drmas.workflow.subs.searcher", "~drmas.agents.searcher", "~drmas.models.sub"]
ARMS = {
    "co_train": ([], {"main": "main", "searcher": "sub"}),
    "main_only": (["drmas.models.sub.trainable=false"], {"main": "main"}),
    "shared": (["drmas.agents.searcher.model=main", "~drmas.models.sub"], {"main": "main", "searcher": "main"}),
    "unaligned": (["drmas.alignment.mode=none"], {"main": "main", "searcher": "sub"}),
    "single": ([*DROP_SUB, "drmas.workflow.main_tools=[reason,search,visit]"], {"main": "main"}),
}


@pytest.mark.parametrize("arm", ARMS)
def test_the_arms_of_mgrpo_pass_our_checks_and_verls(arm):
    overrides, trained = ARMS[arm]
    config = compose_as_verl(["--config-name", "mgrpo", "actor_rollout_ref.model.path=org/model", *overrides])
    prepared = prepare_keys(config)
    validate_with_verl(config, prepared.policies)
    section = prepared.section
    assert {a: section.agent(a).model for a in prepared.agents() if section.trained(a)} == trained
    assert (section.alignment.mode == "none") is (arm == "unaligned")


@pytest.mark.parametrize("engine", ["megatron", "dp"])
@pytest.mark.parametrize("servers", ["vllm", "sglang"])
def test_engines_and_mappings_combine(engine, servers):
    arguments = ["--config-name", "drmas_math_separate", f"model_engine={engine}"]
    arguments += [f"actor_rollout_ref.rollout.name={servers}", "actor_rollout_ref.actor.use_kl_loss=true"]
    config = compose_as_verl([*arguments, "actor_rollout_ref.model.path=org/model"])
    prepared = prepare_keys(config)
    validate_with_verl(config, prepared.policies)
    section = "megatron" if engine == "megatron" else "fsdp_config"
    for policy in prepared.policies.values():
        actor = policy.actor_rollout_ref.actor
        assert actor.strategy == ("megatron" if engine == "megatron" else "fsdp2")
        assert OmegaConf.select(actor, f"{section}.param_offload") is True  # two models share the GPUs
        assert OmegaConf.select(policy, f"actor_rollout_ref.ref.{section}.param_offload") is True
