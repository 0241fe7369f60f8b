"""Which models share which GPUs: the pools of a run, and whether the models of a pool can share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_drmas.config import OWN_POOL, TOGETHER, ConfigError, DrmasConfig
from verl_drmas.support import get

ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Pool:
    """GPUs that are placed as one, and the models on them.

    Attributes:
        name: A key of `drmas.pools`, or `run` for the run's own.
        n_gpus_per_node: GPUs on each node.
        nnodes: Nodes.
        models: The models that train and serve here, in the section's order.
    """

    name: str
    n_gpus_per_node: int
    nnodes: int
    models: tuple[str, ...]

    @property
    def gpus(self) -> int:
        return self.n_gpus_per_node * self.nnodes

    @property
    def shared(self) -> bool:
        """Several models take turns on these GPUs."""
        return len(self.models) > 1

    @property
    def max_colocate_count(self) -> int:
        """Worker processes that a GPU must have room for in Ray's books: one a model, and at least verl's own 3."""
        return max(3, len(self.models))


def placement(config: Any, section: DrmasConfig) -> dict[str, Pool]:
    """The run's pools, by name, in the order of their first model."""
    members: dict[str, list[str]] = {}
    for model_id, model in section.models.items():
        if model.remote is None:
            members.setdefault(model.pool or OWN_POOL, []).append(model_id)
    pools = {}
    for name, models in members.items():
        if name == OWN_POOL:
            size = int(get(config, "trainer.n_gpus_per_node", 1)), int(get(config, "trainer.nnodes", 1))
        else:
            size = section.pools[name].n_gpus_per_node, section.pools[name].nnodes
        pools[name] = Pool(name, *size, tuple(models))
    return pools


def pool_of(pools: Mapping[str, Pool], model_id: str) -> Pool:
    """The pool that a model is in; a remote one is in none."""
    return next(pool for pool in pools.values() if model_id in pool.models)


def server_size(policy: Any) -> int:
    """GPUs of one server of a model: tensor x data x pipeline parallel size.

    Args:
        policy: The run's configuration as the model sees it.
    """
    names = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    sizes = [int(get(policy, f"{ROLLOUT}.{name}", 1)) for name in names]
    return sizes[0] * sizes[1] * sizes[2]


def check_placement(pools: Mapping[str, Pool], policies: Mapping[str, Any]) -> None:
    """Every server fits its pool, and the models of a pool can share it.

    Args:
        pools: From `placement`.
        policies: By model id: the run's configuration as the model sees it.

    Raises:
        ConfigError: One line: pool, models, fix.
    """
    for pool in pools.values():
        for model_id in pool.models:
            size, node = server_size(policies[model_id]), pool.n_gpus_per_node
            if pool.gpus % size or (node % size and size % node):
                raise ConfigError(
                    f"model {model_id}: a server takes {size} GPUs ({ROLLOUT}.tensor_model_parallel_size x ...), which "
                    f"don't divide the {pool.nnodes} x {node} of pool {pool.name!r} into nodes; change one of the two"
                )
        if pool.shared:
            _check_shared(pool, {model_id: policies[model_id] for model_id in pool.models})


def _check_shared(pool: Pool, policies: Mapping[str, Any]) -> None:
    engines = {model_id: str(get(policy, f"{ROLLOUT}.name")) for model_id, policy in policies.items()}
    told = ", ".join(f"{model_id}: {engine}" for model_id, engine in engines.items())
    if len(set(engines.values())) > 1:
        raise ConfigError(
            f"pool {pool.name!r} has models on different engines ({told}), whose servers don't make room for each "
            "other; give them pools of their own (drmas.pools, drmas.models.<id>.pool) or one engine"
        )
    first = next(iter(policies.values()))
    if get(first, "trainer.device", "cuda") == "cpu":
        return  # memory is the machine's, and vLLM has no sleep mode here
    for model_id, policy in policies.items():
        for name in ("free_cache_engine", "enable_sleep_mode"):
            if not get(policy, f"{ROLLOUT}.{name}", True):
                raise ConfigError(
                    f"model {model_id}: {ROLLOUT}.{name} is false, but it shares pool {pool.name!r} with "
                    f"{', '.join(m for m in pool.models if m != model_id)}; its servers must sleep while others train: "
                    "set it to true"
                )
    shares = {m: float(get(policy, f"{ROLLOUT}.gpu_memory_utilization", 0.5)) for m, policy in policies.items()}
    if round(sum(shares.values()), 6) > TOGETHER:
        told = " + ".join(f"{share:g} ({model_id})" for model_id, share in shares.items())
        raise ConfigError(
            f"pool {pool.name!r}: {ROLLOUT}.gpu_memory_utilization adds up to {sum(shares.values()):.2f}: {told}; the "
            f"servers are awake together in rollout, so lower them to {TOGETHER} in all"
        )


def check_cluster(config: Any, pools: Mapping[str, Pool]) -> dict[str, Any]:
    """The GPUs that the job asks Ray for are enough for the pools.

    Returns:
        Keys to set: on a CPU the GPUs are logical, and as many as the pools have.

    Raises:
        ConfigError: `ray_init.num_gpus` is less than the pools' sum.
    """
    key = "ray_kwargs.ray_init.num_gpus"
    asked, wanted = get(config, key), sum(pool.gpus for pool in pools.values())
    if asked is None or int(asked) >= wanted:
        return {}
    if get(config, "trainer.device", "cuda") == "cpu":
        return {key: wanted}
    told = " + ".join(f"{pool.gpus} ({pool.name})" for pool in pools.values())
    raise ConfigError(f"{key} is {asked}, but the pools take {wanted}: {told}; raise it, or make the pools smaller")
