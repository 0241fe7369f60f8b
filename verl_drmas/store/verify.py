"""Proof, from what a store says of itself, that each session was trained once, or is pending, or was given up aloud."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

import sqlalchemy as sa

from verl_drmas.store.codec import checksum
from verl_drmas.store.database import Store
from verl_drmas.store.schema import (
    CLAIMED,
    DEAD,
    DROPPED,
    EMPTY,
    FINISHED,
    LEFT_OUT,
    LISTED,
    OPEN,
    READY,
    SAVED,
    TRAINED,
    events,
    groups,
    manifests,
    rows,
    sessions,
    steps,
)

# The events that change a step's state: from which ones, to which.
MOVES = {
    "closed": ({OPEN}, READY),
    "empty": ({OPEN}, EMPTY),
    "claimed": ({READY}, CLAIMED),
    "released": ({CLAIMED}, READY),
    "trained": ({CLAIMED}, TRAINED),
    "saved": ({TRAINED}, SAVED),
    "rewound": ({TRAINED, SAVED}, READY),
    "dropped": ({READY, CLAIMED}, DROPPED),
    "dead": ({READY, CLAIMED}, DEAD),
}
AT_ONCE = 500  # rows in memory: some have hundreds of kilobytes


def verify(store: Store, *, checksums: bool = True) -> list[str]:
    """Check a store, on one state of it; jobs may go on meanwhile.

    Args:
        checksums: Read all rows that are still there and compare their checksums; False: only count them.

    Returns:
        One line for each problem; [] proves that, beyond what was rewound, no group was trained twice, nothing is
        saved that was not trained, and every session of a closed step was trained once, is pending, was left out by
        the main job, or was dropped or given up with an event that says so. Of a dead step no damage is told again.
    """
    return store.read(lambda connection: list(problems(connection, checksums)))


def problems(connection: sa.Connection, checksums: bool) -> Iterator[str]:
    """What `verify` finds, in the caller's transaction."""
    known = {step.id: step for step in connection.execute(sa.select(steps).order_by(steps.c.role, steps.c.step))}
    yield from _histories(connection, known)
    yield from _groups(connection, known)
    yield from _sessions(connection, known)
    yield from _rows(connection, known)
    yield from _bytes(connection, known, checksums)


def _name(step: sa.Row | None, step_id: int) -> str:
    return f"a step without a record ({step_id})" if step is None else f"step {step.step} of role {step.role!r}"


def _stream(connection: sa.Connection, query: sa.Select) -> sa.CursorResult:
    return connection.execute(query, execution_options={"yield_per": AT_ONCE})


def _histories(connection: sa.Connection, known: dict[int, sa.Row]) -> Iterator[str]:
    """Walk each step's events from `open` on; where they end must be where the step is."""
    ends: dict[tuple[str, int], str] = {}
    by_name = {(step.role, step.step): step for step in known.values()}
    query = sa.select(events).where(events.c.kind.in_(MOVES)).order_by(events.c.role, events.c.step, events.c.id)
    for key, history in groupby(_stream(connection, query), lambda event: (event.role, event.step)):
        name, step, state = f"step {key[1]} of role {key[0]!r}", by_name.get(key), OPEN
        if step is None:
            yield f"{name} has events and no record"
        for event in history:
            before, after = MOVES[event.kind]
            if state not in before:
                twice = ": it would be trained twice" if event.kind in ("claimed", "trained") else ""
                yield f"{name} was {event.kind} (event {event.id}) while it was {state}{twice}"
            state = after
            counts = (event.groups, event.sessions, event.rows)
            if step is not None and counts != (step.groups, step.sessions, step.rows):
                yield (
                    f"{name} was {event.kind} (event {event.id}) with {counts[0]} groups, {counts[1]} sessions and "
                    f"{counts[2]} rows; it has {step.groups}, {step.sessions} and {step.rows}"
                )
        ends[key] = state
    for key, step in by_name.items():
        told = ends.get(key, OPEN)
        if told != step.state:
            yield f"step {key[1]} of role {key[0]!r} is {step.state}; its events say {told}"


def _groups(connection: sa.Connection, known: dict[int, sa.Row]) -> Iterator[str]:
    query = sa.select(groups.c.step_id, groups.c.state, sa.func.count().label("n"))
    query = query.group_by(groups.c.step_id, groups.c.state).order_by(groups.c.step_id)
    seen = set()
    for step_id, states in groupby(_stream(connection, query), lambda row: row.step_id):
        step, counts = known.get(step_id), {row.state: row.n for row in states}
        seen.add(step_id)
        if step is None:
            yield f"groups of {_name(step, step_id)}"
            continue
        closed = {LISTED: step.groups, LEFT_OUT: step.left_out}
        expected = {state: n for state, n in closed.items() if n} if step.state != OPEN else {OPEN: counts.get(OPEN)}
        if counts != expected:
            yield f"{_name(step, step_id)} has groups {counts}; expected {expected}"
    for step in known.values():
        if step.groups and step.id not in seen:
            yield f"{_name(step, step.id)} has no groups; expected {step.groups}"


def _sessions(connection: sa.Connection, known: dict[int, sa.Row]) -> Iterator[str]:
    """What the manifests list, against the sessions themselves."""
    seen = set()
    query = sa.select(sessions.c.step_id, sessions.c.prompt, sessions.c.session, sessions.c.listed, sessions.c.rows)
    query = query.order_by(sessions.c.step_id, sessions.c.prompt, sessions.c.session)
    for step_id, found in groupby(_stream(connection, query), lambda row: row.step_id):
        step, here = known.get(step_id), list(found)
        seen.add(step_id)
        if step is None:
            yield f"sessions of {_name(step, step_id)}"
            continue
        if step.state == OPEN:
            continue
        listed = {(one.prompt, one.session) for one in here if one.listed}
        if any(one.listed is None for one in here):
            yield f"{_name(step, step_id)} is closed, and holds sessions that it neither lists nor leaves out"
        text = connection.execute(sa.select(manifests.c.manifest).where(manifests.c.step_id == step_id)).scalar()
        if text is None or listed != {(prompt, session) for prompt, session in json.loads(text)["sessions"]}:
            yield f"{_name(step, step_id)} doesn't hold the sessions that its manifest lists"
        counts = (len(listed), sum(one.rows for one in here if one.listed))
        if counts != (step.sessions, step.rows):
            yield (
                f"{_name(step, step_id)} holds {counts[0]} listed sessions with {counts[1]} rows; "
                f"{step.sessions} with {step.rows} were closed"
            )
    for step in known.values():
        if step.sessions and step.id not in seen:
            yield f"{_name(step, step.id)} has no sessions; {step.sessions} were closed"
    same = (groups.c.step_id == sessions.c.step_id) & (groups.c.prompt == sessions.c.prompt)
    query = sa.select(sessions.c.step_id, sessions.c.prompt, sessions.c.session).outerjoin_from(sessions, groups, same)
    for one in _stream(connection, query.where(groups.c.prompt.is_(None))):
        yield f"session {one.session} of prompt {one.prompt} in {_name(known.get(one.step_id), one.step_id)}: no group"


def _rows(connection: sa.Connection, known: dict[int, sa.Row]) -> Iterator[str]:
    """Each session's number of rows, against the rows themselves, both ways."""
    key = ("step_id", "prompt", "session")
    columns = [rows.c[name] for name in key]
    number = sa.func.count().label("n")
    counted = sa.select(*columns, number).group_by(*columns).subquery()
    same = sa.and_(*(sessions.c[name] == counted.c[name] for name in key))
    found = sa.func.coalesce(counted.c.n, 0)
    query = sa.select(*(sessions.c[name] for name in key), sessions.c.rows, found.label("n"))
    for one in _stream(connection, query.outerjoin_from(sessions, counted, same).where(sessions.c.rows != found)):
        step = known.get(one.step_id)
        if step is not None and step.state == DEAD:
            continue
        where = _name(step, one.step_id)
        yield f"session {one.session} of prompt {one.prompt} in {where} has {one.n} rows; {one.rows} were written"
    query = sa.select(*(counted.c[name] for name in key)).outerjoin_from(counted, sessions, same)
    for one in _stream(connection, query.where(sessions.c.session.is_(None))):
        where = _name(known.get(one.step_id), one.step_id)
        yield f"rows of session {one.session} of prompt {one.prompt} in {where}, which holds no such session"


def _bytes(connection: sa.Connection, known: dict[int, sa.Row], checksums: bool) -> Iterator[str]:
    for step in known.values():
        if step.freed and step.state not in FINISHED:
            yield f"{_name(step, step.id)} is {step.state}, and its rows' bytes are deleted"
    columns = [rows.c.step_id, rows.c.prompt, rows.c.session, rows.c.position, rows.c.checksum]
    columns.append(rows.c.data if checksums else rows.c.data.is_not(None).label("data"))
    for row in _stream(connection, sa.select(*columns)):
        step = known.get(row.step_id)
        name = f"row {row.position} of session {row.session} of prompt {row.prompt} in {_name(step, row.step_id)}"
        if step is None or step.state == DEAD:
            continue
        gone = row.data is None or row.data is False or row.data == 0
        if gone != step.freed:
            yield f"{name}: its bytes are {'deleted' if gone else 'still there'}"
        elif checksums and not gone and checksum(bytes(row.data)) != bytes(row.checksum):
            yield f"{name}: its bytes are not those that were written"
