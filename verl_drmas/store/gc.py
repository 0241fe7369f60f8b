"""Rows that nobody needs any more: their bytes go, what is known of them stays, so that `verify` still can tell."""

from __future__ import annotations

import contextlib
import sqlite3

import sqlalchemy as sa

from verl_drmas.store.database import Store
from verl_drmas.store.errors import StoreError
from verl_drmas.store.journal import record
from verl_drmas.store.schema import FINISHED, SAVED, rows, steps

PAGES = 10_000  # given back at once: 40 MB, for which writers wait
_FULL = (steps.c.freed == sa.false(), steps.c.state.in_(FINISHED))  # `freed` is in an index: few steps are full


def gc(
    store: Store,
    *,
    keep_steps: int | None = None,
    older_than: float | None = None,
    max_bytes: int | None = None,
    role: str | None = None,
) -> int:
    """Free the rows of steps that are saved, dropped or dead, and of groups that were left out of them.

    Args:
        keep_steps: The last saved steps of a role that keep their rows; earlier ones lose them.
        older_than: Steps that came into their state more than so many seconds ago lose their rows.
        max_bytes: The oldest finished steps lose their rows until all rows have at most so many bytes; steps that are
            still to be trained keep theirs, however many.
        role: Only this role's.

    Returns:
        How many rows were freed. A rule frees what it names, so two rules free more than one.

    Raises:
        StoreError: No rule was given.
    """
    if keep_steps is None and older_than is None and max_bytes is None:
        raise StoreError("gc needs a rule: keep_steps, older_than or max_bytes")
    freed = 0
    if keep_steps is not None:
        freed += keep_last(store, keep_steps, role)
    if older_than is not None:
        old = sa.select(steps.c.id).where(*_FULL, *_of(role), steps.c.since < store.now() - older_than)
        freed += _free(store, _ids(store, old))
    if max_bytes is not None:
        freed += _shrink(store, max_bytes, role)
    return freed


def keep_last(store: Store, count: int, role: str | None = None) -> int:
    """Free the finished steps of a role (None: of each) that are older than its last `count` saved ones."""
    last = sa.select(steps.c.step).where(steps.c.state == SAVED).order_by(steps.c.step.desc())
    freed = 0
    for one in [role] if role else _roles(store):
        first_kept = last.where(steps.c.role == one).offset(max(count - 1, 0)).limit(1)
        bound = store.read(lambda connection, query=first_kept: connection.execute(query).scalar())
        if bound is None:
            continue
        due = steps.c.step < bound if count else steps.c.step <= bound
        freed += _free(store, _ids(store, sa.select(steps.c.id).where(*_FULL, steps.c.role == one, due)))
    return freed


def _shrink(store: Store, max_bytes: int, role: str | None) -> int:
    here = sa.select(sa.func.coalesce(sa.func.sum(steps.c.bytes), 0)).where(steps.c.freed == sa.false(), *_of(role))
    oldest = sa.select(steps.c.id, steps.c.bytes).where(*_FULL, *_of(role)).order_by(steps.c.since, steps.c.step)
    total, candidates = store.read(
        lambda connection: (int(connection.execute(here).scalar_one()), connection.execute(oldest).all())
    )
    chosen = []
    for one in candidates:
        if total <= max_bytes:
            break
        total -= one.bytes
        chosen.append(one.id)
    return _free(store, chosen)


def _free(store: Store, ids: list[int]) -> int:
    """Free steps one by one: each is a short transaction that others hardly wait for."""
    freed = 0
    for step_id in ids:

        def work(connection: sa.Connection, step_id: int = step_id) -> int:
            query = sa.select(steps).where(steps.c.id == step_id, *_FULL).with_for_update()
            step = connection.execute(query).mappings().first()
            if step is None:  # rewound meanwhile
                return 0
            here = (rows.c.step_id == step_id, rows.c.data.is_not(None))
            number = connection.execute(sa.select(sa.func.count()).where(*here)).scalar_one()
            connection.execute(rows.update().where(*here).values(data=None))
            connection.execute(steps.update().where(steps.c.id == step_id).values(freed=True))
            record(store, connection, step["role"], "freed", step["step"], rows=number)
            return number

        freed += store.write(work)
    if freed and not store.postgresql:  # PostgreSQL's autovacuum does it by itself
        while store.write(_vacuum):
            pass
    return freed


def _vacuum(connection: sa.Connection) -> bool:
    """Give some free pages of a SQLite file back to the disk; returns whether more remain."""
    raw = connection.connection.driver_connection
    assert raw is not None
    with contextlib.suppress(sqlite3.OperationalError):  # another one writes; the next call will do it
        # A script is stepped to its end; `execute` would free one page. It ends the transaction before it begins.
        raw.executescript(f"PRAGMA incremental_vacuum({PAGES})")
        return raw.execute("PRAGMA freelist_count").fetchone()[0] > 0
    return False


def _ids(store: Store, query: sa.Select) -> list[int]:
    return list(store.read(lambda connection: connection.execute(query).scalars().all()))


def _roles(store: Store) -> list[str]:
    query = sa.select(steps.c.role).distinct().order_by(steps.c.role)
    return list(store.read(lambda connection: connection.execute(query).scalars().all()))


def _of(role: str | None) -> tuple[sa.ColumnElement[bool], ...]:
    return () if role is None else (steps.c.role == role,)
