"""A run's configuration as Hydra left it (``.hydra/config.yaml``): who was on which model, what makes runs alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

# What two runs of one configuration may differ in.
SEED = re.compile(r"(^|[._])seed$")
PLACES = re.compile(
    r"(^|[._])(dir|folder|save_path|local_path|port|ports|host|hosts|url|urls|address|project_name|experiment_name|"
    r"group_name|logger|save_freq|max_actor_ckpt_to_keep|max_critic_ckpt_to_keep|resume_mode|resume_from_path|"
    r"log_val_generations|show_first_session)$"
)
BRANCHES = ("hydra.", "ray_kwargs.", "global_profiler.", "drmas_composed.", "trainer.wandb")
IGNORED = "seeds, folders, file locations, addresses, names, loggers, and when checkpoints are saved"
SEED_NAME = re.compile(r"[-_. ]?\bseed[-_=]?\d+|[-_.]seed[-_=]?\d+", re.IGNORECASE)
HASH = re.compile(r"[-_](?=[0-9a-f]*\d)[0-9a-f]{8,}$")
GENERAL = re.compile(
    r"^(model|models|hf|huggingface|actor|latest|snapshots|checkpoints?|global_step_\d+|[0-9a-f]{32,})$"
)

EMPTY = "{}"  # a section that sets nothing
SINGLE, SHARED, SEPARATE, HETEROGENEOUS, PARTLY = "single", "shared", "separate", "heterogeneous", "partly shared"


@dataclass(frozen=True)
class Settings:
    """A run's configuration.

    Attributes:
        path: of the file.
        values: every value by its dotted key; interpolations resolved as far as they can be here.
    """

    path: Path
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value; `default` where there is none or it is null."""
        value = self.values.get(key)
        return default if value is None else value

    @property
    def estimator(self) -> str:
        """Name of the advantage estimator."""
        return str(self.get("algorithm.adv_estimator", "unknown"))

    @property
    def workflow(self) -> str | None:
        """Name of the team's workflow; None: a run of stock verl, or of its agent loops."""
        name = self.get("drmas.workflow.name")
        return None if name is None else str(name)

    @cached_property
    def agents(self) -> dict[str, str]:
        """The model of each agent; empty: no team."""
        found = {}
        for key, value in self.values.items():
            parts = key.split(".")
            if parts[:2] == ["drmas", "agents"] and parts[3:] == ["model"]:
                found[parts[2]] = str(value)
        return found

    @cached_property
    def models(self) -> dict[str, str]:
        """What each model was before training, such as `Qwen/Qwen3-4B`, by its id; `base` without a team."""
        own = str(self.get("actor_rollout_ref.model.path", "unknown"))
        ids = list(dict.fromkeys(self.agents.values())) or ["base"]
        return {m: model_name(str(self.get(f"drmas.models.{m}.actor_rollout_ref.model.path", own))) for m in ids}

    @property
    def frozen(self) -> list[str]:
        """The models that are served and never trained."""
        return [m for m in self.models if self.values.get(f"drmas.models.{m}.trainable") is False]

    @property
    def mapping(self) -> str:
        """How the agents are spread over models, in the paper's words."""
        if len(self.agents) < 2:
            return SINGLE
        if len(self.models) == 1:
            return SHARED
        if len(set(self.models.values())) > 1:
            return HETEROGENEOUS
        return SEPARATE if len(self.models) == len(self.agents) else PARTLY

    @property
    def model(self) -> str:
        """The models' names, each once."""
        return " + ".join(dict.fromkeys(self.models.values()))

    @property
    def last_step(self) -> int | None:
        """The step that the run was to end at, where the configuration names it."""
        value = self.get("trainer.total_training_steps")
        return value if isinstance(value, int) else None

    @property
    def epochs(self) -> int | None:
        """The epochs that the run was to have, which count where `last_step` is None."""
        value = self.get("trainer.total_epochs")
        return value if isinstance(value, int) else None

    @cached_property
    def seeds(self) -> dict[str, Any]:
        """Every seed that is set, by its key."""
        return {key: value for key, value in self.values.items() if SEED.search(key) and value is not None}

    @cached_property
    def identity(self) -> dict[str, str]:
        """What the runs of one group share: every value but those of `IGNORED`, locations by their last name."""
        return {
            key: _placeless(key, value)
            for key, value in self.values.items()
            if not (value == EMPTY or SEED.search(key) or PLACES.search(key) or key.startswith(BRANCHES))
        }


def read_settings(path: Path) -> Settings:
    """Reads a run's configuration.

    Raises:
        ValueError: the file isn't one; names it, and what is wrong.
    """
    try:
        config = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} can't be read ({' '.join(str(error).split())})") from None
    if not isinstance(config, DictConfig) or "trainer" not in config:
        raise ValueError(f"{path} is no configuration of verl's: it has no section trainer")
    return Settings(path, dict(_leaves(config, "")))


def _leaves(node: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    for key in node:
        name = f"{prefix}{key}"
        try:
            value = node[key]
        except OmegaConfBaseException:  # an interpolation of a variable or resolver that isn't here, or a missing value
            value = OmegaConf.to_container(node, resolve=False)[key]
        if isinstance(value, DictConfig) and value:
            yield from _leaves(value, f"{name}.")
        elif isinstance(value, DictConfig | ListConfig):
            yield name, json.dumps(OmegaConf.to_container(value, resolve=False), default=str)
        else:
            yield name, value


def model_name(path: str) -> str:
    """Returns what a model is called, wherever it lies.

    `Qwen/Qwen3-4B` stays; of a folder the last part that says something, without a seed or a hash at its end; of
    Hugging Face's cache the repository.
    """
    parts = [part for part in path.replace("\\", "/").split("/") if part]
    if not path.startswith(("/", "~", ".")) and len(parts) <= 2:
        return path
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    for part in reversed(parts):
        if not GENERAL.match(part):
            return without_seed(HASH.sub("", part))
    return path


def without_seed(name: str) -> str:
    """Returns a name without the words that number its seed: `math-seed3` is `math`."""
    return SEED_NAME.sub("", name) or name


def _placeless(key: str, value: Any) -> str:
    text = str(value)
    if key.endswith("model.path"):
        return model_name(text)
    if "/" in text:
        places = text.strip("[]\"' ").split(",")
        return ", ".join(without_seed(place.strip("\"' ").rstrip("/").split("/")[-1]) for place in places)
    return text
