"""What a team trainer writes out: dumps and tables in each row's own tokenizer, and the validation's numbers."""

from __future__ import annotations

from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_drmas.config import DrmasConfig
from verl_drmas.dumps import COLUMN
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.masked import MaskedRows
from verl_drmas.trainer.metrics import reported
from verl_drmas.trainer.records import TrainedStep, plain, step_settings
from verl_drmas.trainer.step import StepRows
from verl_drmas.trainer.transcripts import Transcripts
from verl_drmas.trainer.validation import validation_metrics
from verl_drmas.workflows import Workflow


class WrittenTrainer(PPOTrainerSync):
    """verl's dumps, tables and validation for a team. A subclass sets the attributes and `_report`."""

    whole_team = True  # all agents' rows are in this job
    section: DrmasConfig
    workflow: type[Workflow] | None
    transcripts: Transcripts
    rows: dict[str, Row]  # of the step, by key
    _masked: MaskedRows
    _trained_rows: TrainedStep | None = None  # of the step, where the run writes its rollouts

    def _sessions_played(self) -> int | None:
        """How many sessions the batch's rows are of; None: as many as have a row."""

    def stop_if_too_many_failed(self, failed: int, expected: int, report: dict[str, float], where: str) -> None:
        """End the run where the share of failed sessions is above `drmas.faults.max_failed_share`.

        Raises:
            RuntimeError: It is; with the reasons.
        """
        most = self.section.faults.max_failed_share
        if failed > most * expected:
            raise RuntimeError(
                f"{failed / expected:.0%} of the sessions of {where} failed ({report}); "
                f"drmas.faults.max_failed_share is {most:.0%}"
            )

    def _sampled(self, batch: KVBatchMeta) -> None:
        trainer = self.config.trainer
        if batch.partition_id == "val" and not batch.keys:
            raise RuntimeError(f"every session of a validation batch failed: {self._report()}")
        if batch.partition_id == "val" and (trainer.get("validation_data_dir") or trainer.log_val_generations):
            self.transcripts.note(batch)

    def _validate(self) -> dict[str, float]:
        try:
            return super()._validate()
        finally:
            self.transcripts.clear()

    def _keep_for_dump(self, step: StepRows, updated: dict[str, bool]) -> None:
        """Keep what the step's estimator saw until the step is dumped, if it is.

        Args:
            step: The batch's rows, with the estimator's numbers.
            updated: Whether each row of the batch enters an update, by key in batch order.
        """
        if self._masked.dumped:
            copies = None if step.alignment is None else self.section.alignment.copies
            settings = step_settings(
                self.config,
                self.section,
                step,
                copies=copies,
                whole_team=self.whole_team,
                played=self._sessions_played(),
            )
            self._trained_rows = TrainedStep.of(step, updated, settings)

    def _log_rollout_data(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> None:
        batch = self._masked.put_back(batch)
        self.transcripts.note(batch, self._trained_rows, self.rows)
        try:
            super()._log_rollout_data(batch, *args, **kwargs)
        finally:
            self.transcripts.clear()
            self._masked.clear()
            self._trained_rows = None

    def _dump_generations(
        self, inputs: list[str], outputs: list[str], *, reward_extra_infos_dict: dict[str, list], **kwargs: Any
    ) -> None:
        keys = reward_extra_infos_dict["uid"]
        columns = plain(reward_extra_infos_dict) | self.transcripts.rewrite(keys, inputs, outputs)
        columns[COLUMN] = self.transcripts.records(keys, self._trained_rows)
        super()._dump_generations(inputs=inputs, outputs=outputs, reward_extra_infos_dict=columns, **kwargs)

    def _maybe_log_val_generations(self, inputs: list[str], outputs: list[str], scores: list[float]) -> None:
        inputs, outputs = list(inputs), list(outputs)  # verl goes on to write the same lists
        self.transcripts.rewrite_finals(inputs, outputs)
        super()._maybe_log_val_generations(inputs=inputs, outputs=outputs, scores=scores)

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
        expected = sum((expected_acc_counts or {}).values())
        report = self._report()
        metrics |= {f"val/{name}": value for name, value in reported(report).items()}
        self.stop_if_too_many_failed(expected - len(sample_uids), expected, report, "the validation")
        return metrics
