"""A trainer that says during what a server died, and goes on where others can do its work."""

from __future__ import annotations

import logging
from typing import Any

from ray.exceptions import RayError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_drmas.trainer.watchdog import REFUSALS, Server, Watchdog

logger = logging.getLogger(__name__)


class GuardedTrainer(PPOTrainerSync):
    """Names the phase of a run, watches the servers of its policies, and raises reasons instead of symptoms.

    A subclass sets `policies`, `section` and, from `_build_watchdog`, `watchdog`.
    """

    policies: dict[str, Any]
    section: Any
    watchdog: Watchdog

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
        policy.drop_server(server.replica)

    def _kill_workers(self, model_id: str) -> None:
        """Make every call that waits for this model's workers raise."""
        self.policies[model_id].kill_workers()

    def _report(self) -> dict[str, float]:
        report = getattr(self.agent_loop_manager, "report", None)
        return report() if report else {}

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
