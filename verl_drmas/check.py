"""One check of a whole configuration before any GPU is taken, and the keys that a team run fills in.

It runs in a Hydra callback, where interpolations are still open and a change reaches the job; again in the trainer, for
command lines that bypass our files; and in `verl-drmas check`, without Ray.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_drmas.advantage import ESTIMATORS
from verl_drmas.check_machine import check_data, check_machine, check_model, check_start
from verl_drmas.check_pair import STORE_MODE, check_links, check_pair
from verl_drmas.compose import check_composed, compose_models, policy_config
from verl_drmas.config import AgentConfig, ConfigError, DrmasConfig, nearest, parse
from verl_drmas.data.stages import check_curriculum, stage_files
from verl_drmas.placement import Pool, check_cluster, check_placement, placement
from verl_drmas.sockets import job_keys
from verl_drmas.support import GROUP_ESTIMATORS, PER_AGENT, estimator_refusals, get, is_mgrpo, switch_refusals
from verl_drmas.workflows import Workflow, load_workflow

MODE = "drmas_sync"
LOOP_NAME = "drmas_team"
MANAGER = "verl_drmas.rollout.worker.TeamManager"
IDLE_MANAGER = "verl_drmas.rollout.worker.IdleManager"


@dataclass
class Prepared:
    """A checked configuration.

    Attributes:
        section: The typed `drmas` section.
        workflow: The workflow class; None for a stock agent loop.
        base_estimator: verl's estimator that runs per agent, or None.
        filled: Keys that were set because a team run needs them.
        policies: By model id: the run's configuration as the model sees it.
        pools: Which models share which GPUs, by pool.
        found: What the workflow found of the tools that it needs; empty if it needs none.
    """

    section: DrmasConfig
    workflow: type[Workflow] | None
    base_estimator: str | None = None
    filled: dict[str, Any] = field(default_factory=dict)
    policies: dict[str, DictConfig] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    found: str = ""

    def agents(self) -> tuple[str, ...]:
        """The team, or what a job trains of it; the agents that are listed, or `default`, of a stock agent loop."""
        if self.workflow is None or self.section.store is not None:
            return tuple(self.section.agents) or ("default",)
        return build_workflow(self.section).agents

    def activations(self) -> dict[str, tuple[int, int]]:
        """Fewest and most activations of each agent in a session; empty if nobody can tell."""
        if self.workflow is None:
            return {}
        return build_workflow(self.section).activations()


def prepare(config: DictConfig) -> Prepared:
    """Check a composed configuration and fill the keys that follow from it. Changes `config`.

    Raises:
        ConfigError: One line: key, value, fix.
    """
    prepared = _prepare(config, compose=True)
    validate_with_verl(config, prepared.policies)
    for model_id, policy in prepared.policies.items():
        with naming(prepared.section, model_id):
            if not prepared.section.models[model_id].remote:
                check_machine(policy)
            check_model(policy)
            check_start(prepared.section.models[model_id].init_from, policy)
    check_links(prepared.section)
    if prepared.section.store is not None:
        return prepared  # prompts, tools and judges are the other job's
    check_curriculum(config, prepared.section)
    named = prepared.section.request_seed is not None or bool(prepared.section.remote)
    check_data(config, prepared.workflow, seeded=named)
    prepared.found = check_tools(prepared)
    return prepared


def prepare_trainer(config: DictConfig) -> Prepared:
    """The part of the check that holds inside a running job, where the machine and the files aren't the user's."""
    return _prepare(config, compose=False)


def prepare_keys(config: DictConfig) -> Prepared:
    """The part that holds on a machine that isn't the run's: sections, keys and the models' own configurations."""
    return _prepare(config, compose=True)


def _prepare(config: DictConfig, *, compose: bool) -> Prepared:
    section = read_section(config)
    mode = get(config, "trainer.v1.trainer_mode")
    estimator = str(get(config, "algorithm.adv_estimator", "gae"))
    if mode not in (MODE, STORE_MODE):
        if estimator in ESTIMATORS or is_mgrpo(config) or "drmas" in config:
            what = "a drmas section" if "drmas" in config else f"algorithm.adv_estimator={estimator}"
            raise ConfigError(
                f"trainer.v1.trainer_mode is {mode!r}, but {what} needs agent ids: set trainer.v1.trainer_mode={MODE}"
            )
        raise ConfigError(f"trainer.v1.trainer_mode is {mode!r}; this check is for {MODE}")
    if not get(config, "trainer.use_v1", True):
        raise ConfigError(f"trainer.use_v1 is false; {mode} is a V1 trainer: set trainer.use_v1=true")
    check_pair(section, mode)
    workflow = check_team(section)
    check_estimator(estimator)
    prepared = Prepared(section, workflow)
    for line in estimator_refusals(config, section):
        raise ConfigError(line)
    _fill(config, prepared, estimator)
    if compose:
        prepared.filled |= compose_models(config, section)
    else:
        check_composed(config)
    prepared.policies = {model_id: policy_config(config, section, model_id) for model_id in section.models}
    prepared.pools = placement(config, section)
    check_placement(prepared.pools, prepared.policies)
    if compose:
        _set(config, check_cluster(config, prepared.pools), prepared)
    for model_id, policy in prepared.policies.items():
        with naming(section, model_id):
            for line in switch_refusals(policy, section.only(model_id)):
                raise ConfigError(line)
    return prepared


@contextmanager
def naming(section: DrmasConfig, model_id: str) -> Iterator[None]:
    """Errors say which model they are about, where there are several."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith("init_from"):
            raise ConfigError(f"drmas.models.{model_id}.{error}") from None
        if len(section.models) == 1 or not str(error).startswith("actor_rollout_ref"):
            raise
        raise ConfigError(f"model {model_id}: {error}") from None


def validate_with_verl(config: DictConfig, policies: Mapping[str, DictConfig]) -> None:
    """verl's own `validate_config`, once a model.

    Raises:
        ConfigError: What verl's assertions say.
    """
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    for model_id, policy in policies.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it reports each success, and the job says it again
                validate_config(policy, use_reference_policy=need_reference_policy(policy), use_critic=False)
        except (AssertionError, ValueError, TypeError, HydraException, OmegaConfBaseException) as error:
            whose = f"model {model_id}: " if len(policies) > 1 else ""
            text = " ".join(str(error).split())
            raise ConfigError(f"{whose}verl refuses the configuration: {text}") from None


def read_section(config: DictConfig) -> DrmasConfig:
    """The typed `drmas` section of a configuration; defaults if there is none."""
    try:
        section = OmegaConf.select(config, "drmas")
        section = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    except OmegaConfBaseException as error:
        raise ConfigError(f"drmas: {' '.join(str(error).split())}") from None
    return parse(section)


def check_estimator(estimator: str) -> None:
    """verl knows the estimator (it looks the name up at the first advantage, after a whole rollout).

    Raises:
        ConfigError: Names the nearest one.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY  # loaded before this runs: ours register with it

    known = {str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY} | set(ESTIMATORS)
    if estimator not in known:
        raise ConfigError(f"algorithm.adv_estimator={estimator}: unknown; {nearest(estimator, sorted(known))}")


def check_team(section: DrmasConfig) -> type[Workflow] | None:
    """The workflow class; its agents and the section's must be the same.

    Raises:
        ConfigError: Unknown workflow, setting or agent, or an agent without a model.
    """
    if section.workflow is None:
        if len(section.models) > 1:
            raise ConfigError(
                f"drmas.models lists {len(section.models)} models, and drmas.workflow is not set: a stock agent loop "
                "speaks to one; set drmas.workflow.name"
            )
        for agent_id, agent in section.agents.items():
            own = AgentConfig(agent.model, agent.trainable, agent.invalid_penalty)
            if agent != own:
                raise ConfigError(
                    f"drmas.agents.{agent_id}: sampling and lengths are the workflow's to apply, and drmas.workflow is "
                    "not set; set them where your agent loop samples"
                )
        return None
    name = section.workflow.get("name")
    if not name:
        raise ConfigError("drmas.workflow.name is missing; set a registry name or package.module:Class")
    try:
        cls = load_workflow(str(name))
    except ValueError as error:
        raise ConfigError(f"drmas.workflow.name: {error}") from None
    for module in cls.requires:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"drmas.workflow.name: {name!r} needs the module {module}; pip install "
                + (f"'verl-drmas[{cls.extra}]'" if cls.extra else f"what brings {module}")
            )
    settings = {k: v for k, v in section.workflow.items() if k != "name"}
    for key in settings:
        if key not in cls.setting_names():
            raise ConfigError(f"drmas.workflow.{key}: unknown key; {nearest(key, cls.setting_names())}")
    parse(settings, cls.Settings, "drmas.workflow", strict=True)
    try:
        agents = build_workflow(section).agents
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"drmas.workflow: {error}") from None
    model = next(iter(section.models))
    for agent_id in agents if section.store is None else ():  # the others of the team are another job's
        if agent_id not in section.agents:
            raise ConfigError(
                f"drmas.agents: workflow {name!r} needs agent {agent_id!r}, which has no model; "
                f"add `{agent_id}: {{model: {model}}}`"
            )
    for agent_id in section.agents:
        if agent_id not in agents:
            raise ConfigError(
                f"drmas.agents.{agent_id}: workflow {name!r} has no such agent; {nearest(agent_id, agents)}"
            )
    return cls


def build_workflow(section: DrmasConfig) -> Workflow:
    """The workflow that the section names, with its settings."""
    settings = {k: v for k, v in (section.workflow or {}).items() if k != "name"}
    cls = load_workflow((section.workflow or {})["name"])
    return cls(cls.Settings(**settings))


def check_tools(prepared: Prepared) -> str:
    """What the workflow needs beside its agents is there; returns a line on it.

    Raises:
        ConfigError: As the workflow's `preflight` says it.
    """
    if prepared.workflow is None:
        return ""
    try:
        return build_workflow(prepared.section).preflight()
    except Exception as error:  # whatever a user's workflow raises
        raise ConfigError(f"drmas.workflow: {' '.join(str(error).split()) or type(error).__name__}") from error


def _fill(config: DictConfig, prepared: Prepared, estimator: str) -> None:
    """Set what a team run needs; a value of the user's own stays, except where nothing else can work."""
    section = prepared.section
    wanted: dict[str, Any] = {
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": MANAGER,
        # Rows per step vary, and verl's fixed micro-batches need a multiple of them.
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
    }
    if section.store is not None:
        wanted["actor_rollout_ref.rollout.agent.agent_loop_manager_class"] = IDLE_MANAGER
        wanted |= {"trainer.val_before_train": False, "trainer.test_freq": -1}  # it has no prompts to validate on
    elif prepared.workflow is not None:
        wanted["actor_rollout_ref.rollout.agent.default_agent_loop"] = LOOP_NAME
    if section.curriculum:
        wanted["data.train_files"] = stage_files(section)
    if any(agent.sampling.stop for agent in section.agents.values()):
        wanted["actor_rollout_ref.rollout.skip_tokenizer_init"] = False  # the engine looks for the strings in text
    wanted |= job_keys(config)  # two jobs on one machine must not share the sockets of their weight updates
    if section.group_by == "agent" and estimator in GROUP_ESTIMATORS:
        wanted["algorithm.adv_estimator"] = PER_AGENT
        wanted["drmas_base_estimator"] = estimator
    _set(config, wanted, prepared)
    prepared.base_estimator = get(config, "drmas_base_estimator")


def _set(config: DictConfig, wanted: Mapping[str, Any], prepared: Prepared) -> None:
    with open_dict(config):
        for key, value in wanted.items():
            if get(config, key) != value:
                OmegaConf.update(config, key, value, force_add=True)
                prepared.filled[key] = value
