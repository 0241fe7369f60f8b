"""The run's pools as Ray places them: one set of placement groups a pool, made once and shared by its models."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
from verl.utils.device import get_resource_name

from verl_drmas.placement import Pool


def create_pools(pools: Mapping[str, Pool]) -> dict[str, RayResourcePool]:
    """Make the pools; their placement groups are taken when the first worker group needs them.

    Raises:
        ValueError: A pool whose nodes the cluster doesn't have; Ray would wait for them for ever.
    """
    _check_nodes(pools)
    made: dict[str, RayResourcePool] = {}
    for pool in pools.values():
        manager = ResourcePoolManager(
            resource_pool_spec={pool.name: [pool.n_gpus_per_node] * pool.nnodes},
            mapping={},
            max_colocate_count=pool.max_colocate_count,
        )
        manager.create_resource_pool()
        made |= manager.resource_pool_dict
    return made


def _check_nodes(pools: Mapping[str, Pool]) -> None:
    """Place the pools on paper, the widest first; a part of a pool lies on one node."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = [resources.get(get_resource_name(), 0.0) for resources in alive]
    for pool in sorted(pools.values(), key=lambda pool: -pool.n_gpus_per_node):
        for _ in range(pool.nnodes):
            fitting = [i for i, gpus in enumerate(free) if gpus >= pool.n_gpus_per_node]
            if not fitting:
                raise ValueError(
                    f"pool {pool.name!r} takes {pool.nnodes} x {pool.n_gpus_per_node} GPUs, and beside the other pools "
                    f"the cluster's nodes have {', '.join(f'{gpus:g}' for gpus in free)} left; change drmas.pools or "
                    "trainer.n_gpus_per_node"
                )
            free[min(fitting, key=lambda i: free[i])] -= pool.n_gpus_per_node


class ExistingPool(ResourcePoolManager):
    """A manager over a pool that is there already."""

    def create_resource_pool(self) -> None:
        """Nothing to make."""
