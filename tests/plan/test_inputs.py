"""What the formulas are given: read from a configuration as verl reads it, nothing assumed that it says."""

import pytest
from omegaconf import OmegaConf

from verl_drmas.config import ConfigError
from verl_drmas.plan.inputs import optimizer_states, read_server, read_trainer


def policy(**keys):
    """A policy's configuration, as far as it is read."""
    config = OmegaConf.create(
        {
            "algorithm": {},
            "actor_rollout_ref": {
                "model": {"use_remove_padding": True, "override_config": {}},
                "actor": {
                    "strategy": "fsdp2",
                    "use_kl_loss": False,
                    "ppo_max_token_len_per_gpu": 4096,
                    "fsdp_config": {},
                    "optim": {"optimizer": "AdamW"},
                },
                "ref": {"log_prob_max_token_len_per_gpu": 3000},
                "rollout": {
                    "name": "vllm",
                    "prompt_length": 100,
                    "response_length": 200,
                    "log_prob_max_token_len_per_gpu": 8192,
                },
            },
        }
    )
    for key, value in keys.items():
        OmegaConf.update(config, f"actor_rollout_ref.{key}", value, force_add=True)
    return config


def trainer(row=300, scaled=False, **keys):
    return read_trainer(policy(**keys), 4, row=row, scaled=scaled)


FSDP = "actor.fsdp_config"


def test_verls_defaults():
    plain = trainer()
    assert (plain.engine, plain.gpus, plain.shards, plain.fsdp2) == ("fsdp", 4, 4, True)
    assert (plain.weight_bytes, plain.compute_bytes, plain.reduce_bytes) == (
        4,
        2,
        4,
    )  # float32 weights, bfloat16 passes
    assert (plain.states, plain.state_bytes) == (2, 4)
    assert (plain.tokens, plain.infer_tokens, plain.ref_tokens) == (4096, 8192, 0)
    assert plain.checkpointing and plain.flash and plain.entropy == "compiled" and not plain.entropy_loss


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({f"{FSDP}.model_dtype": "bfloat16"}, {"weight_bytes": 2, "state_bytes": 2}),
        ({f"{FSDP}.mixed_precision": {"param_dtype": "fp32"}}, {"compute_bytes": 4, "reduce_bytes": 4}),
        ({f"{FSDP}.fsdp_size": 2}, {"shards": 2}),
        ({f"{FSDP}.param_offload": True, f"{FSDP}.optimizer_offload": True}, {"param_offload": True}),
        ({f"{FSDP}.offload_policy": True}, {"cpu_policy": True}),
        ({f"{FSDP}.offload_policy": True, "actor.strategy": "fsdp"}, {"cpu_policy": False, "fsdp2": False}),
        ({f"{FSDP}.use_no_sync_for_gradient_accumulation": False}, {"defer_sync": False}),
        ({f"{FSDP}.use_torch_compile": False}, {"entropy": "eager"}),
        (
            {f"{FSDP}.use_torch_compile": False, f"{FSDP}.entropy_from_logits_with_chunking": True},
            {"entropy": "chunked"},
        ),
        ({"model.use_remove_padding": False}, {"entropy": "eager"}),
        ({"model.override_config.attn_implementation": "sdpa"}, {"flash": False}),
        ({"model.enable_gradient_checkpointing": False}, {"checkpointing": False}),
        ({"actor.entropy_coeff": 0.01}, {"entropy_loss": True}),
        ({"actor.calculate_entropy": True}, {"entropy_loss": True}),
        ({"actor.use_kl_loss": True}, {"ref_tokens": 3000}),
        ({"actor.use_kl_loss": True, "model.lora_rank": 8}, {"ref_tokens": 0}),  # the base weights are the reference
        ({"actor.optim.optimizer": "AdamW8bit"}, {"states": 2, "state_bytes": 1}),
    ],
)
def test_a_key_reaches_the_formulas(keys, expected):
    read = trainer(**keys)
    assert {name: getattr(read, name) for name in expected} == expected


def test_a_micro_batch_holds_the_longest_row():
    assert (trainer(row=5000).tokens, trainer(row=5000).infer_tokens) == (5000, 8192)
    assert trainer(row=10000, **{f"{FSDP}.ulysses_sequence_parallel_size": 2}).tokens == 5000  # a row's half


def test_megatron():
    own = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "param_offload": True}
    read = trainer(**{"actor.strategy": "megatron", "actor.megatron": own})
    assert (read.engine, read.shards, read.weight_bytes, read.param_offload) == ("megatron", 4, 2, True)
    assert not read.checkpointing and not read.flash and read.entropy == "eager"
    full = {"override_transformer_config": {"recompute_granularity": "full"}}
    assert trainer(**{"actor.strategy": "megatron", "actor.megatron": full}).checkpointing


def test_what_plan_doesnt_know_is_said():
    with pytest.raises(ConfigError, match=r"actor\.strategy is 'torchtitan'; plan knows fsdp, fsdp2, megatron"):
        trainer(**{"actor.strategy": "torchtitan"})
    with pytest.raises(ConfigError, match=r"fsdp_config\.model_dtype: 'int3' is a type of number"):
        trainer(**{f"{FSDP}.model_dtype": "int3"})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("AdamW", (2, 4)), ("SGD", (0, 4)), ("Lion", (1, 4)), ("AdamW8bit", (2, 1)), ("Adam2000", (2, 4))],
)
def test_optimizer_states(name, expected):
    assert optimizer_states(name, 4) == expected


def test_a_server():
    plain = read_server(policy())
    assert (plain.length, plain.share, plain.weight_bytes, plain.cache_bytes, plain.gpus) == (300, 0.5, 2, 2, 1)
    assert plain.sleeps and plain.kv_bytes is None and not plain.own_overhead
    rollout = {"max_model_len": 64, "dtype": "float32", "tensor_model_parallel_size": 2, "free_cache_engine": False}
    kwargs = {"vllm": {"kv_cache_memory_bytes": 1 << 26, "kv_cache_dtype": "fp8_e5m2"}}
    read = read_server(policy(**{f"rollout.{k}": v for k, v in rollout.items()}, **{"rollout.engine_kwargs": kwargs}))
    assert (read.length, read.weight_bytes, read.cache_bytes, read.gpus) == (64, 4, 1, 2)
    assert not read.sleeps and read.kv_bytes == 1 << 26
    other = read_server(policy(**{"rollout.engine_kwargs": kwargs, "rollout.name": "sglang"}))
    assert other.kv_bytes is None and other.own_overhead and other.cache_bytes == 2  # the other engine's settings
    bucket = {"rollout.checkpoint_engine.update_weights_bucket_megabytes": 64}
    assert read_server(policy(**bucket)).bucket == 64 << 20
