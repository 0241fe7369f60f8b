"""How a store is doing, in numbers for a tracker and for `verl-drmas store status`."""

from __future__ import annotations

import sqlalchemy as sa

from verl_drmas.store.database import Store
from verl_drmas.store.schema import OPEN, READY, STATES, counters, groups, roles, steps


def numbers(store: Store, role: str) -> dict[str, float]:
    """One role's numbers; takes as long with a million groups as with a hundred, but for a scan of the steps.

    Returns:
        `steps/<state>` and `groups/<state>`: what is in each state, groups that were left out apart;
        `ready_age`: seconds that the longest waiting step is ready; `lag`: last closed step minus the version served;
        `version`, `last_closed`; `bytes` of rows that are there; and of closed steps `sessions/ended`,
        `sessions/failed`, `sessions/left_out`, and `d/<n>`: listed sessions that have n rows. `count/<name>`: counters;
        `duplicate` and `replayed` count sessions, `rewound` and `released` steps, `dropped`, `dead` and `left_out`
        groups, and `retries` what the producer says.
    """

    def work(connection: sa.Connection) -> dict[str, float]:
        result = {f"{what}/{state}": 0.0 for what in ("steps", "groups") for state in STATES}
        here = steps.c.role == role
        bytes_there = sa.func.sum(sa.case((steps.c.freed, 0), else_=steps.c.bytes)).label("bytes")
        query = sa.select(
            steps.c.state,
            sa.func.count().label("n"),
            sa.func.sum(steps.c.groups).label("groups"),
            sa.func.sum(steps.c.left_out).label("left_out"),
            sa.func.min(steps.c.since).label("since"),
            sa.func.max(steps.c.step).label("last"),
            bytes_there,
            store.now().label("now"),
        )
        result |= {"groups/left_out": 0.0, "ready_age": 0.0, "last_closed": 0.0, "bytes": 0.0}
        for row in connection.execute(query.where(here).group_by(steps.c.state)):
            result[f"steps/{row.state}"] = float(row.n)
            result[f"groups/{row.state}"] = float(row.groups)
            result["groups/left_out"] += float(row.left_out)
            result["bytes"] += float(row.bytes)
            if row.state == READY:
                result["ready_age"] = max(0.0, float(row.now - row.since))
            if row.state != OPEN:
                result["last_closed"] = max(result["last_closed"], float(row.last))
        still = sa.select(sa.func.count()).select_from(groups).join(steps, steps.c.id == groups.c.step_id)
        result[f"groups/{OPEN}"] = float(connection.execute(still.where(here, steps.c.state == OPEN)).scalar_one())
        version = connection.execute(sa.select(roles.c.version).where(roles.c.role == role)).scalar()
        result["version"] = float(version or 0)
        result["lag"] = max(0.0, result["last_closed"] - result["version"])
        result |= {"sessions/ended": 0.0, "sessions/failed": 0.0, "sessions/left_out": 0.0}
        for row in connection.execute(sa.select(counters).where(counters.c.role == role)):
            result[_key(row.name)] = float(row.n)
        return result

    return store.read(work)


def _key(counter: str) -> str:
    return counter if counter.startswith(("d/", "sessions/")) else f"count/{counter}"


def role_names(store: Store) -> list[str]:
    """The roles that a store knows, by name."""
    query = sa.select(roles.c.role).order_by(roles.c.role)
    return list(store.read(lambda connection: connection.execute(query).scalars().all()))
