"""The end of a step: what was played meets what the main job trained on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from verl_drmas.store.database import Store
from verl_drmas.store.errors import StoreError
from verl_drmas.store.journal import count, move
from verl_drmas.store.schema import EMPTY, LEFT_OUT, LISTED, OPEN, READY, groups, manifests, sessions, steps

Pair = tuple[int, int]  # prompt and session
NAMED = 5  # sessions that an error names
AT_ONCE = 500  # values of one statement


def close(store: Store, connection: sa.Connection, role: str, step: int, manifest: dict[str, Any]) -> dict[str, Any]:
    """See `Producer.close_step`."""
    listed = _listed(step, manifest)
    text = json.dumps(manifest)
    query = sa.select(steps).where(steps.c.role == role, steps.c.step == step).with_for_update()
    found = connection.execute(query).mappings().first()
    if found is None:
        raise StoreError(f"step {step} was never opened; call open_step before close_step")
    if found["state"] != OPEN:
        return manifest_of(connection, found["id"])
    played = connection.execute(
        sa.select(sessions.c.prompt, sessions.c.session, sessions.c.ended, sessions.c.rows, sessions.c.bytes).where(
            sessions.c.step_id == found["id"]
        )
    ).all()
    _check_played(step, listed, {(one.prompt, one.session) for one in played})
    chosen = [one for one in played if (one.prompt, one.session) in listed]
    prompts = {one.prompt for one in chosen}
    left_out = _mark(connection, found["id"], listed, prompts)
    rows, size = sum(one.rows for one in chosen), sum(one.bytes for one in played)
    connection.execute(manifests.insert().values(step_id=found["id"], manifest=text))
    move(
        store,
        connection,
        found,
        READY if rows else EMPTY,
        "closed" if rows else "empty",
        groups=len(prompts),
        left_out=left_out,
        sessions=len(chosen),
        rows=rows,
        bytes=size,
        freed=not size,
        closed_at=store.now(),
    )
    numbers = Counter({"left_out": left_out, "sessions/left_out": len(played) - len(chosen)})
    numbers.update("sessions/ended" if one.ended else "sessions/failed" for one in played)
    numbers.update(f"d/{one.rows}" for one in chosen)
    count(store, connection, role, numbers)
    return json.loads(text)


def manifest_of(connection: sa.Connection, step_id: int) -> dict[str, Any]:
    """What a step, which is not open, was closed with."""
    query = sa.select(manifests.c.manifest).where(manifests.c.step_id == step_id)
    return json.loads(connection.execute(query).scalar_one())


def _listed(step: int, manifest: dict[str, Any]) -> set[Pair]:
    try:
        return {(int(prompt), int(session)) for prompt, session in manifest["sessions"]}
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"the manifest of step {step} has no list of [prompt, session] pairs under 'sessions' ({error!r})"
        ) from error


def _check_played(step: int, listed: Collection[Pair], played: Collection[Pair]) -> None:
    missing = sorted(set(listed) - set(played))
    if missing:
        names = ", ".join(f"{session} of prompt {prompt}" for prompt, session in missing[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise StoreError(f"the manifest of step {step} lists sessions that were never put: {names}{more}")


def _mark(connection: sa.Connection, step_id: int, listed: set[Pair], prompts: set[int]) -> int:
    """Write down what is listed; returns how many groups are left out."""
    these = sessions.c.step_id == step_id
    connection.execute(sessions.update().where(these).values(listed=sa.false()))
    pairs = sorted(listed)
    for at in range(0, len(pairs), AT_ONCE):
        key = sa.tuple_(sessions.c.prompt, sessions.c.session)
        chosen = sessions.update().where(these, key.in_(pairs[at : at + AT_ONCE]))
        connection.execute(chosen.values(listed=sa.true()))
    connection.execute(groups.update().where(groups.c.step_id == step_id).values(state=LEFT_OUT))
    known = sorted(prompts)
    for at in range(0, len(known), AT_ONCE):
        chosen = groups.update().where(groups.c.step_id == step_id, groups.c.prompt.in_(known[at : at + AT_ONCE]))
        connection.execute(chosen.values(state=LISTED))
    left = sa.select(sa.func.count()).where(groups.c.step_id == step_id, groups.c.state == LEFT_OUT)
    return connection.execute(left).scalar_one()
