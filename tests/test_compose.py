"""A model's own configuration: merged while interpolations are open, so that what follows from a key follows."""

from copy import deepcopy

import pytest
from omegaconf import OmegaConf

from verl_drmas.check import naming, prepare_keys, prepare_trainer, validate_with_verl
from verl_drmas.check_command import compose_as_verl
from verl_drmas.compose import COMPOSED, RUN_LEVEL, policy_config
from verl_drmas.config import ConfigError, parse

pytestmark = pytest.mark.long

ROOT = "actor_rollout_ref"


@pytest.fixture(scope="module")
def composed():
    common = ["actor_rollout_ref.model.path=org/base", "data.max_prompt_length=100", "+drmas=solver_verifier"]
    return {"cpu": compose_as_verl([*common, "+drmas_runtime=cpu"]), "gpu": compose_as_verl(common)}


@pytest.fixture
def make(composed):
    def make(models, on="cpu", pools=None, **changes):
        config = deepcopy(composed[on])
        OmegaConf.set_struct(config, False)
        names = list(models)
        OmegaConf.update(config, "drmas.models", models, force_add=True)
        OmegaConf.update(config, "drmas.pools", pools or {}, force_add=True)
        config.drmas.agents.solver.model, config.drmas.agents.verifier.model = names[0], names[-1]
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
        return config

    return make


def refusal(config):
    with pytest.raises(ConfigError) as error:
        prepare_keys(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def override(**value):
    return {"a": {}, "b": {ROOT: value}}


def test_one_plain_model_changes_nothing(make):
    config = make({"base": {}})
    prepared = prepare_keys(config)
    assert COMPOSED not in config
    assert prepared.policies["base"][ROOT] == config[ROOT]


def test_dependents_follow_an_override(make):
    config = make(override(model={"path": "org/other"}, actor={"ppo_max_token_len_per_gpu": 777}))
    policies = prepare_keys(config).policies
    a, b = policies["a"][ROOT], policies["b"][ROOT]
    assert (a.model.path, b.model.path) == ("org/base", "org/other")
    assert (a.rollout.prometheus.served_model_name, b.rollout.prometheus.served_model_name) == ("org/base", "org/other")
    assert b.rollout.log_prob_max_token_len_per_gpu == b.ref.log_prob_max_token_len_per_gpu == 777
    assert a.rollout.log_prob_max_token_len_per_gpu == 16384
    assert b.rollout.prompt_length == 100


def test_the_reference_model_follows_the_actors_strategy(make):
    config = make(override(actor={"strategy": "fsdp2"}), on="gpu", **{f"{ROOT}.rollout.gpu_memory_utilization": 0.4})
    policies = prepare_keys(config).policies
    assert [policies[m][ROOT].ref.strategy for m in "ab"] == ["fsdp", "fsdp2"]


def test_a_dependent_of_ones_own_stays(make):
    own = {"actor": {"ppo_max_token_len_per_gpu": 777}, "rollout": {"log_prob_max_token_len_per_gpu": 888}}
    assert prepare_keys(make(override(**own))).policies["b"][ROOT].rollout.log_prob_max_token_len_per_gpu == 888


def test_keys_of_others_are_taken_as_they_are(make):
    own = {"model": {"override_config": {"rope_theta": 5}}, "rollout": {"engine_kwargs": {"vllm": {"block_size": 32}}}}
    policy = prepare_keys(make(override(**own))).policies["b"][ROOT]
    assert policy.model.override_config == {"attn_implementation": "sdpa", "rope_theta": 5}
    assert policy.rollout.engine_kwargs.vllm.block_size == 32
    assert policy.rollout.engine_kwargs.vllm.kv_cache_memory_bytes > 0


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"actor": {"optm": {"lr": 1}}}, "b.actor_rollout_ref.actor.optm: unknown key; did you mean 'optim'?"),
        ({"actor": {"optim": {"lrr": 1}}}, "b.actor_rollout_ref.actor.optim.lrr: unknown key; did you mean 'lr'?"),
        ({"modle": {}}, "b.actor_rollout_ref.modle: unknown key; did you mean 'model'?"),
        ({"actor": 3}, "b.actor_rollout_ref.actor: 3 is not valid: a section of keys is needed"),
        ({"actor": {"strategy": "deepspeed"}}, "b.actor_rollout_ref.actor.strategy is 'deepspeed'; "),
        (
            {"actor": {"ppo_micro_batch_size_per_gpu": 4}},
            "b.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: has no effect, ",
        ),
        ({"actor": {"use_dynamic_bsz": False}}, "b.actor_rollout_ref.actor.use_dynamic_bsz: is the run's, "),
        ({"rollout": {"n": 4}}, "b.actor_rollout_ref.rollout.n: is the run's, not a model's "),
        ({"rollout": {"response_length": 9}}, "b.actor_rollout_ref.rollout.response_length: is an agent's, "),
    ],
)
def test_what_can_not_be_overridden_is_one_line(make, own, line):
    assert refusal(make(override(**own))).startswith(f"drmas.models.{line}")


def test_every_key_of_the_run_exists_in_verl(make):
    config = make({"base": {}})
    assert all(OmegaConf.select(config, f"{ROOT}.{key}") is not None for key in RUN_LEVEL)


@pytest.mark.parametrize(
    ("models", "pools", "line"),
    [
        (
            {"a": {}, "idle": {}, "b": {}},
            {},
            "drmas.models.idle: no agent is on it (agents are on a, b); give it one, or drop it",
        ),
        (
            {"a": {}, "b": {"trainable": False, ROOT: {"actor": {"optim": {"lr": 1}}}}},
            {},
            "drmas.models.b.actor_rollout_ref.actor is set, but the model is frozen",
        ),
        (
            {"a": {}, "b": {ROOT: {"rollout": {"name": "sglang"}}}},
            {},
            "pool 'run' has models on different engines (a: vllm, b: sglang)",
        ),
        (
            {"a": {}, "b": {"pool": "rihgt"}},
            {"right": {"n_gpus_per_node": 1}},
            "drmas.models.b.pool is 'rihgt', which ",
        ),
        ({"a": {}, "b": {}}, {"right": {"n_gpus_per_node": 1}}, "drmas.pools.right: no model is in it; "),
        ({"a": {"trainable": False}}, {}, "drmas.models has no model that this job trains"),
        ({"a": {}, "mute": {}}, {}, "drmas.models.mute: none of its agents is trained (verifier); set "),
        (
            {"a": {}, "b": {"trainable": False, "init_from": "x"}},
            {},
            "drmas.models.b.init_from is set, but the model is ",
        ),
        ({"a": {}, "b b": {}}, {}, "drmas.models.b b: 'b b' names a folder and metrics"),
    ],
)
def test_wrong_mappings_are_one_line(make, models, pools, line):
    config = make(models, pools=pools)
    config.drmas.agents.verifier.trainable = "mute" not in models
    if "idle" in models:
        config.drmas.agents.verifier.model = "b"
    assert refusal(config).startswith(line)


def test_an_agent_as_an_adapter_is_refused_with_the_reason(make):
    line = refusal(make({"base": {}}, **{"drmas.agents.solver.lora_rank": 8}))
    assert line.startswith("drmas.agents.solver.lora_rank: agents can't be adapters on one base model")
    assert "#" in line and "a model of its own" in line


def test_a_pools_gpus_are_the_models(make):
    config = make({"a": {}, "b": {"pool": "right"}}, pools={"right": {"n_gpus_per_node": 4, "nnodes": 2}})
    policies = prepare_keys(config).policies
    assert (policies["b"].trainer.n_gpus_per_node, policies["b"].trainer.nnodes) == (4, 2)
    assert policies["b"][ROOT].rollout.n_gpus_per_node == 4
    assert policies["a"].trainer.n_gpus_per_node == policies["a"][ROOT].rollout.n_gpus_per_node == 1


def test_models_that_share_a_pool_leave_it_to_each_other(make):
    config = make({"a": {}, "b": {ROOT: {"actor": {"fsdp_config": {"param_offload": False}}}}})
    prepared = prepare_keys(config)
    a, b = (prepared.policies[m][ROOT].actor.fsdp_config for m in "ab")
    assert (a.param_offload, a.optimizer_offload) == (True, True)
    assert (b.param_offload, b.optimizer_offload) == (False, True)  # what the user names stays
    assert prepared.filled["drmas.models.a.actor_rollout_ref.actor.fsdp_config.optimizer_offload"] is True


def test_a_frozen_model_reads_its_weights_from_disk(make):
    config = make({"a": {}, "judge": {"trainable": False}})
    policies = prepare_keys(config).policies
    assert (policies["a"][ROOT].rollout.load_format, policies["judge"][ROOT].rollout.load_format) == ("dummy", "auto")


def test_with_every_model_elsewhere_the_runs_path_is_the_first_trained_models(make):
    models = {
        "judge": {"trainable": False, ROOT: {"model": {"path": "org/j"}}},
        "a": {ROOT: {"model": {"path": "org/a"}}},
    }
    config = make(models)
    prepared = prepare_keys(config)
    assert config[ROOT].model.path == prepared.filled["actor_rollout_ref.model.path"] == "org/a"


def test_another_strategy_brings_its_own_keys_and_keeps_the_common_ones(make):
    own = {"actor": {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}}
    config = make(
        {"a": {}, "b": {ROOT: own, "pool": "right"}},
        on="gpu",
        pools={"right": {"n_gpus_per_node": 4}},
        **{f"{ROOT}.rollout.name": "vllm"},
        **{f"{ROOT}.actor.clip_ratio": 0.17, f"{ROOT}.rollout.n": 3, f"{ROOT}.rollout.enable_sleep_mode": True},
    )
    prepared = prepare_keys(config)
    a, b = prepared.policies["a"][ROOT], prepared.policies["b"][ROOT]
    assert a.actor.strategy == "fsdp" and "megatron" not in a.actor
    assert (b.actor.strategy, b.ref.strategy) == ("megatron", "megatron")
    assert b.actor.megatron.tensor_model_parallel_size == b.ref.megatron.tensor_model_parallel_size == 2
    assert "fsdp_config" not in b.actor and b.actor._target_.endswith("McoreActorConfig")
    assert (b.actor.clip_ratio, b.rollout.n, b.model.path) == (0.17, 3, "org/base")
    assert (b.rollout.name, b.rollout.enable_sleep_mode) == ("vllm", True)  # also what verl's own file lacks
    assert (a.actor.optim.optimizer, b.actor.optim.optimizer) == ("AdamW", "adam")
    validate_with_verl(config, prepared.policies)


def test_the_job_reads_what_the_callback_composed(make):
    config = make(override(actor={"optim": {"lr": 0.5}}))
    prepare_keys(config)
    OmegaConf.resolve(config)  # as verl's task runner does
    assert prepare_trainer(config).policies["b"][ROOT].actor.optim.lr == 0.5


def test_a_saved_configuration_that_was_changed_is_refused(make):
    config = make(override(actor={"optim": {"lr": 0.5}}))
    prepare_keys(config)
    OmegaConf.resolve(config)
    config[ROOT].actor.optim.lr = 0.25  # a rerun from .hydra/config.yaml, where the callback isn't
    with pytest.raises(ConfigError, match="changed since the models' configurations were composed"):
        prepare_trainer(config)


def test_an_overrides_own_interpolations_are_the_models(make):
    own = {
        "actor": {"ppo_max_token_len_per_gpu": 777},
        "ref": {"log_prob_max_token_len_per_gpu": "${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}"},
    }
    assert prepare_keys(make(override(**own))).policies["b"][ROOT].ref.log_prob_max_token_len_per_gpu == 777


def test_a_command_line_that_goes_without_the_callback_is_refused(make):
    config = make(override(actor={"optim": {"lr": 0.5}}))
    with pytest.raises(ConfigError, match="are composed by our Hydra callback"):
        prepare_trainer(config)


def test_verl_validates_each_model(make):
    config = make(override(actor={"loss_agg_mode": "by-feel"}))
    prepared = prepare_keys(config)
    with pytest.raises(ConfigError, match=r"^model b: verl refuses the configuration: "):
        validate_with_verl(config, prepared.policies)


def test_the_policys_copy_is_its_own(make):
    config = make({"a": {}, "b": {}})
    section = prepare_keys(config).section
    policy_config(config, section, "a")[ROOT].actor.optim.lr = 99.0
    assert policy_config(config, section, "a")[ROOT].actor.optim.lr != 99.0


def test_errors_name_the_model_where_there_are_several():
    several = parse({"agents": {"x": {"model": "a"}, "y": {"model": "b"}}, "models": {"a": {}, "b": {}}})
    with pytest.raises(ConfigError, match=r"^model b: actor_rollout_ref\.x: no"), naming(several, "b"):
        raise ConfigError("actor_rollout_ref.x: no")
    with pytest.raises(ConfigError, match=r"^trainer\.device: no"), naming(several, "b"):
        raise ConfigError("trainer.device: no")


def test_one_model_with_overrides_is_the_runs_own_configuration(make):
    config = make({"base": {ROOT: {"rollout": {"temperature": 0.5}}}})
    prepared = prepare_keys(config)
    assert config[ROOT].rollout.temperature == prepared.policies["base"][ROOT].rollout.temperature == 0.5
    OmegaConf.resolve(config)
    prepare_trainer(config)


# -- a model of another job --------------------------------------------------------------------------------------------

REMOTE = {"store": "sqlite:///pair.db", "role": "sub"}


def test_a_remote_model_has_a_configuration_but_no_gpus(make):
    own = {"model": {"path": "org/far"}, "rollout": {"temperature": 0.5}}
    config = make({"a": {}, "far": {"remote": REMOTE, ROOT: own}}, **{f"{ROOT}.rollout.n": 4})
    prepared = prepare_keys(config)
    far = prepared.policies["far"][ROOT]
    assert (far.model.path, far.rollout.temperature, far.rollout.n) == ("org/far", 0.5, 4)
    assert prepared.policies["a"][ROOT].model.path == config[ROOT].model.path == "org/base"
    assert [pool.models for pool in prepared.pools.values()] == [("a",)]
    # The model that is left is alone on its GPUs, and offloads nothing for another.
    assert prepared.policies["a"][ROOT].actor.fsdp_config.optimizer_offload is False
    assert not [key for key in prepared.filled if "far" in key or "offload" in key]
    OmegaConf.resolve(config)
    assert prepare_trainer(config).policies["far"][ROOT].model.path == "org/far"


def test_the_runs_path_is_that_of_the_first_model_that_is_trained_here(make):
    models = {
        "far": {"remote": REMOTE, ROOT: {"model": {"path": "org/far"}}},
        "a": {ROOT: {"model": {"path": "org/a"}}},
    }
    config = make(models)
    prepare_keys(config)
    assert config[ROOT].model.path == "org/a"


def test_agents_of_a_remote_model_are_trained_elsewhere(make):
    """No `none of its agents is trained`, and no refusal of switches that only training reads."""
    config = make({"a": {}, "far": {"remote": REMOTE}}, **{"drmas.agents.verifier.sampling": {"temperature": 0.5}})
    assert prepare_keys(config).section.trained("solver")
    OmegaConf.update(config, f"{ROOT}.model.use_fused_kernels", True, force_add=True)
    prepare_keys(config)
