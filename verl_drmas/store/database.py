"""The connection to a store: SQLite on one machine, PostgreSQL between several."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite

from verl_drmas.store.away import patiently, shown, translated
from verl_drmas.store.disks import network_disk
from verl_drmas.store.errors import StoreError
from verl_drmas.store.migrations import MIGRATIONS, current, migrate

logger = logging.getLogger(__name__)
T = TypeVar("T")
KINDS = "sqlite:///path/of/a/file.db or postgresql+psycopg://user:password@host/database"
READ = "drmas_read"


def parse(url: str) -> sa.URL:
    """A store's URL, a SQLite path made absolute: workers may run in another folder.

    Raises:
        StoreError: No URL of a store; says which there are, and shows nothing of a password.
    """
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        raise StoreError(f"the store's URL can't be read; give {KINDS}") from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        if not parsed.database:
            raise StoreError(f"store {shown(parsed)} names no database; give {KINDS}")
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise StoreError(f"store {shown(parsed)} has no known kind of database; give {KINDS}")
    path = parsed.database
    if not path or path == ":memory:" or path.startswith("file:"):
        raise StoreError(f"store {shown(parsed)} is no file that two jobs can open; give {KINDS}")
    return parsed.set(drivername="sqlite", database=str(Path(path).expanduser().absolute()))


def open_store(url: str, *, patience: float = 60.0, create: bool = True) -> Store:
    """Open a store, making or migrating its tables; any number of processes may do so at once.

    Args:
        url: `sqlite:///path` or `postgresql+psycopg://user:password@host/database`.
        patience: Seconds that the database may be away, now and in each later call.
        create: False refuses a database that holds no store yet.

    Raises:
        StoreAway: No connection within `patience`.
        StoreError: No store's URL, or a store of a newer version.
    """
    parsed = parse(url)
    if parsed.drivername == "sqlite":
        path = Path(str(parsed.database))
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind := network_disk(path):
                logger.warning(
                    "store %s lies on a network disk (%s): every job that uses it must run on this machine; jobs on "
                    "several machines need PostgreSQL",
                    shown(parsed),
                    kind,
                )
        elif not path.is_file():
            raise StoreError(f"store {shown(parsed)}: no such file; give the store of a run")
    store = Store(parsed.render_as_string(hide_password=False), patience)
    version, identity = store.read(current)
    if not version and not create:
        raise StoreError(f"store {shown(parsed)}: the database holds no store; give the one of a run")
    if version < len(MIGRATIONS) or identity is None:
        identity = store.write(migrate)
    store.id = identity
    return store


class Store:
    """A database that holds a store; made by `open_store`.

    Threads may share it. It can be pickled, and used in a forked process: each process has connections of its own.

    Attributes:
        id: Made once for each database; tells two stores apart.
        patience: Seconds that the database may be away in a call.
    """

    def __init__(self, url: str, patience: float):
        self._url = sa.make_url(url)
        self.patience = patience
        self.id = ""
        self._engines: dict[int, sa.Engine] = {}
        self._writer: dict[int, threading.Lock] = {}

    def __repr__(self) -> str:
        return f"Store({shown(self._url)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engines": {}, "_writer": {}}

    @property
    def url(self) -> str:
        """The URL without its password."""
        return shown(self._url)

    @property
    def postgresql(self) -> bool:
        return self._url.drivername != "sqlite"

    @property
    def engine(self) -> sa.Engine:
        """This process's engine. A parent's stays referenced: collecting it would close connections that the parent
        still uses.
        """
        process = os.getpid()
        if process not in self._engines:
            make = _postgresql_engine if self.postgresql else _sqlite_engine
            self._engines.setdefault(process, make(self._url, self.patience))  # connects to nothing yet
        return self._engines[process]

    def close(self) -> None:
        """Close this process's connections; a later call opens new ones."""
        if engine := self._engines.pop(os.getpid(), None):
            engine.dispose()

    def now(self) -> sa.ColumnElement[float]:
        """Seconds since 1970 by the clock that all users of the database share."""
        if self.postgresql:
            return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double)
        return sa.literal(time.time(), sa.Double)

    def insert(self, table: sa.Table) -> Any:
        """An insert that knows `on_conflict_do_nothing` and `on_conflict_do_update`.

        Whether a row went in shows in what `returning` gives: psycopg's `rowcount` doesn't tell.
        """
        return postgresql.insert(table) if self.postgresql else sqlite.insert(table)

    def write(self, work: Callable[[sa.Connection], T], *, patience: float | None = None) -> T:
        """Run `work` in one transaction, all or nothing, and again while the database is away or locked.

        `work` may run more than once, even after a commit whose confirmation was lost: it must come to the same end.

        Raises:
            StoreAway: Not done within `patience` seconds (None: the store's).
            StoreError: The database refused.
        """
        if self.postgresql:
            return self._run(work, patience, {})
        # SQLite lets writers of all processes wait for each other by sleeping; threads of one can do better.
        with self._writer.setdefault(os.getpid(), threading.Lock()):
            return self._run(work, patience, {})

    def read(self, work: Callable[[sa.Connection], T], *, patience: float | None = None) -> T:
        """Run `work` on one state of the database that nobody changes meanwhile; otherwise as `write`."""
        options: dict[str, Any] = {READ: True}
        if self.postgresql:
            options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        return self._run(work, patience, options)

    def _run(self, work: Callable[[sa.Connection], T], patience: float | None, options: dict[str, Any]) -> T:
        def attempt() -> T:
            try:
                with self.engine.connect().execution_options(**options) as connection, connection.begin():
                    return work(connection)
            except exc.SQLAlchemyError as error:
                raise translated(error, self._url) from error

        return patiently(attempt, self.patience if patience is None else patience)


def _sqlite_engine(url: sa.URL, patience: float) -> sa.Engine:
    busy = min(patience, 30.0)  # seconds that SQLite itself waits for a lock
    engine = sa.create_engine(url, hide_parameters=True, connect_args={"timeout": busy})

    @event.listens_for(engine, "connect")
    def prepare(connection, record) -> None:
        connection.isolation_level = None  # sqlite3 begins no transactions; `begin` below does
        settings = ["journal_mode=WAL", "synchronous=FULL"]  # FULL: a committed session survives a loss of power
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            # Rows that are freed shrink the file. Later it would count for nothing, and take the write lock.
            settings.insert(0, "auto_vacuum=INCREMENTAL")
        for setting in settings:
            connection.execute(f"PRAGMA {setting}").fetchall()

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer takes the lock at once: one that reads first and then writes would fail if another wrote between.
        kind = "DEFERRED" if connection.get_execution_options().get(READ) else "IMMEDIATE"
        connection.exec_driver_sql(f"BEGIN {kind}")

    return engine


def _postgresql_engine(url: sa.URL, patience: float) -> sa.Engine:
    try:
        engine = sa.create_engine(
            url,
            hide_parameters=True,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_size=4,
            max_overflow=12,
            pool_timeout=30,
            connect_args=_unless_given(
                url,
                {
                    "connect_timeout": max(2, round(min(patience, 10))),
                    "application_name": "verl-drmas",
                    # A host that is gone without a word shows within half a minute, not after hours.
                    "keepalives_idle": 10,
                    "keepalives_interval": 5,
                    "keepalives_count": 3,
                    "tcp_user_timeout": 30_000,
                },
            ),
        )
    except ImportError as error:
        raise StoreError(f"store {shown(url)} needs psycopg: pip install 'verl-drmas[store]'") from error

    @event.listens_for(engine, "connect")
    def prepare(connection, record) -> None:
        # A process that is stopped in the middle of a transaction would hold its locks for ever.
        connection.autocommit = True
        connection.execute("SET idle_in_transaction_session_timeout = '60s'")
        connection.autocommit = False

    return engine


def _unless_given(url: sa.URL, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in url.query}
