"""Advantages of a team's rows and what goes with them; pure functions on arrays, without Ray and without verl."""

from verl_drmas.advantage.balance import balance_weights, loss_unit, row_size
from verl_drmas.advantage.diagnostics import agent_diagnostics, shadow
from verl_drmas.advantage.estimators import ESTIMATORS, Switches
from verl_drmas.advantage.groups import group_advantage
from verl_drmas.advantage.penalty import invalid_penalty, penalised_advantage
from verl_drmas.advantage.tokens import broadcast

__all__ = [
    "ESTIMATORS",
    "Switches",
    "agent_diagnostics",
    "balance_weights",
    "broadcast",
    "group_advantage",
    "invalid_penalty",
    "loss_unit",
    "penalised_advantage",
    "row_size",
    "shadow",
]
