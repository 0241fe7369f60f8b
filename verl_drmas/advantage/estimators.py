"""The named advantage estimators: which three switches of `group_advantage` each name sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Switches:
    """Arguments of `group_advantage` that make up an estimator; `**vars(switches)` passes them on."""

    mean_scope: str
    std_scope: str
    pool: str


ESTIMATORS: dict[str, Switches] = {
    "drmas": Switches("agent", "agent", "activation"),  # the paper's method, Eq. 5
    "drmas_mean": Switches("agent", "prompt", "activation"),  # ablation of Table 3: agent mean, global std
    "drmas_std": Switches("prompt", "agent", "activation"),  # ablation of Table 3: global mean, agent std
    "grpo_team": Switches("prompt", "prompt", "session"),  # the paper's GRPO baseline, Eq. 2
    "grpo_activation": Switches("prompt", "prompt", "activation"),  # the control missing from the paper
}
