"""LLM servers of several models in one Ray job: their ranks, which name actors and sockets, must not collide."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import ray
from verl.single_controller.ray.base import RayResourcePool, split_resource_pool
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

from verl_drmas.placement import server_size
from verl_drmas.rollout.client import is_dead


def next_base(taken: int, gpus_per_node: int) -> int:
    """First free replica rank that leaves SGLang's `rank x GPUs a server % GPUs a node` where it would be from 0.

    Args:
        taken: Ranks in use: 0 to `taken` - 1.
        gpus_per_node: Of the model's pool.
    """
    return math.ceil(taken / gpus_per_node) * gpus_per_node


def _replica_class(config: Any) -> type:
    rollout = config.actor_rollout_ref.rollout
    return get_rollout_replica_class(rollout.name, disaggregation_enabled=rollout.disaggregation.enabled)


class HybridServers(LLMServerManager):
    """verl's manager over servers whose ranks begin at `start_rank` (beside `start_rank` others of the job)."""

    def __init__(self, config: Any, worker_group: Any, start_rank: int):
        class OffsetReplica(_replica_class(config)):
            async def init_hybrid(self, worker_group: Any) -> None:
                # verl slices the workers by the replica's rank in the job.
                skip = [None] * (self.world_size * start_rank)
                await super().init_hybrid(SimpleNamespace(workers=skip + list(worker_group.workers)))

        self.rollout_replica_class = OffsetReplica
        super().__init__(config=config, worker_group=worker_group, start_rank=start_rank)


class FrozenServers(LLMServerManager):
    """Servers of a model nobody trains, on the GPUs of a pool; they read their weights from disk."""

    def __init__(self, config: Any, pool: RayResourcePool, start_rank: int):
        self.parts = split_resource_pool(pool, server_size(config))
        parts, base = self.parts, start_rank

        class PlacedReplica(_replica_class(config)):
            async def init_standalone(self) -> None:
                # verl would take GPUs of its own here; colocated servers sleep and wake without a weight update.
                await self.init_colocated(parts[self.replica_rank - base])

        self.rollout_replica_class = PlacedReplica
        super().__init__(config=config, start_rank=start_rank)


class FrozenSync:
    """Stands for a checkpoint manager: before a rollout the servers wake with the weights they have.

    Args:
        servers: The model's.
        sleeps: True where others need the GPUs between rollouts.
    """

    def __init__(self, servers: FrozenServers, sleeps: bool):
        self.replicas, self.sleeps = list(servers.get_replicas()), sleeps
        self._asleep = False

    def sleep_replicas(self) -> None:
        """Free the GPUs, if somebody shares them."""
        if self.sleeps and not self._asleep:
            asyncio.run(_all([replica.sleep() for replica in self.replicas]))
            self._asleep = True

    def update_weights(self, global_steps: int | None = None) -> None:
        """Be ready for a rollout; a server that died meanwhile is left out, unless it is the last.

        Raises:
            Exception: What a server said that is not dead, or the last one's death.
        """
        if not self._asleep:
            return
        answers = asyncio.run(_all([replica.wake_up() for replica in self.replicas], return_exceptions=True))
        errors = {replica: a for replica, a in zip(self.replicas, answers, strict=True) if isinstance(a, Exception)}
        for error in errors.values():
            if not is_dead(error) or len(errors) == len(self.replicas):
                raise error
        self.remove_replicas(list(errors))
        self._asleep = False

    def remove_replicas(self, replicas: list[Any]) -> None:
        """Forget dead servers."""
        self.replicas = [replica for replica in self.replicas if replica not in replicas]


async def _all(calls: list[Any], **options: Any) -> list[Any]:
    return await asyncio.gather(*calls, **options)


def kill_servers(servers: LLMServerManager) -> None:
    """End a model's servers, so that whoever waits for one of them goes on with an error."""
    for replica in servers.get_replicas():
        for server in replica.servers:
            ray.kill(server)
