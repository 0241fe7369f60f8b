"""Steps change their state here only, each change with its event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from verl_drmas.store.database import Store
from verl_drmas.store.schema import counters, events, roles, steps


def add_role(store: Store, connection: sa.Connection, role: str) -> None:
    """Make the role's row, if it is new."""
    new = store.insert(roles).values(role=role, main_saved=0, version=0)
    connection.execute(new.on_conflict_do_nothing())


def count(store: Store, connection: sa.Connection, role: str, amounts: Mapping[str, int]) -> None:
    """Add to counters; last in a transaction and in one order, so that two don't wait for each other."""
    for name in sorted(amounts):
        if amounts[name]:
            new = store.insert(counters).values(role=role, name=name, n=amounts[name])
            connection.execute(
                new.on_conflict_do_update(
                    index_elements=[counters.c.role, counters.c.name], set_={"n": counters.c.n + new.excluded.n}
                )
            )


def record(
    store: Store,
    connection: sa.Connection,
    role: str,
    kind: str,
    step: int | None = None,
    *,
    groups: int = 0,
    sessions: int = 0,
    rows: int = 0,
    note: str = "",
) -> None:
    """Write one event."""
    connection.execute(
        events.insert().values(
            role=role,
            kind=kind,
            step=step,
            groups=groups,
            sessions=sessions,
            rows=rows,
            note=clean(note),
            at=store.now(),
        )
    )


def move(
    store: Store, connection: sa.Connection, step: sa.RowMapping, state: str, kind: str, note: str = "", **values: Any
) -> None:
    """Bring a step, whose row the caller has locked, into `state`, and write the event `kind`.

    Args:
        step: The step's row; counts in `values` go before its own.
        values: Other columns of the step that change.
    """
    connection.execute(steps.update().where(steps.c.id == step["id"]).values(state=state, since=store.now(), **values))
    numbers = {name: values.get(name, step[name]) for name in ("groups", "sessions", "rows")}
    record(store, connection, step["role"], kind, step["step"], **numbers, note=note)


def clean(text: str) -> str:
    """Text that every database takes: no NUL, no half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
