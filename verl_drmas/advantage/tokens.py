"""From one advantage per row to one per token, as verl's losses want them."""

from __future__ import annotations

import numpy as np
import torch


def broadcast(advantage: np.ndarray, response_mask: torch.Tensor) -> torch.Tensor:
    """Repeat each row's advantage over the tokens its agent sampled.

    Args:
        advantage: One number per row (rows,).
        response_mask: 1 on tokens the agent sampled, 0 elsewhere (rows, tokens); bool, integer or float.

    Returns:
        float32 tensor of shape (rows, tokens) on the mask's device, 0 where the mask is 0.

    Raises:
        ValueError: The shapes do not fit.
    """
    if response_mask.dim() != 2 or len(response_mask) != len(advantage):
        raise ValueError(
            f"response_mask has shape {tuple(response_mask.shape)} for {len(advantage)} advantages: give (rows, tokens)"
        )
    if response_mask.dtype == torch.float64:
        response_mask = response_mask.float()  # all other mask types already give float32 in the product
    column = torch.as_tensor(advantage, dtype=torch.float32, device=response_mask.device).unsqueeze(-1)
    return column * response_mask
