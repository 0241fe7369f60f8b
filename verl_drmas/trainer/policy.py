"""The trainer's handle on one model: a stock verl trainer that never fits, whose stages run on the model's own rows."""

from __future__ import annotations

import os
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import RayResourcePool
from verl.trainer.ppo.utils import need_reference_policy
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import validate_config

from verl_drmas.config import DrmasConfig
from verl_drmas.rollout.client import RetryingClient
from verl_drmas.trainer.lanes import Driver, WaitingGroup
from verl_drmas.trainer.pools import ExistingPool
from verl_drmas.trainer.servers import HybridServers, kill_servers
from verl_drmas.trainer.worker import TeamActorRolloutRefWorker


class Policy(PPOTrainerSync):
    """One model: worker group, servers, optimiser, weight sync.

    It has no data, no rewards and no loop; `TeamTrainer` calls the inherited `_balance_batch`, `_compute_old_log_prob`,
    `_compute_ref_log_prob` and `_update_actor` with the rows of this model.

    Args:
        model_id: The model.
        config: This policy's configuration, from `in_rows`.
        updates_per_step: Optimizer updates per step and epoch.
        placed: The pool whose GPUs it trains and serves on.
        replica_base: First rank of its servers in the job.
        driver: Let go while workers work.
    """

    def __init__(
        self,
        model_id: str,
        config: DictConfig,
        updates_per_step: int,
        placed: RayResourcePool,
        replica_base: int,
        driver: Driver,
    ):
        with open_dict(config):
            config.actor_rollout_ref.replica_base = replica_base
        super().__init__(config)
        self.model_id, self.updates_per_step = model_id, updates_per_step
        self._placed, self._replica_base, self._driver = placed, replica_base, driver
        self._rows = 0
        self._updates = updates_per_step

    def _init_dataloader(self) -> None:
        """The team trainer owns the data."""

    def _build_replay_buffer(self) -> None:
        """And samples it."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        (role,) = self.role_worker_mapping
        self.role_worker_mapping[role] = ray.remote(TeamActorRolloutRefWorker)
        name = self._placed.name_prefix
        self.resource_pool_manager = ExistingPool({}, {role: name}, resource_pool_dict={name: self._placed})
        # verl numbers the servers of every model from 0; only the first model may have those. This is verl's own switch
        # that leaves the servers to a subclass, and it is read again after the roles above are set.
        self._enable_hybrid_replicas = not self._replica_base

    def _setup(self) -> None:
        super()._setup()
        if self._replica_base:
            ray.kill(self.llm_server_manager.global_load_balancer)  # of the empty manager that verl made
            self.llm_server_manager = HybridServers.create(self.config, self.actor_rollout_wg, self._replica_base)
            self.checkpoint_manager.add_replicas(self.llm_server_manager.get_replicas())
            self.checkpoint_manager.sleep_replicas()  # the next model's servers may need the memory
        self.actor_rollout_wg = WaitingGroup(self.actor_rollout_wg, self._driver)
        if hasattr(self, "ref_policy_wg"):
            self.ref_policy_wg = self.actor_rollout_wg

    def start_from(self, folder: str) -> None:
        """Load a checkpoint's weights, and nothing else of it."""
        self.actor_rollout_wg.load_weights(os.path.abspath(os.path.expanduser(folder)))

    def drop_server(self, replica: Any) -> None:
        """The worker that feeds a dead server stops doing so."""
        self.actor_rollout_wg.drop_server(replica.replica_rank)

    def kill_workers(self) -> None:
        """Make every call that waits for this model's workers or servers raise."""
        for worker in self.actor_rollout_wg.workers:
            ray.kill(worker)
        kill_servers(self.llm_server_manager)

    def get_llm_client(self) -> RetryingClient:
        return self.llm_server_manager.get_client(client_cls=RetryingClient)

    # -- a fixed number of updates per step, whatever the number of rows

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **kwargs: Any) -> KVBatchMeta:
        """verl's padding and balancing to a multiple of (updates x data-parallel ranks), padding spread over
        updates.
        """
        self._rows = len(batch)
        batch = super()._balance_batch(batch, metrics, **kwargs)
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        padding = [tag.get("is_padding", False) for tag in batch.tags]
        batch.reorder(spread(padding, ranks=ranks, updates=self._updates))
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        self._updates = feasible_updates(self.updates_per_step, rows=self._rows, ranks=dp_size)
        return dp_size * self._updates

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        real = sum(not tag.get("is_padding", False) for tag in batch.tags)
        with open_dict(self.config):  # in rows: `in_rows` set rollout.n to 1
            self.config.actor_rollout_ref.actor.ppo_mini_batch_size = len(batch) // self._updates
        batch = super()._update_actor(batch, metrics)
        metrics["rows"] = real
        metrics["padding_rows"] = len(batch) - real
        metrics["padding_share"] = 1 - real / len(batch)
        metrics["updates"] = self._updates * self.config.actor_rollout_ref.actor.ppo_epochs
        return batch


def feasible_updates(wanted: int, *, rows: int, ranks: int) -> int:
    """Most updates up to `wanted` that leave each at least one real row per rank; at least 1."""
    return max(1, min(wanted, rows // ranks))


def spread(padding: list[bool], *, ranks: int, updates: int) -> list[int]:
    """Order that gives every update its share of the padding rows.

    Each rank trains its block of the batch from front to back, one equal slice an update. verl's balancing may put all
    padding into one slice, and an update of padding only has no tokens to average over.

    Args:
        padding: Which rows are padding, rank after rank; a multiple of ranks x updates rows.
        ranks: Data-parallel size.
        updates: Slices per rank.

    Returns:
        A permutation of the row numbers; rows stay with their rank, and real rows keep their order.
    """
    block = len(padding) // ranks
    size = block // updates
    order: list[int] = []
    dealt = 0  # goes on from rank to rank, so that the slices of an update share evenly over ranks as well
    for rank in range(ranks):
        rows = range(rank * block, (rank + 1) * block)
        pads, real = [r for r in rows if padding[r]], [r for r in rows if not padding[r]]
        share = [0] * updates
        for i in range(len(pads)):
            share[(dealt + i) % updates] += 1
        dealt += len(pads)
        pad_rows, real_rows = iter(pads), iter(real)
        for update in range(updates):
            order += [next(real_rows) for _ in range(size - share[update])]
            order += [next(pad_rows) for _ in range(share[update])]
    return order


def in_rows(policy: DictConfig, run: DictConfig, section: DrmasConfig) -> DictConfig:
    """A model's configuration, counted in rows, without data, rewards and resume of its own.

    Args:
        policy: The run's configuration as the model sees it; changed in place.
        run: The run's; its data loader has set the length of learning-rate schedules.
        section: The `drmas` section with the model's agents alone.
    """
    with open_dict(policy):
        validate_config(policy, use_reference_policy=need_reference_policy(policy), use_critic=False)
        model = policy.actor_rollout_ref
        model.actor.optim.total_training_steps = run.actor_rollout_ref.actor.optim.total_training_steps
        model.actor.ppo_mini_batch_size *= model.rollout.n  # verl counts prompts here and multiplies by n itself
        model.rollout.n = 1
        model.rollout.nnodes = max(1, model.rollout.nnodes)  # for the empty server manager that verl's `_setup` makes
        model.sync_timeout = section.faults.sync_timeout
        model.row_temperature = section.mixes_temperature(model.rollout.temperature)
        policy.trainer.v1.trainer_mode = "sync"
        policy.trainer.resume_mode = "disable"
        policy.trainer.checkpoint_callback_class = None
        policy.reward.num_workers = 0
    return policy
