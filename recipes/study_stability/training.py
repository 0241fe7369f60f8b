"""One training run of a team: a world, an estimator, a seed, and how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipes.study_stability.policy import Policy
from recipes.study_stability.worlds import AGENTS, WORLDS, Batch, Draw, Sampler, first_tables
from verl_drmas.advantage import ESTIMATORS as SWITCHES
from verl_drmas.advantage import agent_diagnostics, invalid_penalty, penalised_advantage

ESTIMATORS = ("grpo_team", "grpo_activation", "drmas_mean", "drmas_std", "drmas")  # in the order of tables and figures
PENALISED = ("grpo_team", "grpo_activation", "drmas")  # those that are also trained with malformed actions
TOLERANCE = 1e-9


class StudyError(RuntimeError):
    """Something that the study holds to be true was not; the message says what was measured."""


@dataclass(frozen=True)
class Penalty:
    """What a malformed action costs.

    Attributes:
        coefficient: in units of the reward.
        place: ``inside`` or ``outside`` the statistics, see `penalised_advantage`.
        std_floor: least std of a group with spread, see `group_advantage`.
    """

    coefficient: float
    place: str = "inside"
    std_floor: float = 0.0

    @property
    def name(self) -> str:
        """What tables call it."""
        floor = f", floor {self.std_floor:g}" if self.std_floor else ""
        return f"{self.coefficient:g} {self.place}{floor}"


@dataclass(frozen=True)
class Setting:
    """All that a run depends on; equal settings give equal numbers.

    Attributes:
        world: one of `WORLDS`.
        estimator: one of `ESTIMATORS`.
        seed: of what is true, of the prompts and of all luck.
        budget: actions that the run may sample; it ends with the step that reaches them. An action is one token.
        rate: learning rate.
        optimiser: ``adamw`` or ``sgd``.
        prompts: of a step.
        sessions: of a prompt.
        updates: optimiser steps of an agent in a step (the paper's search runs take 5).
        penalty: of malformed actions, or None.
    """

    world: str
    estimator: str
    seed: int
    budget: int = 64_000
    rate: float = 0.01
    optimiser: str = "adamw"
    prompts: int = 20
    sessions: int = 8
    updates: int = 5
    penalty: Penalty | None = None


@dataclass
class Team:
    """The agents' policies in training."""

    setting: Setting
    sampler: Sampler
    policies: list[Policy]

    @classmethod
    def of(cls, setting: Setting) -> Team:
        """Returns the team of a setting before its first step."""
        torch.set_num_threads(1)  # the tables are tiny; and sums must not depend on the machine's cores
        world = WORLDS[setting.world]
        truth, tables = first_tables(world, setting.seed)
        sampler = Sampler(world, truth, setting.prompts, setting.sessions, Draw.TRAINING, setting.seed)
        return cls(setting, sampler, [Policy(table, setting.optimiser, setting.rate) for table in tables])

    def tables(self) -> list[np.ndarray]:
        """Returns a copy of each agent's logits."""
        return [policy.logits for policy in self.policies]

    def sample(self, step: int) -> Batch:
        """Returns the batch of a step, sampled from the policies as they stand."""
        return self.sampler.sample(self.tables(), step)

    def update(self, batch: Batch, advantage: np.ndarray, step: int) -> list[list[float]]:
        """Updates every agent on its rows, in an order drawn for it; returns each agent's gradient norms."""
        norms = []
        for agent, policy in enumerate(self.policies):
            order = np.random.default_rng((Draw.ORDER, self.setting.seed, step, agent))
            rows = order.permutation(batch.rows_of(agent))
            columns = (batch.context[rows], batch.action[rows], batch.log_prob[rows], advantage[rows])
            norms.append(policy.update(*columns, self.setting.updates))
        return norms


def train(setting: Setting) -> Iterator[dict[str, Any]]:
    """Trains a team and yields what was measured in each step, as plain data.

    Yields:
        ``step``, ``actions`` (sampled up to and including this step), ``success`` (share of its sessions, before its
        update), ``flat_mass`` (share of the sum of |advantage| in prompts whose sessions all had the same outcome:
        what penalties alone push), and by agent ``activations`` (rows), ``norm`` (mean over the step's updates of the
        gradient's norm before clipping, as verl logs it), ``norm_max``, ``valid`` (share of its actions that are well
        formed), and of `agent_diagnostics` ``f``, ``f_max``, ``zero_std`` and ``mass``. What isn't defined is left out.

    Raises:
        StudyError: an inflation factor is above N - 1 without a penalty, or isn't 1 in the world ``even``.
    """
    team = Team.of(setting)
    step, actions = 0, 0
    while actions < setting.budget:
        batch = team.sample(step)
        rewards, advantage = advantages(setting, batch)
        health = agent_diagnostics(rewards, advantage, tokens=np.ones(len(batch)), **batch.ids)
        check_factors(setting, health)
        norms = team.update(batch, advantage, step)
        actions += len(batch)
        yield {
            "step": step,
            "actions": actions,
            "success": float(batch.success.mean()),
            "flat_mass": _flat_mass(batch, advantage),
            "agents": {name: _measures(batch, agent, norms[agent], health) for agent, name in enumerate(AGENTS)},
        }
        step += 1


def advantages(setting: Setting, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rewards that the statistics see and the advantages, (rows,) each."""
    penalty = setting.penalty or Penalty(0.0)
    off = invalid_penalty(
        batch.valid, agent_id=batch.agent, coefficients=dict.fromkeys(range(len(AGENTS)), penalty.coefficient)
    )
    advantage = penalised_advantage(
        batch.reward,
        off,
        place=penalty.place,
        std_floor=penalty.std_floor,
        **vars(SWITCHES[setting.estimator]),
        **batch.ids,
    )
    return (batch.reward - off if penalty.place == "inside" else batch.reward), advantage


def check_factors(setting: Setting, health: dict) -> None:
    """Raise a StudyError where a group's inflation factor breaks what must hold of it.

    The largest factor of an agent bounds all its groups; a penalty inside the statistics makes rewards differ within a
    session, of which nothing is claimed.
    """
    if setting.penalty and setting.penalty.place == "inside":
        return
    for agent, metrics in health.items():
        mean, largest = metrics.get("inflation_factor/mean", 1.0), metrics.get("inflation_factor/max", 1.0)
        if largest > setting.sessions - 1 + TOLERANCE:
            raise StudyError(f"{setting}: F of {AGENTS[agent]} is {largest}, above N - 1 = {setting.sessions - 1}")
        if WORLDS[setting.world].even and max(abs(mean - 1), abs(largest - 1)) > TOLERANCE:
            raise StudyError(f"{setting}: F of {AGENTS[agent]} is {mean} on average, {largest} at most: it must be 1")


def _flat_mass(batch: Batch, advantage: np.ndarray) -> float:
    outcomes = batch.success.reshape(batch.uid.max() + 1, -1)
    size = np.abs(advantage)
    return float(size[(outcomes.std(-1) == 0)[batch.uid]].sum() / max(size.sum(), np.finfo(float).tiny))


def _measures(batch: Batch, agent: int, norms: list[float], health: dict[int, dict[str, float]]) -> dict[str, float]:
    rows = batch.rows_of(agent)
    if not len(rows):
        return {"activations": 0}
    metrics = health[agent]
    measured = {
        "activations": len(rows),
        "valid": float(batch.valid[rows].mean()),
        "norm": float(np.mean(norms)),
        "norm_max": max(norms),
        "zero_std": metrics["zero_std_share"],
        "mass": metrics["advantage_mass_share"],
    }
    if "inflation_factor/mean" in metrics:
        measured |= {"f": metrics["inflation_factor/mean"], "f_max": metrics["inflation_factor/max"]}
    return measured
