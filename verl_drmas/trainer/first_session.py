"""The first session as the model saw it: prompts, what was sampled, what is masked, special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from verl_drmas.rollout.rows import Row


def describe_session(
    rows: list[Row],
    prompts: list[Any],
    responses: list[Any],
    masks: list[Any],
    tokenizers: Mapping[str, Any],
) -> str:
    """A printable account of one session's rows.

    Args:
        rows: The session's rows, in order.
        prompts: Token ids of each row's prompt.
        responses: Token ids of each row's response.
        masks: Response mask of each row.
        tokenizers: By model id; they decode with special tokens kept.
    """
    lines = [f"first session (dataset index {rows[0].index}, session {rows[0].session}); masked text in {{{{ }}}}"]
    for row, prompt, response, mask in zip(rows, prompts, responses, masks, strict=True):
        tokenizer = tokenizers[row.model_id]
        lines.append(f"-- {row.path or row.agent_id} [{row.model_id}], valid: {row.valid}")
        lines.append(f"   prompt, {len(prompt)} tokens: {tokenizer.decode(prompt, skip_special_tokens=False)!r}")
        spoken = "".join(
            text if trained else f"{{{{{text}}}}}" for trained, text in _segments(response, mask, tokenizer)
        )
        lines.append(f"   response, {len(response)} tokens, {int(np.sum(mask))} trained: {spoken!r}")
    if rows[0].metrics:
        lines.append("   session: " + ", ".join(f"{k}={v:g}" for k, v in rows[0].metrics.items()))
    return "\n".join(lines)


def _segments(response: Any, mask: Any, tokenizer: Any) -> list[tuple[bool, str]]:
    ids, mask = list(map(int, response)), [bool(m) for m in mask]
    cuts = [0, *(i for i in range(1, len(ids)) if mask[i] != mask[i - 1]), len(ids)]
    return [(mask[a], tokenizer.decode(ids[a:b], skip_special_tokens=False)) for a, b in pairwise(cuts) if a < b]
