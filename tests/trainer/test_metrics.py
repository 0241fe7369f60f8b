"""Numbers per agent and per session, by hand, and the warnings for an agent that collapses."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from metric_page import page_names_of, undocumented
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.metric import reduce_metrics

from verl_drmas.config import parse
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer import metrics as metrics_module
from verl_drmas.trainer.alignment import StepAlignment, alignment_metrics
from verl_drmas.trainer.metrics import (
    CollapseWatch,
    agent_metrics,
    log_prob_gaps,
    model_metrics,
    session_metrics,
    shadow_metrics,
    workflow_metrics,
)
from verl_drmas.trainer.step import StepRows

ROWS = [
    Row("p", 0, 0, 0, "solver", "base", metrics={"rounds": 1.0}, counts={"turns": 1.0}),
    Row("p", 0, 1, 0, "verifier", "base", valid=False),
    Row("p", 1, 0, 0, "solver", "base", metrics={"rounds": 2.0, "approved": 1.0}, counts={"turns": 1.0}),
    Row("p", 1, 1, 0, "verifier", "base"),
    Row("p", 1, 2, 0, "solver", "base", counts={"turns": 3.0, "cut_characters": 6.0}),
]


def step(**advantage):
    section = parse(
        {
            "agents": {"solver": {"model": "base"}, "verifier": {"model": "base", "invalid_penalty": 0.25}},
            "advantage": advantage,
        }
    )
    built = StepRows([None, *ROWS, None], section)
    built.scores = np.array([0.0, 1.0, 1.0, 1.0, 0.5])
    built.advantage = np.array([-1.0, 0.0, 1.0, 0.0, 0.0])
    built.tokens = np.array([10, 20, 30, 40, 100])
    return built


def test_agent_metrics_by_hand():
    metrics = agent_metrics(step())
    solver = {k.removeprefix("drmas/agent/solver/"): v for k, v in metrics.items() if "/solver/" in k}
    assert solver["rows"] == 3
    assert solver["reward/mean"] == pytest.approx(0.5)
    assert solver["penalty/mean"] == 0
    assert solver["valid_share"] == 1
    assert solver["activations_per_session"] == 1.5
    assert solver["response_length/mean"] == pytest.approx(140 / 3)
    assert solver["token_share"] == pytest.approx(0.7)
    assert solver["turns/mean"] == pytest.approx(5 / 3)
    assert solver["cut_characters/mean"] == 2.0  # a row without the count has none of it
    assert solver["advantage_mass_share"] == 1.0
    assert solver["zero_std_share"] == 0.0
    assert metrics["drmas/agent/verifier/valid_share"] == 0.5
    assert metrics["drmas/agent/verifier/penalty/mean"] == 0.125
    assert metrics["drmas/agent/verifier/reward/mean"] == 1.0


def test_reward_parts_are_averaged_over_the_rows_that_have_them():
    """A row whose judge failed has no such term, and must not count as one judged 0."""
    built = step()
    parts = [{"format": 0.1, "judge": 0.5}, {}, {"format": 0.2}, {}, {"format": 0.0, "judge": 0.0}]
    built.rows = [row and replace(row, parts=parts[ROWS.index(row)]) for row in built.rows]
    metrics = agent_metrics(built)
    assert metrics["drmas/agent/solver/reward_part/format/mean"] == pytest.approx(0.1)
    assert metrics["drmas/agent/solver/reward_part/judge/mean"] == 0.25
    assert "drmas/agent/verifier/reward_part/format/mean" not in metrics


@pytest.mark.parametrize(("place", "flat"), [("inside", 0.0), ("outside", 1.0)])
def test_a_group_has_the_spread_that_its_statistics_saw(place, flat):
    """Equal outcomes, one invalid action: the penalty gives the group a spread only if it enters the statistics."""
    assert agent_metrics(step(penalty=place))["drmas/agent/verifier/zero_std_share"] == flat


def test_shadow_metrics_name_the_estimators():
    options = {"ddof": 1, "eps": 1e-6, "std_floor": 0.0, "singleton": "zero", "constant": "zero"}
    metrics = shadow_metrics(step(), options)
    assert {k.split("/")[2] for k in metrics} == {"grpo_team", "grpo_activation", "drmas"}
    assert "drmas/shadow/grpo_team/advantage_mass_share/verifier" in metrics


def test_workflow_metrics_average_over_the_sessions_that_have_the_number():
    assert workflow_metrics(ROWS, None) == {"drmas/workflow/rounds": 1.5, "drmas/workflow/approved": 1.0}


def test_a_workflow_may_summarise_its_sessions_itself():
    class Own:
        @classmethod
        def summarise(cls, sessions):
            return {"sessions": float(len(sessions))}

    assert workflow_metrics(ROWS, Own) == {"drmas/workflow/sessions": 2.0}


def test_session_metrics_count_what_is_missing():
    metrics = session_metrics(ROWS, 4, {"failed/timeout": 1, "retried_calls": 3})
    assert metrics == {
        "drmas/sessions/expected": 4.0,
        "drmas/sessions/failed": 2.0,
        "drmas/sessions/rows_per_session": 2.5,
        "drmas/sessions/failed/timeout": 1.0,
        "drmas/sessions/retried_calls": 3.0,
    }
    assert session_metrics([], 4, {})["drmas/sessions/failed"] == 4.0


def test_sessions_of_different_prompts_are_different():
    other = [replace(row, uid="q") for row in ROWS]
    assert session_metrics([*ROWS, *other], 4, {})["drmas/sessions/failed"] == 0.0


# -- collapse ----------------------------------------------------------------------------------------------------------


def numbers(agent="a", activations=1.0, valid=1.0, flat=0.0):
    prefix = f"drmas/agent/{agent}"
    return {
        f"{prefix}/activations_per_session": activations,
        f"{prefix}/valid_share": valid,
        f"{prefix}/zero_std_share": flat,
    }


def watch(steps, agents=("a",), **settings):
    """Warnings of each step."""
    watcher = CollapseWatch(**settings)
    return [watcher.look(metrics, list(agents)) for metrics in steps]


def test_an_agent_below_a_fifth_of_its_start_is_named_once():
    said = watch([numbers(activations=2.0)] * 3 + [numbers(activations=0.41), numbers(activations=0.39)] * 2)
    assert [len(s) for s in said] == [0, 0, 0, 0, 1, 0, 0]
    assert said[4] == ["agent 'a': activations per session fell to 0.39, from 2 at the start"]


def test_the_start_is_the_mean_of_the_first_steps():
    said = watch([numbers(valid=v) for v in (1.0, 0.5, 0.0, 0.11, 0.09)])
    assert [len(s) for s in said] == [0, 0, 0, 0, 1]
    assert "valid share" in said[4][0]


def test_an_agent_that_stops_acting_has_no_metrics_and_is_named():
    said = watch([numbers()] * 3 + [{}])
    assert said[3] == ["agent 'a': activations per session fell to 0, from 1 at the start"]


def test_an_agent_that_never_acted_is_not_said_to_have_fallen():
    assert watch([{}] * 6) == [[]] * 6


def test_no_spread_for_some_steps_in_a_row():
    flat, fine = numbers(flat=1.0), numbers(flat=0.9)
    said = watch([flat] * 4 + [fine] + [flat] * 7)
    assert [len(s) for s in said] == [0] * 9 + [1, 0, 0]
    assert "no group had any spread in rewards for 5 steps" in said[9][0]


def test_agents_are_watched_apart():
    first = {**numbers("a"), **numbers("b")}
    said = watch([first] * 3 + [{**numbers("a", valid=0.0), **numbers("b")}], agents=("a", "b"))
    assert [len(s) for s in said] == [0, 0, 0, 1]
    assert said[3][0].startswith("agent 'a'")


def test_a_resumed_run_warns_as_an_uninterrupted_one():
    """The watch's memory goes through the checkpoint's JSON after every step."""
    low = numbers("a", activations=0.1, valid=0.1)
    steps = [{**numbers("a"), **numbers("b", flat=1.0)}] * 3
    steps += [{**numbers("a"), **numbers("b", flat=1.0)}, {**low, **numbers("b", flat=1.0)}, low, {}]
    whole = watch(steps, agents=("a", "b"))
    assert [len(said) for said in whole] == [0, 0, 0, 0, 3, 1, 0]  # both fall, b is flat, b stops
    for cut in range(len(steps)):
        watcher = CollapseWatch()
        said = []
        for step, metrics in enumerate(steps):
            if step == cut:
                state = json.loads(json.dumps(watcher.state()))
                watcher = CollapseWatch()
                watcher.load(state)
            said.append(watcher.look(metrics, ["a", "b"]))
        assert said == whole, cut


def test_a_checkpoint_without_a_watch_starts_it_anew():
    watcher = CollapseWatch()
    watcher.load({})
    assert [watcher.look(metrics, ["a"]) for metrics in [numbers()] * 3] == [[], [], []]
    assert len(watcher.look(numbers(valid=0.0), ["a"])) == 1


# -- models ------------------------------------------------------------------------------------------------------------

OWN = {
    "actor/grad_norm": 0.5,
    "actor/pg_loss": 0.25,
    "actor/lr": 1e-6,
    "training/rollout_probs_diff_max": 0.1,
    "perf/mfu/actor": 0.3,
    "global_seqlen/min": 12,
    "rows": 19,
    "padding_rows": 5,
    "padding_share": 5 / 24,
    "updates": 3,
    "seconds/update_actor": 1.5,
}
UNDER_MODEL = {
    "drmas/model/judge/grad_norm": 0.5,
    "drmas/model/judge/pg_loss": 0.25,
    "drmas/model/judge/lr": 1e-6,
    "drmas/model/judge/rollout_probs_diff_max": 0.1,
    "drmas/model/judge/mfu/actor": 0.3,
    "drmas/model/judge/global_seqlen/min": 12,
    "drmas/model/judge/rows": 19,
    "drmas/model/judge/padding_rows": 5,
    "drmas/model/judge/padding_share": 5 / 24,
    "drmas/model/judge/updates": 3,
    "drmas/model/judge/seconds/update_actor": 1.5,
}


def test_a_models_numbers_stand_under_its_name():
    """With several models verl's names would be one model's, by chance."""
    assert model_metrics("judge", OWN, alone=False) == UNDER_MODEL


def test_verls_names_stay_where_there_is_one_model():
    ours = {"rows", "padding_rows", "padding_share", "updates", "seconds/update_actor"}
    stock = {name: value for name, value in OWN.items() if name not in ours}
    assert model_metrics("judge", OWN, alone=True) == UNDER_MODEL | stock
    # A name of verl's that merely begins like ours is verl's.
    assert "updates_skipped" in model_metrics("judge", {"updates_skipped": 1.0}, alone=True)


def test_no_two_of_a_stages_numbers_get_the_same_name():
    assert len(model_metrics("judge", OWN, alone=False)) == len(OWN)


# verl picks the way to merge by what a name contains: gemini -> min, summarizer and total -> sum, maximus -> max.
ODD = ("gemini", "examiner", "summarizer", "total", "maximus", "average", "timing_s", "lr")


def test_verl_keeps_every_models_and_agents_numbers_as_they_are():
    """A step has one trigger, so whatever way verl takes has one value to merge."""
    metrics = {}
    for i, name in enumerate(ODD):
        own = {key: value + i for key, value in OWN.items()}
        metrics |= model_metrics(name, own, alone=False)
        metrics |= numbers(name, activations=1.5 + i, valid=0.25 + i)
        metrics |= alignment_metrics(
            [Row("p", 0, n, 0, name, "base") for n in range(3)],
            np.array([1.0, 2.0, 0.0]),
            StepAlignment((name,), {name: 2 + i}, "sample", 0, 1),
            {name: [3, 0]},
        )
        metrics[f"drmas/model/{name}/weight_syncs"] = 1
        metrics[f"drmas/model/{name}/log_prob_gap/max"] = 1e-7 * i
    for samples in (0, 8):
        aggregator = MetricsAggregator()
        aggregator.add_step_metrics({"prepare/seconds": 1.0})  # verl's own, before the trigger
        aggregator.add_step_metrics(metrics, sample_count=samples)
        merged = aggregator.get_aggregated_metrics()
        assert merged == {**metrics, "prepare/seconds": 1.0}
    assert reduce_metrics({name: [value] for name, value in metrics.items()}) == metrics


def test_a_policys_micro_batches_are_merged_before_the_models_name_is_added():
    """verl reduces lists inside the stage; under the name `gemini` their mean would become a minimum."""
    lists = {"actor/pg_loss": [1.0, 2.0, 6.0]}
    assert model_metrics("gemini", reduce_metrics(dict(lists)), alone=False) == {"drmas/model/gemini/pg_loss": 3.0}
    named = {f"drmas/model/gemini/{name}": values for name, values in lists.items()}
    assert list(reduce_metrics(named).values()) == [1.0]  # what would happen the other way round


# -- the page ----------------------------------------------------------------------------------------------------------


def test_every_name_of_a_step_is_on_the_page():
    built = step()
    built.rows = [row and replace(row, parts={"format": 0.1}) for row in built.rows]
    metrics = agent_metrics(built)
    metrics |= shadow_metrics(
        built, {"ddof": 1, "eps": 1e-6, "std_floor": 0.0, "singleton": "zero", "constant": "zero"}
    )
    metrics |= session_metrics(ROWS, 4, {"failed/timeout": 1, "retried_calls": 3, "tools/retrieval/calls": 1})
    metrics |= alignment_metrics(
        [replace(row, agent_id="finder") for row in ROWS],
        np.array([1.0, 2.0, 0.0, 1.0, 1.0]),
        StepAlignment(("finder",), {"finder": 2}, "sample", 0, 1),
        {"finder": [5, 0]},
    )
    metrics |= model_metrics("judge", OWN, alone=True)
    assert len(metrics) > 80
    assert undocumented(metrics, verls=OWN) == []


def test_what_is_ours_of_a_models_numbers_is_on_the_page():
    words = ["rows", "padding_rows", "padding_share", "updates", "seconds/update_actor"]
    assert all(metrics_module._OURS.match(name) for name in words)
    assert all(page_names_of(f"drmas/model/judge/{name}") for name in words)
    assert metrics_module._OURS.pattern.count("|") == 4  # another one is another row of the page


# -- engine against trainer --------------------------------------------------------------------------------------------


def test_log_prob_gaps_are_over_each_models_sampled_tokens(monkeypatch):
    """Masked tokens have log-prob 0 in the engine's rows and some number in the trainer's."""
    rows = {  # old log-probs, the rollout's, mask
        "a_0_0": ([-1.0, -2.0, -9.0], [-1.0, -2.5, 0.0], [1, 1, 0]),
        "a_1_0": ([-0.5], [-0.25], [1]),
        "b_0_0": ([-3.0, -1.0], [-3.0, -1.0], [1, 1]),
        "pad_0_0": ([-7.0], [0.0], [0]),
    }

    def get(keys, partition_id, select_fields):
        assert partition_id == "train"
        columns = dict(
            zip(
                ("old_log_probs", "rollout_log_probs", "response_mask"),
                zip(*(rows[key] for key in keys), strict=True),
                strict=True,
            )
        )
        return {
            name: torch.nested.as_nested_tensor([torch.tensor(r) for r in columns[name]], layout=torch.jagged)
            for name in select_fields
        }

    monkeypatch.setattr(metrics_module, "tq", SimpleNamespace(kv_batch_get=get))
    batch = KVBatchMeta(keys=list(rows), tags=[{} for _ in rows], partition_id="train")
    keys = {"a": ["a_0_0", "a_1_0", "pad_0_0"], "b": ["b_0_0"], "idle": [], "padding": ["pad_0_0"]}
    metrics = log_prob_gaps(batch, keys)
    assert {name: value for name, value in metrics.items() if "log_prob_gap" in name} == {
        "drmas/model/a/log_prob_gap/max": 0.5,
        "drmas/model/a/log_prob_gap/mean": pytest.approx(0.75 / 3),
        "drmas/model/b/log_prob_gap/max": 0.0,
        "drmas/model/b/log_prob_gap/mean": 0.0,
    }
    # verl's own numbers, on each model's rows.
    assert metrics["drmas/model/b/rollout_corr/kl"] == 0.0
    assert metrics["drmas/model/a/rollout_corr/kl"] == pytest.approx((0.0 - 0.5 + 0.25) / 3)
    assert not [name for name in metrics if "/idle/" in name or "/padding/" in name]
    assert undocumented(metrics) == []
