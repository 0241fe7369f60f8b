"""What a training configuration says of its team: workflow, agents and models, and how agents sample."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_drmas.config import AgentConfig, DrmasConfig, nearest, parse

# What holds in validation too (verl's rollout.val_kwargs has temperature, top_p and top_k of its own); the first three
# of OpenAI's API, the others of vLLM's and SGLang's.
SAMPLED = ("presence_penalty", "frequency_penalty", "stop", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class TrainingTeam:
    """The team of a training configuration.

    Attributes:
        section: Its `drmas` section.
        response_length: `data.max_response_length`, which bounds an agent's answer; None where it isn't set.
        template: `data.apply_chat_template_kwargs`, such as `enable_thinking`.
    """

    section: DrmasConfig
    response_length: int | None = None
    template: dict[str, Any] = field(default_factory=dict)

    @property
    def workflow(self) -> str:
        """The workflow's name."""
        return str((self.section.workflow or {})["name"])

    @property
    def settings(self) -> dict[str, Any]:
        """The workflow's settings."""
        return {key: value for key, value in (self.section.workflow or {}).items() if key != "name"}

    def max_tokens(self, agent_id: str) -> int | None:
        """Most tokens of one turn of an agent."""
        agent = self.section.agent(agent_id)
        return agent.turn_length or agent.response_length or self.response_length

    def sampled(self, agent_id: str) -> dict[str, Any]:
        """What an agent samples with beside temperature and top_p, as fields of a request."""
        agent: AgentConfig = self.section.agent(agent_id)
        own = {name: getattr(agent.sampling, name) for name in SAMPLED}
        return {name: value for name, value in own.items() if value is not None}


def read_training(given: str) -> TrainingTeam:
    """The team of a configuration.

    Args:
        given: A YAML file: a run's `.hydra/config.yaml`, or one that Hydra composes with verl's; or the name of one of
            ours, such as `drmas_math`.

    Raises:
        ValueError: One line on what is wrong with it.
    """
    path = _file(given)
    try:
        config = _load(path)
        section, template = (_mapping(config, key) for key in ("drmas", "data.apply_chat_template_kwargs"))
        length = OmegaConf.select(config, "data.max_response_length")
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {given}: {' '.join(str(error).split())}") from error
    team = TrainingTeam(parse(section), length, template)
    if not (team.section.workflow or {}).get("name"):
        raise ValueError(
            f"--config {given}: no drmas.workflow.name; give a team's configuration, such as a run's .hydra/config.yaml"
        )
    return team


def _mapping(config: DictConfig, key: str) -> dict[str, Any]:
    found = OmegaConf.select(config, key)
    return OmegaConf.to_container(found, resolve=True) if isinstance(found, DictConfig) else {}


def _file(given: str) -> Path:
    path = Path(given).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(f"--config {given}: no such file")
        return path.resolve()
    folder = Path(next(iter(importlib.util.find_spec("verl_drmas.configs").submodule_search_locations)))
    if not (folder / f"{given}.yaml").is_file():
        known = sorted(file.stem for file in folder.glob("*.yaml"))
        raise ValueError(f"--config {given}: neither a YAML file nor a configuration of ours; {nearest(given, known)}")
    return folder / f"{given}.yaml"


def _load(path: Path) -> DictConfig:
    """The configuration, composed where it has a defaults list."""
    config = OmegaConf.load(path)
    if not isinstance(config, DictConfig) or "defaults" not in config:
        return config if isinstance(config, DictConfig) else OmegaConf.create({})
    verl = importlib.util.find_spec("verl").submodule_search_locations[0]  # verl itself isn't imported
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(path.parent), version_base=None):
        return compose(path.stem, [f"hydra.searchpath=[file://{verl}/trainer/config]"])
