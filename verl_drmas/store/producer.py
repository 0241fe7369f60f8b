"""The main job's side of a store: sessions go in, steps are closed, and the next step waits for the other job."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from verl_drmas.store.closing import close, manifest_of
from verl_drmas.store.codec import checksum, pack
from verl_drmas.store.database import Store
from verl_drmas.store.errors import StoreError
from verl_drmas.store.journal import add_role, clean, count, move, record
from verl_drmas.store.records import ConsumerState, Gate, SessionRecord
from verl_drmas.store.schema import (
    CLAIMED,
    DROPPED,
    OPEN,
    READY,
    SAVED,
    TRAINED,
    UNFINISHED,
    groups,
    roles,
    rows,
    sessions,
    steps,
)


class Producer:
    """What the job that plays sessions does with a store. Threads may share it, and it can be pickled; several
    processes may have one of the same role at once.

    Every method may raise `StoreAway` (the database was away for the store's patience) and `StoreError`.
    """

    def __init__(self, store: Store, role: str):
        self.store = store
        self.role = role

    def put_contract(self, contract: dict[str, Any]) -> None:
        """Keep what both jobs must agree on; the last one counts."""
        text = json.dumps(contract)

        def work(connection: sa.Connection) -> None:
            add_role(self.store, connection, self.role)
            connection.execute(roles.update().where(roles.c.role == self.role).values(contract=text))

        self.store.write(work)

    def contract(self) -> dict[str, Any] | None:
        """The document that was put last; None before."""
        return self.store.read(lambda connection: contract_of(connection, self.role))

    def open_step(self, step: int, prompts: Sequence[int], sessions: int) -> None:
        """Open a group of `sessions` sessions for each prompt of a step.

        Again, it adds the prompts that are new; of a step that is closed it changes nothing.

        Raises:
            StoreError: The step is open with another number of sessions.
        """
        prompts = sorted({int(prompt) for prompt in prompts})

        def work(connection: sa.Connection) -> None:
            add_role(self.store, connection, self.role)
            zeros = dict.fromkeys(("attempts", "groups", "left_out", "sessions", "rows", "bytes"), 0)
            new = self.store.insert(steps).values(
                role=self.role, step=step, state=OPEN, freed=False, since=self.store.now(), **zeros
            )
            connection.execute(new.on_conflict_do_nothing())
            found = self._step(connection, step, read=True)
            assert found is not None
            if found["state"] != OPEN or not prompts:
                return
            values = [
                {"step_id": found["id"], "prompt": prompt, "sessions": sessions, "state": OPEN} for prompt in prompts
            ]
            connection.execute(self.store.insert(groups).on_conflict_do_nothing(), values)
            other = connection.execute(
                sa.select(groups.c.prompt, groups.c.sessions)
                .where(groups.c.step_id == found["id"], groups.c.sessions != sessions)
                .limit(1)
            ).first()
            if other:
                raise StoreError(
                    f"prompt {other.prompt} of step {step} is open with {other.sessions} sessions, not {sessions}; "
                    f"a run keeps its number of sessions, or begins with a new store"
                )

        self.store.write(work)

    def put_session(self, record: SessionRecord, *, patience: float | None = None) -> bool:
        """Write a session with its rows, all or nothing.

        A session that failed gives way to the same session played again with success, while its step is open.

        Args:
            record: The session.
            patience: Seconds to wait for a database that is away; None: the store's.

        Returns:
            False if the session is there already, or its step is closed; nothing changes then but the counter
            `duplicate`.

        Raises:
            StoreError: Its group was never opened.
            ValueError: A row or an outcome that can't be written.
        """
        if record.outcome is not None and not math.isfinite(record.outcome):
            raise ValueError(f"session {_name(record)}: the outcome is {record.outcome}; give a finite number or None")
        packed = [pack(row) for row in record.rows]  # before the transaction: others wait for its locks
        values = {
            "ended": bool(record.ended),
            "reason": clean(record.reason),
            "outcome": None if record.outcome is None else float(record.outcome),
            "main_version": record.main_version,
            "rows": len(packed),
            "bytes": sum(map(len, packed)),
        }
        return self.store.write(lambda connection: self._put(connection, record, values, packed), patience=patience)

    def _put(
        self, connection: sa.Connection, session: SessionRecord, values: dict[str, Any], packed: list[bytes]
    ) -> bool:
        # The lock is shared: sessions of a step don't wait for each other, only closing it waits for them.
        step = self._step(connection, session.step, read=True)
        if step is None:
            raise StoreError(f"session {_name(session)}: step {session.step} was never opened; call open_step first")
        if step["state"] != OPEN:
            count(self.store, connection, self.role, {"duplicate": 1})
            return False
        key = {"step_id": step["id"], "prompt": session.prompt, "session": session.session}
        self._check_group(connection, session, step["id"])
        new = self.store.insert(sessions).values(**key, **values, put_at=self.store.now())
        added = connection.execute(new.on_conflict_do_nothing().returning(sessions.c.session)).first()
        if added is None:
            this = sa.and_(*(sessions.c[name] == value for name, value in key.items()))
            known = connection.execute(sa.select(sessions.c.ended).where(this).with_for_update()).one()
            if known.ended or not session.ended:
                count(self.store, connection, self.role, {"duplicate": 1})
                return False
            connection.execute(rows.delete().where(*(rows.c[name] == value for name, value in key.items())))
            connection.execute(sessions.update().where(this).values(**values, put_at=self.store.now()))
        if packed:
            table = [
                {
                    **key,
                    "position": position,
                    "agent": clean(row.agent_id),
                    "tokens": len(row.prompt_ids) + len(row.response_ids),
                    "checksum": checksum(data),
                    "data": data,
                }
                for position, (row, data) in enumerate(zip(session.rows, packed, strict=True))
            ]
            connection.execute(rows.insert(), table)
        if added is None:
            count(self.store, connection, self.role, {"replayed": 1})
        return True

    def _check_group(self, connection: sa.Connection, session: SessionRecord, step_id: int) -> None:
        found = sa.select(groups.c.sessions).where(groups.c.step_id == step_id, groups.c.prompt == session.prompt)
        size = connection.execute(found).scalar()
        if size is None or not 0 <= session.session < size:
            group = "was never opened; call open_step with it" if size is None else f"has sessions 0..{size - 1}"
            raise StoreError(f"session {_name(session)}: prompt {session.prompt} of step {session.step} {group}")

    def close_step(self, step: int, manifest: dict[str, Any]) -> dict[str, Any]:
        """End a step: what the manifest lists is ready to be trained on, the rest is left out.

        Args:
            manifest: A JSON document with `sessions`: a [prompt, session] pair for each one to train on.

        Returns:
            The manifest that counts: this one, or that of an earlier call.

        Raises:
            StoreError: No such step, no such manifest, or a listed session that was not put.
        """
        return self.store.write(lambda connection: close(self.store, connection, self.role, step, manifest))

    def manifest(self, step: int) -> dict[str, Any] | None:
        """What a step was closed with; None if it is open or unknown."""

        def work(connection: sa.Connection) -> dict[str, Any] | None:
            query = sa.select(steps.c.id).where(steps.c.role == self.role, steps.c.step == step, steps.c.state != OPEN)
            found = connection.execute(query).scalar()
            return None if found is None else manifest_of(connection, found)

        return self.store.read(work)

    def gate(self, step: int, max_lag: int) -> Gate:
        """Whether `step` may begin while the other job is at most `max_lag` steps behind.

        `needed` counts steps that are to be trained again as well: a job that fell back to its checkpoint has older
        weights than the sessions that are being played were promised.
        """
        limit = step - 1 - max_lag

        def work(connection: sa.Connection) -> Gate:
            # One query a state: with several, a planner may walk through all steps instead of the index of states.
            due = sa.select(steps.c.step).where(steps.c.role == self.role, steps.c.step <= limit)
            waiting: list[int] = []
            for state in UNFINISHED:
                waiting += connection.execute(due.where(steps.c.state == state)).scalars()
            last = due.order_by(steps.c.step.desc()).limit(1)
            states = (READY, CLAIMED, TRAINED, SAVED)
            to_train = [connection.execute(last.where(steps.c.state == state)).scalar() for state in states]
            return Gate(tuple(sorted(waiting)), max(step or 0 for step in to_train))

        return self.store.read(work)

    def drop_stale(self, step: int, max_lag: int) -> int:
        """Give up the steps that `step` would have to wait for, but those that a live consumer trains.

        Returns:
            How many groups that were.
        """
        limit = step - 1 - max_lag

        def work(connection: sa.Connection) -> int:
            alive = self._consumer(connection, lock=True).alive
            states = [READY] if alive else [READY, CLAIMED]
            stale = sa.select(steps).where(steps.c.role == self.role, steps.c.state.in_(states), steps.c.step <= limit)
            found = connection.execute(stale.order_by(steps.c.step).with_for_update()).mappings().all()
            for late in found:
                move(self.store, connection, late, DROPPED, "dropped", f"step {step} began, max_lag {max_lag}")
            dropped = sum(late["groups"] for late in found)
            count(self.store, connection, self.role, {"dropped": dropped})
            return dropped

        return self.store.write(work)

    def consumer(self) -> ConsumerState:
        """What the store knows of the job that trains the role."""
        return self.store.read(self._consumer)

    def _consumer(self, connection: sa.Connection, *, lock: bool = False) -> ConsumerState:
        alive = sa.func.coalesce(roles.c.lease_until > self.store.now(), sa.false()).label("alive")
        query = sa.select(roles, alive).where(roles.c.role == self.role)
        found = connection.execute(query.with_for_update() if lock else query).first()
        if found is None:
            return ConsumerState(False, None, 0, None, None)
        claimed = sa.select(sa.func.min(steps.c.step)).where(steps.c.role == self.role, steps.c.state == CLAIMED)
        training = connection.execute(claimed).scalar()
        return ConsumerState(bool(found.alive), found.seen, found.version, found.endpoint, training)

    def begin(self, step: int) -> None:
        """The main job runs, from `step` on: takes back an earlier `finish`."""
        self._set("begin", step, finish=None)

    def finish(self, step: int) -> None:
        """The main job's run is over after `step`."""
        self._set("finish", step, finish=step)

    def saved(self, step: int) -> None:
        """The main job has a checkpoint of `step`."""
        self._set("main_saved", step, main_saved=step)

    def last_saved(self) -> int:
        """The main job's last checkpoint; 0: none."""
        query = sa.select(roles.c.main_saved).where(roles.c.role == self.role)
        return self.store.read(lambda connection: connection.execute(query).scalar()) or 0

    def _set(self, kind: str, step: int, **values: Any) -> None:
        def work(connection: sa.Connection) -> None:
            add_role(self.store, connection, self.role)
            connection.execute(roles.update().where(roles.c.role == self.role).values(**values))
            record(self.store, connection, self.role, kind, step)

        self.store.write(work)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter, such as `retries`."""
        self.store.write(lambda connection: count(self.store, connection, self.role, {name: n}))

    def _step(self, connection: sa.Connection, step: int, *, read: bool) -> sa.RowMapping | None:
        query = sa.select(steps).where(steps.c.role == self.role, steps.c.step == step)
        return connection.execute(query.with_for_update(read=read)).mappings().first()


def contract_of(connection: sa.Connection, role: str) -> dict[str, Any] | None:
    """The role's document; None if there is none."""
    text = connection.execute(sa.select(roles.c.contract).where(roles.c.role == role)).scalar()
    return None if text is None else json.loads(text)


def _name(session: SessionRecord) -> str:
    return f"{session.session} of prompt {session.prompt} in step {session.step}"
