"""What a store of two decoupled jobs costs: its speed beside a trainer's, and how its calls grow with what is done.

PostgreSQL is a private server with fsync on; the disk decides what a commit costs on either database.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "store"), str(TESTS.parent)]

from played import row, session  # noqa: E402
from postgres_server import SETTINGS, Server, why_not  # noqa: E402

from verl_drmas.store.consumer import Consumer  # noqa: E402
from verl_drmas.store.database import open_store  # noqa: E402
from verl_drmas.store.numbers import numbers  # noqa: E402
from verl_drmas.store.producer import Producer  # noqa: E402

SIZES = (10_000, 100_000, 1_000_000)  # groups
PER_STEP = 8  # groups
ROUNDS = 30
PROMPT, RESPONSE = 1024, 3072  # tokens of a long row
FASTER = 10  # times that a store must be as fast as a trainer


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request, tmp_path_factory):
    if request.param == "sqlite":
        opened = open_store(f"sqlite:///{tmp_path_factory.mktemp('bench') / 'store.db'}")
        yield opened
        opened.close()
        return
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    server = Server(folder).create().start(SETTINGS | {"fsync": "on", "shared_buffers": "256MB"})
    try:
        opened = open_store(server.url)
        yield opened
        opened.close()
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def trainer_rate():
    """Rows of 4,096 tokens that a trainer of the smallest model takes in a second, on this machine: a bound from above
    for real models on it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from recipes.cpu_arithmetic.tiny_model import build_tiny_model

    folder = Path(tempfile.mkdtemp())
    try:
        build_tiny_model(folder, style="llama", max_position_embeddings=PROMPT + RESPONSE)
        model = AutoModelForCausalLM.from_pretrained(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, model.config.vocab_size, (1, PROMPT + RESPONSE))

    def step():
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step()
    return 1 / statistics.median(step() for _ in range(5))


@pytest.mark.benchmark
def test_a_store_is_faster_than_a_trainer(store, trainer_rate):
    prompts, sessions, steps = 8, 8, 4
    long = row(0, prompt=PROMPT, response=RESPONSE)
    producer, consumer = Producer(store, "speed"), Consumer(store, "speed", keep_steps=1)
    consumer.attach(0)
    writing = {1: [], 8: []}
    reading = []
    for step in range(1, steps + 1):
        producer.open_step(step, range(prompts), sessions)
        records = [replace(session(step, p, n, 0), rows=(long,)) for p in range(prompts) for n in range(sessions)]
        threads = 1 if step % 2 else 8
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            assert all(pool.map(producer.put_session, records))
            writing[threads].append(len(records) / (time.perf_counter() - start))
        producer.close_step(step, {"sessions": [[one.prompt, one.session] for one in records]})
        start = time.perf_counter()
        claimed = consumer.claim()
        consumer.trained(claimed.step)
        consumer.saved(claimed.step)
        reading.append(sum(len(one.rows) for one in claimed.sessions) / (time.perf_counter() - start))
    consumer.detach()
    one, eight, read = (statistics.median(rates) for rates in (writing[1], writing[8], reading))
    kind = "postgresql" if store.postgresql else "sqlite"
    tokens = PROMPT + RESPONSE
    print(
        f"\n{kind}, sessions of one row of {tokens} tokens: written {one:.0f}/s by one thread, {eight:.0f}/s by eight;"
    )
    print(f"  claimed, trained and saved {read:.0f}/s. A trainer of the smallest model takes {trainer_rate:.2f}/s")
    print(f"  times the trainer: written {one / trainer_rate:.0f}, read {read / trainer_rate:.0f} (at least {FASTER})")
    assert min(one, read) >= FASTER * trainer_rate


def fill(store, have, want):
    """Finished groups in bulk, `PER_STEP` a step, each a session with a row of no bytes: 90 % saved, 10 % dropped."""
    first, last = have // PER_STEP + 1, want // PER_STEP
    series = (
        f"SELECT n FROM generate_series({first}, {last}) AS s(n)"
        if store.postgresql
        else f"WITH RECURSIVE s(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM s WHERE n < {last}) SELECT n FROM s"
    )
    groups = " UNION ALL ".join(f"SELECT {number} AS p" for number in range(PER_STEP))
    ids = f"SELECT id, p FROM drmas_step, ({groups}) AS g WHERE role = 'growth' AND step BETWEEN {first} AND {last}"
    empty, yes = ("CAST('' AS BYTEA)", "true") if store.postgresql else ("x''", "1")
    statements = [
        "INSERT INTO drmas_step (role, step, state, attempts, groups, left_out, sessions, rows, bytes, freed, since) "
        f"SELECT 'growth', n, CASE WHEN n % 10 = 0 THEN 'dropped' ELSE 'saved' END, 1, {PER_STEP}, 0, {PER_STEP}, "
        f"{PER_STEP}, 0, {yes}, 0 FROM ({series}) AS f",
        f"INSERT INTO drmas_group (step_id, prompt, sessions, state) SELECT id, p, 1, 'listed' FROM ({ids}) AS f",
        "INSERT INTO drmas_session "
        "(step_id, prompt, session, ended, reason, main_version, rows, bytes, listed, put_at) "
        f"SELECT id, p, 0, {yes}, '', 0, 1, 0, {yes}, 0 FROM ({ids}) AS f",
        "INSERT INTO drmas_row (step_id, prompt, session, position, agent, tokens, checksum, data) "
        f"SELECT id, p, 0, 0, 'a', 0, {empty}, {empty} FROM ({ids}) AS f",
        *(
            "INSERT INTO drmas_event (role, kind, step, groups, sessions, rows, note, at) "
            f"SELECT 'growth', '{kind}', n, {PER_STEP}, {PER_STEP}, {PER_STEP}, '', 0 FROM ({series}) AS f"
            for kind in ("closed", "claimed", "trained", "saved")
        ),
    ]
    for statement in statements:
        store.write(lambda connection, statement=statement: connection.execute(sa.text(statement)))
    store.write(lambda connection: connection.execute(sa.text("ANALYZE")))  # as PostgreSQL's autovacuum does
    if store.postgresql:  # what was filled in is written now, and not while the calls are timed
        store.write(lambda connection: connection.execute(sa.text("CHECKPOINT")))


def rounds(store, size):
    """Milliseconds of each call in the middle of what is there, by name: medians."""
    producer, consumer = Producer(store, "growth"), Consumer(store, "growth", keep_steps=2)
    base = size // PER_STEP
    consumer.attach(base)
    times = {}

    def timed(name, call):
        start = time.perf_counter()
        result = call()
        times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
        return result

    for number in range(1, ROUNDS + 1):
        step = base + number
        timed("open", lambda: producer.open_step(step, range(4), 1))  # noqa: B023 - called at once
        for prompt in range(4):
            record = session(step, prompt, 0)
            timed("put", lambda: producer.put_session(record))  # noqa: B023
        manifest = {"sessions": [[prompt, 0] for prompt in range(4)]}
        timed("close", lambda: producer.close_step(step, manifest))  # noqa: B023
        timed("gate", lambda: producer.gate(step + 1, 0))  # noqa: B023
        claimed = timed("claim", consumer.claim)
        timed("trained", lambda: consumer.trained(claimed.step))  # noqa: B023
        timed("saved", lambda: consumer.saved(claimed.step))  # noqa: B023
        timed("numbers", lambda: numbers(store, "growth"))
    consumer.detach()
    return {name: statistics.median(each) for name, each in times.items()}


@pytest.mark.benchmark
def test_calls_stay_as_quick_as_the_store_grows(store):
    kind = "postgresql" if store.postgresql else "sqlite"
    found, have = {}, 0
    print(f"\n{kind}: median milliseconds of a call with so many finished groups ({ROUNDS} rounds)")
    for size in SIZES:
        start = time.perf_counter()
        fill(store, have, size)
        filled = time.perf_counter() - start
        found[size] = rounds(store, size)
        have = size + ROUNDS * PER_STEP  # the rounds' own steps lie beyond
        calls = ", ".join(f"{name} {ms:.1f}" for name, ms in found[size].items())
        print(f"  {size:>9,}: {calls} (filled in {filled:.0f} s)")
    ratio = found[SIZES[-1]]["claim"] / found[SIZES[0]]["claim"]
    print(f"  claim with {SIZES[-1]:,} over {SIZES[0]:,}: {ratio:.2f}")
    assert ratio <= 5
