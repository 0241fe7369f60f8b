"""Sessions that fail are counted by their reason, and the worker reports them once."""

import asyncio
import logging
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

from verl_drmas.config import parse
from verl_drmas.rollout.delivery import Delivery
from verl_drmas.rollout.loop import VALIDATE
from verl_drmas.rollout.worker import TeamManager, TeamWorker, TeamWorkerActor
from verl_drmas.workflows import SessionFailed


@pytest.fixture
def worker(monkeypatch):
    """A `TeamWorker` without Ray, whose session is the coroutine `worker.session`."""
    built = object.__new__(TeamWorker)
    built.section = parse({"faults": {"session_timeout": 0.05}})
    built.failures, built._said_default, built.delivery = Counter(), False, Delivery(built.section)
    built.llm_client = SimpleNamespace(retried=0)

    async def run(self, sampling_params, trajectory, **kwargs):
        await self.session()

    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", run)
    return built


def run(worker, validate=False):
    asyncio.run(worker._run_agent_loop({}, {"validate": validate}, agent_name="x"))


def test_a_session_over_its_time_fails_and_is_cancelled(worker):
    state = {}

    async def endless():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            state["cancelled"] = True
            raise

    worker.session = endless
    start = time.monotonic()
    with pytest.raises(SessionFailed, match=r"0\.05 s \(drmas\.faults\.session_timeout\)") as failed:
        run(worker)
    assert time.monotonic() - start < 10
    assert failed.value.reason == "timeout"
    assert state == {"cancelled": True}
    assert worker.report() == {"failed/timeout": 1}


def test_a_time_out_inside_the_session_is_told_apart(worker):
    async def tool():
        raise TimeoutError("the search server did not answer")

    worker.session = tool
    with pytest.raises(TimeoutError, match="the search server"):
        run(worker)
    assert worker.report() == {"failed/timeout": 1}


def test_failures_are_counted_by_reason(worker):
    async def fail(error):
        raise error

    for error in (SessionFailed("server", "gone"), SessionFailed("empty"), SessionFailed("server"), KeyError("x")):
        worker.session = lambda error=error: fail(error)
        with pytest.raises(type(error)):
            run(worker)
    assert worker.report() == {"failed/server": 2, "failed/empty": 1, "failed/KeyError": 1}
    assert worker.report() == {}


def test_a_session_that_ends_is_no_failure(worker):
    worker.session = lambda: asyncio.sleep(0)
    run(worker)
    assert worker.report() == {}


def test_a_masked_session_is_counted_as_failed(worker, monkeypatch):
    stored = []

    async def store(self, rows, validate, **kwargs):
        stored.extend(rows)

    monkeypatch.setattr(TeamWorker.__mro__[1], "_agent_loop_postprocess", store)
    fields = {"agent_id": "a", "failed": "retrieval"}
    row = AgentLoopOutput(
        prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics(), extra_fields=fields
    )
    asyncio.run(worker._agent_loop_postprocess([row], False))
    assert len(stored) == 1
    assert worker.report() == {"failed/retrieval": 1}


def test_what_the_workflows_tools_counted_is_reported(worker, monkeypatch):
    monkeypatch.setattr("verl_drmas.rollout.worker.tools_report", lambda: {"retrieval/retries": 3})
    assert worker.report() == {"tools/retrieval/retries": 3}


def test_retried_calls_are_reported_once(worker):
    worker.llm_client.retried = 3
    assert worker.report() == {"retried_calls": 3}
    assert worker.report() == {}
    worker.llm_client = object()  # a client of another kind has no counter
    assert worker.report() == {}


@pytest.mark.parametrize("validate", [True, False])
def test_the_session_knows_whether_it_is_validation(worker, validate):
    seen = []

    async def session():
        seen.append(VALIDATE.get())

    worker.session = session
    run(worker, validate)
    assert seen == [validate]


def test_parallel_sessions_do_not_share_the_validation_flag(worker):
    seen = {}

    async def session():
        await asyncio.sleep(0.01)
        seen[asyncio.current_task()] = VALIDATE.get()

    worker.session = session
    worker.section.faults.session_timeout = 60

    async def both():
        tasks = [
            asyncio.create_task(worker._run_agent_loop({}, {"validate": v}, agent_name="x"))
            for v in (True, False, True)
        ]
        await asyncio.gather(*tasks)

    asyncio.run(both())
    assert sorted(seen.values()) == [False, True, True]


def test_the_default_agent_is_said_once(worker, monkeypatch, caplog):
    async def stored(self, rows, validate, **kwargs):
        pass

    monkeypatch.setattr(TeamWorker.__mro__[1], "_agent_loop_postprocess", stored)
    monkeypatch.setattr(logging.getLogger("verl_drmas"), "propagate", True)
    for _ in range(2):
        rows = [
            AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())
            for _ in range(2)
        ]
        asyncio.run(worker._agent_loop_postprocess(rows, False))
    # By identity: one record may reach two handlers.
    (said,) = {id(r): r for r in caplog.records if "agent_id" in r.getMessage()}.values()
    assert said.levelno == logging.WARNING


def test_the_manager_starts_our_workers():
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None, model=None))
    manager = TeamManager(config, None)
    assert manager.agent_loop_workers_class is TeamWorkerActor
