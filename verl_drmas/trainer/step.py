"""What verl's estimator interface doesn't carry: who acted in each row of the batch being normalised.

verl hands a registered estimator rewards, mask, uid and configuration, never agent ids (verl PR 7473 would add them).
The trainer sets a `StepRows` around verl's own advantage stage; estimators read it, and leave their numbers for the
metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from verl_drmas.advantage import invalid_penalty
from verl_drmas.config import DrmasConfig
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.alignment import StepAlignment

_CURRENT: ContextVar[StepRows] = ContextVar("drmas_step_rows")


@dataclass
class StepRows:
    """The batch's rows in batch order; None stands for a padding row.

    Attributes:
        rows: One entry per row of the batch.
        section: The `drmas` section.
        base_estimator: verl's estimator behind `group_by: agent`, else None.
        scores: Reward of each real row before any penalty, float64 (real rows,); set by the estimator.
        advantage: Advantage of each real row, float64 (real rows,); set by the estimator.
        tokens: Trained tokens of each real row (real rows,); set by the estimator.
        alignment: How `mgrpo` aligns the step's rows; None for other estimators.
        copies: How often each real row counts, float64 (real rows,); set by `mgrpo`.
    """

    rows: list[Row | None]
    section: DrmasConfig
    base_estimator: str | None = None
    alignment: StepAlignment | None = None
    scores: np.ndarray | None = None
    advantage: np.ndarray | None = None
    tokens: np.ndarray | None = None
    copies: np.ndarray | None = None
    real: np.ndarray = field(init=False)

    def __post_init__(self):
        self.real = np.array([row is not None for row in self.rows], dtype=bool)

    @property
    def known(self) -> list[Row]:
        """The real rows, in batch order."""
        return [row for row in self.rows if row is not None]

    def ids(self) -> dict[str, list]:
        """`uid`, `session` and `agent_id` of the real rows, as the advantage functions take them."""
        rows = self.known
        return {
            "uid": [r.uid for r in rows],
            "session": [r.session for r in rows],
            "agent_id": [r.agent_id for r in rows],
        }

    def penalty(self) -> np.ndarray:
        """Penalty of each real row, float64 (real rows,)."""
        rows = self.known
        coefficients = {agent: c.invalid_penalty for agent, c in self.section.agents.items()}
        return invalid_penalty([r.valid for r in rows], agent_id=[r.agent_id for r in rows], coefficients=coefficients)

    @contextmanager
    def current(self) -> Iterator[StepRows]:
        """Make these rows the ones that estimators see."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)


def current_rows(estimator: str) -> StepRows:
    """The rows of the batch whose advantages are being computed.

    Raises:
        RuntimeError: No team trainer set them: agent ids would be missing, and the result silently GRPO.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise RuntimeError(
            f"algorithm.adv_estimator={estimator} needs agent ids, and this trainer passes none: "
            "set trainer.v1.trainer_mode=drmas_sync"
        ) from None
