"""Sessions go to the store of another job's model whole, before verl has them."""

import asyncio
import threading
import time
from collections import Counter

import numpy as np
import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopWorker
from verl.trainer.ppo.v1 import agent_loop_tq

from verl_drmas.config import parse
from verl_drmas.plain import plain_values
from verl_drmas.rollout import delivery as delivery_module
from verl_drmas.rollout.activation import Activation
from verl_drmas.rollout.delivery import NO_STORE, NOTE_PATIENCE, Delivery, packed
from verl_drmas.rollout.worker import TeamWorker
from verl_drmas.store.codec import pack, unpack
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.errors import StoreAway
from verl_drmas.store.producer import Producer
from verl_drmas.workflows import SessionFailed

PLACE = {"step": 4, "prompt": 7, "session": 1}


def row(agent="finder", model="sub", tokens=(5, 6, 7), **fields):
    extra = {
        "agent_id": agent,
        "model_id": model,
        "min_global_steps": 2,
        "max_global_steps": 3,
        "path": f"main.0/{agent}",
        "session_metrics": {"rounds": 1.0},
        "reward_extra_info": {"acc": 1.0, "outcome": 0.5},
        **fields.pop("extra", {}),
    }
    settings = {
        "prompt_ids": [1, 2],
        "response_ids": list(tokens),
        "response_mask": [1, 0, 1][: len(tokens)],
        "response_logprobs": [-0.1] * len(tokens),
        "num_turns": 4,
        "own_reward": 0.75,
    }
    return Activation(**{**settings, **fields}, metrics=AgentLoopMetrics(), extra_fields=extra)


# -- a row -------------------------------------------------------------------------------------------------------------


def test_a_row_keeps_what_training_reads():
    made = packed(row(extra={"temperature": 0.5}), 3)
    assert (made.agent_id, made.min_version, made.max_version, made.reward) == ("finder", 2, 3, 0.75)
    assert made.prompt_ids.tolist() == [1, 2] and made.response_ids.tolist() == [5, 6, 7]
    assert made.response_mask.tolist() == [True, False, True]
    assert made.logprobs.tolist() == [np.float32(-0.1)] * 3
    assert made.fields == {
        "position": 3,
        "num_turns": 4,
        "extra": {
            "model_id": "sub",
            "path": "main.0/finder",
            "reward_extra_info": {"acc": 1.0, "outcome": 0.5},
            "temperature": 0.5,
        },
    }
    assert unpack(pack(made)) == made


def test_what_an_engine_did_not_give_is_none():
    made = packed(row(response_logprobs=None, own_reward=None), 0)
    assert made.logprobs is None and made.reward is None
    assert packed(row(own_reward=0.0), 0).reward == 0.0


def test_values_become_what_json_holds():
    odd = {"a": np.float32(0.5), 2: (np.int64(3), np.array([[1, 2]])), "c": [True, None, "x", np.bool_(False)]}
    assert plain_values(odd) == {"a": 0.5, "2": [3, [[1, 2]]], "c": [True, None, "x", False]}
    assert type(plain_values(odd)["c"][3]) is bool and type(plain_values(odd)["2"][0]) is int


# -- a session ---------------------------------------------------------------------------------------------------------


def section(**urls):
    """Agents on models of other jobs, by the model's name; `main` is this job's."""
    models = {"main": {}, **{m: {"remote": {"store": url, "role": f"role-{m}"}} for m, url in urls.items()}}
    agents = {"main": {"model": "main"}, **{f"agent-{m}": {"model": m} for m in urls}}
    return parse({"agents": agents, "models": models})


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/pair.db"


@pytest.fixture
def delivery(url):
    """Of two remote models in one store, with the step open."""
    made = Delivery(section(sub=url, other=url))
    for producer in made.producers.values():
        producer.open_step(4, [7, 8], 3)
    return made


def claim(url, role, sessions):
    """The step as the other job finds it."""
    producer, consumer = Producer(open_store(url), role), Consumer(open_store(url), role, lease=30)
    producer.close_step(4, {"sessions": sessions})
    consumer.attach(0)
    try:
        return consumer.claim()
    finally:
        consumer.detach()


def test_a_run_without_remote_models_delivers_nothing():
    made = Delivery(parse({}))
    assert made.producers == {}
    asyncio.run(made.put([row()], **PLACE))


def test_every_store_gets_the_rows_of_its_model_and_hears_of_every_session(delivery, url):
    rows = [row("agent-sub", "sub", (5,)), row("main", "main"), row("agent-sub", "sub", (6,)), row("x", "other")]
    asyncio.run(delivery.put(rows, **PLACE))
    asyncio.run(delivery.put([row("main", "main")], **{**PLACE, "session": 2}))
    first, second = claim(url, "role-sub", [[7, 1], [7, 2]]).sessions
    assert [(r.fields["position"], r.response_ids.tolist()) for r in first.rows] == [(0, [5]), (2, [6])]
    assert (first.step, first.prompt, first.session, first.ended, first.reason) == (4, 7, 1, True, "")
    assert (first.outcome, first.main_version) == (0.5, 3)
    assert (second.session, second.ended, second.rows) == (2, True, ())
    (third,) = claim(url, "role-other", [[7, 1]]).sessions
    assert [(r.agent_id, r.fields["position"]) for r in third.rows] == [("x", 3)]


def test_a_session_without_an_outcome_has_none(delivery, url):
    masked = row(extra={"reward_extra_info": {}, "failed": "retrieval"})
    asyncio.run(delivery.put([masked], **PLACE, reason="retrieval"))
    (session,) = claim(url, "role-sub", [[7, 1]]).sessions
    assert (session.ended, session.reason, session.outcome) == (False, "retrieval", None)


def test_a_failed_session_is_noted_and_gives_way_to_its_replay(delivery, url):
    asyncio.run(delivery.fail(**PLACE, reason="timeout"))
    asyncio.run(delivery.put([row()], **PLACE))
    (session,) = claim(url, "role-sub", [[7, 1]]).sessions
    assert session.ended and len(session.rows) == 1


def test_a_session_of_a_step_that_nobody_opened_fails_by_name(delivery):
    with pytest.raises(SessionFailed, match=r"session 1 of data row 9: .*prompt 9 of step 4 was never opened") as error:
        asyncio.run(delivery.put([row()], **{**PLACE, "prompt": 9}))
    assert error.value.reason == "store"


class Away:
    def __init__(self):
        self.patience = []

    def put_session(self, record, *, patience):
        self.patience.append(patience)
        raise StoreAway("the database is away")


def away():
    made = Delivery(parse({}))
    made.producers, made.patience = {"sub": Away()}, {"sub": 900.0}
    return made


def test_a_store_that_is_away_fails_the_session_but_not_one_that_failed_already(caplog):
    made = away()
    with pytest.raises(SessionFailed) as error:
        asyncio.run(made.put([row()], **PLACE))
    assert error.value.reason == NO_STORE
    asyncio.run(made.fail(**PLACE, reason="timeout"))
    long, short = made.producers["sub"].patience
    assert 890 < long <= 900 and short <= NOTE_PATIENCE
    assert "a failed session could not be noted: store: session 1 of data row 7" in caplog.text


def test_a_store_that_is_slow_holds_no_other_session_up():
    """Sessions of a worker share its event loop."""
    order = []

    class Slow:
        def put_session(self, record, *, patience):
            ready.wait(20)
            order.append("stored")

    ready, made = threading.Event(), Delivery(parse({}))
    made.producers, made.patience = {"sub": Slow()}, {"sub": 60.0}

    async def other():
        order.append("other")
        ready.set()

    async def both():
        await asyncio.gather(made.put([row()], **PLACE), other())

    asyncio.run(both())
    assert order == ["other", "stored"]


# -- in the worker -----------------------------------------------------------------------------------------------------

FIELDS = {"uid": "u", "session_id": 1, "global_steps": 4, "index": 7, "raw_prompt": []}


@pytest.fixture
def worker(delivery, monkeypatch):
    """A `TeamWorker` without Ray; what happened to its sessions is in `worker.log`."""
    built = object.__new__(TeamWorker)
    built.section = parse({"faults": {"session_timeout": 30}})
    built.failures, built.delivery, built.log = Counter(), delivery, []
    built.reward_loop_worker_handles, built.distillation_enabled, built.processor = None, False, None
    built._said_default, built.mm_processor_kwargs = False, {}
    for name, producer in delivery.producers.items():
        put = producer.put_session

        def noted(record, name=name, put=put, **options):
            built.log.append((name, len(record.rows), record.reason))
            return put(record, **options)

        producer.put_session = noted

    async def put(**batch):
        built.log.append(("verl", len(batch["keys"]), batch["partition_id"]))

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put)
    return built


def scored(*rows):
    rows[-1].reward_score = rows[-1].own_reward
    return list(rows)


def test_the_store_has_a_session_before_verl(worker):
    rows = scored(row("agent-sub", "sub"), row("main", "main"))
    asyncio.run(worker._agent_loop_postprocess(rows, False, **FIELDS))
    assert worker.log == [("sub", 1, ""), ("other", 0, ""), ("verl", 2, "train")]


def test_validation_is_not_stored(worker, monkeypatch):
    asyncio.run(worker._agent_loop_postprocess(scored(row()), True, **FIELDS))
    assert worker.log == [("verl", 1, "val")]

    async def fail(self, *args, **kwargs):
        raise SessionFailed("server", "gone")

    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", fail)
    with pytest.raises(SessionFailed):
        asyncio.run(worker._run_agent_loop({}, {"validate": True}, agent_name="x", **FIELDS))
    assert worker.log == [("verl", 1, "val")] and worker.failures == {"server": 1}


def test_a_masked_session_is_stored_with_its_reason(worker):
    rows = scored(row("agent-sub", "sub", extra={"failed": "retrieval"}))
    asyncio.run(worker._agent_loop_postprocess(rows, False, **FIELDS))
    assert worker.log[:2] == [("sub", 1, "retrieval"), ("other", 0, "retrieval")]


def test_rows_without_a_token_have_no_place(worker, url):
    """Places are the numbers that verl gives the rows."""
    rows = scored(row("main", "main", ()), row("agent-sub", "sub"), row("main", "main"))
    asyncio.run(worker._agent_loop_postprocess(rows, False, **FIELDS))
    (session,) = claim(url, "role-sub", [[7, 1]]).sessions
    assert [r.fields["position"] for r in session.rows] == [0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(SessionFailed("server", "gone"), "server"), (KeyError("x"), "KeyError"), (TimeoutError("a tool"), "timeout")],
)
def test_every_way_to_fail_is_noted(worker, monkeypatch, error, reason):
    async def fail(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", fail)
    with pytest.raises(type(error)):
        asyncio.run(worker._run_agent_loop({}, {"validate": False}, agent_name="x", **FIELDS))
    assert worker.log == [("sub", 0, reason), ("other", 0, reason)]
    assert worker.failures == {reason: 1}


def test_a_session_over_its_time_is_noted(worker, monkeypatch):
    async def endless(self, *args, **kwargs):
        await asyncio.sleep(60)

    worker.section.faults.session_timeout = 0.05
    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", endless)
    with pytest.raises(SessionFailed):
        asyncio.run(worker._run_agent_loop({}, {"validate": False}, agent_name="x", **FIELDS))
    assert worker.log == [("sub", 0, "timeout"), ("other", 0, "timeout")]


def test_a_session_that_no_store_took_never_reaches_verl(worker):
    worker.delivery = away()
    with pytest.raises(SessionFailed):
        asyncio.run(worker._agent_loop_postprocess(scored(row()), False, **FIELDS))
    assert worker.log == []


def test_an_outage_is_waited_for_once_by_a_session(worker, monkeypatch):
    async def played(self, *args, **kwargs):
        await self._agent_loop_postprocess(scored(row()), False, **FIELDS)

    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", played)
    worker.delivery = away()
    with pytest.raises(SessionFailed):
        asyncio.run(worker._run_agent_loop({}, {"validate": False}, agent_name="x", **FIELDS))
    assert len(worker.delivery.producers["sub"].patience) == 1 and worker.failures == {NO_STORE: 1}


def test_the_time_in_the_queue_counts(monkeypatch, url):
    """In an outage, many sessions wait for few threads."""
    monkeypatch.setattr(delivery_module, "THREADS", 1)
    made = Delivery(section(sub=url))

    class Waits(Away):
        def put_session(self, record, *, patience):
            time.sleep(0.3)
            return super().put_session(record, patience=patience)

    made.producers, made.patience = {"sub": Waits()}, {"sub": 0.5}

    async def all_of_them():
        return await asyncio.gather(*(made.put([row()], **PLACE) for _ in range(4)), return_exceptions=True)

    assert all(isinstance(error, SessionFailed) for error in asyncio.run(all_of_them()))
    first, *_, last = made.producers["sub"].patience
    assert 0.3 < first <= 0.5 and last == 0
