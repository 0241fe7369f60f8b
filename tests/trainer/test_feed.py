"""How far apart the two jobs of a pair may be, on a real store."""

import json

import numpy as np
import pytest

from verl_drmas.config import ConfigError
from verl_drmas.store.codec import PackedRow
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.producer import Producer
from verl_drmas.store.records import SessionRecord
from verl_drmas.store.settings import RemoteConfig
from verl_drmas.trainer import feed as module
from verl_drmas.trainer.feed import Feed, PartnerAway


class Clock:
    """Time that only passes in sleeps; `then` is called at each."""

    def __init__(self):
        self.now, self.then, self.naps = 1000.0, lambda: None, 0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.naps += 1
        assert self.naps < 100_000, "it waits for ever"
        self.then()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/pair.db"


def feed(url, **remote):
    return Feed.of("finders", RemoteConfig(store=url, role="sub", **remote))


def played(producer, step):
    """A step of one session with one row, ready for the other job."""
    row = PackedRow("finder", np.array([1]), np.array([2]), np.array([True]), None, 0.5, step - 1, step - 1)
    producer.open_step(step, [7], 1)
    producer.put_session(SessionRecord(step, 7, 0, True, "", 0.5, step - 1, (row,)))
    producer.close_step(step, {"sessions": [[7, 0]]})


@pytest.fixture
def partner(url):
    """The other job, with its lease."""
    made = Consumer(open_store(url), "sub", lease=600)
    made.attach(0)
    yield made
    made.detach()


def train(partner, *steps):
    for step in steps:
        assert partner.claim().step == step
        partner.trained(step)


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_the_first_step_waits_for_nobody(url, clock):
    feed(url).wait(1)
    assert clock.naps == 0


def test_a_step_waits_until_the_one_before_is_trained(url, clock, partner):
    made = feed(url)
    played(made.producer, 1)
    clock.then = lambda: clock.naps == 3 and train(partner, 1)
    made.wait(2)
    assert clock.naps == 3
    assert made.waited == pytest.approx(3 * module.POLL)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_other_job_may_be_behind_by_the_lag_and_no_more(url, clock, partner, lag):
    made = feed(url, max_lag=lag)
    for step in range(1, lag + 2):
        made.wait(step)
        played(made.producer, step)
    assert clock.naps == 0
    clock.then = lambda: clock.naps == 2 and train(partner, 1)
    made.wait(lag + 2)
    assert clock.naps == 2


def test_a_partner_that_is_away_ends_the_run_by_name(url, clock):
    made = feed(url, patience=50)
    played(made.producer, 1)
    with pytest.raises(
        PartnerAway, match=r"step 2 waits for role 'sub' to train step 1, .* \(drmas.models.finders.rem"
    ):
        made.wait(2)
    assert clock.now - 1000 == pytest.approx(50, abs=1)


def test_a_partner_that_lives_may_take_its_time(url, clock, partner):
    made = feed(url, patience=5)
    played(made.producer, 1)
    clock.then = lambda: clock.now > 1100 and partner.claim() and partner.trained(1)
    made.wait(2)
    assert clock.now > 1100


def test_patience_begins_anew_with_each_sign_of_life(url, clock):
    made, partner = feed(url, patience=50), Consumer(open_store(url), "sub", lease=600)
    played(made.producer, 1)
    seen = []

    def then():
        if 1040 < clock.now < 1060 and not seen:
            seen.append(partner.attach(0))
        if clock.now > 1060:
            partner.detach()

    clock.then = then
    with pytest.raises(PartnerAway):
        made.wait(2)
    assert clock.now - 1000 > 60 + 45


def test_what_is_waited_for_is_said_now_and_then(url, clock, partner, caplog):
    made = feed(url)
    played(made.producer, 1)
    clock.then = lambda: clock.now > 1150 and partner.claim() and partner.trained(1)
    made.wait(2)
    assert caplog.text.count("step 2 waits for role sub to train step 1; the other job is alive") == 2


def test_a_run_that_ends_waits_no_more(url, clock):
    made = feed(url)
    played(made.producer, 1)

    def check():
        raise RuntimeError("no server left")

    with pytest.raises(RuntimeError, match="no server left"):
        made.wait(2, check)


# -- dropping ----------------------------------------------------------------------------------------------------------


def test_stale_steps_are_dropped_where_it_says_so(url, clock, caplog):
    made = feed(url, stale="drop")
    played(made.producer, 1)
    made.wait(2)
    assert clock.naps == 0 and "1 groups are older than max_lag=0 and dropped" in caplog.text
    assert made.numbers()["steps/dropped"] == 1


def test_a_step_that_is_being_trained_is_waited_for(url, clock, partner):
    made = feed(url, stale="drop")
    played(made.producer, 1)
    assert partner.claim().step == 1
    clock.then = lambda: clock.naps == 2 and partner.trained(1)
    made.wait(2)
    assert clock.naps == 2 and made.numbers()["steps/dropped"] == 0


# -- numbers, end and resume -------------------------------------------------------------------------------------------


def test_the_time_waited_is_reported_once(url, clock, partner):
    made = feed(url)
    played(made.producer, 1)
    clock.then = lambda: clock.naps == 3 and train(partner, 1)
    made.wait(2)
    numbers = made.numbers()
    assert numbers["waited"] == pytest.approx(3 * module.POLL) and numbers["steps/trained"] == 1
    assert made.numbers()["waited"] == 0
    assert all(type(value) is float for value in numbers.values())


def test_a_run_resumes_with_the_store_it_began_with(url, tmp_path):
    made = feed(url)
    saved = json.loads(json.dumps(made.state()))
    made.producer.finish(2)
    made.begin({"total_training_steps": 4})
    made.resume(saved, 2, chosen=False)
    watching = Consumer(open_store(url), "sub", lease=30)
    watching.attach(0)
    assert watching.finished() is None  # it goes on
    watching.detach()
    with pytest.raises(
        ConfigError, match=r"^drmas.models.finders.remote: the checkpoint of step 2 was saved with store"
    ):
        feed(f"sqlite:///{tmp_path}/other.db").resume(saved, 2, chosen=True)


def test_a_later_checkpoint_in_the_store_is_seen(url):
    made = feed(url)
    made.producer.saved(4)
    with pytest.raises(ConfigError, match="knows of a checkpoint of step 4, and this run would start from step 2"):
        made.resume(made.state(), 2, chosen=False)
    made.resume(made.state(), 2, chosen=True)
    made.resume(made.state(), 4, chosen=False)


def test_a_store_is_opened_once_a_role(url):
    made = feed(url)
    assert isinstance(made.producer, Producer) and made.producer.role == "sub"
    assert made.state() == {"id": open_store(url).id, "role": "sub"}
