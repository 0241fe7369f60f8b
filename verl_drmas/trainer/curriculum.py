"""A curriculum: training sets that follow each other, exactly also over a resume."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import create_rl_dataset
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.dataset.rl_dataset import collate_fn

from verl_drmas.config import ConfigError, DrmasConfig, StageConfig, nearest

logger = logging.getLogger(__name__)


class StageSampler(Sampler[int]):
    """Row numbers of the current stage, in rounds without an end.

    The data sets of the stages lie one behind the other. A round gives each row of the stage at most once and whole
    batches only, so that no step has a prompt twice; which rows are left over is drawn anew each round (without shuffle
    they are the last ones, as in verl). The order follows from seed, stage and round alone. `StatefulDataLoader` saves
    the state as it stands after the last batch, which is exact without workers that fetch ahead.

    Args:
        sizes: Rows of each stage.
        batch_size: Rows of a step.
        shuffle: A new order each round; False: the files' order.
        seed: Of the order.
    """

    def __init__(self, sizes: Sequence[int], *, batch_size: int, shuffle: bool = True, seed: int = 0):
        for number, size in enumerate(sizes):
            if size < batch_size:
                raise ConfigError(
                    f"drmas.curriculum.{number}: {size} rows are left after data.filter_overlong_prompts, less than "
                    f"one batch (data.train_batch_size is {batch_size}); raise data.max_prompt_length or add files"
                )
        self.sizes, self.batch_size, self.shuffle, self.seed = list(sizes), batch_size, shuffle, seed
        self.stage = self.round = self.position = 0
        self._order: np.ndarray | None = None

    def __iter__(self) -> Iterator[int]:
        while True:
            size = self.sizes[self.stage]
            if self.position >= size // self.batch_size * self.batch_size:
                self.round, self.position, self._order = self.round + 1, 0, None
            if self._order is None:
                self._order = self._draw(size)
            row = int(self._order[self.position]) + sum(self.sizes[: self.stage])
            self.position += 1
            yield row

    def __len__(self) -> int:
        """Rows of a round of the current stage."""
        return self.sizes[self.stage] // self.batch_size * self.batch_size

    def move_on(self) -> None:
        """The next row is of the next stage."""
        self.stage, self.round, self.position, self._order = self.stage + 1, 0, 0, None

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {
            "stage": self.stage,
            "round": self.round,
            "position": self.position,
            "size": self.sizes[self.stage],
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there.

        Raises:
            ConfigError: The curriculum has fewer stages now.
        """
        if state["stage"] >= len(self.sizes):
            raise ConfigError(
                f"the checkpoint is in stage {state['stage'] + 1} of its curriculum, and drmas.curriculum has "
                f"{len(self.sizes)} stages; list the stages it was saved with"
            )
        self.stage, self.round, self.position = state["stage"], state["round"], state["position"]
        self.seed, self._order = state["seed"], None
        if state["size"] != self.sizes[self.stage]:
            logger.warning(
                "curriculum: stage %d had %d rows when the checkpoint was saved and has %d now; a new round begins",
                self.stage + 1,
                state["size"],
                self.sizes[self.stage],
            )
            self.round, self.position = self.round + 1, 0

    def _draw(self, size: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(size)
        return np.random.default_rng([self.seed % 2**63, self.stage, self.round]).permutation(size)


class StageWatch:
    """Says when a stage ends."""

    def __init__(self, stages: Sequence[StageConfig]):
        self.stages = list(stages)
        self.streak = 0
        self._without = 0  # steps of this stage without its metric; -1: it was there, or was warned about

    def look(self, number: int, metrics: Mapping[str, Any], step: int) -> str:
        """Look at a step's metrics. A step that lacks the metric ends a streak.

        Args:
            number: Of the stage, from 0.
            metrics: Of the step.
            step: Its number.

        Returns:
            Why the stage is over; empty: it isn't.
        """
        stage = self.stages[number]
        if stage.until_metric is not None:
            value = metrics.get(stage.until_metric)
            if value is None:
                self._miss(stage, metrics)
            else:
                self._without = -1
            self.streak = self.streak + 1 if value is not None and float(value) >= stage.above else 0
            if self.streak >= stage.for_steps:
                return f"{stage.until_metric} was at least {stage.above:g} for {self.streak} steps in a row"
        if stage.until_step is not None and step >= stage.until_step:
            return f"step {step} is done"
        return ""

    def begin(self) -> None:
        """A new stage."""
        self.streak = self._without = 0

    def _miss(self, stage: StageConfig, metrics: Mapping[str, Any]) -> None:
        if self._without < 0:
            return
        self._without += 1
        if self._without >= stage.for_steps:
            self._without = -1
            hint = nearest(stage.until_metric, sorted(name for name in metrics if name.startswith("drmas/")))
            logger.warning(
                "curriculum: stage %s waits for the metric %s, which no step has had yet; %s",
                stage.name,
                stage.until_metric,
                hint,
            )


class StagedTrainer(PPOTrainerSync):
    """Trains on the stages of `drmas.curriculum`, if it has any. A subclass sets `section`.

    Length of the run and learning-rate schedule stay the configuration's, whatever stage it is in.
    """

    section: DrmasConfig
    stage_sampler: StageSampler | None = None
    stage_watch: StageWatch | None = None

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        stages, data = self.section.curriculum, self.config.data
        if not stages:
            return
        limit = data.get("train_max_samples", -1)
        parts = [
            create_rl_dataset(list(s.files), data, self.tokenizer, self.processor, is_train=True, max_samples=limit)
            for s in stages
        ]
        self.train_dataset = ConcatDataset(parts)
        seed = data.get("seed")
        self.stage_sampler = StageSampler(
            [len(part) for part in parts],
            batch_size=data.train_batch_size,
            shuffle=data.shuffle,
            seed=0 if seed is None else int(seed),
        )
        self.stage_watch = StageWatch(stages)
        self.train_dataloader = StatefulDataLoader(
            dataset=self.train_dataset,
            batch_size=data.get("gen_batch_size", None) or data.train_batch_size,
            num_workers=0,  # see StageSampler; `check_curriculum` has refused any other number
            drop_last=True,
            collate_fn=collate_fn,
            sampler=self.stage_sampler,
        )
        rows = ", ".join(f"{stage.name} ({len(part)} rows)" for stage, part in zip(stages, parts, strict=True))
        logger.warning("curriculum: %s", rows)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        # Here, because verl saves the checkpoint next: what this step decides must be in it.
        batch = super().step(metrics, timing_raw)
        metrics |= self.look_at_stage(metrics)
        return batch

    def look_at_stage(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Move on to the next stage if this step was the last one of its stage; once a step, before its checkpoint.

        Args:
            metrics: Of the step.

        Returns:
            `drmas/curriculum/stage` (of this step, from 1) and `/streak` (steps in a row that reached `above`).
        """
        if self.stage_sampler is None:
            return {}
        number, stages = self.stage_sampler.stage, self.section.curriculum
        why = self.stage_watch.look(number, metrics, self.global_steps)
        numbers = {"drmas/curriculum/stage": number + 1.0, "drmas/curriculum/streak": float(self.stage_watch.streak)}
        if why:
            self.stage_sampler.move_on()
            self.stage_watch.begin()
            logger.warning("curriculum: stage %s follows %s: %s", stages[number + 1].name, stages[number].name, why)
        return numbers

    def stage_state(self) -> dict[str, Any]:
        """What resumes beside the data loader's state; empty without a curriculum."""
        return {} if self.stage_watch is None else {"streak": self.stage_watch.streak}

    def load_stage_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `stage_state` gave.

        Raises:
            ConfigError: One of the two runs has a curriculum and the other hasn't: the place in the data is lost.
        """
        if bool(state) != (self.stage_watch is not None):
            was, now = ("with", "empty") if state else ("without", "set")
            raise ConfigError(
                f"the checkpoint was saved {was} a curriculum, and drmas.curriculum is {now} now: its place in the "
                "data means nothing here; start from its weights with drmas.models.<id>.init_from and a new "
                "trainer.default_local_dir"
            )
        if self.stage_watch is not None:
            self.stage_watch.streak = int(state["streak"])
