"""The search team trains through real verl and vLLM, with a search server in a process of its own."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from launch import run
from metric_page import of_run
from search_job import free_port, overrides, served, serving, taught

from verl_drmas.dumps import read_step
from verl_drmas.replay.arms import arm_of
from verl_drmas.replay.compare import compare
from verl_drmas.replay.run import Trained, replay

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]
STEPS = 3


@pytest.fixture(scope="module")
def job(assets):
    folder = Path(tempfile.mkdtemp(prefix="s"))
    start, port = taught(folder / "start"), free_port()
    with serving(start.index, port, folder / "server.log"):
        finished = run(
            folder,
            [
                *overrides(start, port),
                f"trainer.rollout_data_dir={folder / 'dump'}",
                "trainer.test_freq=3",
                "actor_rollout_ref.rollout.val_kwargs.n=2",
            ],
            steps=STEPS,
            timeout=420,
        )
        finished.served = served(port)
    yield finished
    shutil.rmtree(folder, ignore_errors=True)


def test_searches_and_exact_match_are_logged_every_step(job):
    assert sorted(job.steps) == list(range(1, STEPS + 1))
    for step in job.steps.values():
        assert 0 <= step["drmas/workflow/em"] <= step["drmas/workflow/f1"] <= 1
        assert 0 < step["drmas/workflow/searches"] <= 3
        assert step["drmas/agent/answer/activations_per_session"] == 1  # the last turn must answer
        assert step["drmas/sessions/failed"] == 0
        for agent in ("verifier", "search", "answer"):
            assert 0 <= step[f"drmas/agent/{agent}/valid_share"] <= 1


def test_every_search_reached_the_server_and_none_failed(job):
    for step in job.steps.values():
        sessions = step["drmas/sessions/expected"]
        assert step["drmas/tools/retrieval/calls"] == pytest.approx(step["drmas/workflow/searches"] * sessions)
        assert step["drmas/tools/retrieval/outages"] == step["drmas/tools/retrieval/retries"] == 0
    assert job.served["retriever_queries_total"] >= sum(s["drmas/tools/retrieval/calls"] for s in job.steps.values())


def test_the_penalty_of_invalid_actions_is_the_agents_own(job):
    for step in job.steps.values():
        for agent in ("verifier", "search", "answer"):
            share = step[f"drmas/agent/{agent}/valid_share"]
            assert step[f"drmas/agent/{agent}/penalty/mean"] == pytest.approx(0.01 * (1 - share))


def test_evidence_is_cut_to_its_budget_and_counted(job):
    assert sum(step["drmas/workflow/cut_tokens"] for step in job.steps.values()) > 0
    rows = [json.loads(line) for line in (job.folder / "dump" / "1.jsonl").read_text().splitlines()]
    prompts = [row["input"] for row in rows]
    assert all("Question: Who is the" in prompt for prompt in prompts)
    assert {row["agent_id"] for row in rows} == {"verifier", "search", "answer"}
    assert any("[1] " in prompt for prompt in prompts)


@pytest.mark.parametrize("number", range(1, STEPS + 1))
def test_a_dumped_step_replays_as_it_was_trained(job, number):
    step = read_step(job.folder / "dump" / f"{number}.jsonl")
    trained = Trained.of(step)
    made = compare(trained, replay(trained, arm_of(step, None, {})))
    assert made.replayed.arm.own and made.same
    logged = job.steps[number]
    assert made.replayed.metrics == pytest.approx({name: logged[name] for name in made.replayed.metrics})
    told = [row.own["told"] for row in step.rows]
    assert any("passages" in own for own in told) and any("parsed" in own for own in told)


def test_validation_is_reported_by_source(job):
    last = job.steps[STEPS]
    assert 0 <= last["val/world/avg@2"] <= last["val/world/pass@2"] <= 1
    assert last["val/world/failed_sessions"] == 0 and last["val/drmas/searches"] >= 0


def test_every_metric_is_on_the_page(job):
    assert of_run(job.steps) == []
