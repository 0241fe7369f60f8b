"""A store's rows as files that anything reads: JSON lines or parquet."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from verl_drmas.store.database import Store
from verl_drmas.store.errors import Corrupt, StoreError
from verl_drmas.store.reading import read_row
from verl_drmas.store.schema import rows, sessions, steps

logger = logging.getLogger(__name__)
Rows = list[dict[str, Any]]


def export(store: Store, target: Path, *, role: str | None = None) -> int:
    """Write the rows that a store still holds, by role, step, prompt, session and position.

    A row gives its role, step with state, prompt, session with outcome, and all that `PackedRow` holds; `fields` is a
    JSON text in parquet. Numbers that JSON doesn't have (NaN) become null. Damaged rows are left out with a WARNING.

    Args:
        target: A file `.jsonl` or `.parquet`, which is there whole or not at all.
        role: Only this role's.

    Returns:
        How many rows were written.

    Raises:
        StoreError: Another kind of file.
    """
    target = Path(target)
    kinds: dict[str, Callable[[Path, Iterator[Rows]], int]] = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
    if target.suffix not in kinds:
        raise StoreError(f"{target}: can't be written; give a name that ends in .jsonl or .parquet")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    try:
        number = kinds[target.suffix](part, _steps(store, role))
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return number


def _steps(store: Store, role: str | None) -> Iterator[Rows]:
    """The rows of each step; each step is read in a transaction of its own, which others hardly wait for."""
    query = sa.select(steps).where(steps.c.freed == sa.false()).order_by(steps.c.role, steps.c.step)
    if role is not None:
        query = query.where(steps.c.role == role)
    for step in store.read(lambda connection: connection.execute(query).all()):
        yield store.read(lambda connection, step=step: _rows(connection, step))


def _rows(connection: sa.Connection, step: sa.Row) -> Rows:
    same = sa.and_(*(sessions.c[name] == rows.c[name] for name in ("step_id", "prompt", "session")))
    of_session = [sessions.c[name] for name in ("ended", "reason", "outcome", "main_version", "listed")]
    query = sa.select(rows, *of_session).join(sessions, same).where(rows.c.step_id == step.id)
    result = []
    for row in connection.execute(query.order_by(rows.c.prompt, rows.c.session, rows.c.position)):
        try:
            packed = read_row(row)
        except Corrupt as error:
            logger.warning("step %d of role %r: %s; left out", step.step, step.role, error)
            continue
        logprobs = None if packed.logprobs is None else [_number(value) for value in packed.logprobs.tolist()]
        result.append(
            {
                "role": step.role,
                "step": step.step,
                "state": step.state,
                "prompt": row.prompt,
                "session": row.session,
                "position": row.position,
                "ended": row.ended,
                "reason": row.reason,
                "outcome": row.outcome,
                "main_version": row.main_version,
                "listed": row.listed,
                "agent_id": packed.agent_id,
                "prompt_ids": packed.prompt_ids.tolist(),
                "response_ids": packed.response_ids.tolist(),
                "response_mask": packed.response_mask.tolist(),
                "logprobs": logprobs,
                "reward": _number(packed.reward),
                "min_version": packed.min_version,
                "max_version": packed.max_version,
                "fields": packed.fields,
            }
        )
    return result


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _write_jsonl(path: Path, parts: Iterator[Rows]) -> int:
    number = 0
    with path.open("w") as file:
        for part in parts:
            number += len(part)
            file.writelines(json.dumps(row) + "\n" for row in part)
    return number


def _write_parquet(path: Path, parts: Iterator[Rows]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole, real, text = pa.int64(), pa.float64(), pa.string()
    kinds = {name: whole for name in ("step", "prompt", "session", "position")}
    kinds |= {name: whole for name in ("main_version", "min_version", "max_version")}
    kinds |= {name: text for name in ("role", "state", "reason", "agent_id", "fields")}
    kinds |= {"ended": pa.bool_(), "listed": pa.bool_(), "outcome": real, "reward": real}
    kinds |= {"prompt_ids": pa.list_(pa.int32()), "response_ids": pa.list_(pa.int32())}
    kinds |= {"response_mask": pa.list_(pa.bool_()), "logprobs": pa.list_(pa.float32())}
    schema = pa.schema(list(kinds.items()))
    number = 0
    with pq.ParquetWriter(path, schema) as writer:
        for part in parts:
            if part:
                number += len(part)
                plain = [{**row, "fields": json.dumps(row["fields"])} for row in part]
                writer.write_table(pa.Table.from_pylist(plain, schema=schema))
    return number
