"""A step that another job played, as rows of this job's own: what verl's rollout would have stored of them."""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_drmas.rollout.activation import Activation
from verl_drmas.store.codec import PackedRow
from verl_drmas.store.records import ClaimedStep, SessionRecord


def uid_of(step: int, prompt: int) -> str:
    """Name of a prompt within this job; the same whenever the step is trained. verl allows no underscore."""
    return f"{step}-{prompt}"


def unpacked(row: PackedRow, model_id: str, *, row_temperature: bool) -> Activation:
    """The row as the agent loop returned it; `packed` in `rollout/delivery.py` is its other half.

    Args:
        row: From the store.
        model_id: What this job calls the model.
        row_temperature: Whether rows carry their own temperature to training.
    """
    extra = dict(row.fields["extra"])
    temperature = extra.pop("temperature", None)
    return Activation(
        prompt_ids=row.prompt_ids.tolist(),
        response_ids=row.response_ids.tolist(),
        response_mask=[int(sampled) for sampled in row.response_mask],
        response_logprobs=None if row.logprobs is None else row.logprobs.tolist(),
        num_turns=int(row.fields["num_turns"]),
        metrics=AgentLoopMetrics(),
        own_reward=row.reward,
        row_temperature=temperature if row_temperature else None,
        extra_fields={
            **extra,
            "agent_id": row.agent_id,
            "model_id": model_id,
            "session_metrics": None,
            "min_global_steps": row.min_version,
            "max_global_steps": row.max_version,
        },
    )


def put_step(claimed: ClaimedStep, model_id: str, *, row_temperature: bool, partition: str = "train") -> KVBatchMeta:
    """Put the step's rows into TransferQueue, with the fields and tags of `AgentLoopWorkerTQ._agent_loop_postprocess`.

    Args:
        claimed: The step, with at least one row.
        model_id: What this job calls the model.
        row_temperature: See `unpacked`.
        partition: TransferQueue's.
    """
    keys: list[str] = []
    fields: list[dict[str, Any]] = []
    tags: list[dict[str, Any]] = []
    for session in claimed.sessions:
        for row in session.rows:
            activation = unpacked(row, model_id, row_temperature=row_temperature)
            keys.append(f"{uid_of(claimed.step, session.prompt)}_{session.session}_{row.fields['position']}")
            fields.append(_fields(activation, session))
            tags.append(_tags(row, claimed.step))
    tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=partition)
    return KVBatchMeta(partition_id=partition, keys=keys, tags=tags)


def _fields(activation: Activation, session: SessionRecord) -> dict[str, Any]:
    fields = activation.as_dict()
    input_ids = torch.cat([fields["prompts"], fields["responses"]])
    return fields | {
        "uid": uid_of(session.step, session.prompt),
        "session_id": session.session,
        "index": session.prompt,
        "global_steps": session.step,
        "loss_mask": fields["response_mask"],
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids), dtype=torch.int64),
        "multi_modal_inputs": {},
    }


def _tags(row: PackedRow, step: int) -> dict[str, Any]:
    prompt, response = len(row.prompt_ids), len(row.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": step,
        "min_global_steps": row.min_version,
        "max_global_steps": row.max_version,
    }
