"""How well each estimator points, at policies that stand still: every estimator sees the same batches.

Training mixes an estimator's direction with its size, the learning rate and luck. Here the policies are fixed, many
batches are drawn, and each estimator's gradient on a batch is held against the exact one of the expected reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from recipes.study_stability.exact import expected_success
from recipes.study_stability.moments import group_moments
from recipes.study_stability.policy import gradient
from recipes.study_stability.training import ESTIMATORS, Setting, Team, advantages
from recipes.study_stability.worlds import AGENTS, WORLDS, Batch, Draw, Sampler, first_tables
from verl_drmas.advantage import ESTIMATORS as SWITCHES
from verl_drmas.advantage import group_advantage

SILENT = 1e-9
MOMENT_BATCHES = 10


def snapshots(setting: Setting, at: Sequence[float]) -> list[list[np.ndarray]]:
    """Trains and returns the agents' tables when each share of the budget in `at`, rising, was spent."""
    team, step, actions, kept = Team.of(setting), 0, 0, []
    while len(kept) < len(at):
        if actions >= at[len(kept)] * setting.budget:
            kept.append(team.tables())
            continue
        batch = team.sample(step)
        team.update(batch, advantages(setting, batch)[1], step)
        actions += len(batch)
        step += 1
    return kept


def probe(
    setting: Setting, tables: Sequence[np.ndarray], batches: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measures every estimator at fixed policies.

    Args:
        setting: its world, prompts, sessions and seed are used; all estimators are measured.
        tables: the agents' logits.
        batches: to draw.

    Returns:
        For each estimator and agent ``alignment`` (mean cosine of a batch's gradient with that of the expected reward:
        bias and noise together), ``cosine`` (of the mean gradient, freed of the noise that is left in it: 1 is without
        bias; None where the noise is more than the rest), ``norm`` (root mean square of a batch's gradient) and
        ``silent`` (share of the agent's rows, in prompts with both outcomes, that get no push at all); and the moments
        of the groups of the first batches, see `group_moments`.
    """
    world = WORLDS[setting.world]
    _, true = expected_success(world, first_tables(world, setting.seed)[0], tables)
    found: dict[str, list[list[np.ndarray]]] = {name: [[] for _ in AGENTS] for name in ESTIMATORS}
    silent = {name: np.zeros((2, len(AGENTS))) for name in ESTIMATORS}
    moments: list[dict[str, Any]] = []
    for number, batch in enumerate(_draw(setting, tables, batches)):
        if number < MOMENT_BATCHES:
            moments += group_moments(batch, tables)
        outcomes = batch.success.reshape(setting.prompts, -1)
        mixed = (outcomes.std(-1) > 0)[batch.uid]
        for name in ESTIMATORS:
            advantage = group_advantage(batch.reward, **vars(SWITCHES[name]), **batch.ids)
            for agent in range(len(AGENTS)):
                rows = batch.rows_of(agent)
                sums = gradient(tables[agent], batch.context[rows], batch.action[rows], advantage[rows])
                found[name][agent].append(sums / max(len(rows), 1))
                unpushed = mixed[rows] & (np.abs(advantage[rows]) <= SILENT)
                silent[name][:, agent] += unpushed.sum(), mixed[rows].sum()
    measured = [
        {
            "estimator": name,
            "agent": AGENTS[agent],
            "silent": float(silent[name][0, agent] / max(silent[name][1, agent], 1)),
            **direction(np.array(found[name][agent]).reshape(batches, -1), true[agent].ravel()),
        }
        for name in ESTIMATORS
        for agent in range(len(AGENTS))
    ]
    return measured, moments


def _draw(setting: Setting, tables: Sequence[np.ndarray], batches: int) -> Iterator[Batch]:
    """Batches of other prompts than those of the training."""
    truth, _ = first_tables(WORLDS[setting.world], setting.seed)
    sampler = Sampler(WORLDS[setting.world], truth, setting.prompts, setting.sessions, Draw.PROBE, setting.seed)
    for number in range(batches):
        yield sampler.sample(tables, number)


def direction(gradients: np.ndarray, true: np.ndarray) -> dict[str, float | None]:
    """Returns ``alignment``, ``cosine`` and ``norm`` of gradients (batches, numbers) with the true one (numbers,)."""
    count = len(gradients)
    true = true / np.linalg.norm(true)
    lengths = np.linalg.norm(gradients, axis=-1)
    along = gradients @ true
    mean = gradients.mean(0)
    noise = float(((gradients - mean) ** 2).sum() / (count - 1) / count)  # left in the mean, squared
    signal = float(mean @ mean) - noise
    return {
        "alignment": float(np.divide(along, lengths, out=np.zeros_like(along), where=lengths > 0).mean()),
        "cosine": float(mean @ true / np.sqrt(signal)) if signal > noise else None,
        "norm": float(np.sqrt((lengths**2).mean())),
    }
