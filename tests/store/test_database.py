"""Opening a store, what it survives, and what its errors show."""

import logging
import multiprocessing
import os
import pickle
import sqlite3
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from played import opened, play, put_steps, session, tamper

from verl_drmas.store import away, database, disks, migrations
from verl_drmas.store.database import Store, open_store, parse
from verl_drmas.store.errors import StoreAway, StoreError
from verl_drmas.store.producer import Producer
from verl_drmas.store.schema import METADATA, groups
from verl_drmas.store.verify import verify

SPAWN = multiprocessing.get_context("spawn")
SECRET = "very:secret"
NOWHERE = "postgresql+psycopg://user:very%3Asecret@127.0.0.1:9/base"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("no url", "can't be read"),
        ("sqlite://", "is no file"),
        ("sqlite:///:memory:", "is no file"),
        ("mysql://user:very%3Asecret@host/base", "no known kind"),
        ("postgresql://user:very%3Asecret@host", "names no database"),
        ("postgresql+psycopg2://user:very%3Asecret@host/base?password=very:secret", "no known kind"),
        ("postgresql://user:very:secret@host:port/base", "can't be read"),
    ],
)
def test_a_wrong_url_is_named_with_what_is_right_and_without_its_password(url, message):
    with pytest.raises(StoreError, match=message) as error:
        open_store(url)
    assert "sqlite:///path" in str(error.value)
    shown = str(error.value) + repr(error.value.__cause__) + repr(error.value.__context__)
    assert "secret" not in shown


def test_every_spelling_of_postgresql_is_one():
    for scheme in ("postgresql", "postgresql+psycopg"):
        assert parse(f"{scheme}://u@h/d").drivername == "postgresql+psycopg"


def test_a_relative_path_holds_in_other_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite:///runs/one/store.db")
    monkeypatch.chdir("/")
    Producer(store, "sub").saved(3)
    assert (tmp_path / "runs/one/store.db").is_file()
    assert str(tmp_path) in store.url


def test_opening_twice_is_opening_one_store(url, producer):
    again = open_store(url)
    producer.saved(3)
    assert again.id == producer.store.id and len(again.id) == 32
    assert Producer(again, "sub").last_saved() == 3


def test_nothing_is_made_where_a_store_is_expected(url, tmp_path):
    with pytest.raises(StoreError, match=r"no such file|holds no store"):
        open_store(url, create=False)
    assert list(tmp_path.iterdir()) == []
    first = open_store(url)
    assert open_store(url, create=False).id == first.id


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "folder.db").mkdir()
    start = time.monotonic()
    with pytest.raises(StoreError, match="unable to open") as error:
        open_store(f"sqlite:///{tmp_path / 'folder.db'}", patience=300)
    assert not isinstance(error.value, StoreAway)
    assert time.monotonic() - start < 60


def test_another_file_is_no_store(tmp_path):
    (tmp_path / "text.db").write_text("no database at all" * 100)
    with pytest.raises(StoreError, match="not a database"):
        open_store(f"sqlite:///{tmp_path / 'text.db'}", patience=300)


def test_a_pickled_store_is_the_same(producer):
    producer.saved(3)
    again = pickle.loads(pickle.dumps(producer))
    assert (again.store.id, again.last_saved()) == (producer.store.id, 3)


def test_a_store_shows_no_password(postgresless=NOWHERE):
    store = Store(postgresless, 0.1)
    assert "secret" not in repr(store) + store.url + str(store)
    assert "***" in store.url


def test_sqlite_is_as_durable_as_it_can_be(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    pragmas = ("journal_mode", "synchronous", "auto_vacuum")
    found = store.read(lambda c: [c.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas])
    assert found == ["wal", 2, 2]


def test_the_tables_are_those_that_queries_name(store):
    found = store.read(
        lambda connection: {
            name: {column["name"]: column["nullable"] for column in sa.inspect(connection).get_columns(name)}
            for name in sa.inspect(connection).get_table_names()
        }
    )
    assert {name: set(columns) for name, columns in found.items()} == {
        table.name: set(table.columns.keys()) for table in METADATA.tables.values()
    }
    for table in METADATA.tables.values():
        for column in table.columns:
            if not column.primary_key:
                assert found[table.name][column.name] == column.nullable, column


def test_an_old_store_is_brought_up_to_date_once(url, monkeypatch):
    old = open_store(url)
    play(Producer(old, "sub"), 1)
    more = [*migrations.MIGRATIONS, "ALTER TABLE drmas_role ADD COLUMN colour TEXT; CREATE TABLE drmas_new (x {real})"]
    monkeypatch.setattr(migrations, "MIGRATIONS", more)
    monkeypatch.setattr(database, "MIGRATIONS", more)
    new = open_store(url)
    assert new.id == old.id
    tamper(new, "UPDATE drmas_role SET colour = 'red'")
    assert open_store(url).read(lambda c: c.exec_driver_sql("SELECT count(*) FROM drmas_new").scalar()) == 0
    assert verify(new) == []


def test_a_migration_that_fails_leaves_the_old_store(url, monkeypatch):
    old = open_store(url)
    with monkeypatch.context() as patch:
        for module in (migrations, database):
            patch.setattr(module, "MIGRATIONS", [*migrations.MIGRATIONS, "CREATE TABLE drmas_new (x {real}); NONSENSE"])
        with pytest.raises(StoreError, match="syntax error"):
            open_store(url)
    assert open_store(url).id == old.id
    assert old.read(lambda c: sa.inspect(c).has_table("drmas_new")) is False


def test_a_store_of_a_newer_version_is_refused(url, store):
    tamper(store, "UPDATE drmas_meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(StoreError, match=r"schema 99 and this version knows \d+; upgrade verl-drmas"):
        open_store(url)


@pytest.mark.process
def test_many_may_open_a_new_store_at_once(url):
    with ProcessPoolExecutor(4, mp_context=SPAWN) as pool:
        assert len(set(pool.map(opened, [url] * 12))) == 1


@pytest.mark.process
def test_processes_write_into_the_same_steps(producer, store):
    with ProcessPoolExecutor(4, mp_context=SPAWN) as pool:
        assert len(set(pool.map(put_steps, [producer] * 4, range(4)))) > 1
    every = [[prompt, number] for prompt in range(4) for number in range(4)]
    for step in range(1, 6):
        producer.close_step(step, {"sessions": every})
    assert verify(store) == []


@pytest.mark.process
def test_a_forked_process_has_connections_of_its_own(producer, store):
    producer.saved(3)  # the parent has a connection
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            producer.saved(4)
            os.write(writing, str(producer.last_saved()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert answer.read() == "4"
    os.waitpid(child, 0)
    assert producer.last_saved() == 4
    producer.saved(5)
    assert producer.last_saved() == 5


def test_more_threads_than_connections(producer):
    producer.open_step(1, range(64), 1)
    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(producer.put_session, [session(1, prompt, 0) for prompt in range(64)]))


def test_a_locked_sqlite_is_waited_for(tmp_path):
    path = tmp_path / "store.db"
    producer = Producer(open_store(f"sqlite:///{path}", patience=60), "sub")
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.5, lambda: other.execute("ROLLBACK"))
    timer.start()
    producer.saved(3)
    timer.join()
    assert producer.last_saved() == 3
    other.execute("BEGIN IMMEDIATE")
    impatient = Producer(open_store(f"sqlite:///{path}", patience=0.3), "sub")
    assert impatient.last_saved() == 3  # readers don't wait
    with pytest.raises(StoreAway, match=r"locked; tried for 0\.3 s"):
        impatient.saved(4)
    other.close()


def test_a_database_that_is_away_is_waited_for_and_named_without_its_password(caplog):
    start = time.monotonic()
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreAway) as error:
        open_store(NOWHERE, patience=4)
    assert 0.5 < time.monotonic() - start < 60
    assert "user:***@127.0.0.1:9/base" in str(error.value)
    assert "tried for 4 s" in str(error.value)
    assert "trying again" in caplog.text
    everything, cause = caplog.text, error.value
    while cause is not None:
        everything += repr(cause)
        cause = cause.__cause__ or cause.__context__
    assert "secret" not in everything


def test_which_errors_pass_by_themselves():
    import psycopg

    class WithState(psycopg.OperationalError):
        def __init__(self, state):
            self.state = state
            super().__init__("text")

        @property
        def sqlstate(self):
            return self.state

    def passes(original, kind=sa.exc.OperationalError):
        return isinstance(away.translated(kind("SELECT", {}, original), sa.make_url(NOWHERE)), StoreAway)

    for state in ("08006", "53300", "57P01", "57P03", "40001", "40P01", "55P03", "25P03", "58030"):
        assert passes(WithState(state)), state
    for state in ("28P01", "3D000", "42P01", "23505", "22P05", "25006"):
        assert not passes(WithState(state)), state
    assert passes(psycopg.OperationalError("connection refused"))
    assert not passes(psycopg.OperationalError('password authentication failed for user "user"'))
    assert not passes(psycopg.OperationalError('database "base" does not exist'))


@pytest.mark.process
def test_a_wrong_password_or_database_is_said_at_once(postgres_url):
    right = sa.make_url(postgres_url)
    start = time.monotonic()
    for wrong, message in (
        (right.set(password="wrong-secret"), "password authentication failed"),
        (right.set(database="nothing"), "does not exist"),
    ):
        with pytest.raises(StoreError, match=message) as error:
            open_store(wrong.render_as_string(hide_password=False), patience=300)
        assert not isinstance(error.value, StoreAway)
        assert "wrong-secret" not in str(error.value)
    assert time.monotonic() - start < 60


def test_what_a_database_refuses_is_one_of_our_errors_without_values(store, producer):
    play(producer, 1, close=False)
    double = groups.insert().values(step_id=1, prompt=0, sessions=123456789, state="open")
    with pytest.raises(StoreError, match=r"(?i)unique") as error:
        store.write(lambda connection: connection.execute(double))
    assert "123456789" not in str(error.value) + str(error.value.__cause__)
    assert "\n" not in str(error.value)


def test_a_reader_sees_one_state_and_cannot_write(store, producer, url):
    def work(connection):
        count = sa.select(sa.func.count()).select_from(groups)
        before = connection.execute(count).scalar()
        Producer(open_store(url), "sub").open_step(1, [0, 1, 2], 1)
        return before, connection.execute(count).scalar()

    assert store.read(work) == (0, 0)
    assert producer.gate(2, 0).unfinished == (1,)


def test_network_disks_are_told_from_local_ones(tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mounts"
    folder = tmp_path / "shared folder"
    escaped = str(folder).replace(" ", r"\040")
    monkeypatch.setattr(disks, "MOUNTS", mounts)
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\nnone {escaped}/local tmpfs rw 0 0\n")
    assert disks.network_disk(folder / "x" / "store.db") == "nfs4"
    assert disks.network_disk(folder / "local" / "store.db") is None
    assert disks.network_disk(tmp_path / "shared folders" / "store.db") is None
    open_store(f"sqlite:///{folder / 'store.db'}")
    assert "lies on a network disk (nfs4)" in caplog.text
    monkeypatch.setattr(disks, "MOUNTS", tmp_path / "none")
    assert disks.network_disk(folder) is None


def test_the_settings_need_no_database():
    """`config` imports them in processes that never see a store."""
    import subprocess
    import sys

    code = "import sys, verl_drmas.store.settings; print([m for m in ('sqlalchemy', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_the_store_imports_no_trainer():
    forbidden = ("ray", "verl", "torch", "vllm")
    for path in Path(database.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                assert words[1].split(".")[0] not in forbidden, f"{path.name}: {line}"
