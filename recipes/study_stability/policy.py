"""An agent's policy, a table of logits, and its update: clipped loss, clipped gradient, AdamW as in the papers."""

from __future__ import annotations

import numpy as np
import torch

CLIP = 0.2
DUAL_CLIP = 3.0  # verl's clip_ratio_c
GRAD_CLIP = 1.0
OPTIMISERS = ("adamw", "sgd")


class Policy:
    """A softmax policy: one row of logits for each context."""

    def __init__(self, logits: np.ndarray, optimiser: str, rate: float):
        """Starts from `logits` (contexts, actions); `optimiser` is one of `OPTIMISERS`, `rate` its learning rate."""
        self._logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        if optimiser not in OPTIMISERS:
            raise ValueError(f"optimiser={optimiser!r} is unknown: choose one of {', '.join(OPTIMISERS)}")
        if optimiser == "adamw":
            self._optimiser: torch.optim.Optimizer = torch.optim.AdamW([self._logits], rate, weight_decay=0.01)
        else:
            self._optimiser = torch.optim.SGD([self._logits], rate)

    @property
    def logits(self) -> np.ndarray:
        """Returns a copy, float64 (contexts, actions)."""
        return self._logits.detach().numpy().copy()

    def update(
        self, context: np.ndarray, action: np.ndarray, log_prob: np.ndarray, advantage: np.ndarray, parts: int
    ) -> list[float]:
        """Takes one optimiser step for each of `parts` nearly equal parts of the rows, in the order given.

        Args:
            context: int (rows,).
            action: int (rows,).
            log_prob: of the actions when they were sampled (rows,).
            advantage: (rows,).
            parts: optimiser steps; a part without rows takes none.

        Returns:
            The gradient's norm at each step, before it is clipped to `GRAD_CLIP`, as verl logs it.
        """
        norms = []
        for rows in np.array_split(np.arange(len(context)), parts):
            if not len(rows):
                continue
            logits = self._logits.detach().numpy()
            weight = self._push(logits, context[rows], action[rows], log_prob[rows], advantage[rows])
            self._logits.grad = torch.from_numpy(-gradient(logits, context[rows], action[rows], weight))
            norms.append(float(torch.nn.utils.clip_grad_norm_([self._logits], GRAD_CLIP)))
            self._optimiser.step()
        return norms

    @staticmethod
    def _push(
        logits: np.ndarray, context: np.ndarray, action: np.ndarray, log_prob: np.ndarray, advantage: np.ndarray
    ) -> np.ndarray:
        """What the score of each row is weighted with, so that the sum is the gradient of the clipped objective's mean.

        Where a clip is active the objective doesn't depend on the policy; elsewhere its derivative is advantage times
        ratio. An action is one token here.
        """
        ratio = np.exp(log_softmax(logits)[context, action] - log_prob)
        free = np.where(advantage > 0, ratio <= 1 + CLIP, (ratio >= 1 - CLIP) & (ratio <= DUAL_CLIP))
        return advantage * ratio * free / len(advantage)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns log-probabilities over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def scores(logits: np.ndarray, context: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Score of each row where it is not 0: gradient of its log-probability by its context's logits.

    Args:
        logits: (contexts, actions).
        context: int (rows,).
        action: int (rows,).

    Returns:
        float64 (rows, actions).
    """
    score = -np.exp(log_softmax(logits))[context]
    score[np.arange(len(action)), action] += 1.0
    return score


def gradient(logits: np.ndarray, context: np.ndarray, action: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the sum over rows of weight times score, as a table (contexts, actions)."""
    table = np.zeros_like(logits)
    np.add.at(table, context, scores(logits, context, action) * weight[:, None])
    return table
