"""One training row as bytes, and back, without pickle.

The layout, little endian, format 1:

| bytes | what |
|---|---|
| 4 | `DRMR` |
| 2 | format number, unsigned: 1 |
| 2 | flags, unsigned: bit 0 is set if there are log-probs |
| 4, 4, 4 | unsigned: p tokens of the prompt, r of the response, j bytes of JSON |
| 4p | prompt ids, int32 |
| 4r | response ids, int32 |
| 4r or 0 | log-probs, float32, any NaN as it was |
| ceil(r / 8) | response mask, one bit a token, the first token in the highest bit |
| j | JSON in ASCII: `agent_id`, `reward`, `min_version`, `max_version`, `fields`; NaN as Python writes it |

A row's checksum is the 16-byte BLAKE2b digest of these bytes; the store keeps it in a column of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from verl_drmas.store.errors import Corrupt, StoreError

MAGIC = b"DRMR"
FORMAT = 1
LOGPROBS = 1  # flag
HEADER = struct.Struct("<4sHHIII")


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One activation of an agent, as it was sampled.

    Attributes:
        agent_id: Who acted.
        prompt_ids: int32, shape (p,).
        response_ids: int32, shape (r,).
        response_mask: bool, shape (r,): which tokens the agent sampled itself.
        logprobs: float32, shape (r,); None if the engine gave none.
        reward: The row's own reward; None if it has none.
        min_version: Oldest weights that an answer in the row came from.
        max_version: Newest of them.
        fields: Everything else of the row, as JSON values.
    """

    agent_id: str
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    response_mask: np.ndarray
    logprobs: np.ndarray | None
    reward: float | None
    min_version: int
    max_version: int
    fields: dict[str, Any] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Whether all bytes are the same; a NaN equals itself."""
        return isinstance(other, PackedRow) and pack(self) == pack(other)

    __hash__ = None  # type: ignore[assignment]


def _ids(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} has shape {array.shape} and type {array.dtype}; give token ids in one dimension")
    if array.size and not (array.min() >= 0 and array.max() < 2**31):
        raise ValueError(f"{name} holds {array.min()}..{array.max()}; token ids are int32 from 0 on")
    return array.astype("<i4")


def pack(row: PackedRow) -> bytes:
    """A row as bytes; see the module's table.

    Raises:
        ValueError: Lengths, types or values that the layout can't hold; names the field.
    """
    prompt, response = _ids(row.prompt_ids, "prompt_ids"), _ids(row.response_ids, "response_ids")
    mask = np.asarray(row.response_mask)
    if mask.shape != response.shape or not np.isin(mask, (0, 1)).all():
        raise ValueError(
            f"response_mask has shape {mask.shape}; it needs one 0 or 1 for each of {len(response)} tokens"
        )
    parts = [prompt.tobytes(), response.tobytes()]
    if row.logprobs is not None:
        logprobs = np.asarray(row.logprobs, dtype="<f4")
        if logprobs.shape != response.shape:
            raise ValueError(f"logprobs has shape {logprobs.shape}; it needs one for each of {len(response)} tokens")
        parts.append(logprobs.tobytes())
    parts.append(np.packbits(mask.astype(bool)).tobytes())
    rest = {
        "agent_id": row.agent_id,
        "reward": None if row.reward is None else float(row.reward),
        "min_version": int(row.min_version),
        "max_version": int(row.max_version),
        "fields": row.fields,
    }
    try:
        text = json.dumps(rest, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"fields of a row of {row.agent_id!r} can't be written as JSON: {error}") from error
    flags = LOGPROBS if row.logprobs is not None else 0
    return b"".join([HEADER.pack(MAGIC, FORMAT, flags, len(prompt), len(response), len(text)), *parts, text])


def checksum(data: bytes) -> bytes:
    """16 bytes that tell whether `data` is what was written."""
    return blake2b(data, digest_size=16).digest()


def unpack(data: bytes) -> PackedRow:
    """The row that `pack` made bytes of; its arrays are copies of one's own.

    Raises:
        Corrupt: No such bytes.
        StoreError: A newer format than this version knows.
    """
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise Corrupt(f"no row: {len(data)} bytes that begin with {data[:4]!r}")
    _, number, flags, p, r, j = HEADER.unpack_from(data)
    if number != FORMAT:
        raise StoreError(f"a row has format {number}; this version reads {FORMAT}: upgrade verl-drmas")
    bits = (r + 7) // 8
    has_logprobs = bool(flags & LOGPROBS)
    expected = HEADER.size + 4 * p + 4 * r * (1 + has_logprobs) + bits + j
    if len(data) != expected:
        raise Corrupt(f"a row has {len(data)} bytes; its header says {expected}")
    at = HEADER.size

    def take(kind: str, count: int) -> np.ndarray:
        nonlocal at
        array = np.frombuffer(data, kind, count, at)
        at += array.nbytes
        return array

    prompt, response = take("<i4", p).astype(np.int32), take("<i4", r).astype(np.int32)
    logprobs = take("<f4", r).astype(np.float32) if has_logprobs else None
    mask = np.unpackbits(take("u1", bits), count=r).astype(bool)
    try:
        rest = json.loads(bytes(data[at:]))
        return PackedRow(prompt_ids=prompt, response_ids=response, response_mask=mask, logprobs=logprobs, **rest)
    except (ValueError, TypeError) as error:
        raise Corrupt(f"a row's JSON can't be read: {error}") from error
