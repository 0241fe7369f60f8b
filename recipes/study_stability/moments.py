"""Lemma 4.2 of the Dr. MAS paper on real groups, the bound of the inflation factor, and what the factor depends on.

For one prompt and one agent the lemma says: the second moment of the agent's gradient under the prompt's statistics is
E|z|^2 * F + Delta, with z the score of an action, F the inflation factor and Delta the covariance of |z|^2 with the
squared advantage. All moments are over the agent's actions; standard deviations are the population's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from recipes.study_stability.policy import scores
from recipes.study_stability.worlds import AGENTS, Batch
from verl_drmas.advantage import ESTIMATORS, agent_diagnostics, group_advantage

EXACT = {"ddof": 0, "eps": 0.0}  # the lemma's statistics, without what the code adds to them


def group_moments(batch: Batch, tables: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
    """Measures both sides of the lemma on every group of a batch, each side by itself.

    The left side is the mean of |advantage * score|^2 with the advantages of `group_advantage`; F is that of
    `agent_diagnostics`; Delta is the covariance, from the outcomes.

    Args:
        batch: as sampled.
        tables: the logits it was sampled from.

    Yields:
        For each prompt with both outcomes and each agent that acted: ``agent``, ``f``, ``z2`` (mean of |z|^2),
        ``delta``, ``shared`` (second moment under the prompt's statistics), ``own`` (under the agent's: 0 where its
        outcomes are all equal) and ``error`` (relative, of the identity).
    """
    shared = group_advantage(batch.reward, **vars(ESTIMATORS["grpo_team"]), **batch.ids, **EXACT)
    own = group_advantage(batch.reward, **vars(ESTIMATORS["drmas"]), **batch.ids, **EXACT)
    z2 = np.empty(len(batch))
    for agent, table in enumerate(tables):
        rows = batch.agent == agent
        z2[rows] = (scores(table, batch.context[rows], batch.action[rows]) ** 2).sum(-1)
    outcomes = batch.success.reshape(batch.uid.max() + 1, -1)
    for prompt, outcome in enumerate(outcomes):
        if outcome.std() == 0:
            continue
        of_prompt = np.flatnonzero(batch.uid == prompt)
        health = agent_diagnostics(
            batch.reward[of_prompt],
            shared[of_prompt],
            tokens=np.ones(len(of_prompt)),
            **{name: ids[of_prompt] for name, ids in batch.ids.items()},
        )
        for agent, metrics in health.items():
            rows = of_prompt[batch.agent[of_prompt] == agent]
            squared = ((batch.reward[rows] - outcome.mean()) / outcome.std()) ** 2
            delta = float(np.cov(z2[rows], squared, ddof=0)[0, 1])
            left = float(np.mean(z2[rows] * shared[rows] ** 2))
            right = float(z2[rows].mean() * metrics["inflation_factor/mean"] + delta)
            yield {
                "agent": AGENTS[agent],
                "f": metrics["inflation_factor/mean"],
                "z2": float(z2[rows].mean()),
                "delta": delta,
                "shared": left,
                "own": float(np.mean(z2[rows] * own[rows] ** 2)),
                "error": abs(left - right) / max(left, np.finfo(float).tiny),
            }


def extreme(sessions: int, calls: int = 1) -> dict[str, float]:
    """Measures the group that reaches the bound: the agent acts in the only successful session, `calls` times.

    Returns:
        ``f`` of that agent, and the largest |advantage| that ``grpo_team`` and ``drmas`` give its rows.
    """
    others, own = np.arange(sessions), np.zeros(calls, dtype=int)
    ids = {
        "uid": np.zeros(sessions + calls, dtype=int),
        "session": np.concatenate([others, own]),
        "agent_id": np.concatenate([np.zeros(sessions, dtype=int), np.ones(calls, dtype=int)]),
    }
    reward = (ids["session"] == 0).astype(float)
    size = {
        name: np.abs(group_advantage(reward, **vars(ESTIMATORS[name]), **ids))[ids["agent_id"] == 1].max()
        for name in ("grpo_team", "drmas")
    }
    health = agent_diagnostics(reward, reward, tokens=np.ones(len(reward)), **ids)
    return {"f": health[1]["inflation_factor/max"], **{name: float(value) for name, value in size.items()}}


def expected_factor(success: np.ndarray | float, own: np.ndarray | float) -> np.ndarray | float:
    """F of an agent if the share `success` of a prompt's sessions and `own` of the agent's actions succeed.

    Outcomes are 0 or 1, so that a successful action has the squared advantage (1 - success) / success and a failed one
    the inverse. It is 1 where `own` equals `success`, and for a `success` of one half whatever `own` is.
    """
    return own * (1 - success) / success + (1 - own) * success / (1 - success)
