"""One activation as verl stores it: a row with a reward of its own."""

from __future__ import annotations

from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


class Activation(AgentLoopOutput):
    """A training row with a reward of its own.

    verl copies the last row's reward onto every row of a session (`v1/agent_loop_tq.py`, `_agent_loop_postprocess`);
    `as_dict` is what gets stored, so the row's own reward is put back there.
    """

    own_reward: float | None = None
    """The row's reward; None leaves what verl put."""
    row_temperature: float | None = None
    """Sampling temperature, where agents differ in it; None: the run's."""

    @classmethod
    def of(cls, output: AgentLoopOutput) -> Activation:
        """The same row as an `Activation`; a reward that the loop gave it becomes its own."""
        if isinstance(output, cls):
            return output
        row = cls.model_construct(_fields_set=set(output.model_fields_set), **dict(output))
        if output.reward_score is not None:
            row.own_reward = output.reward_score
        return row

    def as_dict(self) -> dict[str, Any]:
        """verl's fields of the row; `rm_scores` (tokens,) float32 holds the own reward on the last token."""
        row = super().as_dict()
        reward, temperature = row.pop("own_reward", None), row.pop("row_temperature", None)
        if reward is not None:
            row["rm_scores"] = torch.zeros_like(row["response_mask"], dtype=torch.float32)
            row["rm_scores"][-1] = reward
        if temperature is not None:
            row["row_temperature"] = torch.tensor(temperature, dtype=torch.float32)
        return row
