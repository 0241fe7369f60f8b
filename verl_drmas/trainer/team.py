"""The trainer `drmas_sync`: a stock synchronous trainer whose stages fan out over one policy per model."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.config import omega_conf_to_dataclass

from verl_drmas.check import build_workflow, prepare_trainer
from verl_drmas.compose import COMPOSED, default_updates, policy_config
from verl_drmas.logs import configure_logging
from verl_drmas.placement import pool_of
from verl_drmas.rollout.client import TeamClient
from verl_drmas.rollout.rows import Row
from verl_drmas.support import get, is_mgrpo
from verl_drmas.trainer.alignment import (
    Alignment,
    StepAlignment,
    alignment_metrics,
    calls_by_session,
    copies_of,
    loss_weights,
)
from verl_drmas.trainer.buffer import TeamReplayBuffer
from verl_drmas.trainer.checkpoint import CheckpointedTrainer
from verl_drmas.trainer.copies import make_copies
from verl_drmas.trainer.curriculum import StagedTrainer
from verl_drmas.trainer.estimators import advantage_options
from verl_drmas.trainer.fan import Fan
from verl_drmas.trainer.feeding import FeedingTrainer
from verl_drmas.trainer.first_session import describe_session
from verl_drmas.trainer.frozen import FrozenModel
from verl_drmas.trainer.guarded import GuardedTrainer
from verl_drmas.trainer.lanes import Lanes
from verl_drmas.trainer.masked import MaskedRows, take
from verl_drmas.trainer.metrics import (
    CollapseWatch,
    agent_metrics,
    log_prob_gaps,
    model_metrics,
    session_metrics,
    shadow_metrics,
    workflow_metrics,
)
from verl_drmas.trainer.policy import Policy, in_rows
from verl_drmas.trainer.pools import create_pools
from verl_drmas.trainer.row_weights import put_row_weights, row_weights
from verl_drmas.trainer.servers import next_base
from verl_drmas.trainer.step import StepRows
from verl_drmas.trainer.transcripts import Transcripts
from verl_drmas.trainer.written import WrittenTrainer
from verl_drmas.workflows import load_workflow

if TYPE_CHECKING:
    from verl_drmas.trainer.remote_model import RemoteModel

logger = logging.getLogger(__name__)


@register_trainer("drmas_sync")
class TeamTrainer(FeedingTrainer, GuardedTrainer, CheckpointedTrainer, StagedTrainer, WrittenTrainer):
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
        self.alignment: Alignment | None = None
        if is_mgrpo(config) and workflow:
            seed = self.section.request_seed if self.section.request_seed is not None else get(config, "data.seed", 0)
            self.alignment = Alignment(self.section.alignment, build_workflow(self.section).aligned, int(seed))
        self._shown = not self.section.show_first_session
        self._masked = MaskedRows(dumped=bool(config.trainer.get("rollout_data_dir")))
        self._padding: dict[str, str] = {}  # padding row: the model whose batch it fills up

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
            sampled=self._sampled,
        )

    # -- setting up

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self._build_feeds()
        self.policies = self._build_policies()
        self.trained = {m: policy for m, policy in self.policies.items() if isinstance(policy, Policy)}
        self.transcripts = Transcripts({m: self._tokenizer_of(policy) for m, policy in self.policies.items()})
        self.reward_loop_manager = RewardLoopManager(config=self.config)
        self.teacher_model_manager = self.distillation_config = None
        self.use_reference_policy = any(p.use_reference_policy for p in self.trained.values())
        self.actor_rollout_wg = Fan({m: p.actor_rollout_wg for m, p in self.trained.items()}, self.lanes)
        self.ref_policy_wg = self.actor_rollout_wg
        # Frozen models wake last: a weight update of another takes more of the GPU than its servers do afterwards.
        order = [*self.trained, *(m for m, policy in self.policies.items() if isinstance(policy, FrozenModel))]
        self.checkpoint_manager = Fan({m: self.policies[m].checkpoint_manager for m in order}, self.lanes)
        self.watchdog = self._build_watchdog()
        self._load_checkpoint()
        if not self.global_steps:
            self._start_from_checkpoints()
        self._begin_feeding()

    def _build_policies(self) -> dict[str, Policy | FrozenModel | RemoteModel]:
        """One after another: a model's servers start when the trainers and servers before them have made room."""
        pools = self.prepared.pools
        self.lanes, placed = Lanes(pools), create_pools(pools)
        policies: dict[str, Policy | FrozenModel | RemoteModel] = {}
        servers = 0
        for model_id, model in self.section.models.items():
            config = policy_config(self.config, self.section, model_id)
            if model.remote:
                from verl_drmas.trainer.remote_model import RemoteModel  # with libraries that only a pair needs

                policies[model_id] = RemoteModel(model_id, config, model.remote)
                continue
            pool = pool_of(pools, model_id)
            base = next_base(servers, pool.n_gpus_per_node)
            if model.trainable:
                config = in_rows(config, self.config, self.section.only(model_id))
                updates = self.section.updates(model_id) or default_updates(self.prepared.policies[model_id])
                policy = Policy(model_id, config, updates, placed[pool.name], base, self.lanes.driver)
                policy._setup()
            else:
                policy = FrozenModel(model_id, config, pool, placed[pool.name], base)
            servers = base + len(policy.llm_server_manager.get_replicas())
            policies[model_id] = policy
        with open_dict(self.config):
            self.config.pop(COMPOSED, None)  # the policies have it; trackers need not log it again
        return policies

    def _start_from_checkpoints(self) -> None:
        for model_id, policy in self.trained.items():
            folder = self.section.models[model_id].init_from
            if folder is not None:
                logger.warning("model %s starts from the weights of %s", model_id, folder)
                policy.start_from(folder)

    @staticmethod
    def _tokenizer_of(policy: Policy | FrozenModel | RemoteModel) -> Any:
        known = getattr(policy, "tokenizer", None)
        return known or omega_conf_to_dataclass(policy.config.actor_rollout_ref.model).tokenizer

    def get_llm_client(self) -> Any:
        clients = {model_id: policy.get_llm_client() for model_id, policy in self.policies.items()}
        return next(iter(clients.values())) if len(clients) == 1 else TeamClient(clients)

    def _rollout_server_managers(self) -> list[Any]:
        return [
            policy.llm_server_manager for policy in self.policies.values() if policy.llm_server_manager.get_replicas()
        ]

    def _get_n_gpus_for_throughput(self) -> int:
        return sum(pool.gpus for pool in self.prepared.pools.values())

    def team_state(self) -> dict[str, Any]:
        aligned = {} if self.alignment is None else {"alignment": self.alignment.state()}
        own = {"collapse": self._collapse.state(), "stage": self.stage_state()}
        return super().team_state() | own | aligned

    def load_team_state(self, state: dict[str, Any]) -> None:
        super().load_team_state(state)
        self._collapse.load(state.get("collapse", {}))
        self.load_stage_state(state.get("stage", {}))
        if self.alignment is not None:
            self.alignment.load(state.get("alignment", {}))

    # -- the weight update, counted

    def on_step_end(self) -> None:
        before = self.checkpoint_manager.calls.copy()
        super().on_step_end()
        done = self.checkpoint_manager.calls - before
        self._pending_sync_metrics = {
            f"drmas/model/{model_id}/weight_syncs": done[model_id, "update_weights"] for model_id in self.trained
        }

    # -- the stages of the inherited step: hand each policy its own rows

    def _owner(self, key: str) -> str | None:
        """The model that trains on a row; None: nobody does."""
        row = self.rows.get(key)
        if row is None:
            return self._padding[key]
        return row.model_id if self.section.trained(row.agent_id) else None

    def _each(
        self, stage: str, batch: KVBatchMeta, metrics: dict[str, Any], only: Collection[str] | None = None
    ) -> KVBatchMeta:
        """Run a policy stage on every policy's trained rows; other rows stay in the batch untouched.

        Args:
            stage: Name of a method of `Policy`.
            batch: Rows of all models.
            metrics: Gets every policy's, under its model's name.
            only: Models that take part; None: all.
        """
        rows: dict[str, list[int]] = {model_id: [] for model_id in self.trained if only is None or model_id in only}
        rest: list[int] = []
        for i, key in enumerate(batch.keys):
            rows.get(self._owner(key), rest).append(i)
        calls = {
            model_id: partial(self._stage, stage, self.trained[model_id], take(batch, mine))
            for model_id, mine in rows.items()
            if mine
        }
        keys, tags = [], []
        for model_id, (part, own) in self.lanes.run(calls).items():
            self._padding |= {key: model_id for key in part.keys if key not in self.rows}
            keys, tags = keys + part.keys, tags + part.tags
            metrics |= model_metrics(model_id, own, alone=len(self.policies) == 1)
        left = take(batch, rest)
        return KVBatchMeta(
            keys=keys + left.keys,
            tags=tags + left.tags,
            partition_id=batch.partition_id,
            extra_info=batch.extra_info,
        )

    @staticmethod
    def _stage(stage: str, policy: Policy, batch: KVBatchMeta) -> tuple[KVBatchMeta, dict[str, Any]]:
        own: dict[str, Any] = {}
        began = time.perf_counter()
        batch = getattr(policy, stage)(batch, metrics=own)
        own[f"seconds/{stage.lstrip('_')}"] = time.perf_counter() - began
        return batch, own

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._enter("log-probs and advantages")
        batch, self.rows = self._masked.take_out(batch, self._read_rows(batch))
        self._account(metrics)
        played = self.rows
        if self.alignment is not None:
            batch = self._align(batch)
        self._hand_over(played, {} if self.alignment is None else self._aligned.target)
        # Rows arrive in completion order; sorted, nothing after this depends on which session ended first.
        batch.reorder(sorted(range(len(batch)), key=lambda i: self.rows[batch.keys[i]].order))
        if not self._shown:
            self._show_first_session(batch)
        self._padding = {}
        return self._each("_balance_batch", batch, metrics)

    def _aligned_step(self) -> tuple[dict[str, list[int]], StepAlignment]:
        """Trajectories of each session by sub-agent, and how they are aligned."""
        calls = calls_by_session(self.rows.values(), self.alignment.aligned)
        return calls, self.alignment.of_step(calls, self.global_steps)

    def _align(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Choose D, and with physical copies make them."""
        self._calls, self._aligned = self._aligned_step()
        self._copies_made: np.ndarray | None = None
        if self.section.alignment.copies == "physical":
            known = [self.rows[key] for key in batch.keys]
            self._aligned_rows, self._copies_made = known, copies_of(known, self._aligned)
            batch, self.rows = make_copies(batch, self.rows, self._copies_made)
            self._aligned = replace(self._aligned, mode="none")
        return batch

    def _put_copies(self, batch: KVBatchMeta, step: StepRows, metrics: dict[str, Any]) -> None:
        """Weigh rows by their copies, unless they are rows already, and say what alignment did."""
        rows, copies, aligned = step.known, step.copies, step.alignment
        if self._copies_made is not None:
            rows, copies = self._aligned_rows, self._copies_made
        else:
            prompts, sessions = self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n
            owners = [self._owner(key) for key in batch.keys]
            weights = loss_weights(step.rows, step.copies, owners, aligned, prompts=prompts, sessions=sessions)
            put_row_weights(batch, weights)
        metrics |= alignment_metrics(rows, copies, aligned, self._calls)

    def _read_rows(self, batch: KVBatchMeta) -> dict[str, Row]:
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["extra_fields", "index"])
        default = next(iter(self.section.models))
        extra, index = list(data["extra_fields"]), list(data["index"])
        return {
            key: Row.read(key, fields, getattr(i, "data", i), default)
            for key, fields, i in zip(batch.keys, extra, index, strict=True)
        }

    def _account(self, metrics: dict[str, Any]) -> None:
        """Count the sessions that failed, and stop the run if they are too many."""
        expected = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        report = self._report()
        numbers = session_metrics(list(self.rows.values()), expected, report)
        metrics |= numbers
        if self._masked.rows:
            metrics["drmas/sessions/masked"] = float(self._masked.sessions)
        if self.watchdog.deaths:
            metrics["drmas/sessions/dead_servers"] = float(self.watchdog.deaths)
        if not self.rows:
            raise RuntimeError(f"every session of step {self.global_steps} failed: {report}")
        failed = int(numbers["drmas/sessions/failed"])
        self.stop_if_too_many_failed(failed, expected, report, f"step {self.global_steps}")

    def _show_first_session(self, batch: KVBatchMeta) -> None:
        self._shown = True
        first = self.rows[batch.keys[0]]
        keys = [k for k in batch.keys if (self.rows[k].uid, self.rows[k].session) == (first.uid, first.session)]
        fields = ["prompts", "responses", "response_mask"]
        data = tq.kv_batch_get(keys, batch.partition_id, select_fields=fields)
        texts = [[ids.tolist() for ids in data[name].unbind()] for name in fields]
        logger.warning("%s", describe_session([self.rows[k] for k in keys], *texts, self.transcripts.tokenizers))

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._copy_rollout_log_probs(batch, "old_log_probs")
        batch = self._each("_compute_old_log_prob", batch, metrics)
        if self._mixed and self.config.actor_rollout_ref.rollout.calculate_log_probs:
            metrics |= log_prob_gaps(batch, {m: [k for k in batch.keys if self._owner(k) == m] for m in self.trained})
        return batch

    @property
    def _mixed(self) -> bool:
        """Numbers over a whole batch would mix models, or rows that nobody trains into a model's."""
        return len(self.policies) > 1 or not all(self.section.trained(agent_id) for agent_id in self.section.agents)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.config.algorithm.use_kl_in_reward:
            self._copy_rollout_log_probs(batch, "ref_log_prob")  # a frozen row has no distance to pay for
        having = [model_id for model_id, policy in self.trained.items() if policy.use_reference_policy]
        return self._each("_compute_ref_log_prob", batch, metrics, only=having)

    def _copy_rollout_log_probs(self, batch: KVBatchMeta, field: str) -> None:
        """Fill a field of the rows nobody trains; TransferQueue drops a field for all rows if one lacks it."""
        frozen = [key for key in batch.keys if self._owner(key) is None]
        if frozen:
            data = tq.kv_batch_get(frozen, batch.partition_id, select_fields=["rollout_log_probs"])
            data[field] = data.pop("rollout_log_probs")
            tq.kv_batch_put(keys=frozen, partition_id=batch.partition_id, fields=data)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._enter("the update")
        return self._each("_update_actor", batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        rows = [self.rows.get(key) for key in batch.keys]
        aligned = self._aligned if self.alignment is not None else None
        step = StepRows(rows, self.section, self.prepared.base_estimator, alignment=aligned)
        with step.current():
            batch = super()._compute_advantage(batch, metrics)
        if self._mixed:
            for name in [name for name in metrics if name.startswith("rollout_corr/")]:
                metrics[f"drmas/team/{name}"] = metrics.pop(name)
        if step.scores is None:  # an estimator of the user's own, which knows nothing of `StepRows`
            self._read_statistics(batch, step)
        metrics |= agent_metrics(step, sessions=self._sessions_played())
        metrics |= self._team_metrics(step)
        if self.section.advantage.shadow:
            metrics |= shadow_metrics(step, advantage_options(step))
        agents = sorted({*self.section.agents, *(row.agent_id for row in step.known)})
        for warning in self._collapse.look(metrics, agents):
            logger.warning("%s", warning)
        if step.copies is not None:
            self._put_copies(batch, step, metrics)
        if self.section.advantage.balance != "none":
            modes = {m: policy.config.actor_rollout_ref.actor.loss_agg_mode for m, policy in self.trained.items()}
            put_row_weights(batch, row_weights(step, modes))
        self._keep_for_dump(step, updated={key: self._owner(key) is not None for key in batch.keys})
        return batch

    def _team_metrics(self, step: StepRows) -> dict[str, float]:
        """Numbers of the whole team's sessions."""
        return workflow_metrics(step.known, self.workflow) | self._store_metrics()

    def _read_statistics(self, batch: KVBatchMeta, step: StepRows) -> None:
        """Take the rows' scores and advantages from where verl put them, for the metrics and the dumps."""
        with_kl = self.config.algorithm.use_kl_in_reward  # the statistics saw the reward with its KL term
        fields = ["token_level_rewards" if with_kl else "rm_scores", "advantages", "response_mask"]
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=fields)
        scores, advantages, mask = (data[name].to_padded_tensor(0.0) for name in fields)
        first = mask.argmax(dim=1, keepdim=True)
        step.scores = scores.sum(-1).double().numpy()[step.real]
        step.advantage = advantages.gather(1, first).squeeze(1).double().numpy()[step.real]
        step.tokens = mask.sum(-1).numpy()[step.real]
