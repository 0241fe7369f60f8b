"""Computes a dumped step's advantages as the trainer did: the same rows in the same order, through verl's own call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_drmas.dumps import DumpedRow, DumpedStep, DumpError
from verl_drmas.replay.arms import Arm
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer import estimators  # noqa: F401  (registers them in verl)
from verl_drmas.trainer.metrics import agent_metrics, without_team
from verl_drmas.trainer.step import StepRows


@dataclass(frozen=True)
class Trained:
    """The rows that a step's estimator saw.

    Attributes:
        step: The dump.
        rows: In the order of the batch.
        mask: Response mask (rows, tokens), int64.
    """

    step: DumpedStep
    rows: tuple[DumpedRow, ...]
    mask: torch.Tensor

    @classmethod
    def of(cls, step: DumpedStep) -> Trained:
        """Collect them.

        Raises:
            DumpError: Some are missing.
        """
        rows = sorted((row for row in step.rows if row.trained), key=lambda row: row.trained["position"])
        places = [row.trained["position"] for row in rows]
        if not rows or places != list(range(len(rows))):
            last = places[-1] + 1 if places else 0
            raise DumpError(
                f"{step.file}: has {len(rows)} trained rows, and the last is number {last} of its batch: rows are "
                "missing or doubled; take the dump as it was written"
            )
        for row in rows:
            if sum(row.mask) != row.trained["tokens"]:
                raise DumpError(
                    f"{row.file}: line {row.number}: its spans have {sum(row.mask)} trained tokens, and training had "
                    f"{row.trained['tokens']}; take the dump as it was written"
                )
        masks = [torch.tensor(row.mask) for row in rows]
        return cls(step, tuple(rows), torch.nn.utils.rnn.pad_sequence(masks, batch_first=True))

    @property
    def agents(self) -> list[str]:
        """Of each row."""
        return [row.agent for row in self.rows]

    def tokens(self) -> list[np.ndarray]:
        """What each row's trained tokens got in training, float32 (tokens,) each; none for a row without any."""
        made = []
        for row in self.rows:
            value, count = row.trained["advantage"], row.trained["tokens"]
            values = value if isinstance(value, list) else [value] * count
            made.append(np.asarray(values, dtype=np.float32))
        return made


@dataclass(frozen=True)
class Replayed:
    """What an estimator gave.

    Attributes:
        arm: The estimator.
        tokens: Of each row's trained tokens, float32 (tokens,) each.
        copies: As `mgrpo` counts rows, float64 (rows,); None for others.
        metrics: `drmas/agent/...`, as the trainer logs them; of one job of a pair without those of the whole team.
    """

    arm: Arm
    tokens: list[np.ndarray]
    copies: np.ndarray | None
    metrics: dict[str, float]


def replay(trained: Trained, arm: Arm) -> Replayed:
    """Apply an estimator.

    Args:
        trained: The rows.
        arm: The estimator.

    Raises:
        DumpError: It refuses the rows or the switches.
    """
    step = StepRows([_row(row) for row in trained.rows], arm.section, arm.base_estimator, alignment=arm.alignment)
    rewards = torch.zeros(trained.mask.shape, dtype=torch.float32)
    rewards[:, 0] = torch.tensor([row.trained["reward"] for row in trained.rows], dtype=torch.float64)
    data = DataProto(
        batch=TensorDict(
            {"token_level_rewards": rewards, "response_mask": trained.mask.clone()}, batch_size=len(trained.rows)
        ),
        non_tensor_batch={"uid": np.array([row.place[0] for row in trained.rows], dtype=object)},
    )
    algorithm = OmegaConf.create(dict(arm.algorithm))
    try:
        with step.current():
            data = compute_advantage_for_multi_trajectories(
                data,
                batch_keys=[row.line["uid"] for row in trained.rows],
                adv_estimator=arm.estimator,
                gamma=algorithm.get("gamma", 1.0),
                lam=algorithm.get("lam", 1.0),
                num_repeat=trained.step.settings["sessions"],
                norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
                config=algorithm,
            )
    except ValueError as error:
        raise DumpError(f"{trained.step.file}: {arm.name} refuses its rows or settings: {error}") from error
    advantages = data.batch["advantages"].float()
    tokens = [values[mask.bool()].numpy() for values, mask in zip(advantages, trained.mask, strict=True)]
    if step.scores is None:  # one of verl's own, which knows nothing of `StepRows`
        step.scores = rewards.sum(-1).double().numpy()
        step.advantage = np.array([float(own[0]) if len(own) else 0.0 for own in tokens])
        step.tokens = trained.mask.sum(-1).numpy()
    settings = trained.step.settings
    metrics = agent_metrics(step, sessions=settings["sessions_played"])
    return Replayed(arm, tokens, step.copies, metrics if settings["whole_team"] else without_team(metrics))


def _row(row: DumpedRow) -> Row:
    uid, session, activation = row.place
    return Row(
        uid=uid,
        session=session,
        activation=activation,
        index=int(row.line["index"]),
        agent_id=row.agent,
        model_id=str(row.line["model_id"]),
        valid=bool(row.own["valid"]),
        path=row.own["path"],
        counts=row.own.get("counts") or {},
        parts=row.own.get("parts") or {},
    )


def per_row(tokens: Sequence[np.ndarray]) -> np.ndarray:
    """One number a row, the mean over its trained tokens; float64 (rows,), 0 for a row without any."""
    return np.array([float(own.astype(np.float64).mean()) if len(own) else 0.0 for own in tokens])
