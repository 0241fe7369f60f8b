"""Rows as text, each decoded with its own model's tokenizer; verl decodes every row of a dump with the run's.

A dump also tells who spoke, agent and model beside each text, and what became of it (`dumps.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_drmas.dumps import spans_of
from verl_drmas.plain import encodable
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.records import TrainedStep, one_number, plain, record

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Transcript:
    """One row as text.

    Attributes:
        row: What the trainer knows of it.
        prompt, response: Its texts.
        record: The dump's column `drmas`.
    """

    row: Row
    prompt: str
    response: str
    record: dict[str, Any]


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

    def note(self, batch: KVBatchMeta, step: TrainedStep | None = None, rows: Mapping[str, Row] | None = None) -> None:
        """Decode a batch's real rows, before verl clears them away.

        Args:
            batch: The rows.
            step: What was trained on them; None: nothing, as in validation.
            rows: What the trainer knows of them by now: of copies, which repeat their originals' fields, and of rows
                that took over their session's numbers from one that was dropped. Others are read.
        """
        keys = [k for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        trained = [key for key in keys if step is not None and key in step.rows]
        known = set(trained)
        # TransferQueue drops a field for all rows if one lacks it: rows that no estimator saw are read apart.
        for part, own in ((trained, step), ([key for key in keys if key not in known], None)):
            if part:
                self._note(part, batch.partition_id, own, rows or {})
        self._finals += final_keys(keys)

    def _note(self, keys: list[str], partition_id: str, step: TrainedStep | None, known: Mapping[str, Row]) -> None:
        tokens = ["prompts", "responses", "response_mask", "rm_scores"]
        tokens += ["advantages", "rollout_is_weights"] if step is not None else []
        data = tq.kv_batch_get(keys, partition_id, select_fields=[*tokens, "extra_fields", "index"])
        rows = {name: data[name].unbind() for name in tokens if name in data.keys()}  # noqa: SIM118  (a TensorDict)
        default = next(iter(self.tokenizers))
        extra, index = list(data["extra_fields"]), list(data["index"])
        for i, key in enumerate(keys):
            row = known.get(key) or Row.read(key, extra[i], getattr(index[i], "data", index[i]), default)
            tokenizer, mask = self.tokenizers[row.model_id], rows["response_mask"][i]
            ids, response_ids = rows["prompts"][i].tolist(), rows["responses"][i].tolist()

            def decode(some: Sequence[int], tokenizer: Any = tokenizer) -> str:
                return encodable(tokenizer.decode(some, skip_special_tokens=True))

            prompt, response = decode(ids), decode(response_ids)
            own = None
            if step is not None:
                weight = one_number(rows["rollout_is_weights"][i], mask) if "rollout_is_weights" in rows else None
                own = {
                    **step.rows[key],
                    "advantage": one_number(rows["advantages"][i], mask),
                    "weight": None if isinstance(weight, list) else weight,
                }
            spans = spans_of(mask.tolist(), response_ids, response, decode)
            reward = rows["rm_scores"][i].sum().item() if "rm_scores" in rows and not row.failed else None
            made = plain(record(row, extra[i], spans, len(ids), reward, own))
            self._noted[key] = Transcript(row, prompt, response, made)

    def records(self, keys: list[str], step: TrainedStep | None = None) -> list[dict[str, Any] | None]:
        """The column `drmas` of the rows that verl is about to write; the first trained one bears the step's settings,
        and the first one that isn't padding how many rows there are.

        Args:
            keys: Of the rows.
            step: What was trained on them.
        """
        made = [noted.record if (noted := self._noted.get(key)) else None for key in keys]
        first = next((i for i, own in enumerate(made) if own is not None and "trained" in own), None)
        if first is not None:
            made[first] = made[first] | {"settings": plain(step.settings)}
        known = next((i for i, own in enumerate(made) if own is not None), None)
        if known is not None:
            made[known] = made[known] | {"rows": len(keys)}
        return made

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
        return plain(columns)

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
