"""The side of a store of the job that trains a role: whole steps come out, in order, each trained once."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa

from verl_drmas.store.database import Store
from verl_drmas.store.errors import Corrupt, LeaseLost, RoleTaken, StoreError
from verl_drmas.store.gc import keep_last
from verl_drmas.store.journal import add_role, count, move, record
from verl_drmas.store.lease import Lease
from verl_drmas.store.producer import contract_of
from verl_drmas.store.reading import read_step
from verl_drmas.store.records import ClaimedStep
from verl_drmas.store.schema import CLAIMED, DEAD, READY, SAVED, TRAINED, roles, steps

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Consumer:
    """What the job that trains a role does with a store; one at a time has the role.

    Args:
        lease: Seconds without a sign of life after which another consumer may take the role.
        max_attempts: How often a step is claimed, without coming to be trained, before it counts as dead.
        keep_steps: Saved steps whose rows are kept; None: all.
        owner: Name of this consumer; another one of the same name takes its role over at once. None: one of its own.

    Every method may raise `StoreAway` (the database was away for the store's patience), `LeaseLost` and `StoreError`.
    """

    def __init__(
        self,
        store: Store,
        role: str,
        *,
        lease: float = 60.0,
        max_attempts: int = 5,
        keep_steps: int | None = None,
        owner: str | None = None,
    ):
        self.store, self.role = store, role
        self.lease, self.max_attempts, self.keep_steps = lease, max_attempts, keep_steps
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._lease: Lease | None = None
        self._known: set[int] = set()  # steps that a call of claim gave out
        self._published: int | None = None

    def attach(self, position: int, *, rewind_saved: bool = False) -> None:
        """Take the role, and bring the store to where this job's checkpoint is.

        Steps that were trained after `position` are ready again, as are those that a former consumer had claimed;
        trained ones up to `position` are in the checkpoint, and count as saved.

        Args:
            position: Step of the checkpoint that this job resumed from; 0: none.
            rewind_saved: Train saved steps again too, if their rows are still there.

        Raises:
            RoleTaken: Another consumer has the role; its `remaining` says for how long.
            StoreError: Steps after `position` are saved: another checkpoint has them.
        """
        if self._lease is not None:
            raise StoreError(f"this consumer has role {self.role!r} already; detach it first")
        token = uuid.uuid4().hex
        self.store.write(lambda connection: self._attach(connection, token, position, rewind_saved))
        self._known.clear()
        self._published = None
        self._lease = Lease(self.store, self.role, token, self.lease)

    def _attach(self, connection: sa.Connection, token: str, position: int, rewind_saved: bool) -> None:
        store, now = self.store, self.store.now()
        add_role(store, connection, self.role)
        remaining = (roles.c.lease_until - now).label("remaining")
        query = sa.select(roles.c.owner, remaining).where(roles.c.role == self.role).with_for_update()
        holder = connection.execute(query).one()
        if holder.remaining is not None and holder.remaining > 0 and holder.owner != self.owner:
            raise RoleTaken(
                f"role {self.role!r} of store {store.url} is {holder.owner}'s for another {holder.remaining:.0f} s; "
                f"stop that job, or wait until its lease has run out",
                holder.remaining,
            )
        rewound, released = self._rewind(connection, position, rewind_saved)
        connection.execute(
            roles.update()
            .where(roles.c.role == self.role)
            .values(
                owner=self.owner, lease=token, lease_until=now + self.lease, seen=now, endpoint=None, version=position
            )
        )
        record(store, connection, self.role, "attached", position, note=self.owner)
        count(store, connection, self.role, {"rewound": rewound, "released": released})

    def _rewind(self, connection: sa.Connection, position: int, rewind_saved: bool) -> tuple[int, int]:
        mine = sa.select(steps).where(steps.c.role == self.role).order_by(steps.c.step).with_for_update()

        def found(*conditions: sa.ColumnElement[bool]) -> list[sa.RowMapping]:
            return list(connection.execute(mine.where(*conditions)).mappings())

        later = found(steps.c.state == SAVED, steps.c.step > position)
        if later and not rewind_saved:
            raise StoreError(
                f"the checkpoint is of step {position}, but the store says that role {self.role!r} saved step "
                f"{later[-1]['step']}; resume from that checkpoint, or train its steps again with rewind_saved"
            )
        if gone := [step["step"] for step in later if step["freed"]]:
            raise StoreError(
                f"steps {gone[0]}..{gone[-1]} of role {self.role!r} can't be trained again, their rows are deleted; "
                f"resume from a later checkpoint, or keep more (drmas.store.keep_steps)"
            )
        for step in found(steps.c.state == TRAINED, steps.c.step <= position):
            move(self.store, connection, step, SAVED, "saved", "by the checkpoint that was resumed from")
        later += found(steps.c.state == TRAINED, steps.c.step > position)
        for step in later:
            move(self.store, connection, step, READY, "rewound", f"to step {position}", lease=None)
        claimed = found(steps.c.state == CLAIMED)
        for step in claimed:
            move(self.store, connection, step, READY, "released", f"by {self.owner}", lease=None)
        return len(later), len(claimed)

    def detach(self) -> None:
        """Give the role back; what was claimed and not trained is ready again. Does nothing if it is lost already."""
        if self._lease is None:
            return
        lease, self._lease = self._lease, None
        lease.stop()

        def work(connection: sa.Connection) -> None:
            lease.hold(connection)
            query = sa.select(steps).where(steps.c.role == self.role, steps.c.state == CLAIMED).order_by(steps.c.step)
            found = connection.execute(query.with_for_update()).mappings().all()
            for step in found:  # nothing failed, so the attempt doesn't count
                values = {"lease": None, "attempts": step["attempts"] - 1}
                move(self.store, connection, step, READY, "released", "detached", **values)
            gone = {"owner": None, "lease": None, "lease_until": None, "endpoint": None}
            connection.execute(roles.update().where(roles.c.role == self.role).values(**gone))
            record(self.store, connection, self.role, "detached", note=self.owner)
            count(self.store, connection, self.role, {"released": len(found)})

        try:
            self.store.write(work)
        except LeaseLost as error:
            logger.warning("%s", error)

    def claim(self) -> ClaimedStep | None:
        """The next step to train on, now this consumer's; None if none is ready.

        Steps that can't be trained, because they were tried too often or a row of theirs is damaged, count as dead
        and are passed over with a WARNING.
        """
        # Asked again and again while there is nothing: a look writes nothing, where holding the role renews its lease.
        if not self._anything():
            return None
        while (step := self._held(self._claim)) is not None:
            try:
                claimed = self.store.read(lambda connection, step=step: read_step(connection, step))
            except Corrupt as error:
                self._held(lambda connection, step=step, why=str(error): self._bury(connection, step["id"], why))
                continue
            self._known.add(step["step"])
            return claimed
        return None

    def _anything(self) -> bool:
        """Whether a step is ready, or claimed by a call whose answer may have been lost."""
        self._check()
        due = sa.select(steps.c.id).where(steps.c.role == self.role).limit(1)
        found = [due.where(steps.c.state == state) for state in (READY, CLAIMED)]
        return self.store.read(lambda connection: any(connection.execute(query).first() for query in found))

    def _claim(self, connection: sa.Connection) -> sa.RowMapping | None:
        token = self._token
        # Claimed by a call whose answer was lost on its way here.
        mine = (steps.c.role == self.role, steps.c.state == CLAIMED, steps.c.lease == token)
        for step in connection.execute(sa.select(steps).where(*mine).order_by(steps.c.step)).mappings():
            if step["step"] not in self._known:
                return step
        ready = sa.select(steps).where(steps.c.role == self.role, steps.c.state == READY)
        next_one = ready.order_by(steps.c.step).limit(1).with_for_update()
        while (step := connection.execute(next_one).mappings().first()) is not None:
            if step["attempts"] < self.max_attempts:
                move(self.store, connection, step, CLAIMED, "claimed", lease=token, attempts=step["attempts"] + 1)
                self._known.discard(step["step"])  # a step of before a rewind is new again
                return step
            self._kill(connection, step, f"claimed {step['attempts']} times and never trained")
        return None

    def _bury(self, connection: sa.Connection, step_id: int, why: str) -> None:
        query = sa.select(steps).where(steps.c.id == step_id, steps.c.state == CLAIMED).with_for_update()
        step = connection.execute(query).mappings().first()
        if step is not None:
            self._kill(connection, step, why)

    def _kill(self, connection: sa.Connection, step: sa.RowMapping, why: str) -> None:
        logger.warning("step %d of role %r is left untrained: %s", step["step"], self.role, why)
        move(self.store, connection, step, DEAD, "dead", why, lease=None)
        count(self.store, connection, self.role, {"dead": step["groups"]})

    def trained(self, step: int) -> None:
        """A claimed step was trained on, and is in the weights; again, it changes nothing.

        Raises:
            LeaseLost: The step is not this consumer's any more: the main job may have dropped it while the lease was
                out.
        """
        self._check()
        if step not in self._known:
            raise StoreError(f"step {step} of role {self.role!r} was not claimed; call claim first")

        def work(connection: sa.Connection) -> None:
            query = sa.select(steps).where(steps.c.role == self.role, steps.c.step == step).with_for_update()
            found = connection.execute(query).mappings().first()
            mine = found is not None and found["lease"] == self._token
            if mine and found["state"] in (TRAINED, SAVED):
                return
            if not mine or found["state"] != CLAIMED:
                what = "unknown" if found is None else found["state"]
                raise LeaseLost(f"step {step} of role {self.role!r} is {what}, and not claimed by {self.owner}")
            move(self.store, connection, found, TRAINED, "trained", self.owner, attempts=0)

        self._held(work)

    def saved(self, step: int) -> None:
        """This job has a checkpoint of `step`: what was trained up to it is done for good, and old rows are freed."""

        def work(connection: sa.Connection) -> None:
            due = (steps.c.role == self.role, steps.c.state == TRAINED, steps.c.step <= step)
            query = sa.select(steps).where(*due).order_by(steps.c.step).with_for_update()
            for found in connection.execute(query).mappings().all():
                move(self.store, connection, found, SAVED, "saved", f"by checkpoint {step}")

        self._held(work)
        if self.keep_steps is not None:
            keep_last(self.store, self.keep_steps, self.role)

    def publish(self, version: int, endpoint: str) -> None:
        """Say that `endpoint` serves `version`, which never goes back while the role is held."""
        if self._published is not None and version < self._published:
            raise StoreError(f"version {version} of role {self.role!r} can't follow {self._published}")

        def work(connection: sa.Connection) -> None:
            values = roles.update().where(roles.c.role == self.role).values(version=version, endpoint=endpoint)
            connection.execute(values)
            record(self.store, connection, self.role, "published", version, note=endpoint)

        self._held(work)
        self._published = version

    def finished(self) -> int | None:
        """The main job's last step, if its run is over."""
        self._check()
        return self.finish_mark()

    def finish_mark(self) -> int | None:
        """The same, without a lease."""
        query = sa.select(roles.c.finish).where(roles.c.role == self.role)
        return self.store.read(lambda connection: connection.execute(query).scalar())

    def last_saved(self) -> int:
        """The last step that is in a checkpoint of this role; 0: none. Needs no lease."""
        query = sa.select(steps.c.step).where(steps.c.role == self.role, steps.c.state == SAVED)
        last = query.order_by(steps.c.step.desc()).limit(1)
        return self.store.read(lambda connection: connection.execute(last).scalar()) or 0

    def contract(self) -> dict[str, Any] | None:
        """What the main job put with `put_contract`; None before. Needs no lease."""
        return self.store.read(lambda connection: contract_of(connection, self.role))

    @property
    def _token(self) -> str:
        if self._lease is None:
            raise StoreError(f"this consumer has no lease on role {self.role!r}; call attach first")
        return self._lease.token

    def _check(self) -> None:
        """Raise what a call must raise without a lease."""
        _ = self._token
        assert self._lease is not None
        self._lease.check()

    def _held(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a transaction that holds the role's row and renews the lease."""
        self._check()
        lease = self._lease
        assert lease is not None

        def held(connection: sa.Connection) -> T:
            lease.hold(connection)
            return work(connection)

        try:
            return self.store.write(held)
        except LeaseLost as error:
            lease.lost(error)
            raise
