"""Advantages of a team's rows and what goes with them; pure functions on arrays, without Ray and without verl."""

from verl_drmas.advantage.alignment import ALIGN_MODES, align, seed_of, target_of
from verl_drmas.advantage.balance import balance_weights, loss_unit, row_size
from verl_drmas.advantage.diagnostics import agent_diagnostics, disagreement, shadow
from verl_drmas.advantage.estimators import ESTIMATORS, Switches
from verl_drmas.advantage.groups import group_advantage
from verl_drmas.advantage.mgrpo import (
    EXACT_LOSS_AGG_MODES,
    EXACT_POLICY_LOSSES,
    MgrpoAdvantage,
    copy_weights,
    mgrpo_advantage,
)
from verl_drmas.advantage.penalty import invalid_penalty, penalised_advantage
from verl_drmas.advantage.tokens import broadcast

__all__ = [
    "ALIGN_MODES",
    "ESTIMATORS",
    "EXACT_LOSS_AGG_MODES",
    "EXACT_POLICY_LOSSES",
    "MgrpoAdvantage",
    "Switches",
    "agent_diagnostics",
    "align",
    "balance_weights",
    "broadcast",
    "copy_weights",
    "disagreement",
    "group_advantage",
    "invalid_penalty",
    "loss_unit",
    "mgrpo_advantage",
    "penalised_advantage",
    "row_size",
    "seed_of",
    "shadow",
    "target_of",
]
