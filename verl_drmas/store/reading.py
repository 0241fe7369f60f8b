"""Sessions read back from a store."""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa

from verl_drmas.store.closing import manifest_of
from verl_drmas.store.codec import PackedRow, checksum, unpack
from verl_drmas.store.errors import Corrupt
from verl_drmas.store.records import ClaimedStep, SessionRecord
from verl_drmas.store.schema import rows, sessions


def read_row(row: sa.Row) -> PackedRow:
    """One row of the table `rows`, its checksum compared.

    Raises:
        Corrupt: Names the row.
    """
    name = f"row {row.position} of session {row.session} of prompt {row.prompt}"
    if row.data is None:
        raise Corrupt(f"{name}: its bytes are deleted")
    data = bytes(row.data)
    if checksum(data) != bytes(row.checksum):
        raise Corrupt(f"{name}: its bytes are not those that were written")
    try:
        return unpack(data)
    except Corrupt as error:
        raise Corrupt(f"{name}: {error}") from error


def read_step(connection: sa.Connection, step: sa.RowMapping) -> ClaimedStep:
    """A closed step with the sessions that its manifest lists, by prompt and session, their rows in order.

    Raises:
        Corrupt: A row's bytes changed, or a row is missing; names it.
    """
    listed = sa.and_(sessions.c.step_id == step["id"], sessions.c.listed)
    query = sa.select(sessions).where(listed).order_by(sessions.c.prompt, sessions.c.session)
    found = connection.execute(query).all()
    same = sa.and_(
        rows.c.step_id == sessions.c.step_id, rows.c.prompt == sessions.c.prompt, rows.c.session == sessions.c.session
    )
    of_session: dict[tuple[int, int], list[PackedRow]] = defaultdict(list)
    query = sa.select(rows).join(sessions, same).where(listed)
    for row in connection.execute(query.order_by(rows.c.prompt, rows.c.session, rows.c.position)):
        of_session[row.prompt, row.session].append(read_row(row))
    for one in found:
        if one.rows != len(of_session[one.prompt, one.session]):
            raise Corrupt(
                f"session {one.session} of prompt {one.prompt} has {len(of_session[one.prompt, one.session])} rows; "
                f"{one.rows} were written"
            )
    records = tuple(
        SessionRecord(
            step=step["step"],
            prompt=one.prompt,
            session=one.session,
            ended=one.ended,
            reason=one.reason,
            outcome=one.outcome,
            main_version=one.main_version,
            rows=tuple(of_session[one.prompt, one.session]),
        )
        for one in found
    )
    return ClaimedStep(step["step"], manifest_of(connection, step["id"]), records)
