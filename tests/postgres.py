"""Fixtures with a real PostgreSQL: `postgres_url`, an empty database for each test.

The server is that of DRMAS_TEST_POSTGRES, the URL of an administrator; without one, a private server is started from
Debian's package, if it is installed. A conftest imports all three fixtures.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from postgres_server import Server, why_not


@pytest.fixture(scope="session")
def postgres_admin() -> Iterator[str]:
    """URL of a server's administrator."""
    if given := os.environ.get("DRMAS_TEST_POSTGRES"):
        yield given
        return
    with private_server() as server:
        yield server.url


class private_server:
    """A started server in a folder of its own, that may be killed; skips the test where there can be none."""

    def __enter__(self) -> Server:
        if reason := why_not():
            pytest.skip(f"{reason}; set DRMAS_TEST_POSTGRES to the URL of a server's administrator")
        # Not below pytest's folder, which user postgres may not enter; short, because a socket's path is.
        self._folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
        self._server = Server(self._folder).create().start()
        return self._server

    def __exit__(self, *exception: object) -> None:
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="module")
def postgres_database(postgres_admin: str) -> Iterator[str]:
    """URL of a new database, dropped afterwards. One for a module: making one takes a second on a busy machine."""
    with fresh_database(postgres_admin) as url:
        yield url


@pytest.fixture
def postgres_url(postgres_database: str) -> str:
    """URL of an empty database."""
    engine = sa.create_engine(postgres_database, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        connection.exec_driver_sql(f"{others} AND pid <> pg_backend_pid()")
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    return postgres_database


class fresh_database:
    """A new database on a server, dropped at the end with whoever is still connected."""

    def __init__(self, admin: str):
        self._engine = sa.create_engine(admin, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self._name = f"drmas_{secrets.token_hex(6)}"

    def __enter__(self) -> str:
        self._do(f"CREATE DATABASE {self._name}")
        return self._engine.url.set(database=self._name).render_as_string(hide_password=False)

    def __exit__(self, *exception: object) -> None:
        self._do(f"DROP DATABASE IF EXISTS {self._name} WITH (FORCE)")

    def _do(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.exec_driver_sql(statement)
