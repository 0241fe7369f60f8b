"""The run's pools as Ray places them: one set of placement groups a pool, made once and shared by its models."""

from __future__ import annotations

from collections.abc import Mapping

from verl.single_controller.ray import RayResourcePool, ResourcePoolManager

from verl_drmas.placement import Pool


def create_pools(pools: Mapping[str, Pool]) -> dict[str, RayResourcePool]:
    """Make the pools; their placement groups are taken when the first worker group needs them.

    Raises:
        ValueError: Ray has fewer GPUs than the pools have together (verl's own check).
    """
    made: dict[str, RayResourcePool] = {}
    for pool in pools.values():
        manager = ResourcePoolManager(
            resource_pool_spec={pool.name: [pool.n_gpus_per_node] * pool.nnodes},
            mapping={},
            max_colocate_count=pool.max_colocate_count,
        )
        manager.create_resource_pool()
        made |= manager.resource_pool_dict
    wanted = ResourcePoolManager(
        resource_pool_spec={p.name: [p.n_gpus_per_node] * p.nnodes for p in pools.values()}, mapping={}
    )
    wanted._check_resource_available()  # all together: nothing is placed yet
    return made


class ExistingPool(ResourcePoolManager):
    """A manager over a pool that is there already."""

    def create_resource_pool(self) -> None:
        """Nothing to make."""
