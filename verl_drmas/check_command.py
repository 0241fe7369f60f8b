"""`verl-drmas check <the same arguments as main_ppo>`: what a run would be, in seconds and without Ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import verl.trainer
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from verl_drmas.advantage import ESTIMATORS
from verl_drmas.check import Prepared, prepare
from verl_drmas.compose import default_updates
from verl_drmas.config import ConfigError, DrmasConfig
from verl_drmas.placement import pool_of, server_size
from verl_drmas.support import SWITCHES, get, is_mgrpo


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """Compose, check and print. Returns the exit status: 0, or 1 with one line on what is wrong."""
    console = console or Console(width=None if sys.stdout.isatty() else 110)
    try:
        config = compose_as_verl(arguments)
        prepared = prepare(config)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        console.print(f"refused: {' '.join(str(error).split())}", style="bold red", markup=False, soft_wrap=True)
        return 1
    for table in (team_table(config, prepared), model_table(prepared), step_table(config, prepared)):
        console.print(table)
    for model_id, policy in prepared.policies.items():
        console.print(f"model {model_id}: {get(policy, 'actor_rollout_ref.model.path')}", markup=False, soft_wrap=True)
    filled = ", ".join(f"{k}={v}" for k, v in prepared.filled.items()) or "nothing"
    console.print(f"filled in: {filled}", markup=False, soft_wrap=True)
    advantage = prepared.section.advantage
    if is_mgrpo(config) and (advantage.ddof, advantage.eps) != (0, 0.0):
        line = f"drmas.advantage: ddof={advantage.ddof}, eps={advantage.eps:g}; M-GRPO's paper has ddof=0 and eps=0"
        console.print(line, markup=False, soft_wrap=True)
    if prepared.found:
        console.print(f"tools: {prepared.found}", markup=False, soft_wrap=True)
    for line in switched(config):
        console.print(line, markup=False, soft_wrap=True)
    console.print("ready", style="bold green")
    return 0


def compose_as_verl(arguments: Sequence[str]) -> DictConfig:
    """Compose as `python -m verl.trainer.main_ppo <arguments>` does, interpolations open.

    Raises:
        HydraException: As Hydra has it.
        ConfigError: A Hydra flag that changes no configuration, or a folder that isn't there.
    """
    parser = argparse.ArgumentParser(prog="verl-drmas check", add_help=False)
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn", default="ppo_trainer")
    parser.add_argument("--config-dir", "-cd")
    flags, overrides = parser.parse_known_args(list(arguments))
    stray = [o for o in overrides if o.startswith("-")]
    if stray:
        raise ConfigError(f"{stray[0]}: not a flag of check; give the arguments of main_ppo")
    GlobalHydra.instance().clear()
    if flags.config_path:
        main = Path(verl.trainer.__file__)  # Hydra reads the path from main_ppo.py's folder
        start = initialize_config_dir(str(_folder(str(main.parent / flags.config_path))), version_base=None)
    else:
        start = initialize_config_module("verl.trainer.config", version_base=None)
    with start:
        if flags.config_dir:  # not as hydra.searchpath, which Hydra reads after it has looked for the primary file
            loader = GlobalHydra.instance().config_loader()
            place = SearchPathQuery(provider="schema")
            loader.get_search_path().prepend("command-line", f"file://{_folder(flags.config_dir)}", place)
            loader.repository.initialize_sources(loader.get_search_path())
        return compose(flags.config_name, overrides)


def _folder(path: str) -> Path:
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"{path}: no such folder")
    return folder


def team_table(config: DictConfig, prepared: Prepared) -> Table:
    """The team: who is on which model, how each samples, and what its group is."""
    table = Table(title="team", title_justify="left")
    for column in ("agent", "model", "trained", "temperature", "top_p", "prompt", "response", "penalty", "group"):
        table.add_column(column)
    section, rollout = prepared.section, "actor_rollout_ref.rollout"
    policies = prepared.policies
    for agent_id in prepared.agents():
        agent = section.agent(agent_id)
        own = agent.sampling
        table.add_row(
            agent_id,
            agent.model,
            _trained(section, agent_id),
            _shown(own.temperature, get(policies[agent.model], f"{rollout}.temperature")),
            _shown(own.top_p, get(policies[agent.model], f"{rollout}.top_p")),
            _shown(agent.prompt_length, get(policies[agent.model], f"{rollout}.prompt_length")),
            _shown(agent.response_length, get(policies[agent.model], f"{rollout}.response_length")),
            f"{agent.invalid_penalty:g}",
            group_of(config, prepared),
        )
    return table


def _shown(own: Any, default: Any) -> str:
    return str(default if own is None else own)


def group_of(config: DictConfig, prepared: Prepared) -> str:
    """What a row's mean and spread are taken over."""
    estimator = str(get(config, "algorithm.adv_estimator"))
    if prepared.base_estimator:
        return f"{prepared.base_estimator} per prompt and agent"
    if is_mgrpo(config):
        alignment = prepared.section.alignment
        return f"per prompt and agent; sub-agents aligned to {alignment.target} ({alignment.mode})"
    switches = ESTIMATORS.get(estimator)
    if switches is None:
        return estimator
    spread = "none" if not get(config, "algorithm.norm_adv_by_std_in_grpo", True) else switches.std_scope
    return f"mean: {switches.mean_scope}, std: {spread}, by {switches.pool}"


def step_table(config: DictConfig, prepared: Prepared) -> Table:
    """Sizes of a step: sessions, rows, updates, padding."""
    prompts, n = int(get(config, "data.train_batch_size")), int(get(config, "actor_rollout_ref.rollout.n", 1))
    sessions = prompts * n
    table = Table("step", "value", title="one step", title_justify="left")
    table.add_row("sessions", f"{sessions} ({prompts} prompts x {n})")
    table.add_row("rows", _rows(prepared, sessions))
    for model_id, policy in prepared.policies.items():
        if not prepared.section.models[model_id].trained_here:
            continue
        whose = "" if len(prepared.policies) == 1 else f" of {model_id}"
        updates = prepared.section.updates(model_id) or default_updates(policy)
        ranks = pool_of(prepared.pools, model_id).gpus
        table.add_row(f"updates{whose}", f"{updates} x {get(policy, 'actor_rollout_ref.actor.ppo_epochs', 1)} epochs")
        table.add_row(f"padding rows{whose}", f"at most {updates * ranks - 1} ({ranks} ranks x {updates} updates - 1)")
    return table


def _trained(section: DrmasConfig, agent_id: str) -> str:
    if section.trained(agent_id):
        return "yes"
    agent = section.agent(agent_id)
    return "elsewhere" if agent.trainable and section.models[agent.model].remote else "no"


def model_table(prepared: Prepared) -> Table:
    """The models: how each is trained and served, and where."""
    table = Table(title="models", title_justify="left")
    for column in ("model", "agents", "trained", "strategy", "lr", "engine", "GPUs a server", "pool"):
        table.add_column(column)
    section = prepared.section
    for model_id, policy in prepared.policies.items():
        remote, trained = section.models[model_id].remote, section.models[model_id].trained_here
        pool = None if remote else pool_of(prepared.pools, model_id)
        table.add_row(
            model_id,
            ", ".join(section.agents_of(model_id)) or "all",
            "yes" if trained else f"by another job (role {remote.role})" if remote else "no (served)",
            str(get(policy, "actor_rollout_ref.actor.strategy")) if trained else "-",
            f"{get(policy, 'actor_rollout_ref.actor.optim.lr'):g}" if trained else "-",
            str(get(policy, "actor_rollout_ref.rollout.name")) if pool else "its gateway",
            str(server_size(policy)) if pool else "-",
            f"{pool.name}: {pool.nnodes} x {pool.n_gpus_per_node}" + (" (shared)" if pool.shared else "")
            if pool
            else "-",
        )
    return table


def _rows(prepared: Prepared, sessions: int) -> str:
    if prepared.workflow is None:
        return f"at least {sessions}: as many as the agent loop returns"
    counts = prepared.activations()
    if not counts:
        return f"at least {sessions}: the workflow doesn't tell"
    low, high = (sum(c[i] for c in counts.values()) * sessions for i in (0, 1))
    each = ", ".join(f"{agent} {a}" if a == b else f"{agent} {a}-{b}" for agent, (a, b) in counts.items())
    return f"{low} to {high} ({each} a session)" if low != high else f"{low} ({each} a session)"


def switched(config: DictConfig) -> list[str]:
    """verl's switches that aren't as verl has them, and what a team makes of them."""
    values = [(switch, get(config, switch.key)) for switch in SWITCHES]
    return [f"{s.key}={value}: {s.says}" for s, value in values if value is not None and value != s.default]
