"""Which database errors pass by themselves, and waiting for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_before_delay
from tenacity.wait import wait_exponential, wait_random

from verl_drmas.store.errors import StoreAway, StoreError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# PostgreSQL's classes of errors (appendix A of its manual): lost connections, no room, operator's intervention,
# deadlocks, locks, the server's own input and output; 25P03 ends a transaction that idled too long.
PASSING = ("08", "53", "57", "40", "55", "58", "25P03")
# A connection that is refused for one of these reasons will be refused again.
REFUSED = ("authentication failed", "does not exist", "no pg_hba.conf entry", "permission denied")
SQLITE_PASSING = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_FULL", "SQLITE_PROTOCOL")


def shown(url: sa.URL) -> str:
    """A URL without its secrets: no password, and none of the options, which may hold one."""
    return url.set(query={}).render_as_string(hide_password=True)


def _passes(error: exc.SQLAlchemyError) -> bool:
    if isinstance(error, exc.TimeoutError):  # no free connection of the pool
        return True
    if not isinstance(error, exc.DBAPIError):
        return False
    if name := getattr(error.orig, "sqlite_errorname", None):
        return name.startswith(SQLITE_PASSING)
    state = getattr(error.orig, "sqlstate", None)
    if state:
        return state.startswith(PASSING)
    if isinstance(error, exc.OperationalError | exc.InterfaceError):
        text = str(error.orig)
        if "locked" in text or "busy" in text:  # Python 3.10's sqlite3 gives no error name
            return True
        module = type(error.orig).__module__
        return module.startswith("psycopg") and not any(reason in text for reason in REFUSED)
    return error.connection_invalidated


def translated(error: exc.SQLAlchemyError, url: sa.URL) -> StoreError:
    """One of our errors for one of SQLAlchemy's: one line, without the statement's values or the password."""
    cause = getattr(error, "orig", None) or error
    text = " ".join(str(cause).split())
    if url.password:
        text = text.replace(str(url.password), "***")
    what = f"store {shown(url)}: {type(cause).__name__}: {text}"
    return StoreAway(what) if _passes(error) else StoreError(what)


def patiently(attempt: Callable[[], T], patience: float) -> T:
    """Call until it raises no `StoreAway`, at most `patience` seconds.

    Raises:
        StoreAway: The last one, with what to do.
    """

    def note(state: RetryCallState) -> None:
        if state.attempt_number == 4:  # the first few are an ordinary wait for a lock
            assert state.outcome is not None
            logger.warning("%s; trying again for up to %.0f s", state.outcome.exception(), patience)

    retrying = Retrying(
        retry=retry_if_exception_type(StoreAway),
        wait=wait_exponential(multiplier=0.05, max=5) + wait_random(0, 0.1),
        stop=stop_before_delay(patience),
        before_sleep=note,
        reraise=True,
    )
    try:
        result = retrying(attempt)
    except StoreAway as error:
        raise StoreAway(
            f"{error}; tried for {patience:g} s: start the database, or give its right address, and start the job again"
        ) from error
    if retrying.statistics.get("attempt_number", 1) > 4:
        logger.info("the store answers again")
    return result
