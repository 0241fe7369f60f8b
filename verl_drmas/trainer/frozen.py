"""The trainer's handle on a model that is served and never trained: servers, and no workers."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, open_dict
from verl.single_controller.ray import RayResourcePool

from verl_drmas.placement import Pool
from verl_drmas.rollout.client import RetryingClient
from verl_drmas.trainer.servers import FrozenServers, FrozenSync, kill_servers


class FrozenModel:
    """A served model (`trainable: false`).

    Args:
        model_id: The model.
        config: The run's configuration as the model sees it.
        pool: Where it is served.
        placed: The same, as Ray has it.
        replica_base: First rank of its servers in the job.
    """

    def __init__(self, model_id: str, config: DictConfig, pool: Pool, placed: RayResourcePool, replica_base: int):
        self.model_id, self.config, self.pool = model_id, config, pool
        rollout = config.actor_rollout_ref.rollout
        with open_dict(config):
            # verl counts servers without workers from these two.
            rollout.n_gpus_per_node, rollout.nnodes = pool.n_gpus_per_node, pool.nnodes
        self.llm_server_manager = FrozenServers.create(config, placed, replica_base)
        self.checkpoint_manager = FrozenSync(
            self.llm_server_manager, sleeps=pool.shared and bool(rollout.free_cache_engine)
        )
        self.checkpoint_manager.sleep_replicas()

    def get_llm_client(self) -> RetryingClient:
        """A client of its servers."""
        return self.llm_server_manager.get_client(client_cls=RetryingClient)

    def drop_server(self, replica: Any) -> None:
        """No worker feeds the server; nothing to do beyond the balancer."""

    def kill_workers(self) -> None:
        """Make every call that waits for this model's servers raise."""
        kill_servers(self.llm_server_manager)
