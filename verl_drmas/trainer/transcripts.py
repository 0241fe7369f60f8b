"""Rows as text, each decoded with its own model's tokenizer; verl decodes every row of a dump with the run's.

A dump also tells who spoke: agent and model stand beside each text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_drmas.rollout.rows import Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Transcript:
    """One row as text."""

    row: Row
    prompt: str
    response: str


class Transcripts:
    """Texts by TransferQueue key, taken while the rows are there and used when verl writes them out.

    Args:
        tokenizers: By model id.
    """

    def __init__(self, tokenizers: Mapping[str, Any]):
        self.tokenizers = tokenizers
        self._noted: dict[str, Transcript] = {}
        self._finals: list[str] = []  # each session's last row, in verl's order

    def clear(self) -> None:
        """Forget what was noted."""
        self._noted.clear()
        self._finals.clear()

    def note(self, batch: KVBatchMeta) -> None:
        """Decode a batch's real rows, before verl clears them away."""
        keys = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        fields = ["prompts", "responses", "extra_fields", "index"]
        data = tq.kv_batch_get(keys, batch.partition_id, select_fields=fields)
        prompts, responses = data["prompts"].unbind(), data["responses"].unbind()
        default = next(iter(self.tokenizers))
        extra, index = list(data["extra_fields"]), list(data["index"])
        for i, key in enumerate(keys):
            row = Row.read(key, extra[i], getattr(index[i], "data", index[i]), default)
            tokenizer = self.tokenizers[row.model_id]
            prompt, response = (
                tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in (prompts[i], responses[i])
            )
            self._noted[key] = Transcript(row, prompt, response)
        self._finals += final_keys(keys)

    def rewrite(self, keys: list[str], inputs: list[str], outputs: list[str]) -> dict[str, list]:
        """Put the right texts in place, and give the columns that say who spoke.

        Args:
            keys: Of the rows that verl is about to write.
            inputs: verl's texts of the prompts; changed in place.
            outputs: verl's texts of the responses; changed in place.
        """
        noted = [self._noted.get(key) for key in keys]
        for i, transcript in enumerate(noted):
            if transcript is not None:
                inputs[i], outputs[i] = transcript.prompt, transcript.response
        columns = {
            "agent_id": [t.row.agent_id if t else None for t in noted],
            "model_id": [t.row.model_id if t else None for t in noted],
            "index": [t.row.index if t else None for t in noted],
            "acc": [t.row.acc if t else None for t in noted],
        }
        for name in ("failed", "fault"):
            values = [getattr(t.row, name) if t else "" for t in noted]
            columns |= {name: values} if any(values) else {}
        return columns

    def rewrite_finals(self, inputs: list[str], outputs: list[str]) -> None:
        """The same for verl's table of validation samples, which holds each session's last row and no keys."""
        if len(self._finals) == len(inputs):
            self.rewrite(self._finals, inputs, outputs)
        elif self._finals:
            logger.warning(
                "%d validation samples were noted and %d are logged: their texts are decoded with the run's tokenizer",
                len(self._finals),
                len(inputs),
            )


def final_keys(keys: list[str]) -> list[str]:
    """Each session's last row, in the order in which verl's validation lists them (`PPOTrainer._validate`)."""
    last: dict[str, tuple[int, int]] = {}
    for position, key in enumerate(keys):
        session, _, index = key.rpartition("_")
        if session not in last or int(index) > last[session][0]:
            last[session] = (int(index), position)
    return [keys[position] for _, position in sorted(last.values(), key=lambda x: x[1])]
