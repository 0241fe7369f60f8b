"""Balance as row weights: through verl's per-token field `rollout_is_weights`, which its losses multiply in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_to_nested

from verl_drmas.advantage import balance_weights, row_size
from verl_drmas.trainer.step import StepRows


def row_weights(step: StepRows, loss_modes: Mapping[str, str]) -> np.ndarray:
    """Weights of a batch's rows, balanced within each model: a weight across models would only scale their rates.

    Args:
        step: The rows, with `tokens`.
        loss_modes: verl's `loss_agg_mode` by model id.

    Returns:
        float64 (rows,); 1 for padding rows and for rows that nobody trains.
    """
    known, ids = step.known, step.ids()
    balanced = np.ones(len(known))
    for model_id, mode in loss_modes.items():
        mine = np.flatnonzero([row.model_id == model_id for row in known])
        if not len(mine):
            continue
        size = row_size(step.tokens[mine], mode)
        size = size * [step.section.trained(known[i].agent_id) for i in mine]  # a frozen agent takes no share
        own = {name: [values[i] for i in mine] for name, values in ids.items()}
        balanced[mine] = balance_weights(**own, size=size, balance=step.section.advantage.balance)
    weights = np.ones(len(step.rows))
    weights[step.real] = balanced
    return weights


def put_row_weights(batch: KVBatchMeta, weights: np.ndarray) -> None:
    """Write the weights; every row gets the field, padding rows too, or TransferQueue drops it for all."""
    mask = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["response_mask"])["response_mask"]
    dense = torch.as_tensor(weights, dtype=torch.float32).unsqueeze(-1).expand(-1, mask.offsets().diff().max())
    field = TensorDict({"rollout_is_weights": response_to_nested(dense, mask)}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=field)
