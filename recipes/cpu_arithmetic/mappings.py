"""Which agents of the arithmetic team share a model, and what each model knows before the training starts.

All three run the same workflow code and the same driver; they differ in a Hydra file and in the models' warm starts.
"""

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from recipes.cpu_arithmetic.warm_start import Settings, WarmStart, warm_start
from recipes.cpu_job import log_plainly


class Name(str, Enum):
    """The mappings, by the names on the command line."""

    SHARED = "shared"
    SEPARATE = "separate"
    HETEROGENEOUS = "heterogeneous"


@dataclass(frozen=True)
class TeamModels:
    """The models of a team.

    Attributes:
        config: Hydra file, below ``configs``.
        models: each model's warm start, by its id in the file's ``drmas.models``; all split the problems alike.
    """

    config: str
    models: Mapping[str, Settings]

    def overrides(self, starts: Mapping[str, WarmStart]) -> list[str]:
        """Returns the Hydra overrides that name the data and each model's folder."""
        data = next(iter(starts.values()))
        paths = [f"drmas.models.{model_id}.actor_rollout_ref.model.path={s.model}" for model_id, s in starts.items()]
        if len(starts) == 1:
            paths = [f"actor_rollout_ref.model.path={data.model}"]
        return [f"data.train_files={data.train}", f"data.val_files={data.val}", *paths]


# A model with one role is taught that alone, from fewer examples a step: two such starts see as many as one with both.
MAPPINGS: dict[Name, TeamModels] = {
    Name.SHARED: TeamModels("cpu_arithmetic", {"base": Settings()}),
    Name.SEPARATE: TeamModels(
        "cpu_separate",
        {
            "llama": Settings(style="llama", roles=("solver",)),
            "qwen3": Settings(style="qwen3", roles=("verifier",)),
        },
    ),
    Name.HETEROGENEOUS: TeamModels(
        "cpu_heterogeneous",
        {
            "large": Settings(style="llama", size="large", roles=("solver",)),
            "small": Settings(style="qwen3", size="small", roles=("verifier",)),
            "frozen": Settings(style="qwen3", roles=("solver",)),
        },
    ),
}


def prepare(folder: Path, models: Mapping[str, Settings], seed: int) -> dict[str, WarmStart]:
    """Returns every model's warm start; those that aren't in the cache are made at the same time, a process each.

    Args:
        folder: cache of warm starts.
        models: by model id.
        seed: of all of them, so that they split the problems alike.

    Raises:
        WarmStartError: one of them failed.
    """
    jobs = {model_id: replace(settings, seed=seed) for model_id, settings in models.items()}
    if len(jobs) == 1:
        return {model_id: warm_start(folder, settings) for model_id, settings in jobs.items()}
    # Spawned, because torch's threads don't survive a fork.
    with ProcessPoolExecutor(
        max_workers=min(len(jobs), multiprocessing.cpu_count()),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=log_plainly,
    ) as pool:
        made = {model_id: pool.submit(warm_start, folder, settings) for model_id, settings in jobs.items()}
        return {model_id: future.result() for model_id, future in made.items()}
