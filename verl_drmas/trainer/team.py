"""The trainer `drmas_sync`: a stock synchronous trainer whose stages fan out over one policy per model."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from ray.exceptions import RayError
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_to_nested

from verl_drmas.advantage import balance_weights, row_size
from verl_drmas.check import prepare_trainer
from verl_drmas.logs import configure_logging
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.buffer import TeamReplayBuffer
from verl_drmas.trainer.estimators import advantage_options
from verl_drmas.trainer.fan import Fan
from verl_drmas.trainer.first_session import describe_session
from verl_drmas.trainer.metrics import (
    CollapseWatch,
    agent_metrics,
    session_metrics,
    shadow_metrics,
    workflow_metrics,
)
from verl_drmas.trainer.policy import Policy, default_updates, policy_config
from verl_drmas.trainer.step import StepRows
from verl_drmas.trainer.validation import validation_metrics
from verl_drmas.trainer.watchdog import REFUSALS, Server, Watchdog
from verl_drmas.workflows import load_workflow

logger = logging.getLogger(__name__)


@register_trainer("drmas_sync")
class TeamTrainer(PPOTrainerSync):
    """Trains a team.

    It owns data, rollout, rewards and advantages; each policy owns a model, its servers and its optimiser. With one
    policy, one agent and one call a session it gives the numbers of verl's own `sync` trainer.
    """

    def __init__(self, config: DictConfig):
        configure_logging()
        self.prepared = prepare_trainer(config)
        self.section = self.prepared.section
        super().__init__(config)
        workflow = self.section.workflow
        self.workflow = load_workflow(workflow["name"]) if workflow else None
        self.rows: dict[str, Row] = {}
        self._collapse = CollapseWatch()
        self._shown = not self.section.show_first_session

    def _build_replay_buffer(self) -> TeamReplayBuffer:
        # verl gives every trainer mode but the literal "sync" asynchronous semantics (`trainer_base.py`, here and in
        # the data loader and checkpoints). A method `is_sync()` in verl would remove this.
        self.trainer_mode = "sync"
        buffer = super()._build_replay_buffer()
        if self.config.trainer.v1.sampler.custom_sampler.path:
            return buffer
        return TeamReplayBuffer.adopt(
            buffer,
            poll_interval=self.section.poll_interval,
            stall_timeout=self.section.faults.stall_timeout,
            check=lambda: self.watchdog.check(),
        )

    # -- setting up

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        updates = self.section.updates_per_step or default_updates(self.config)
        self.policies: dict[str, Policy] = {}
        for model_id in self.section.models:
            policy = Policy(model_id, policy_config(self.config, self.section, model_id), updates)
            policy._setup()
            self.policies[model_id] = policy
        self.reward_loop_manager = RewardLoopManager(config=self.config)
        self.teacher_model_manager = self.distillation_config = None
        self.use_reference_policy = any(p.use_reference_policy for p in self.policies.values())
        self.actor_rollout_wg = Fan({m: p.actor_rollout_wg for m, p in self.policies.items()})
        self.ref_policy_wg = self.actor_rollout_wg
        self.checkpoint_manager = Fan({m: p.checkpoint_manager for m, p in self.policies.items()})
        self.watchdog = self._build_watchdog()
        self._load_checkpoint()

    def _build_watchdog(self) -> Watchdog:
        servers = [
            Server(model_id, replica.server_address, replica)
            for model_id, policy in self.policies.items()
            for replica in policy.llm_server_manager.get_replicas()
        ]
        faults = self.section.faults
        watchdog = Watchdog(
            servers,
            poll=faults.poll_health or 5.0,
            hang_timeout=faults.hang_timeout,
            on_dead=self._drop_server,
            on_end=self._kill_workers,
        )
        if faults.poll_health:
            watchdog.start()
        return watchdog

    def _drop_server(self, server: Server) -> None:
        """Nobody asks a dead server again: not the balancer, not sleep and wake-up, not the worker that feeds it."""
        policy = self.policies[server.model_id]
        policy.llm_server_manager.global_load_balancer.remove_servers.remote([server.address])
        policy.checkpoint_manager.remove_replicas([server.replica])
        policy.actor_rollout_wg.drop_server(server.replica.replica_rank)

    def _kill_workers(self, model_id: str) -> None:
        """Make every call that waits for this model's workers raise."""
        for worker in self.policies[model_id].actor_rollout_wg.workers:
            ray.kill(worker)

    def get_llm_client(self) -> Any:
        (policy,) = self.policies.values()
        return policy.get_llm_client()

    def _rollout_server_managers(self) -> list[Any]:
        return [policy.llm_server_manager for policy in self.policies.values()]

    def _get_n_gpus_for_throughput(self) -> int:
        return sum(policy.resource_pool_manager.get_n_gpus() for policy in self.policies.values())

    # -- the loop: name the phase, survive a dead server

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self.watchdog.stop()

    def _enter(self, phase: str) -> None:
        """Name the phase, for whoever has to say during what a server died."""
        self.watchdog.phase = phase
        logger.debug("step %d: %s", self.global_steps, phase)

    def _explain(self, error: Exception) -> None:
        """Raise the reason instead of the symptom, if a server's death is behind an error."""
        if isinstance(error, RayError) and self.watchdog.fatal is None:
            self._look_for_deaths()
        if self.watchdog.fatal is not None and self.watchdog.fatal not in str(error):
            raise RuntimeError(self.watchdog.fatal) from error

    def _look_for_deaths(self) -> None:
        for _ in range(REFUSALS):
            self.watchdog.look()

    def on_init_end(self) -> None:
        self._enter("the first weight update")
        super().on_init_end()

    def on_sample_begin(self) -> None:
        self._enter("rollout")
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        before = self.watchdog.deaths
        try:
            super().on_sample_end()
        except RayError as error:
            self._explain(error)
            if self.watchdog.deaths == before:
                raise
            super().on_sample_end()  # the dead server is out of the list; the others may not be asleep yet

    def on_step_end(self) -> None:
        self._enter("the weight update")
        try:
            super().on_step_end()
        except RayError as error:
            # Not run again: other ranks may still wait for each other in the first call.
            self._explain(error)
            raise

    def on_validate_begin(self) -> None:
        self._enter("validation")
        super().on_validate_begin()

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> KVBatchMeta:
        try:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        except RuntimeError as error:
            if "no materializable trajectories" in str(error):
                self._look_for_deaths()
                self.watchdog.check()
                raise RuntimeError(f"every session of step {self.global_steps} failed: {self._report()}") from error
            raise

    # -- the stages of the inherited step: hand each policy its own rows

    def _trained(self, key: str) -> bool:
        return self.section.agent(self.rows[key].agent_id).trainable

    def _each(self, stage: str, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Run a policy stage on every policy's trained rows; rows of frozen agents stay in the batch untouched."""
        known = [self.rows.get(key) for key in batch.keys]
        frozen = [i for i, row in enumerate(known) if row is not None and not self._trained(batch.keys[i])]
        if not frozen and len(self.policies) == 1:
            (policy,) = self.policies.values()
            return getattr(policy, stage)(batch, metrics=metrics)
        keys, tags = [batch.keys[i] for i in frozen], [batch.tags[i] for i in frozen]
        skip = set(frozen)
        for model_id, policy in self.policies.items():
            # A padding row has no `Row`; with one policy it can only be this policy's.
            mine = [i for i, row in enumerate(known) if i not in skip and (row is None or row.model_id == model_id)]
            if mine:
                part = getattr(policy, stage)(take(batch, mine), metrics=metrics)
                keys, tags = part.keys + keys, part.tags + tags
        return KVBatchMeta(keys=keys, tags=tags, partition_id=batch.partition_id, extra_info=batch.extra_info)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._enter("log-probs and advantages")
        self.rows = self._read_rows(batch)
        self._account(metrics)
        # Rows arrive in completion order; sorted, nothing after this depends on which session ended first.
        batch.reorder(sorted(range(len(batch)), key=lambda i: self.rows[batch.keys[i]].order))
        if not self._shown:
            self._show_first_session(batch)
        return self._each("_balance_batch", batch, metrics)

    def _read_rows(self, batch: KVBatchMeta) -> dict[str, Row]:
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["extra_fields", "index"])
        default = next(iter(self.section.models))
        extra, index = list(data["extra_fields"]), list(data["index"])
        return {
            key: Row.read(key, fields, getattr(i, "data", i), default)
            for key, fields, i in zip(batch.keys, extra, index, strict=True)
        }

    def _report(self) -> dict[str, int]:
        report = getattr(self.agent_loop_manager, "report", None)
        return report() if report else {}

    def _account(self, metrics: dict[str, Any]) -> None:
        """Count the sessions that failed, and stop the run if they are too many."""
        expected = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        report = self._report()
        numbers = session_metrics(list(self.rows.values()), expected, report)
        metrics |= numbers
        if self.watchdog.deaths:
            metrics["drmas/sessions/dead_servers"] = float(self.watchdog.deaths)
        share = numbers["drmas/sessions/failed"] / expected
        if share > self.section.faults.max_failed_share:
            raise RuntimeError(
                f"{share:.0%} of the sessions of step {self.global_steps} failed ({report}); "
                f"drmas.faults.max_failed_share is {self.section.faults.max_failed_share:.0%}"
            )

    def _show_first_session(self, batch: KVBatchMeta) -> None:
        self._shown = True
        first = self.rows[batch.keys[0]]
        keys = [k for k in batch.keys if (self.rows[k].uid, self.rows[k].session) == (first.uid, first.session)]
        fields = ["prompts", "responses", "response_mask"]
        data = tq.kv_batch_get(keys, batch.partition_id, select_fields=fields)
        texts = [[ids.tolist() for ids in data[name].unbind()] for name in fields]
        logger.warning("%s", describe_session([self.rows[k] for k in keys], *texts, self.tokenizer))

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        frozen = [key for key in batch.keys if key in self.rows and not self._trained(key)]
        if frozen:
            # TransferQueue drops a field for all rows if one row lacks it.
            data = tq.kv_batch_get(frozen, batch.partition_id, select_fields=["rollout_log_probs"])
            data["old_log_probs"] = data.pop("rollout_log_probs")
            tq.kv_batch_put(keys=frozen, partition_id=batch.partition_id, fields=data)
        return self._each("_compute_old_log_prob", batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return self._each("_compute_ref_log_prob", batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._enter("the update")
        return self._each("_update_actor", batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        step = StepRows([self.rows.get(key) for key in batch.keys], self.section, self.prepared.base_estimator)
        with step.current():
            batch = super()._compute_advantage(batch, metrics)
        if step.scores is None:  # an estimator of the user's own, which knows nothing of `StepRows`
            self._read_statistics(batch, step)
        metrics |= agent_metrics(step)
        metrics |= workflow_metrics(step.known, self.workflow)
        if self.section.advantage.shadow:
            metrics |= shadow_metrics(step, advantage_options(step))
        agents = sorted({*self.section.agents, *(row.agent_id for row in step.known)})
        for warning in self._collapse.look(metrics, agents):
            logger.warning("%s", warning)
        if self.section.advantage.balance != "none":
            self._put_row_weights(batch, step)
        return batch

    def _read_statistics(self, batch: KVBatchMeta, step: StepRows) -> None:
        """Take the rows' scores and advantages from where verl put them, for the metrics."""
        fields = ["rm_scores", "advantages", "response_mask"]
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=fields)
        scores, advantages, mask = (data[name].to_padded_tensor(0.0) for name in fields)
        first = mask.argmax(dim=1, keepdim=True)
        step.scores = scores.sum(-1).double().numpy()[step.real]
        step.advantage = advantages.gather(1, first).squeeze(1).double().numpy()[step.real]
        step.tokens = mask.sum(-1).numpy()[step.real]

    def _put_row_weights(self, batch: KVBatchMeta, step: StepRows) -> None:
        """Weights go through verl's per-token field `rollout_is_weights`, which its losses multiply in.

        Every row must have the field, padding rows too, or TransferQueue drops it for all.
        """
        size = row_size(step.tokens, self.config.actor_rollout_ref.actor.loss_agg_mode)
        size = size * [
            self.section.agent(row.agent_id).trainable for row in step.known
        ]  # a frozen agent takes no share
        weights = np.ones(len(step.rows))
        weights[step.real] = balance_weights(**step.ids(), size=size, balance=self.section.advantage.balance)
        mask = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["response_mask"])["response_mask"]
        dense = torch.as_tensor(weights, dtype=torch.float32).unsqueeze(-1).expand(-1, mask.offsets().diff().max())
        field = TensorDict({"rollout_is_weights": response_to_nested(dense, mask)}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=field)

    # -- validation

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list[int],
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        sessions = {
            k: reward_extra_infos_dict.pop(k) for k in list(reward_extra_infos_dict) if k.startswith("session/")
        }
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts=expected_acc_counts
        )
        scores = reward_extra_infos_dict.get("acc") or [None]
        if None in scores:  # a stock loop may set it for some sessions only
            scores = reward_extra_infos_dict["reward"]
        metrics |= validation_metrics(data_sources, sample_uids, scores, expected_acc_counts or {})
        if self.workflow is not None:
            rows = [
                {k.removeprefix("session/"): v[i] for k, v in sessions.items() if v[i] is not None}
                for i in range(len(sample_uids))
            ]
            metrics |= {f"val/drmas/{k}": v for k, v in self.workflow.summarise(rows).items()}
        self._report()  # failures in validation are counted above, not in the next training step
        return metrics


def take(batch: KVBatchMeta, rows: list[int]) -> KVBatchMeta:
    """Some rows of a batch."""
    return KVBatchMeta(
        keys=[batch.keys[i] for i in rows],
        tags=[batch.tags[i] for i in rows],
        partition_id=batch.partition_id,
        extra_info=batch.extra_info,
    )
