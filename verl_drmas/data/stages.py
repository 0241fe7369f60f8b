"""A curriculum's files: what each stage reads, and the check before a run."""

from __future__ import annotations

import os
from typing import Any

from verl_drmas.config import ConfigError, DrmasConfig, StageConfig
from verl_drmas.data.parquet import check_indices, check_prompts
from verl_drmas.support import get
from verl_drmas.workflows import load_workflow

# verl computes these, and validates, after the checkpoint is written: a run that goes on from one could not know them.
TOO_LATE = ("val", "critic/", "response_length/", "prompt_length/", "response/", "num_turns/", "perf/", "timing_")


def stage_files(section: DrmasConfig) -> list[str]:
    """The files of all stages, each once, in the order of the stages: `data.train_files` of a run with a curriculum."""
    return list(dict.fromkeys(file for stage in section.curriculum for file in stage.files))


def check_curriculum(config: Any, section: DrmasConfig) -> None:
    """The stages can be trained on, one after the other; says nothing where there is no curriculum.

    An `extra_info.index` may come again in another stage, where a filtered file repeats rows of the first: a step is of
    one stage, and seeds are hashed from the step too.

    Args:
        config: The whole configuration.
        section: Its `drmas` section.

    Raises:
        ConfigError: One line: key, value, fix.
    """
    if not section.curriculum:
        return
    workers = int(get(config, "data.dataloader_num_workers", 0))
    if workers:
        raise ConfigError(
            f"data.dataloader_num_workers is {workers}, but workers fetch ahead of a curriculum's switch; set it to 0"
        )
    for key in ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"):
        if get(config, key, False):
            raise ConfigError(f"{key} is true: it draws more prompts than a step has, and drmas.curriculum counts them")
    _check_ends(section.curriculum, get(config, "trainer.total_training_steps"))
    if get(config, "data.custom_cls.path"):
        return  # a data set class of the user's own reads what it likes
    needs_answer = bool(section.workflow) and load_workflow(str(section.workflow["name"])).needs_answer
    batch = int(get(config, "data.train_batch_size", 1))
    for number, stage in enumerate(section.curriculum):
        _check_files(
            f"drmas.curriculum.{number} ({stage.name})",
            stage,
            batch,
            prompt_key=get(config, "data.prompt_key", "prompt"),
            needs_answer=needs_answer,
            seeded=section.request_seed is not None,
        )


def _check_ends(stages: list[StageConfig], total: int | None) -> None:
    last = 0
    for number, stage in enumerate(stages):
        key = f"drmas.curriculum.{number} ({stage.name})"
        if stage.until_metric is not None and stage.until_metric.startswith(TOO_LATE):
            raise ConfigError(
                f"{key}: until_metric is {stage.until_metric!r}, which a step has only after its checkpoint is "
                "written; take one of drmas/workflow/..., drmas/agent/... or drmas/model/..."
            )
        if stage.until_step is None:
            continue
        if stage.until_step <= last:
            raise ConfigError(
                f"{key}: until_step is {stage.until_step}, but a stage before it ends at {last}; raise it"
            )
        last = stage.until_step
        if total is not None and last >= int(total) and stage.until_metric is None:
            raise ConfigError(
                f"{key}: until_step is {last}, but the run ends at trainer.total_training_steps={total}: the next "
                "stage never begins; lower until_step or drop that stage"
            )


def _check_files(
    key: str, stage: StageConfig, batch: int, *, prompt_key: str, needs_answer: bool, seeded: bool
) -> None:
    files = [os.path.expanduser(file) for file in stage.files]
    if len(set(files)) < len(files):
        raise ConfigError(f"{key}.files names a file twice; drop one")
    try:
        rows = check_prompts(files, prompt_key=prompt_key, needs_answer=needs_answer)
        if seeded:
            check_indices(files)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}.files: {error}") from None
    if rows < batch and not any("://" in file for file in files):
        raise ConfigError(
            f"{key}.files has {rows} rows, less than one batch (data.train_batch_size is {batch}): lower it"
        )
