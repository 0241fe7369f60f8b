"""A trainer whose remote models are trained by other jobs, on the sessions that this one plays."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_drmas.check import Prepared
from verl_drmas.config import DrmasConfig
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.contract import terms
from verl_drmas.trainer.feed import Feed


class FeedingTrainer(PPOTrainerSync):
    """Opens every step in the stores of its remote models, hands it over, and keeps in step with who trains on it.

    Without a remote model it does nothing. A subclass sets `section`, `prepared` and `alignment`.
    """

    section: DrmasConfig
    prepared: Prepared
    alignment: Any
    feeds: dict[str, Feed]
    _stores_saved: dict[str, dict[str, str]]

    def _build_feeds(self) -> None:
        """Before the models are built, which takes a while: the other jobs learn at once what is going to be played."""
        self.feeds = {model_id: Feed.of(model_id, remote) for model_id, remote in self.section.remote.items()}
        self._stores_saved = {}
        for model_id, feed in self.feeds.items():
            agents, policy = self.section.agents_of(model_id), self.prepared.policies[model_id]
            feed.begin(
                {
                    "terms": terms(policy, self.section, agents),
                    "total_training_steps": int(self.total_training_steps),
                    "alignment_seed": None if self.alignment is None else self.alignment.seed,
                    "model": str(policy.actor_rollout_ref.model.path),
                }
            )

    def _begin_feeding(self) -> None:
        """After the checkpoint is loaded: the stores must belong to it."""
        chosen = self.config.trainer.resume_mode != "auto"
        for model_id, feed in self.feeds.items():
            feed.resume(self._stores_saved.get(model_id), self.global_steps, chosen=chosen)

    def team_state(self) -> dict[str, Any]:
        state = super().team_state()
        return state | ({"stores": {m: feed.state() for m, feed in self.feeds.items()}} if self.feeds else {})

    def load_team_state(self, state: dict[str, Any]) -> None:
        super().load_team_state(state)
        self._stores_saved = state.get("stores", {})

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        for feed in self.feeds.values():
            feed.producer.saved(self.global_steps)

    def fit(self, agent_loop_manager: Any) -> None:
        super().fit(agent_loop_manager)
        for feed in self.feeds.values():  # a run that failed is started again, and the other job goes on waiting
            feed.producer.finish(self.global_steps)

    # -- a step

    def _wait_for_partners(self, step: int) -> None:
        for feed in self.feeds.values():
            feed.wait(step, lambda: self.watchdog.check())

    def prepare_step(self) -> dict[str, Any]:
        self._wait_for_partners(self.global_steps)
        return super().prepare_step()

    def on_validate_begin(self) -> None:
        # Validation speaks to the weights that the next step's sessions speak to.
        self._wait_for_partners(self.global_steps + 1)
        super().on_validate_begin()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if self.feeds:
            prompts = [int(getattr(i, "data", i)) for i in batch["index"]]
            for feed in self.feeds.values():
                feed.producer.open_step(self.global_steps, prompts, int(self.config.actor_rollout_ref.rollout.n))
        return super()._submit_batch_to_rollout(batch)

    def _hand_over(self, rows: dict[str, Row], target: dict[str, int]) -> None:
        """Close the step in every store: what is in this job's batch is in the other's.

        Args:
            rows: Of the batch.
            target: D of each aligned sub-agent.
        """
        sessions = sorted({(row.index, row.session) for row in rows.values()})
        for feed in self.feeds.values():
            feed.close(self.global_steps, {"sessions": [list(s) for s in sessions], "target": target})

    def _store_metrics(self) -> dict[str, float]:
        return {
            f"drmas/store/{feed.remote.role}/{name}": value
            for feed in self.feeds.values()
            for name, value in feed.numbers().items()
        }
