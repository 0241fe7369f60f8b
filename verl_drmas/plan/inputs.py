"""Reads from a checked configuration what the formulas need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_drmas.check import Prepared
from verl_drmas.compose import default_updates, engine_section
from verl_drmas.config import ConfigError
from verl_drmas.plan.formulas import CONTEXT, Engine, Server, Trainer
from verl_drmas.plan.pool import Model, PoolNeeds
from verl_drmas.plan.shape import lora_rank, read_shape
from verl_drmas.support import get

ROOT = "actor_rollout_ref"
ENGINES: dict[str, Engine] = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
SIZES = {"fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2}


@dataclass(frozen=True)
class ModelStep:
    """What a step asks of one model.

    Attributes:
        model_id: The model.
        rows: Fewest and most rows of a step; None where the workflow can't tell.
        tokens: Most tokens of these rows; None likewise.
        updates: Optimiser updates; 0: frozen.
        syncs: Weight updates of its servers.
    """

    model_id: str
    rows: tuple[int, int] | None
    tokens: int | None
    updates: int
    syncs: int


def read_pools(prepared: Prepared) -> list[PoolNeeds]:
    """The pools of a checked run, with the models' needs.

    Raises:
        ConfigError: A model's configuration can't be read, or an engine is unknown here.
    """
    pools = []
    for pool in prepared.pools.values():
        models = tuple(_model(prepared, model_id, pool.gpus) for model_id in pool.models)
        device = get(prepared.policies[pool.models[0]], "trainer.device", "cuda")
        pools.append(
            PoolNeeds(pool.name, pool.n_gpus_per_node, pool.nnodes, models, context=0 if device == "cpu" else CONTEXT)
        )
    return pools


def _model(prepared: Prepared, model_id: str, gpus: int) -> Model:
    policy, section = prepared.policies[model_id], prepared.section
    agents = [section.agent(agent_id) for agent_id in section.agents_of(model_id)]
    prompt, response = (int(get(policy, f"{ROOT}.rollout.{name}_length")) for name in ("prompt", "response"))
    row = max(((a.prompt_length or prompt) + (a.response_length or response) for a in agents), default=0)
    trained = section.models[model_id].trained_here
    temperature = float(get(policy, f"{ROOT}.rollout.temperature", 1.0))
    scaled = temperature != 1 or section.only(model_id).mixes_temperature(temperature)
    return Model(
        model_id,
        read_shape(policy),
        read_trainer(policy, gpus, row=row or prompt + response, scaled=scaled) if trained else None,
        read_server(policy),
    )


def read_trainer(policy: Any, gpus: int, *, row: int, scaled: bool) -> Trainer:
    """A model's training workers.

    Args:
        policy: The run's configuration as the model sees it.
        gpus: Of the pool.
        row: Longest row in tokens; a micro-batch holds at least one.
        scaled: Its rows aren't all sampled at temperature 1.

    Raises:
        ConfigError: Another engine than FSDP and Megatron, or a type of number that isn't known.
    """
    from verl.trainer.ppo.utils import need_reference_policy

    strategy = str(get(policy, f"{ROOT}.actor.strategy"))
    engine = ENGINES.get(strategy)
    if engine is None:
        raise ConfigError(f"{ROOT}.actor.strategy is {strategy!r}; plan knows {', '.join(ENGINES)}")
    own = f"{ROOT}.actor.{engine_section(strategy)}"
    parallel = 1 if engine == "megatron" else int(get(policy, f"{own}.ulysses_sequence_parallel_size", 1))
    context = int(get(policy, f"{own}.context_parallel_size", 1))
    attention = str(get(policy, f"{ROOT}.model.override_config.attn_implementation", "flash_attention_2"))
    packed = bool(get(policy, f"{ROOT}.model.use_remove_padding", False))

    least = math.ceil(row / (parallel * context))

    def tokens(key: str) -> int:
        return max(int(get(policy, f"{ROOT}.{key}")), least)

    reference = need_reference_policy(policy) and not lora_rank(policy)
    common = {
        "engine": engine,
        "gpus": gpus,
        "least": least,
        "fsdp2": strategy == "fsdp2",
        "tokens": tokens("actor.ppo_max_token_len_per_gpu"),
        "infer_tokens": tokens("rollout.log_prob_max_token_len_per_gpu"),
        "ref_tokens": tokens("ref.log_prob_max_token_len_per_gpu") if reference else 0,
        "param_offload": bool(get(policy, f"{own}.param_offload", False)),
        "optimizer_offload": bool(get(policy, f"{own}.optimizer_offload", False)),
        "fused": bool(get(policy, f"{ROOT}.model.use_fused_kernels", False)),
        "scaled": scaled,
        "entropy_loss": _entropy_loss(policy),
        "entropy_chunk": int(get(policy, f"{own}.entropy_from_logits_chunk_size", 2048)),
    }
    chunked = bool(get(policy, f"{own}.entropy_from_logits_with_chunking", False))
    if engine == "megatron":
        size = _size(get(policy, f"{own}.dtype", "bfloat16"), f"{own}.dtype")
        recompute = get(policy, f"{own}.override_transformer_config.recompute_granularity")
        return Trainer(
            **common,
            tensor=int(get(policy, f"{own}.tensor_model_parallel_size", 1)),
            pipeline=int(get(policy, f"{own}.pipeline_model_parallel_size", 1)),
            context=context,
            distributed_optimizer=bool(get(policy, f"{own}.use_distributed_optimizer", True)),
            weight_bytes=size,
            compute_bytes=size,
            checkpointing=recompute == "full",
            ref_offload=bool(get(policy, f"{ROOT}.ref.megatron.param_offload", False)),
            flash=False,
            entropy="chunked" if chunked else "eager",
        )
    weight = _size(get(policy, f"{own}.model_dtype", "fp32"), f"{own}.model_dtype")
    states, state_bytes = optimizer_states(str(get(policy, f"{ROOT}.actor.optim.optimizer", "AdamW")), weight)
    compiled = bool(get(policy, f"{own}.use_torch_compile", True))
    return Trainer(
        **common,
        fsdp_size=int(get(policy, f"{own}.fsdp_size", -1)),
        weight_bytes=weight,
        compute_bytes=_size(get(policy, f"{own}.mixed_precision.param_dtype", "bf16"), f"{own}.mixed_precision"),
        reduce_bytes=_size(get(policy, f"{own}.mixed_precision.reduce_dtype", "fp32"), f"{own}.mixed_precision"),
        states=states,
        state_bytes=state_bytes,
        cpu_policy=strategy == "fsdp2" and bool(get(policy, f"{own}.offload_policy", False)),
        reshard=bool(get(policy, f"{own}.reshard_after_forward", True)),
        defer_sync=bool(get(policy, f"{own}.use_no_sync_for_gradient_accumulation", True)),
        checkpointing=bool(get(policy, f"{ROOT}.model.enable_gradient_checkpointing", True)),
        flash=attention.startswith("flash"),
        # Without packed rows verl takes the plain entropy.
        entropy="eager" if not packed else "compiled" if compiled else "chunked" if chunked else "eager",
    )


def _entropy_loss(policy: Any) -> bool:
    wanted = bool(get(policy, f"{ROOT}.actor.calculate_entropy", False))
    return wanted or float(get(policy, f"{ROOT}.actor.entropy_coeff", 0)) != 0


def optimizer_states(name: str, weight_bytes: int) -> tuple[int, int]:
    """How many numbers an optimiser keeps for a parameter, and the bytes of each; an unknown one counts as Adam."""
    name = name.lower()
    states = 0 if name == "sgd" else 1 if name in ("lion", "adagrad", "rmsprop") else 2
    return states, 1 if "8bit" in name else weight_bytes


def read_server(policy: Any) -> Server:
    """A model's servers.

    Raises:
        ConfigError: A type of number that isn't known.
    """
    rollout = f"{ROOT}.rollout"
    name = str(get(policy, f"{rollout}.name"))
    kwargs = get(policy, f"{rollout}.engine_kwargs.{name}", {})
    kwargs = OmegaConf.to_container(kwargs, resolve=True) if OmegaConf.is_config(kwargs) else dict(kwargs)
    weight = _size(get(policy, f"{rollout}.dtype", "bfloat16"), f"{rollout}.dtype")
    cache = str(kwargs.get("kv_cache_dtype") or "auto")
    length = get(policy, f"{rollout}.max_model_len") or sum(
        int(get(policy, f"{rollout}.{part}_length")) for part in ("prompt", "response")
    )
    fixed = kwargs.get("kv_cache_memory_bytes")
    return Server(
        length=int(length),
        share=float(get(policy, f"{rollout}.gpu_memory_utilization", 0.5)),
        kv_bytes=None if fixed is None else int(fixed),
        own_overhead=name == "sglang",
        tensor=int(get(policy, f"{rollout}.tensor_model_parallel_size", 1)),
        pipeline=int(get(policy, f"{rollout}.pipeline_model_parallel_size", 1)),
        replicas=int(get(policy, f"{rollout}.data_parallel_size", 1)),
        weight_bytes=1 if get(policy, f"{rollout}.quantization") == "fp8" else weight,
        cache_bytes=1 if cache.startswith("fp8") else weight if cache == "auto" else _size(cache, "kv_cache_dtype"),
        batched=int(get(policy, f"{rollout}.max_num_batched_tokens", 8192)),
        sequences=int(get(policy, f"{rollout}.max_num_seqs", 256)),
        sleeps=bool(get(policy, f"{rollout}.free_cache_engine", True)),
        bucket=int(get(policy, f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes", 0)) << 20,
    )


def _size(name: Any, key: str) -> int:
    try:
        return SIZES[str(name).removeprefix("torch.")]
    except KeyError:
        raise ConfigError(
            f"{key}: {name!r} is a type of number that plan doesn't know; use bfloat16 or float32"
        ) from None


def read_step(config: Any, prepared: Prepared) -> list[ModelStep]:
    """Rows, tokens, updates and weight syncs of a step, a model each."""
    section = prepared.section
    sessions = int(get(config, "data.train_batch_size")) * int(get(config, f"{ROOT}.rollout.n", 1))
    counts = prepared.activations()
    steps = []
    for model_id, policy in prepared.policies.items():
        mine = {agent_id: counts[agent_id] for agent_id in section.agents_of(model_id) if agent_id in counts}
        rows = tokens = None
        if mine:
            rows = tuple(sum(c[i] for c in mine.values()) * sessions for i in (0, 1))
            tokens = sum(counts[a][1] * sessions * _row(policy, section.agent(a)) for a in mine)
        trained = section.models[model_id].trained_here
        epochs = int(get(policy, f"{ROOT}.actor.ppo_epochs", 1))
        updates = (section.updates(model_id) or default_updates(policy)) * epochs if trained else 0
        steps.append(ModelStep(model_id, rows, tokens, updates, syncs=int(trained)))
    return steps


def _row(policy: Any, agent: Any) -> int:
    prompt, response = (int(get(policy, f"{ROOT}.rollout.{name}_length")) for name in ("prompt", "response"))
    return (agent.prompt_length or prompt) + (agent.response_length or response)
