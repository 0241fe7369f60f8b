"""The tables of a store, for queries; `migrations.py` makes them.

A *step* of the main job is what changes hands, as a whole:

    open -> ready -> claimed -> trained -> saved
         -> empty    claimed -> ready              released: the consumer stopped or was replaced
                     trained | saved -> ready      rewound: the consumer resumed from an earlier checkpoint
            ready | claimed -> dropped | dead      too late for the main job | can't be trained

Each arrow is one row of `drmas_event`, written in the transaction that follows it. Times are seconds since 1970 by the
database's clock (PostgreSQL) or the machine's (SQLite, whose users share one machine), so that hosts with different
clocks agree on leases.
"""

from __future__ import annotations

import operator

import sqlalchemy as sa

# States of a step.
OPEN, READY, EMPTY, CLAIMED, TRAINED, SAVED, DEAD, DROPPED = (
    "open",
    "ready",
    "empty",
    "claimed",
    "trained",
    "saved",
    "dead",
    "dropped",
)
STATES = (OPEN, READY, EMPTY, CLAIMED, TRAINED, SAVED, DEAD, DROPPED)
UNFINISHED = (OPEN, READY, CLAIMED)
FINISHED = (EMPTY, SAVED, DEAD, DROPPED)  # nobody needs the rows any more

# States of a group beside its step's: what the manifest said of it.
LISTED, LEFT_OUT = "listed", "left_out"

METADATA = sa.MetaData()


class Whole(sa.TypeDecorator):
    """A whole number, also one of numpy's, which SQLite would refuse."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value, dialect) -> int | None:
        return None if value is None else operator.index(value)


def _integer(name: str, **options) -> sa.Column:
    return sa.Column(name, Whole, nullable=options.pop("nullable", False), **options)


meta = sa.Table(
    "drmas_meta",
    METADATA,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

roles = sa.Table(
    "drmas_role",
    METADATA,
    sa.Column("role", sa.Text, primary_key=True),
    sa.Column("contract", sa.Text),
    _integer("finish", nullable=True),
    _integer("main_saved"),
    _integer("version"),
    sa.Column("endpoint", sa.Text),
    sa.Column("owner", sa.Text),
    sa.Column("lease", sa.Text),  # token of the consumer that has the role
    sa.Column("lease_until", sa.Double),
    sa.Column("seen", sa.Double),
)

steps = sa.Table(
    "drmas_step",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("role", sa.Text, nullable=False),
    _integer("step"),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("lease", sa.Text),  # token of the consumer that claimed or trained it
    _integer("attempts"),
    # Set when the step closes: what the manifest lists, the groups it leaves out, and the bytes of all rows.
    _integer("groups"),
    _integer("left_out"),
    _integer("sessions"),
    _integer("rows"),
    _integer("bytes"),
    sa.Column("freed", sa.Boolean, nullable=False),  # the rows' bytes are gone, or there never were any
    sa.Column("since", sa.Double, nullable=False),  # when it came into this state
    sa.Column("closed_at", sa.Double),
)

# Apart from the steps, which are scanned for numbers: a manifest may be long.
manifests = sa.Table(
    "drmas_manifest",
    METADATA,
    _integer("step_id", primary_key=True, autoincrement=False),
    sa.Column("manifest", sa.Text, nullable=False),
)

groups = sa.Table(
    "drmas_group",
    METADATA,
    _integer("step_id", primary_key=True, autoincrement=False),
    _integer("prompt", primary_key=True, autoincrement=False),
    _integer("sessions"),  # K
    sa.Column("state", sa.Text, nullable=False),  # open, listed, left_out
)

sessions = sa.Table(
    "drmas_session",
    METADATA,
    _integer("step_id", primary_key=True, autoincrement=False),
    _integer("prompt", primary_key=True, autoincrement=False),
    _integer("session", primary_key=True, autoincrement=False),
    sa.Column("ended", sa.Boolean, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("outcome", sa.Double),
    _integer("main_version"),
    _integer("rows"),
    _integer("bytes"),
    sa.Column("listed", sa.Boolean),  # None until the step closes
    sa.Column("put_at", sa.Double, nullable=False),
)

rows = sa.Table(
    "drmas_row",
    METADATA,
    _integer("step_id", primary_key=True, autoincrement=False),
    _integer("prompt", primary_key=True, autoincrement=False),
    _integer("session", primary_key=True, autoincrement=False),
    _integer("position", primary_key=True, autoincrement=False),
    sa.Column("agent", sa.Text, nullable=False),
    _integer("tokens"),
    sa.Column("checksum", sa.LargeBinary, nullable=False),
    sa.Column("data", sa.LargeBinary),  # None once freed
)

events = sa.Table(
    "drmas_event",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    _integer("step", nullable=True),
    _integer("groups"),
    _integer("sessions"),
    _integer("rows"),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
)

counters = sa.Table(
    "drmas_counter",
    METADATA,
    sa.Column("role", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    _integer("n"),
)
