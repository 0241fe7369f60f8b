"""Calls to a model of another job, through a real gateway on a real socket in this process."""

import asyncio
import logging
import pickle
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from pydantic import SecretStr

from verl_drmas.config import ConfigError
from verl_drmas.gateway import finder
from verl_drmas.gateway.app import Gateway, create_app
from verl_drmas.gateway.serve import Serving
from verl_drmas.rollout import remote
from verl_drmas.rollout.client import TeamClient
from verl_drmas.rollout.remote import RemoteClient
from verl_drmas.store.codec import PackedRow
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.errors import StoreAway, StoreError
from verl_drmas.store.numbers import numbers
from verl_drmas.store.producer import Producer as Main
from verl_drmas.store.records import SessionRecord
from verl_drmas.store.settings import GatewayConfig, RemoteConfig
from verl_drmas.workflows import SessionFailed

CONFIG = OmegaConf.create({"actor_rollout_ref": {"model": {"path": "sub"}}})
TOKEN = "sesame-0123456789"
PARAMS = {"temperature": 1.0, "seed": 11, "max_tokens": 8, "logprobs": True}


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    for name, value in {"FIRST_WAIT": 0.01, "LONGEST_WAIT": 0.05, "LONGEST_BUSY": 0.05}.items():
        monkeypatch.setattr(remote, name, value)
    for name, value in {"FRESH": 0.02, "SOON": 0.01}.items():
        monkeypatch.setattr(finder, name, value)
    monkeypatch.setattr("verl_drmas.gateway.serve.GRACE", 1)
    monkeypatch.setenv("DRMAS_GATEWAY_TOKEN", TOKEN)


class Producer:
    """The store of both jobs."""

    def __init__(self):
        self.endpoint, self.alive, self.needed = None, False, {}
        self.error, self.asked, self.counted = None, [], {}

    def consumer(self):
        self.asked.append("consumer")
        if self.error:
            raise self.error
        return SimpleNamespace(endpoint=self.endpoint, alive=self.alive, version=0)

    def gate(self, step, max_lag):
        self.asked.append(("gate", step, max_lag))
        if self.error:
            raise self.error
        return SimpleNamespace(needed=self.needed.get(step, 0), unfinished=())

    def count(self, name, n=1):
        if self.error:
            raise self.error
        self.counted[name] = self.counted.get(name, 0) + n


class Job:
    """The other job: an engine and a gateway that can be stopped and started again."""

    def __init__(self, producer, port=0, version=3, **settings):
        self.producer, self.port, self.version, self.calls, self.errors = producer, port, version, [], []
        self.settings = GatewayConfig(**settings)
        self.free = asyncio.Event()
        self.free.set()
        self.cancelled = 0

    async def ask(self, id, prompt_ids, sampling):
        self.calls.append((id, prompt_ids, sampling))
        if self.errors:
            raise self.errors.pop(0)
        first = self.version
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return SimpleNamespace(
            token_ids=[i + 1 for i in prompt_ids],
            log_probs=[-0.5] * len(prompt_ids),
            stop_reason="completed",
            num_preempted=2,
            extra_fields={"min_global_steps": first, "max_global_steps": self.version, "num_cached_tokens": 7},
        )

    async def start(self, open=True, linger=30.0):
        self.gateway = Gateway(self.ask, "sub", SecretStr(TOKEN), self.settings, linger=linger)
        if open:
            self.gateway.gate.open(self.version)
        self.serving = await Serving.start(create_app(self.gateway), self.settings, self.port, wait=30)
        self.port = self.serving.port
        self.producer.endpoint, self.producer.alive = f"http://127.0.0.1:{self.port}", True

    async def kill(self):
        """As `kill -9`: connections end, the port is closed, the lease runs on."""
        for connection in list(self.serving._server.server_state.connections):
            connection.transport.abort()
        await self.serving.stop()

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        self.free.set()
        await self.serving.stop()


def make(producer, **settings):
    return RemoteClient(CONFIG, RemoteConfig(store="sqlite:///x", role="sub", **settings), producer=producer)


async def ask(client, step=4, validate=False, prompt=(5, 6)):
    return await client.generate("r", prompt_ids=list(prompt), sampling_params=PARAMS, step=step, validate=validate)


async def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.005)


def run(test, **settings):
    """Runs `test(client, job, producer)` with a job that serves."""

    async def whole():
        producer = Producer()
        client = make(producer, **settings)
        async with Job(producer) as job:
            try:
                await asyncio.wait_for(test(client, job, producer), 90)
            finally:
                await client.close()

    asyncio.run(whole())


def test_an_answer_is_as_verls_client_gives_it():
    async def test(client, job, producer):
        job.free.clear()
        asked = asyncio.create_task(ask(client))
        await until(lambda: job.calls)
        job.version = 4
        job.free.set()
        output = await asked
        assert (output.token_ids, output.log_probs) == ([6, 7], [-0.5, -0.5])
        assert (output.stop_reason, output.num_preempted) == ("completed", 2)
        assert output.extra_fields == {
            "global_steps": 4,
            "min_global_steps": 3,
            "max_global_steps": 4,
            "num_cached_tokens": 7,
        }
        ((id, prompt_ids, sampling),) = job.calls
        assert prompt_ids == [5, 6] and sampling == PARAMS and id != "r"
        assert client.retried == 0 and producer.counted == {}

    run(test)


def test_every_call_has_an_id_of_its_own_whatever_the_callers_is():
    async def test(client, job, producer):
        await asyncio.gather(*(ask(client, prompt=[i]) for i in range(20)))
        assert len({id for id, _, _ in job.calls}) == 20

    run(test)


@pytest.mark.parametrize(("validate", "step"), [(False, 4), (True, 5)])
def test_the_version_that_is_asked_for_is_the_steps_and_validation_comes_after_it(validate, step):
    async def test(client, job, producer):
        producer.needed = {4: 2, 5: 3, 6: 99}
        await asyncio.gather(*(ask(client, validate=validate) for _ in range(30)))
        await ask(client, validate=validate)
        assert [a for a in producer.asked if a != "consumer"] == [("gate", step, 1)]

    run(test, max_lag=1)


def test_a_call_waits_for_weights_that_are_new_enough():
    async def test(client, job, producer):
        producer.needed = {4: 4}
        asked = asyncio.create_task(ask(client))
        await until(lambda: job.gateway.answers.counts["refused/503"] >= 2)
        assert not asked.done() and not job.calls
        job.version = 4
        job.gateway.gate.open(4)
        assert (await asked).extra_fields["min_global_steps"] == 4
        assert client.retried == 0  # waiting is no fault

    run(test)


def test_a_version_that_nobody_needs_any_more_is_not_waited_for():
    """Its step was given up after the call had begun."""

    async def test(client, job, producer):
        producer.needed = {4: 4}
        asked = asyncio.create_task(ask(client))
        await until(lambda: job.gateway.answers.counts["refused/503"] >= 1)
        producer.needed = {4: 3}
        assert (await asked).extra_fields["min_global_steps"] == 3

    run(test)


def test_a_closed_gateway_is_waited_for_beyond_all_patience():
    async def test(client, job, producer):
        producer.alive = False
        job.gateway.gate.close()
        asked = asyncio.create_task(ask(client))
        await until(lambda: job.gateway.answers.counts["refused/503"] >= 3)
        assert not asked.done()
        job.gateway.gate.open(3)
        await asked

    run(test, patience=0.05)


def test_a_gateway_that_is_killed_and_started_again_is_asked_for_the_same_call_again():
    async def test(client, job, producer):
        job.free.clear()
        asked = [asyncio.create_task(ask(client, prompt=[i])) for i in range(5)]
        await until(lambda: len(job.calls) == 5)
        await job.kill()
        await until(lambda: client.retried >= 5)
        job.version = 2  # it resumed from a checkpoint
        await job.start(open=False)
        await until(lambda: job.gateway.answers.counts["refused/503"] >= 1)
        assert len(job.calls) == 5
        job.free.set()
        job.gateway.gate.open(2)
        outputs = await asyncio.gather(*asked)
        assert [output.token_ids for output in outputs] == [[i + 1] for i in range(5)]
        assert {output.extra_fields["max_global_steps"] for output in outputs} == {2}  # the label is the answer's
        first, second = ({id for id, _, _ in calls} for calls in (job.calls[:5], job.calls[5:]))
        assert first == second
        await client.close()
        assert producer.counted["retries"] == client.retried >= 5

    run(test)


def test_a_job_that_comes_back_elsewhere_is_found_in_the_store():
    async def test(client, job, producer):
        await ask(client)
        await job.kill()
        moved = Job(producer)
        asked = asyncio.create_task(ask(client))
        await until(lambda: client.retried >= 1)
        async with moved:
            assert (await asked).token_ids == [6, 7]
        assert moved.port != job.port and len(moved.calls) == 1

    run(test)


def test_a_broken_connection_joins_the_answer_on_its_way():
    async def test(client, job, producer):
        job.free.clear()
        asked = asyncio.create_task(ask(client))
        await until(lambda: job.calls)
        for connection in list(job.serving._server.server_state.connections):
            connection.transport.abort()
        await until(lambda: job.gateway.answers.counts["joined"] == 1)
        job.free.set()
        assert (await asked).token_ids == [6, 7]
        assert len(job.calls) == 1 and client.retried == 1

    run(test)


def test_the_version_sent_along_stays_the_same_for_an_answer_on_its_way():
    """What other calls learn meanwhile must not make a conflict of a call's second attempt."""

    async def test(client, job, producer):
        producer.needed = {4: 3}
        job.free.clear()
        asked = asyncio.create_task(ask(client))
        await until(lambda: job.calls)
        producer.needed = {4: 2}
        await asyncio.sleep(0.05)
        assert await client._finder.needed(4, again=True) == 2
        for connection in list(job.serving._server.server_state.connections):
            connection.transport.abort()
        await until(lambda: job.gateway.answers.counts["joined"] == 1)
        job.free.set()
        assert (await asked).token_ids == [6, 7]

    run(test)


def test_an_answer_that_takes_longer_than_a_silence_may_is_waited_for():
    """The other job's lease has run out, but its gateway says that it is well."""

    async def test(client, job, producer):
        client._caller._read = 0.3
        producer.alive = False
        job.free.clear()
        asked = asyncio.create_task(ask(client))
        await until(lambda: job.gateway.answers.counts["joined"] >= 2)
        assert not asked.done()
        job.free.set()
        await asked
        assert len(job.calls) == 1

    run(test, patience=0.05)


def test_a_failing_engine_is_asked_again_and_not_for_ever():
    async def test(client, job, producer):
        job.errors = [ValueError("x")] * 3
        assert (await ask(client)).token_ids == [6, 7]
        assert client.retried == 3
        job.errors = [ValueError("x")] * 100
        with pytest.raises(SessionFailed, match=r"8 failures in a row.*ValueError") as failed:
            await ask(client)
        assert failed.value.reason == "remote"
        assert len(job.errors) == 92

    run(test)


def test_a_job_that_is_gone_fails_the_session_after_its_patience():
    async def test(client, job, producer):
        await job.kill()
        producer.alive = False
        began = time.monotonic()
        with pytest.raises(SessionFailed, match=r"no sign of life for .*remote\.patience.*ConnectError") as failed:
            await ask(client)
        assert failed.value.reason == "remote"
        assert time.monotonic() - began >= 0.5
        assert client.retried >= 2

    run(test, patience=0.5)


def test_a_job_that_never_came_fails_the_session_after_its_patience():
    async def test():
        client = make(Producer(), patience=0.3)
        with pytest.raises(SessionFailed, match="the store knows no gateway yet"):
            await ask(client)
        await client.close()

    asyncio.run(test())


def test_a_job_that_lives_by_its_lease_is_waited_for_and_the_patience_begins_when_it_ends():
    async def test(client, job, producer):
        await job.kill()
        asked = asyncio.create_task(ask(client))
        await asyncio.sleep(1.0)
        assert not asked.done()
        producer.alive = False
        with pytest.raises(SessionFailed, match="no sign of life"):
            await asked

    run(test, patience=0.2)


def test_a_sign_of_life_starts_the_patience_anew(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def test(client, job, producer):
        async def some_attempts():
            mark = client.retried
            await until(lambda: client.retried >= mark + 3)

        await job.kill()
        producer.alive = False
        asked = asyncio.create_task(ask(client))
        for _ in range(3):
            await some_attempts()
            clock.now += 90
            await some_attempts()
            producer.alive = True
            await some_attempts()
            producer.alive = False
            await some_attempts()
            assert not asked.done()
        clock.now += 110
        with pytest.raises(SessionFailed, match="no sign of life for 110 s"):
            await asked

    run(test, patience=100.0)


REFUSALS = {
    "401": ({}, {"token": "another-token"}, r"status 401.*token_env"),
    "404": ({"role": "main"}, {}, r"status 404.*drmas\.store\.role"),
    "413": ({"max_body": 50}, {}, r"status 413.*max_body"),
}


@pytest.mark.parametrize(("settings", "given", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_for_good_fails_the_session_at_once_and_names_the_fix(settings, given, text):
    async def test():
        producer = Producer()
        role = settings.pop("role", "sub")
        client = RemoteClient(CONFIG, RemoteConfig(store="sqlite:///x", role=role), producer=producer, **given)
        async with Job(producer, **settings):
            with pytest.raises(SessionFailed, match=text) as failed:
                await ask(client)
            assert failed.value.reason == "remote" and client.retried == 0
            await client.close()

    asyncio.run(test())


def test_sampling_that_the_gateway_does_not_know_fails_the_session_by_its_name():
    async def test(client, job, producer):
        with pytest.raises(SessionFailed, match=r"status 422 .*sampling\.best_of"):
            await client.generate("r", prompt_ids=[1], sampling_params={**PARAMS, "best_of": 2}, step=1)
        with pytest.raises(SessionFailed, match=r"status 422 .*sampling\.max_tokens"):
            await client.generate("r", prompt_ids=[1], sampling_params={}, step=1)

    run(test)


# -- the store


def test_a_store_that_is_away_is_waited_for():
    async def test(client, job, producer):
        producer.error = StoreAway("no database")
        asked = asyncio.create_task(ask(client))
        await until(lambda: client.retried >= 3)
        producer.error = None
        assert (await asked).token_ids == [6, 7]

    run(test)


def test_a_store_that_is_away_for_long_fails_the_session():
    async def test(client, job, producer):
        producer.error = StoreAway("no database")
        with pytest.raises(SessionFailed, match=r"no sign of life.*no database"):
            await ask(client)

    run(test, patience=0.3)


def test_without_the_store_the_gateway_is_asked_where_it_was():
    async def test(client, job, producer):
        await ask(client)
        producer.error = StoreAway("no database")
        await asyncio.sleep(0.1)
        assert (await ask(client)).token_ids == [6, 7]

    run(test)


def test_a_store_that_refuses_fails_the_session_at_once():
    async def test(client, job, producer):
        producer.error = StoreError("a newer schema")
        with pytest.raises(SessionFailed, match="the store refuses: a newer schema"):
            await ask(client)
        assert client.retried == 0

    run(test)


def test_retries_that_the_store_did_not_hear_of_come_with_the_next_ones():
    async def test(client, job, producer):
        job.errors = [ValueError()] * 2
        await ask(client)
        await client.close()
        assert producer.counted == {"retries": 2}
        await ask(client)
        job.errors = [ValueError()] * 3
        count, producer.count = producer.count, None

        def away(name, n):
            raise StoreAway("no database")

        producer.count = away
        await ask(client)
        await client.close()
        producer.count = count
        await ask(client)
        await client.close()
        assert producer.counted == {"retries": 5} and client.retried == 5

    run(test)


def test_the_store_is_opened_late_once_and_with_the_clients_own_url(monkeypatch):
    opened = []

    def open_store(url, *, patience):
        opened.append((url, patience))
        return "store"

    monkeypatch.setattr("verl_drmas.store.database.open_store", open_store)
    monkeypatch.setattr("verl_drmas.store.producer.Producer", lambda store, role: (store, role))
    settings = RemoteConfig(store="sqlite:///x", role="sub")
    assert opened == []
    assert RemoteClient(CONFIG, settings)._store() == ("store", "sub")
    client = RemoteClient(CONFIG, settings, "sqlite:////run/x")
    assert client._store() is client._store()
    assert [url for url, _ in opened] == ["sqlite:///x", "sqlite:////run/x"]


def test_both_jobs_meet_in_a_real_store(tmp_path):
    """The gateway is found in it, the version is what its steps ask for, and retries are counted there."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    store = open_store(url)
    consumer = Consumer(store, "sub")
    consumer.attach(0)
    main = Main(store, "sub")

    def train(step):
        main.open_step(step, [0], 1)
        row = PackedRow("a", np.array([1]), np.array([2]), np.array([True]), None, 1.0, 0, 0, {})
        main.put_session(SessionRecord(step, 0, 0, True, "", 1.0, step - 1, (row,)))
        main.close_step(step, {"sessions": [[0, 0]]})
        assert consumer.claim().step == step
        consumer.trained(step)

    async def test():
        client = RemoteClient(CONFIG, RemoteConfig(store=url, role="sub"))
        await asyncio.to_thread(train, 1)
        async with Job(SimpleNamespace(), version=0) as job:
            await asyncio.to_thread(consumer.publish, 0, job.producer.endpoint)
            assert (await ask(client, step=1)).extra_fields["global_steps"] == 0
            asked = asyncio.create_task(ask(client, step=2))
            await until(lambda: job.gateway.answers.counts["refused/503"] >= 1)
            job.version = 1
            job.gateway.gate.open(1)
            job.errors = [ValueError()]
            assert (await asked).extra_fields["global_steps"] == 1
            await client.close()
        assert numbers(store, "sub")["count/retries"] == 1

    try:
        asyncio.run(asyncio.wait_for(test(), 90))
    finally:
        consumer.detach()


# -- the session's end


def test_a_session_that_ends_takes_its_call_with_it():
    async def test(client, job, producer):
        await job.serving.stop()
        await job.start(linger=0.05)
        job.free.clear()
        asked = asyncio.create_task(ask(client))
        await until(lambda: job.calls)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: job.cancelled == 1)
        assert job.gateway.answers.in_flight == 0

    run(test)


@pytest.mark.parametrize("when", ["the gateway is closed", "the job is gone", "the store is away"])
def test_a_session_that_ends_while_it_waits_leaves_nothing(when, caplog):
    async def test(client, job, producer):
        if when == "the gateway is closed":
            job.gateway.gate.close()
        elif when == "the job is gone":
            await job.kill()
        else:
            producer.error = StoreAway("no database")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask(client), 0.5)
        producer.error = None
        await client.close()
        assert not job.calls
        others = [t for t in asyncio.all_tasks() if "generate" in repr(t.get_coro())]
        assert not others

    run(test)
    assert "never retrieved" not in caplog.text


# -- as verl's client


def test_it_goes_through_pickle_with_its_token_and_without_its_connections(monkeypatch):
    settings = RemoteConfig(store="sqlite:///x", role="sub")
    client = RemoteClient(CONFIG, settings, "sqlite:////run/x")
    client.retried = 2

    async def use():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        await client._caller.lives(url)

    asyncio.run(use())
    monkeypatch.delenv("DRMAS_GATEWAY_TOKEN")  # another machine of the cluster
    again = pickle.loads(pickle.dumps(client))
    assert (again.retried, again.url, again.config, again.remote) == (2, "sqlite:////run/x", CONFIG, settings)
    assert again._token.get_secret_value() == TOKEN and not again._caller._open
    assert TOKEN not in repr(vars(again))
    team = TeamClient({"main": client, "sub": again})
    assert team.retried == 4
    team.retried = 0
    assert client.retried == again.retried == 0


def test_it_serves_one_loop_after_another():
    producer = Producer()
    client = make(producer)

    async def test():
        async with Job(producer):
            assert (await ask(client)).token_ids == [6, 7]

    for _ in range(3):
        asyncio.run(test())
    assert len(client._caller._open) == 1


def test_without_a_token_there_is_no_client(monkeypatch):
    monkeypatch.delenv("DRMAS_GATEWAY_TOKEN")
    with pytest.raises(ConfigError, match="token_env is 'DRMAS_GATEWAY_TOKEN', and the variable is not set"):
        make(Producer())


def test_the_log_says_what_is_wrong_once_and_nothing_secret(caplog):
    async def test(client, job, producer):
        job.errors = [ValueError(f"prompt [918273645] {TOKEN}")] * 5
        await ask(client, prompt=[918273645])
        await job.kill()
        asked = [asyncio.create_task(ask(client, prompt=[918273645])) for _ in range(5)]
        await until(lambda: client.retried >= 20)
        await job.start()
        await asyncio.gather(*asked)

    with caplog.at_level(logging.DEBUG):
        run(test)
    ours = [r.getMessage() for r in caplog.records if r.name == "verl_drmas.rollout.remote"]
    assert [line.split(":")[0] for line in ours] == [
        "a call to role sub is asked again",
        "the gateway of role sub answers again",
        "a call to role sub is asked again",
        "the gateway of role sub answers again",
    ]
    assert TOKEN not in caplog.text and "918273645" not in caplog.text
