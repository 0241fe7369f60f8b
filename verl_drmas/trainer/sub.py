"""The trainer `drmas_store`: trains one model of a team on another job's sessions, and serves it to that job.

A step of this job is a step of the other one: same number, same prompts, same draws. It trains as `TeamTrainer` would
have in one job with all models; only where the rows come from differs (M-GRPO, arXiv 2511.13288, 4.2).
"""

from __future__ import annotations

import logging
import time
from typing import Any

from omegaconf import DictConfig, open_dict
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer

from verl_drmas.config import ConfigError
from verl_drmas.gateway.bearer import read_token
from verl_drmas.rollout.resuming import ResumingClient
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.errors import RoleTaken
from verl_drmas.store.numbers import numbers
from verl_drmas.store.records import ClaimedStep
from verl_drmas.trainer.alignment import StepAlignment
from verl_drmas.trainer.claimed import put_step
from verl_drmas.trainer.contract import check_store, check_terms, terms
from verl_drmas.trainer.feed import POLL, SAY
from verl_drmas.trainer.gateway_actor import GatewayKeeper
from verl_drmas.trainer.metrics import without_team
from verl_drmas.trainer.source import ClaimBuffer, Finished, NoData
from verl_drmas.trainer.step import StepRows
from verl_drmas.trainer.team import TeamTrainer

logger = logging.getLogger(__name__)

BEGIN = 180.0  # seconds that the other job is given to replace what an earlier run left in the store


@register_trainer("drmas_store")
class StoreTrainer(TeamTrainer):
    """Trains on another job's sessions.

    Its weights carry that job's step numbers. A step without a call of its agents is never claimed, so that step
    numbers may jump.
    """

    whole_team = False  # the other agents' rows are in the job that plays the sessions

    def __init__(self, config: DictConfig):
        super().__init__(config)
        (self.model_id,) = self.section.models
        self._mixes = self.section.mixes_temperature(config.actor_rollout_ref.rollout.temperature)
        rollout = config.actor_rollout_ref.rollout
        self._sleeps = bool(rollout.free_cache_engine and rollout.enable_sleep_mode)
        self._trained_step = self._saved_step = 0
        self._store_saved: dict[str, str] | None = None
        self.claimed: ClaimedStep | None = None

    def _build_replay_buffer(self) -> Any:
        super()._build_replay_buffer()  # settles the trainer mode
        settings = self.section.store
        store = open_store(settings.url, patience=settings.patience)
        self.consumer = Consumer(
            store,
            settings.role,
            lease=settings.lease,
            max_attempts=settings.max_attempts,
            keep_steps=settings.keep_steps,
        )
        return ClaimBuffer(self.consumer, self._take, check=self._check)

    # -- setting up

    def _init_dataloader(self) -> None:
        """No data: the other job says how many steps there are, and what both must agree on."""
        contract = self._contract = self._wait_for_contract()
        steps = contract["total_training_steps"]
        if self.alignment is not None:
            self.alignment.seed = contract["alignment_seed"]
        self.train_dataset = self.val_dataset = self.val_dataloader = self.train_dataloader_it = None
        self.train_dataloader = NoData()
        self.total_training_steps = self.steps_per_epoch = steps
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = steps

    def _wait_for_contract(self) -> dict[str, Any]:
        """What both jobs agree on.

        What a run that is over, or that was started with other settings, has left in the store may be on its way to be
        replaced: the other job is then given some time to begin.

        Raises:
            ConfigError: They don't agree.
        """
        began, said = time.monotonic(), 0.0
        while True:
            found, why = self.consumer.contract(), "it has not begun"
            late = time.monotonic() - began > BEGIN
            if found is not None and (late or self.consumer.finish_mark() is None):
                try:
                    self._agree(found)
                except ConfigError as error:
                    if late:
                        raise
                    why = str(error)
                else:
                    return found
            if time.monotonic() - said > SAY:
                said = time.monotonic()
                logger.warning(
                    "waiting for the job that plays the sessions of role %s: %s", self.section.store.role, why
                )
            time.sleep(POLL)

    def _agree(self, contract: dict[str, Any]) -> None:
        check_terms(contract["terms"], terms(self.config, self.section, list(self.section.agents)))
        steps, own = contract["total_training_steps"], self.config.trainer.total_training_steps
        if own is not None and own != steps:
            raise ConfigError(
                f"trainer.total_training_steps is {own}, and {steps} in the job that plays the sessions; leave it out"
            )

    def _setup(self) -> None:
        super()._setup()
        chosen = self.config.trainer.resume_mode != "auto"
        known = self.consumer.last_saved()
        state = self._store_state()
        check_store("drmas.store", self._store_saved, state, known=known, step=self.global_steps, chosen=chosen)
        # A job that was killed holds its lease until it runs out.
        waiting = retry(
            retry=retry_if_exception_type(RoleTaken),
            stop=stop_after_delay(2 * self.section.store.lease + 10),
            wait=wait_fixed(1),
            reraise=True,
        )
        waiting(self.consumer.attach)(self.global_steps, rewind_saved=chosen)
        self._trained_step = self._saved_step = self.global_steps

    def _store_state(self) -> dict[str, str]:
        return {"id": self.consumer.store.id, "role": self.section.store.role}

    def team_state(self) -> dict[str, Any]:
        return super().team_state() | {"store": self._store_state()}

    def load_team_state(self, state: dict[str, Any]) -> None:
        super().load_team_state(state)
        self._store_saved = state.get("store")

    def on_init_end(self) -> None:
        super().on_init_end()
        self.gateway = GatewayKeeper(
            self.policies[self.model_id].llm_server_manager.get_client(client_cls=ResumingClient),
            self.section.gateway,
            role=self.section.store.role,
            token=read_token(self.section.gateway.token_env, "drmas.gateway.token_env"),
        )
        self.endpoint = self.gateway.start()
        self._open_gateway()

    def _open_gateway(self) -> None:
        self.gateway.open(self._trained_step)
        self.consumer.publish(self._trained_step, self.endpoint)

    # -- the run

    def _check(self) -> None:
        """Raise if this job can't go on, while it waits for the other one."""
        self.watchdog.check()
        self.gateway.check()
        if self.consumer.contract() != self._contract:
            raise RuntimeError(
                "the job that plays the sessions was started again with other settings, such as another number of "
                "steps; start this one again too"
            )

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            try:
                super().fit(agent_loop_manager)
            except Finished:
                self._shutdown_dump_executor()
            self._save_last()
            self._serve_to_the_end()
        finally:
            self.gateway.stop()
            self.consumer.detach()

    def _save_last(self) -> None:
        """Steps may jump over the one that verl saves at the end."""
        if self.config.trainer.save_freq > 0 and self._trained_step > self._saved_step:
            self.global_steps = self._trained_step
            self._save_checkpoint()

    def _serve_to_the_end(self) -> None:
        """The other job may still validate, or be killed and play its last steps again."""
        if self.consumer.finished() is not None:
            return
        logger.warning("all steps are trained; serving until the job that plays the sessions is done")
        self.watchdog = self._build_watchdog()  # `fit` has stopped the one that there was
        try:
            while self.consumer.finished() is None:
                self._check()
                time.sleep(POLL)
        finally:
            self.watchdog.stop()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        self._trained_step = self.global_steps
        self.consumer.trained(self.global_steps)
        return batch

    def prepare_step(self) -> dict[str, Any]:
        """No prompts of its own."""
        return {}

    def _take(self, claimed: ClaimedStep) -> KVBatchMeta:
        if claimed.step <= self._trained_step:
            raise RuntimeError(
                f"the store of role {self.section.store.role} has step {claimed.step} untrained, and this run has "
                f"trained step {self._trained_step}: its checkpoint and this store don't belong together"
            )
        self.claimed, self.global_steps = claimed, claimed.step
        return put_step(claimed, self.model_id, row_temperature=self._mixes)

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        # With the checkpoint and not with the update: a job that dies in between trains the step again.
        self.consumer.saved(self.global_steps)
        self._saved_step = self.global_steps

    # -- serving beside training

    def on_sample_end(self) -> None:
        if self._sleeps:
            self.gateway.close()
            self.checkpoint_manager.abort_replicas()  # what runs goes on when the servers are awake again
        super().on_sample_end()

    def on_step_end(self) -> None:
        self.gateway.close()
        if not self._sleeps:
            # An answer must not be half of the old weights and half of the new under one label.
            self.checkpoint_manager.abort_replicas()
        super().on_step_end()
        self.checkpoint_manager.resume_generation_replicas()
        self._open_gateway()

    # -- the step as the other job had it

    def _sessions_played(self) -> int:
        return len(self.claimed.sessions)

    def _aligned_step(self) -> tuple[dict[str, list[int]], StepAlignment]:
        aligned = tuple(agent for agent in self.alignment.aligned if agent in self.section.agents)
        calls = {
            agent: [sum(row.agent_id == agent for row in session.rows) for session in self.claimed.sessions]
            for agent in aligned
        }
        target = {agent: int(self.claimed.manifest["target"][agent]) for agent in aligned}
        return calls, StepAlignment(
            aligned, target, self.section.alignment.mode, self.alignment.seed, self.claimed.step
        )

    def _account(self, metrics: dict[str, Any]) -> None:
        """The other job has counted the sessions that failed."""
        sessions = self.claimed.sessions
        metrics["drmas/sessions/expected"] = float(len(sessions))
        metrics["drmas/sessions/rows_per_session"] = len(self.rows) / max(1, len(sessions))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        for name in metrics.keys() - without_team(metrics).keys():
            del metrics[name]
        return batch

    def _team_metrics(self, step: StepRows) -> dict[str, float]:
        store = numbers(self.consumer.store, self.section.store.role) | {"waited": self.replay_buffer.waited}
        return {
            **{f"drmas/store/{self.section.store.role}/{name}": value for name, value in store.items()},
            **{f"drmas/gateway/{name}": value for name, value in self.gateway.report().items()},
        }
