"""Each model's own `actor_rollout_ref`: the run's, with the model's overrides, composed while interpolations are open.

An override patched onto resolved values would leave what follows from it behind (`rollout.served_model_name` follows
`model.path`, `ref.strategy` the actor's); merged before resolution, dependents follow. This happens once, in the Hydra
callback or in `verl-drmas check`; the job reads the result.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_drmas.config import ConfigError, DrmasConfig, ModelConfig, nearest
from verl_drmas.placement import Pool, placement, pool_of
from verl_drmas.support import get

COMPOSED = "drmas_composed"  # where the callback leaves the models' own configurations
ROOT = "actor_rollout_ref"

# Sections whose keys belong to somebody else (an engine, a Hugging Face config): verl takes any.
FREE = (
    "engine_kwargs",
    "override_config",
    "override_transformer_config",
    "override_ddp_config",
    "override_optimizer_config",
    "mixed_precision",
    "wrap_policy",
)
# What the agents of one session share, whatever models they are on.
RUN_LEVEL = {
    "hybrid_engine": "the trainer decides it",
    "rollout.n": "the agents of a session share it",
    "rollout.mode": "the trainer decides it",
    "rollout.agent": "one agent loop plays all agents of a session",
    "rollout.multi_turn": "the workflow decides the turns",
    "rollout.val_kwargs": "validation samples all agents alike",
    "rollout.calculate_log_probs": "the rows of all models carry the same fields",
    "rollout.prompt_length": "set drmas.agents.<id>.prompt_length",
    "rollout.response_length": "set drmas.agents.<id>.response_length",
    "actor.use_dynamic_bsz": "rows per step vary, so a team's micro-batches are token budgets",
    "rollout.log_prob_use_dynamic_bsz": "rows per step vary, so a team's micro-batches are token budgets",
    "ref.log_prob_use_dynamic_bsz": "rows per step vary, so a team's micro-batches are token budgets",
    "actor.optim.total_training_steps": "the data loader counts the steps",
}
# Micro-batches in rows, which nothing reads under dynamic batches, and the token budget that stands for each.
ROW_COUNTS = {
    "actor.ppo_micro_batch_size": "actor.ppo_max_token_len_per_gpu",
    "actor.ppo_micro_batch_size_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "rollout.log_prob_micro_batch_size": "rollout.log_prob_max_token_len_per_gpu",
    "rollout.log_prob_micro_batch_size_per_gpu": "rollout.log_prob_max_token_len_per_gpu",
    "ref.log_prob_micro_batch_size": "ref.log_prob_max_token_len_per_gpu",
    "ref.log_prob_micro_batch_size_per_gpu": "ref.log_prob_max_token_len_per_gpu",
}
# verl's config groups (`model_engine=...`) by the actor's strategy.
FAMILIES = {"fsdp": "dp", "fsdp2": "dp", "megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan"}

ENGINE_SECTION = {"dp": "fsdp_config"}  # of a family whose section has another name than the family
# Keys that mean something else in another family, or nothing.
FAMILYS_OWN = ("_target_", "strategy", "optimizer", "override_optimizer_config")


def policy_config(config: DictConfig, section: DrmasConfig, model_id: str) -> DictConfig:
    """The whole run's configuration as one model sees it: its `actor_rollout_ref`, its pool's GPUs.

    Args:
        config: The run's; `compose_models` has been through it if a model needs a configuration of its own.
        section: Its `drmas` section.
        model_id: The model.

    Raises:
        ConfigError: The model needs its own configuration and nobody composed it.
    """
    policy = copy.deepcopy(config)
    remote = section.models[model_id].remote is not None  # it has no GPUs of this job
    pool = None if remote else pool_of(placement(config, section), model_id)
    with open_dict(policy):
        composed = policy.pop(COMPOSED, None)
        if composed is not None:
            policy[ROOT] = composed["models"][model_id]
        elif _needs_own(section):
            raise ConfigError(
                "drmas.models: models with a configuration of their own are composed by our Hydra callback, which this "
                "command line goes without; add +drmas=base (or another config of the group)"
            )
        if pool is not None:
            policy.trainer.n_gpus_per_node, policy.trainer.nnodes = pool.n_gpus_per_node, pool.nnodes
    return policy


def compose_models(config: DictConfig, section: DrmasConfig) -> dict[str, Any]:
    """Compose the models' own configurations into `config`; changes nothing if the run has one plain model.

    Returns:
        What was set beyond the user's overrides, by key.

    Raises:
        ConfigError: An override that can't be: unknown key, a key of the run, a value that doesn't resolve.
    """
    if not _needs_own(section):
        return {}
    pools, composed, filled = placement(config, section), {}, {}
    for model_id, model in section.models.items():
        pool = None if model.remote else pool_of(pools, model_id)
        whole, own = _compose(config, model_id, model, pool)
        filled |= {f"drmas.models.{model_id}.{key}": value for key, value in own.items()}
        try:
            composed[model_id] = OmegaConf.to_container(whole[ROOT], resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"drmas.models.{model_id}.{ROOT}: {' '.join(str(error).split())}") from None
    with open_dict(config):
        first = next(m for m in section.models if section.models[m].trained_here)
        paths = {model_id: c["model"]["path"] for model_id, c in composed.items()}
        if config[ROOT].model.path not in paths.values():
            # No model is at the run's path, where verl would look for the data's tokenizer.
            config[ROOT].model = composed[first]["model"]
            filled[f"{ROOT}.model.path"] = paths[first]
        if len(composed) == 1:
            config[ROOT] = composed[first]  # the rollout reads the run's
        config[COMPOSED] = {"models": composed, "of": _digest(config)}
    return filled


def check_composed(config: DictConfig) -> None:
    """The models' configurations are those of this `actor_rollout_ref`, `drmas.models` and `drmas.pools`.

    Hydra saves the callback's result in `.hydra/config.yaml`, without the callback: a rerun from that file with another
    rate would train with the old one.

    Raises:
        ConfigError: Something changed since they were composed.
    """
    if COMPOSED in config and config[COMPOSED]["of"] != _digest(config):
        raise ConfigError(
            f"{COMPOSED}: actor_rollout_ref, drmas.models or drmas.pools changed since the models' configurations were "
            "composed; start from your own files and +drmas=base, not from a saved .hydra/config.yaml"
        )


def _digest(config: DictConfig) -> str:
    parts = [config[ROOT], OmegaConf.select(config, "drmas.models"), OmegaConf.select(config, "drmas.pools")]
    plain = [OmegaConf.to_container(part, resolve=True) if part else None for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def engine_section(strategy: str) -> str:
    """The section of `actor` and `ref` that holds the engine's settings."""
    family = FAMILIES[strategy]
    return ENGINE_SECTION.get(family, family)


def default_updates(policy: DictConfig) -> int:
    """Updates per step as verl has them for one row a session: batch prompts over the model's mini-batch prompts."""
    return max(1, int(policy.data.train_batch_size) // int(policy[ROOT].actor.ppo_mini_batch_size))


def _needs_own(section: DrmasConfig) -> bool:
    models = list(section.models.values())
    return len(models) > 1 or bool(models[0].actor_rollout_ref or models[0].pool)


def _compose(
    config: DictConfig, model_id: str, model: ModelConfig, pool: Pool | None
) -> tuple[DictConfig, dict[str, Any]]:
    whole = copy.deepcopy(config)
    key = f"drmas.models.{model_id}.{ROOT}"
    with open_dict(whole):
        base, own = whole[ROOT], _raw_overrides(config, model_id)
        wanted = str(OmegaConf.select(own, "actor.strategy") or base.actor.strategy)
        family = FAMILIES.get(wanted)
        if family is None:
            raise ConfigError(f"{key}.actor.strategy is {wanted!r}; {nearest(wanted, FAMILIES)}")
        before = FAMILIES[str(base.actor.strategy)]
        if family != before:
            base = _carry_over(base, _defaults_of(before), _defaults_of(family))
        _check_keys(model.actor_rollout_ref, base, key)
        whole[ROOT] = OmegaConf.merge(base, own)
        if pool is not None:
            whole.trainer.n_gpus_per_node, whole.trainer.nnodes = pool.n_gpus_per_node, pool.nnodes
        filled = dict(_follows(whole, model, pool))
        for name, value in filled.items():
            OmegaConf.update(whole, name, value, force_add=True)
    return whole, filled


def _raw_overrides(config: DictConfig, model_id: str) -> DictConfig:
    """A model's overrides with their own interpolations open: in them, too, `actor_rollout_ref` is the model's."""
    models = OmegaConf.select(config, "drmas.models") or {}
    raw = models[model_id].get(ROOT) if model_id in models else None
    return OmegaConf.create(OmegaConf.to_container(raw, resolve=False) if raw else {})


def _follows(whole: DictConfig, model: ModelConfig, pool: Pool | None) -> Iterator[tuple[str, Any]]:
    """Keys that follow from how the model is run; a key that the model's own overrides name is left alone."""
    wanted: dict[str, Any] = {}
    if not model.trainable:
        wanted["rollout.load_format"] = "auto"  # nobody sends it weights
        wanted["model.lora_rank"] = 0  # nor an adapter
    elif pool is not None and pool.shared:
        engine = engine_section(str(whole[ROOT].actor.strategy))
        wanted |= {f"actor.{engine}.param_offload": True, f"actor.{engine}.optimizer_offload": True}
        wanted[f"ref.{engine}.param_offload"] = True
    for name, value in wanted.items():
        named = OmegaConf.select(OmegaConf.create(model.actor_rollout_ref), name)
        if named is None and get(whole, f"{ROOT}.{name}") != value:
            yield f"{ROOT}.{name}", value


def _check_keys(overrides: Mapping[str, Any], base: DictConfig, key: str, path: str = "") -> None:
    """Every key exists in verl, and none is one of the run's."""
    known = _known(base)
    for name, value in overrides.items():
        here = f"{path}.{name}" if path else name
        if here in RUN_LEVEL:
            raise ConfigError(
                f"{key}.{name}: is the run's, not a model's ({RUN_LEVEL[here]}); set {ROOT}.{here} for the run"
                if not RUN_LEVEL[here].startswith("set ")
                else f"{key}.{name}: is an agent's, not a model's; {RUN_LEVEL[here]}"
            )
        if here in ROW_COUNTS and value is not None:
            raise ConfigError(
                f"{key}.{name}: has no effect, because rows per step vary and micro-batches are token budgets; set "
                f"{ROW_COUNTS[here]}"
            )
        if name not in known:
            raise ConfigError(f"{key}.{name}: unknown key; {nearest(name, known)}")
        node = base._get_node(name) if name in base else None
        if not isinstance(node, DictConfig) or node._is_none() or not len(node) or name in FREE:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}.{name}: {value!r} is not valid: a section of keys is needed")
        _check_keys(value, node, f"{key}.{name}", here)


def _known(node: DictConfig) -> list[str]:
    """Keys of a section: those in the file, and those of the dataclass that verl makes of it."""
    from hydra.errors import InstantiationException
    from hydra.utils import get_class

    names = [str(name) for name in node]
    target = node.get("_target_") if "_target_" in node else None
    if target:
        try:
            cls = get_class(target)
        except (InstantiationException, ImportError, ValueError):
            return names
        if dataclasses.is_dataclass(cls):
            names += [f.name for f in dataclasses.fields(cls) if f.name not in names]
    return names


def _defaults_of(family: str) -> DictConfig:
    """verl's own `actor_rollout_ref` of another engine family."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    hydra = GlobalHydra.instance()
    before = hydra.hydra
    hydra.clear()
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", [f"model_engine={family}"])[ROOT]
    finally:
        hydra.hydra = before


def _carry_over(run: DictConfig, own: DictConfig, other: DictConfig) -> DictConfig:
    """`run` with another family's `actor` and `ref`, and in them what the run changed from its own family's.

    verl's families differ in these two sections only. What the other family has no key for stays behind.
    """
    result = copy.deepcopy(run)
    with open_dict(result), open_dict(other):
        for role in ("actor", "ref"):
            _carry(run[role], own[role], other[role])
            result[role] = other[role]
    return result


def _carry(run: DictConfig, own: DictConfig, other: DictConfig) -> None:
    for name in list(run):  # not `in run`, which says no for a key whose value is missing
        if name in FAMILYS_OWN or name not in list(other):
            continue
        value, theirs = run._get_node(name), other._get_node(name)
        default = own._get_node(name) if name in list(own) else None
        if isinstance(value, DictConfig) and isinstance(theirs, DictConfig) and not value._is_none() and len(theirs):
            _carry(value, default if isinstance(default, DictConfig) else OmegaConf.create({}), theirs)
        elif default is None or _raw(value) != _raw(default):
            other[name] = copy.deepcopy(value)


def _raw(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node._value()
