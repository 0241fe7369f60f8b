"""A consumer's hold on its role, renewed in the background."""

from __future__ import annotations

import logging
import threading

import sqlalchemy as sa

from verl_drmas.store.database import Store
from verl_drmas.store.errors import LeaseLost, StoreError
from verl_drmas.store.schema import roles

logger = logging.getLogger(__name__)


def hold(store: Store, connection: sa.Connection, role: str, token: str, seconds: float) -> None:
    """Renew a lease in the caller's transaction, and lock the role's row until it ends.

    A lease that ran out is renewed too, as long as nobody took the role: whoever takes it writes a token of its own.

    Raises:
        LeaseLost: The role is another consumer's.
    """
    now = store.now()
    mine = roles.update().where(roles.c.role == role, roles.c.lease == token)
    held = connection.execute(mine.values(lease_until=now + seconds, seen=now).returning(roles.c.role)).first()
    if held is None:
        owner = connection.execute(sa.select(roles.c.owner).where(roles.c.role == role)).scalar()
        raise LeaseLost(
            f"role {role!r} of store {store.url} belongs to {owner or 'nobody'} now; what this job trained since its "
            f"last checkpoint is trained again there: stop this job"
        )


class Lease:
    """Renews in a daemon thread, each third of the lease, until it is stopped or lost."""

    def __init__(self, store: Store, role: str, token: str, seconds: float):
        self._store, self._role, self.token, self.seconds = store, role, token, seconds
        self._lost: LeaseLost | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease of {role}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `LeaseLost` if the lease is known to be lost."""
        if self._lost is not None:
            raise LeaseLost(str(self._lost))

    def hold(self, connection: sa.Connection) -> None:
        """Renew in the caller's transaction; see `hold`."""
        hold(self._store, connection, self._role, self.token, self.seconds)

    def lost(self, error: LeaseLost) -> None:
        """Remember that it is lost."""
        self._lost = error
        self._stop.set()

    def stop(self) -> None:
        """End the renewals; returns when none is under way, or it hangs in a database that is away."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=self.seconds)

    def _renew(self) -> None:
        failing = False
        while not self._stop.wait(self.seconds / 3):
            try:
                self._store.write(self.hold, patience=self.seconds / 3)
                if failing:
                    logger.info("role %r: the lease is renewed again", self._role)
                failing = False
            except LeaseLost as error:
                logger.error("%s", error)
                self.lost(error)
            except StoreError as error:
                if not failing:
                    logger.warning("role %r: the lease could not be renewed, trying on: %s", self._role, error)
                failing = True
