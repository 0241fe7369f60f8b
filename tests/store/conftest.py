"""Stores on both databases; the PostgreSQL ones are `process` tests."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from played import BOTH  # noqa: E402
from postgres import postgres_admin, postgres_database, postgres_url  # noqa: E402, F401

from verl_drmas.store.consumer import Consumer  # noqa: E402
from verl_drmas.store.database import open_store  # noqa: E402
from verl_drmas.store.producer import Producer  # noqa: E402


@pytest.fixture(params=BOTH)
def url(request, tmp_path):
    """URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def store(url):
    opened = open_store(url, patience=30)
    yield opened
    opened.close()


@pytest.fixture
def producer(store):
    return Producer(store, "sub")


@pytest.fixture
def attach(store):
    """Makes an attached consumer of role sub; all are detached at the end."""
    made = []

    def make(position=0, *, rewind_saved=False, **options):
        consumer = Consumer(store, "sub", **{"lease": 30, **options})
        consumer.attach(position, rewind_saved=rewind_saved)
        made.append(consumer)
        return consumer

    yield make
    for consumer in made:
        consumer.detach()
