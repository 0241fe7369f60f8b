"""kill -9 of both jobs, and of the database, all the time: everything is trained once, in order, and nothing is lost.

The jobs are those of store_jobs.py. What the sub job has at the end, its "weights", is compared with a run that nobody
disturbed.
"""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from played import states
from postgres import private_server
from store_jobs import weights

from verl_drmas.store.database import open_store
from verl_drmas.store.numbers import numbers
from verl_drmas.store.verify import verify

JOBS = Path(__file__).with_name("store_jobs.py")
SECONDS = 700


class Job:
    """A process that is started again whenever it was killed."""

    def __init__(self, name, url, folder, steps):
        self.command = [sys.executable, str(JOBS), name, url, str(folder), str(steps)]
        self.log = folder / f"{name}.log"
        self.kills = 0
        self.start()

    def start(self):
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self):
        """kill -9, and start again; False if it had ended well already."""
        self.process.kill()
        if self.process.wait() == 0:
            return False
        self.kills += 1
        self.start()
        return True

    def finish(self, deadline):
        try:
            status = self.process.wait(timeout=max(1, deadline - time.monotonic()))
        finally:
            self.process.kill()
        assert status == 0, self.log.read_text()[-3000:]


def progress(store):
    """How far the jobs are: a number that grows with every event and session."""
    text = "SELECT (SELECT count(*) FROM drmas_event) + (SELECT count(*) FROM drmas_session)"
    return store.read(lambda connection: connection.exec_driver_sql(text).scalar())


def drill(url, folder, steps, kills, seed, server=None, server_kills=0):
    draw = random.Random(seed)
    store = open_store(url, patience=120)
    deadline = time.monotonic() + SECONDS
    jobs = [Job(name, url, folder, steps) for name in ("main", "sub")]
    victims = [0, 1] * (kills // 2) + [2] * server_kills
    draw.shuffle(victims)
    try:
        for victim in victims:
            seen, wanted = progress(store), draw.randrange(4, 25)  # something happens between two kills
            while progress(store) < seen + wanted and any(job.process.poll() is None for job in jobs):
                assert time.monotonic() < deadline, [job.log.read_text()[-1000:] for job in jobs]
                assert all(job.process.poll() in (None, 0) for job in jobs), [j.log.read_text()[-3000:] for j in jobs]
                time.sleep(0.01)
            time.sleep(draw.random() * 0.05)
            if victim == 2:
                server.kill()
                time.sleep(draw.random())
                server.start()
            else:
                jobs[victim].kill()
        for job in jobs:
            job.finish(deadline)
    finally:
        for job in jobs:
            job.process.kill()
    assert json.loads((folder / "checkpoint.json").read_text())["weights"] == weights(steps)
    assert verify(store) == []
    assert set(states(store)) == set(range(1, steps + 1))
    assert set(states(store).values()) <= {"saved", "empty"}
    found = numbers(store, "sub")
    print(
        f"\n{steps} steps, kills: main {jobs[0].kills}, sub {jobs[1].kills}, server {server_kills}; "
        f"rewound {found.get('count/rewound', 0):.0f}, released {found.get('count/released', 0):.0f}, "
        f"duplicate {found.get('count/duplicate', 0):.0f}"
    )
    store.close()
    return jobs, found


@pytest.mark.process
def test_killed_jobs_resume(url, tmp_path):
    jobs, _ = drill(url, tmp_path, steps=10, kills=4, seed=1)
    assert sum(job.kills for job in jobs) >= 2


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(2))
def test_jobs_that_are_killed_all_the_time(tmp_path, seed):
    jobs, found = drill(f"sqlite:///{tmp_path / 'store.db'}", tmp_path, steps=40, kills=20, seed=seed)
    assert min(job.kills for job in jobs) >= 4
    assert found["count/rewound"] > 0 and found["count/duplicate"] > 0


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(2))
def test_jobs_and_their_server_are_killed_all_the_time(tmp_path, seed):
    with private_server() as server:
        jobs, found = drill(server.url, tmp_path, steps=40, kills=16, seed=seed, server=server, server_kills=4)
    assert min(job.kills for job in jobs) >= 4
    assert found["count/rewound"] > 0 and found["count/duplicate"] > 0


@pytest.mark.process
def test_a_killed_server_is_waited_for(tmp_path):
    """Threads write all the time while the server dies under them."""
    from played import session

    from verl_drmas.store.producer import Producer

    with private_server() as server:
        store = open_store(server.url, patience=120)
        producer = Producer(store, "sub")
        producer.open_step(1, range(40), 10)
        errors = []

        def put(thread):
            try:
                for number in range(thread, 400, 4):
                    producer.put_session(session(1, number // 10, number % 10))
            except Exception as error:  # noqa: BLE001 - reported below
                errors.append(error)

        threads = [threading.Thread(target=put, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(0.4)
            server.kill()
            time.sleep(0.3)
            server.start()
        for thread in threads:
            thread.join()
        assert errors == []
        pairs = [[number // 10, number % 10] for number in range(400)]
        producer.close_step(1, {"sessions": pairs})
        assert verify(store) == []
        store.close()
