"""The smallest run of each kind of the recipes: scripts and shipped files, made small by overrides alone.

Drills, since each costs minutes; `drmas_math` on a shared model is in `test_math.py`, which `make test` runs.
"""

from __future__ import annotations

import functools
import json

import pytest
from recipe_job import ROLLOUT, check, play

from verl_drmas.data.parquet import prompt_row, write_rows
from verl_drmas.data.search import SEARCH_SCHEMA, question_row

pytestmark = [pytest.mark.end_to_end, pytest.mark.drill, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def sums(assets):
    """Eight problems of mathematics."""
    rows = [prompt_row(f"What is {a} + 5?", str(a + 5), data_source="sums", split="train", index=a) for a in range(8)]
    return write_rows(rows, assets / "recipes_math.parquet")


@pytest.fixture
def played(short_tmp):
    """Plays a run and forgets its folder."""
    return functools.partial(play, short_tmp)


def test_math_with_four_agents(assets, sums, played):
    options = ["--variant", "four_agents", "--estimator", "grpo_team"]
    job = played("drmas_math", options, [], assets / "chatml", sums)
    last = check(job, "drmas_math_four_agents")
    each = {"solver": 2, "critic": 1, "refiner": 1, "verifier": 1}
    assert {agent: last[f"drmas/agent/{agent}/activations_per_session"] for agent in each} == each
    assert last["drmas/workflow/rounds"] == 2 and "drmas/workflow/refiner_success" in last


def test_math_with_a_single_agent_on_verls_own_trainer(assets, sums, played):
    job = played("drmas_math", ["--mapping", "single"], [], assets / "chatml", sums)
    last = check(job, "drmas_math_single")
    assert not any(name.startswith("drmas/") for name in last)
    # Our score, with the penalty of a solution without a box, through verl's own reward loop.
    assert last["critic/score/mean"] == pytest.approx(-0.1)
    assert last["prompt_length/min"] > 100  # bytes: the solver's prompt, not the bare question


def test_search_with_a_model_for_each_agent(assets, played):
    from verl_drmas.retrieval.build import IndexSettings, build_index

    corpus = assets / "recipes_corpus.jsonl"
    passages = [{"id": str(i), "contents": f'"City {i}"\nCity {i} is old.'} for i in range(9)]
    corpus.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    build_index([corpus], assets / "recipes_index", IndexSettings())
    rows = [
        question_row(f"How old is city {i}?", ["old"], data_source="cities", split="train", index=i) for i in range(8)
    ]
    data = write_rows(rows, assets / "recipes_search.parquet", schema=SEARCH_SCHEMA)
    local = ["drmas.workflow.retrieval.urls=[]", f"drmas.workflow.retrieval.local={assets / 'recipes_index'}"]
    job = played("drmas_search", ["--mapping", "separate"], local, assets / "chatml", data)
    assert sorted(job.steps) == [1, 2]
    last = job.steps[2]
    each = {"verifier": 3, "search": 3, "answer": 1}  # no verdict is no "enough": the last turn must answer
    assert {agent: last[f"drmas/agent/{agent}/activations_per_session"] for agent in each} == each
    for agent in each:
        assert last[f"drmas/agent/{agent}/penalty/mean"] == pytest.approx(0.01)
        assert last[f"drmas/model/{agent}/updates"] == 5
        assert last[f"drmas/model/{agent}/lr"] == pytest.approx(1e-6)


# The team of the warm start in the recipe's: its sub-agent is the finder, who searches a small world on the spot, and
# what only another server gives is left out.
SMALL_TEAM = (
    "~drmas.agents.searcher",
    "~drmas.workflow.subs.searcher",
    "+drmas.workflow.subs.finder={description: searches, tools: [search], max_turns: 3, result_tokens: null}",
    "+drmas.agents.finder={model: sub}",
    "drmas.agents.main.turn_length=null",
    "~drmas.workflow.tools.visit",
    "~drmas.workflow.tools.reason",
    "drmas.workflow.main_tools=[]",
    "~drmas.workflow.judge",
    "+drmas.workflow.judge={kind: contains}",
    "drmas.workflow.tools.search.topk=1",
    "drmas.workflow.tools.search.max_queries=1",
    "drmas.workflow.tools.search.retrieval.urls=[]",
    "drmas.workflow.max_turns=4",
    "drmas.alignment.target=2",
    "data.max_prompt_length=64",
    "data.max_response_length=64",
    f"{ROLLOUT}.max_model_len=256",
)
WEIGHTS = {"main": "main", "sub": "finder"}
ARM_OPTIONS = {
    "co_train": ["--stage", "both"],
    "unaligned": ["--arm", "unaligned", "--stage", "2"],
    "main_only": ["--arm", "main_only", "--stage", "2"],
}


@pytest.mark.timeout(900)  # the first of them teaches the models
@pytest.mark.parametrize("arm", ["co_train", "unaligned", "main_only"])
def test_research_with_a_team(arm, delegate_start, played, short_tmp):
    start = short_tmp / "stage_1"
    start.mkdir()
    for model, agent in WEIGHTS.items():
        (start / model).symlink_to(delegate_start.models[agent])
    local = f"++drmas.workflow.tools.search.retrieval.local={delegate_start.index}"
    overrides = [*SMALL_TEAM, local]
    if arm == "co_train":
        easy, hard = (
            f"{{name: format, files: [{delegate_start.train}], until_step: 1}}",
            "{name: collaboration, files: ",
        )
        overrides.append(f"drmas.curriculum=[{easy}, {hard}[{delegate_start.val}]}}]")
        overrides += [f"++drmas.models.{model}.actor_rollout_ref.model.path={start / model}" for model in WEIGHTS]
        options = ARM_OPTIONS[arm]
    else:
        options = [*ARM_OPTIONS[arm], "--start", str(start)]
    job = played("mgrpo_research", options, overrides, delegate_start.models["main"], delegate_start.train)
    last = check(job, "mgrpo", lr="drmas/model/main/lr")
    assert f"_{arm}_stage" in job.folder.name
    calls = last["drmas/workflow/delegations"]
    assert calls > 0 and last["drmas/agent/finder/activations_per_session"] == pytest.approx(calls)
    assert last["drmas/model/main/updates"] == 1
    assert last.get("drmas/model/sub/updates") == (None if arm == "main_only" else 1)
    stages = [step.get("drmas/curriculum/stage") for _, step in sorted(job.steps.items())]
    assert stages == ([1, 2] if arm == "co_train" else [None, None])
    if arm == "main_only":
        return
    names = ("copies_added", "dropped", "share_without_call", "calls/mean")
    added, dropped, without, mean = (last[f"drmas/alignment/finder/{name}"] for name in names)
    assert mean == pytest.approx(calls)
    if arm == "unaligned":
        assert (added, dropped) == (0, 0)
    else:  # every one of the eight sessions that called counts as two trajectories
        assert 8 * calls - dropped + added == pytest.approx(2 * 8 * (1 - without))


def test_research_with_a_single_agent_on_verls_own_trainer(assets, played):
    rows = [question_row(f"How old is city {i}?", ["old"], data_source="c", split="train", index=i) for i in range(8)]
    data = write_rows(rows, assets / "recipes_research.parquet", schema=SEARCH_SCHEMA)
    options = ["--arm", "single", "--stage", "1"]
    job = played("mgrpo_research", options, [], assets / "chatml", data)
    last = check(job, "mgrpo_single")
    assert not any(name.startswith("drmas/") for name in last)
    # Without a result nothing is earned, not even for the form, and nothing is taken off either.
    assert last["critic/score/mean"] == 0
    assert last["prompt_length/min"] > 200  # the main agent's prompt, not the bare question
