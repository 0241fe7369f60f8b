"""Who is evaluated: the workflow, the served model of each agent, and how each samples."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_drmas import __version__
from verl_drmas.config import nearest, parse
from verl_drmas.evaluation.completions import ServedModel
from verl_drmas.evaluation.endpoint import Sampling
from verl_drmas.evaluation.journal import digest
from verl_drmas.evaluation.training import TrainingTeam
from verl_drmas.evaluation.workflow import build_workflow
from verl_drmas.workflows import Workflow

ONE = "served"  # the model's id where there is one and nobody names it


@dataclass
class AgentEntry:
    """An agent in a file of endpoints.

    Attributes:
        model: Id of its model; None: where the configuration has it, or the only one.
        temperature, top_p, max_tokens: Of its own; None: those of the command line.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None

    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass
class Endpoints:
    """A file of endpoints.

    Attributes:
        models: By model id.
        agents: By agent id.
    """

    models: dict[str, ServedModel]
    agents: dict[str, AgentEntry] = field(default_factory=dict)

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        if not self.models:
            raise ValueError("models is empty; give the urls and the name of at least one")


@dataclass(frozen=True)
class Evaluated:
    """A team, ready to be asked.

    Attributes:
        name: The workflow's name, as it was given.
        workflow: The workflow.
        agents: Model id by agent.
        models: The models that have an agent.
        sampling: How each agent samples; the seed is a run's.
    """

    name: str
    workflow: Workflow
    agents: dict[str, str]
    models: dict[str, ServedModel]
    sampling: dict[str, Sampling]

    def measured(self) -> dict[str, Any]:
        """What would change the sessions, for a file of them: not where servers are, nor how patiently they are asked.

        A workflow's own settings are in whole; its code is told by the text of its modules.
        """
        settings = json.loads(json.dumps(asdict(self.workflow.settings), default=str))
        return {
            "version": __version__,
            "workflow": self.name,
            "workflow code": _code(type(self.workflow)),
            "setting": settings,
            "agents": {
                agent: {"model": model, **_without_seed(self.sampling[agent])} for agent, model in self.agents.items()
            },
            "models": {
                model_id: {"model": model.model, "calls": model.calls, "extra_body": dict(model.extra_body)}
                for model_id, model in self.models.items()
            },
        }


def read_endpoints(path: Path) -> Endpoints:
    """A file of endpoints; `agents` may name just the model.

    Raises:
        ValueError: One line on what is wrong with it.
    """
    try:
        given = OmegaConf.to_container(OmegaConf.load(path.expanduser()), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--endpoints {path}: {' '.join(str(error).split())}") from error
    if isinstance(given, dict) and isinstance(given.get("agents"), dict):
        agents = given["agents"].items()
        given["agents"] = {agent: {"model": own} if isinstance(own, str) else own for agent, own in agents}
    return parse(given, Endpoints, path.name, strict=True)


def build_team(
    *,
    workflow: str | None,
    settings: Sequence[str],
    training: TrainingTeam | None,
    endpoints: Endpoints | None,
    one: ServedModel | None,
    sampling: Sampling,
) -> Evaluated:
    """The team that the options name.

    Args:
        workflow: Registry name or import path; None: the configuration's.
        settings: What differs from the configuration's settings.
        training: A training configuration's team; None: none is given.
        endpoints: The models; None: `one` is the only one.
        one: The model of all agents.
        sampling: Of agents that have nothing of their own.

    Raises:
        ValueError: They don't fit together; one line that names option, value and fix.
    """
    name = workflow or (training.workflow if training else None)
    if name is None:
        raise ValueError("--workflow is missing; name the team, or give a training configuration with --config")
    if training and name != training.workflow:
        raise ValueError(f"--workflow {name}: the configuration's is {training.workflow}; drop one of the two")
    team = build_workflow(name, settings, training.settings if training else None)
    entries = endpoints.agents if endpoints else {}
    for agent in entries:
        if agent not in team.agents:
            raise ValueError(f"--endpoints: agents.{agent}: {name} has no such agent; {nearest(agent, team.agents)}")
    trained = {agent: own.model for agent, own in training.section.agents.items()} if training else {}
    named = {agent: (entries.get(agent) or AgentEntry()).model or trained.get(agent) for agent in team.agents}
    models = endpoints.models if endpoints else _only(one, named)
    agents = {agent: _model_of(agent, named[agent], models) for agent in team.agents}
    used = {model_id: models[model_id] for model_id in dict.fromkeys(agents.values())}
    if training and training.template:
        used = {model_id: _with_template(model, training.template) for model_id, model in used.items()}
    own = {agent: _sampling(agent, entries.get(agent), training, sampling) for agent in team.agents}
    return Evaluated(name, team, agents, used, own)


def _only(one: ServedModel | None, named: Mapping[str, str | None]) -> dict[str, ServedModel]:
    if one is None:
        raise ValueError("--url and --model are missing; name the served model, or several with --endpoints")
    ids = sorted({model_id for model_id in named.values() if model_id is not None})
    if len(ids) > 1:
        raise ValueError(f"--url: the configuration has the models {', '.join(ids)}; name all with --endpoints FILE")
    return {ids[0] if ids else ONE: one}


def _model_of(agent: str, model_id: str | None, models: Mapping[str, ServedModel]) -> str:
    if model_id is None:
        if len(models) > 1:
            raise ValueError(
                f"--endpoints: agent {agent} has no model; add `agents: {{{agent}: <one of {', '.join(models)}>}}`"
            )
        return next(iter(models))
    if model_id not in models:
        raise ValueError(
            f"--endpoints: agent {agent} is on {model_id!r}, which models lacks; {nearest(model_id, models)}"
        )
    return model_id


def _with_template(model: ServedModel, template: dict[str, Any]) -> ServedModel:
    """The model with the arguments that training gave its chat template; its own come first."""
    own = dict(model.extra_body)
    return dataclasses.replace(
        model, extra_body={**own, "chat_template_kwargs": {**template, **(own.get("chat_template_kwargs") or {})}}
    )


def _sampling(agent: str, entry: AgentEntry | None, training: TrainingTeam | None, default: Sampling) -> Sampling:
    own = entry or AgentEntry()
    lengths = (own.max_tokens, default.max_tokens, training.max_tokens(agent) if training else None)
    try:
        return Sampling(
            temperature=default.temperature if own.temperature is None else own.temperature,
            top_p=default.top_p if own.top_p is None else own.top_p,
            max_tokens=next((length for length in lengths if length is not None), None),
            more=training.sampled(agent) if training else {},
        )
    except ValueError as error:
        raise ValueError(f"--endpoints: agents.{agent}.{error}") from None


def _without_seed(sampling: Sampling) -> dict[str, Any]:
    return {name: value for name, value in asdict(sampling).items() if name != "seed"}


def _code(cls: type) -> dict[str, str]:
    """A short name of the text of each module that a workflow's classes stand in; blank where there is no text."""
    texts = {}
    for base in cls.__mro__:
        if issubclass(base, Workflow) and base is not Workflow:
            try:
                texts[base.__module__] = digest([Path(inspect.getsourcefile(base)).read_text(encoding="utf-8")])
            except (OSError, TypeError):
                texts[base.__module__] = ""
    return texts
