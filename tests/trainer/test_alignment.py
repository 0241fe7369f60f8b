"""Alignment in training: D of the first steps and after a resume, copies of rows in any order, weights and numbers."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from verl_drmas.config import AlignmentConfig
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.alignment import (
    Alignment,
    StepAlignment,
    alignment_metrics,
    calls_by_session,
    copies_of,
    loss_weights,
    places,
)

SUBS = ("searcher", "coder")


def session(uid, number, *, index=0, model=None, **calls):
    """One session's rows: the main agent's, then each sub-agent's in turn; `model` names every agent's."""
    names = ["main", *(agent for agent, count in calls.items() for _ in range(count))]
    nth = [names[:i].count(name) for i, name in enumerate(names)]
    paths = [f"main.0/{name}.{n}" if i else "main.0" for i, (name, n) in enumerate(zip(names, nth, strict=True))]
    model = model or {}
    return [
        Row(uid, number, order, index, name, model.get(name, "base"), path=path)
        for order, (name, path) in enumerate(zip(names, paths, strict=True))
    ]


ROWS = [
    *session("p", 0, searcher=1, coder=4),
    *session("p", 1, searcher=3),
    *session("p", 2),
    *session("q", 0, index=1, searcher=5, coder=1),
    *session("q", 1, index=1, coder=2),
]


def step(mode="sample", target=(2, 3), number=4, seed=0):
    return StepAlignment(SUBS, dict(zip(SUBS, target, strict=True)), mode, seed, number)


def identity(row):
    """What a row is in every run: uid is random, and the order within a session may be."""
    return row.index, row.session, row.path


# -- D -----------------------------------------------------------------------------------------------------------------


def alignment(target="auto", steps=2, **settings):
    return Alignment(AlignmentConfig(target=target, auto_steps=steps, **settings), SUBS, seed=5)


def targets(of, counts):
    """D of each step."""
    return [of.of_step(dict(zip(SUBS, own, strict=True)), n + 1).target for n, own in enumerate(counts)]


STEPS = [
    ([1, 1, 2], [0, 0, 0]),
    ([5, 0, 1], [0, 3, 0]),
    ([50, 50, 50], [9, 9, 9]),
    ([0, 0, 0], [0, 0, 0]),
]


def test_a_set_target_is_every_steps():
    assert targets(alignment(target=4), STEPS) == [{"searcher": 4, "coder": 4}] * 4


def test_a_measured_target_grows_with_the_first_steps_and_is_then_kept():
    """An agent that nobody called has D 1."""
    measured = [{"searcher": 2, "coder": 1}, *[{"searcher": 5, "coder": 3}] * 3]
    assert targets(alignment(), STEPS) == measured


@pytest.mark.parametrize(("long", "target"), [(1, 2), (2, 9)])
def test_the_target_is_the_99th_percentile_of_sessions(long, target):
    counts = [9] * long + [2] * (100 - long)
    assert targets(alignment(), [(counts, [0])])[0]["searcher"] == target
    halves = [(counts[:50], [0]), (counts[50:], [0])]  # of all steps so far together
    assert targets(alignment(), halves)[1]["searcher"] == target


def test_a_step_carries_what_the_estimator_needs():
    made = alignment(target=3, mode="mask").of_step({}, 17)
    assert made == StepAlignment(SUBS, {"searcher": 3, "coder": 3}, "mask", 5, 17)


@pytest.mark.parametrize("cut", range(len(STEPS) + 1))
def test_a_resumed_run_has_the_targets_of_an_uninterrupted_one(cut):
    """The state goes through the checkpoint's JSON."""
    first, second = alignment(), alignment()
    before = targets(first, STEPS[:cut])
    second.load(json.loads(json.dumps(first.state())))
    assert before + targets(second, STEPS[cut:]) == targets(alignment(), STEPS)
    assert second.state() == (whole := alignment(), targets(whole, STEPS))[0].state()


def test_a_checkpoint_without_alignment_starts_it_anew():
    made = alignment()
    made.load({})
    assert targets(made, STEPS) == targets(alignment(), STEPS)


def test_agents_that_a_run_no_longer_has_are_forgotten():
    old = Alignment(AlignmentConfig(target="auto"), ("searcher", "writer"), seed=5)
    old.of_step({"searcher": [3], "writer": [4]}, 1)
    made = alignment(steps=10)
    made.load(old.state())
    assert targets(made, [([0], [1])]) == [{"searcher": 3, "coder": 1}]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_sessions_without_a_call_are_counted_as_zero():
    counts = calls_by_session(ROWS, SUBS)
    assert counts == {"searcher": [1, 3, 0, 5, 0], "coder": [4, 0, 0, 1, 2]}
    assert calls_by_session(ROWS, ()) == {}
    assert calls_by_session(session("p", 0), SUBS) == {"searcher": [0], "coder": [0]}


def test_places_are_the_paths_order_and_the_activations_where_a_path_repeats():
    """A template that rewrites history gives one place several activations."""
    rows = [Row("p", 0, order, 0, "a", "base", path=path) for order, path in enumerate(("b", "a", "b", "a"))]
    assert places(rows) == [2, 0, 3, 1]
    assert places([Row("p", 0, order, 0, "a", "base") for order in (3, 1, 2)]) == [2, 0, 1]  # stock loops have no path


@pytest.mark.parametrize("mode", ["sample", "expected", "mask", "none"])
def test_copies_sum_to_the_target_where_an_agent_was_called(mode):
    copies = copies_of(ROWS, step(mode))
    assert copies.dtype == np.float64
    sums, counts = defaultdict(float), Counter()
    for row, count in zip(ROWS, copies, strict=True):
        sums[row.uid, row.session, row.agent_id] += count
        counts[row.uid, row.session, row.agent_id] += 1
    for unit, calls in counts.items():
        target = step().target.get(unit[2], 1)
        wanted = {"none": calls, "mask": min(calls, target)}.get(mode, target)
        assert sums[unit] == pytest.approx(wanted), unit
    assert [c for row, c in zip(ROWS, copies, strict=True) if row.agent_id == "main"] == [1] * 5


def test_neither_order_nor_uid_matters():
    """Parallel calls end in any order: the same path may come as another activation, its row anywhere in the batch."""
    wanted = dict(zip(map(identity, ROWS), copies_of(ROWS, step()), strict=True))
    assert len(set(wanted.values())) > 2
    for seed in range(5):
        rng = Random(seed)
        rows = []
        for uid, number in {(row.uid, row.session): None for row in ROWS}:
            own = [row for row in ROWS if (row.uid, row.session) == (uid, number)]
            orders = rng.sample(range(len(own)), len(own))
            rows += [replace(row, uid=f"{uid}{seed}", activation=a) for row, a in zip(own, orders, strict=True)]
        rng.shuffle(rows)
        assert dict(zip(map(identity, rows), copies_of(rows, step()), strict=True)) == wanted


def test_draws_change_with_step_and_seed():
    first = copies_of(ROWS, step())
    assert copies_of(ROWS, step()).tolist() == first.tolist()
    assert copies_of(ROWS, step(number=5)).tolist() != first.tolist()
    assert copies_of(ROWS, step(seed=1)).tolist() != first.tolist()


# -- the loss ----------------------------------------------------------------------------------------------------------

PROMPTS, SESSIONS, PADDING = 3, 4, 3  # of the step: some sessions failed, and one prompt's all did


def weights_by_model(mode, model, untrained=()):
    """Rows with padding in between, owners, weights, and copies of each row (0 for padding)."""
    aligned = step(mode)
    copies = copies_of(ROWS, aligned)
    rows, owners, counts = [], [], []
    for i, (row, count) in enumerate(zip(ROWS, copies, strict=True)):
        rows.append(row)
        owners.append(None if row.agent_id in untrained else model[row.agent_id])
        counts.append(count)
        if i % 6 == 0:
            rows.append(None)
            owners.append(sorted({m for a, m in model.items() if a not in untrained})[i // 6 % 2])
            counts.append(0.0)
    weights = loss_weights(rows, copies, owners, aligned, prompts=PROMPTS, sessions=SESSIONS)
    return rows, owners, weights, np.array(counts)


@pytest.mark.parametrize("mode", ["sample", "expected", "mask", "none"])
def test_weights_make_verls_mean_the_papers(mode):
    """verl divides a model's rows by their number, padding too. The paper's sum is over copies, by slots: 3 prompts of
    4 sessions, of 2 and 3 trajectories each.
    """
    model = {"main": "a", "searcher": "b", "coder": "b"}
    rows, owners, weights, copies = weights_by_model(mode, model)
    losses = np.random.default_rng(0).normal(size=len(rows))
    real = np.array([row is not None for row in rows])
    losses[~real] = 0.0
    slots = {"main": 12, "searcher": 24, "coder": 36}
    if mode == "none":
        slots |= {"searcher": 9, "coder": 7}
    for model_id in "ab":
        mine = np.array([owner == model_id for owner in owners])
        assert (mine & ~real).sum() > 0
        verls = (weights * losses)[mine].sum() / mine.sum()
        papers = 0.0
        for agent in (agent for agent, m in model.items() if m == model_id):
            own = np.array([row is not None and row.agent_id == agent for row in rows])
            papers += (copies * losses)[own].sum() / slots[agent]
        assert verls == pytest.approx(papers, abs=1e-12)
        assert abs(papers) > 1e-3
    assert weights.dtype == np.float64 and np.isfinite(weights).all()


@pytest.mark.parametrize("mode", ["sample", "mask"])
def test_weighted_rows_weigh_as_physical_ones(mode):
    """With the rows themselves in the batch as often as they count."""
    model = dict.fromkeys(("main", *SUBS), "a")
    rows, owners, weights, copies = weights_by_model(mode, model | {"main": "b"})
    mine = [i for i, owner in enumerate(owners) if owner == "a" and rows[i] is not None]
    losses = np.random.default_rng(1).normal(size=len(rows))
    weighted = (weights * losses)[mine].sum() / owners.count("a")
    physical = [i for i in mine for _ in range(int(copies[i]))]
    slots = {"searcher": 24, "coder": 36}
    assert weighted == pytest.approx(sum(losses[i] / slots[rows[i].agent_id] for i in physical), abs=1e-12)
    assert len(physical) != len(mine)


def test_padding_and_rows_that_nobody_trains_have_weight_1():
    model = {"main": "a", "searcher": "b", "coder": "b"}
    rows, owners, weights, _ = weights_by_model("sample", model, untrained=("coder",))
    free = [row is None or row.agent_id == "coder" for row in rows]
    assert weights[free].tolist() == [1.0] * sum(free)
    # They are in nobody's batch: the searcher's rows are weighted as if they were not there.
    kept = [i for i, owner in enumerate(owners) if owner == "b"]
    copies = copies_of(ROWS, step())[[row.agent_id == "searcher" for row in ROWS]]
    alone = loss_weights([rows[i] for i in kept], copies, ["b"] * len(kept), step(), prompts=PROMPTS, sessions=SESSIONS)
    assert weights[kept].tolist() == alone.tolist()
    assert len(set(alone)) > 2


def test_weights_by_hand():
    """One prompt, two sessions, D 2; batches of 4 rows on model a (a padding row) and of 3 on model b."""
    rows = [
        *session("p", 0, model={"main": "a", "searcher": "b"}, searcher=1),
        *session("p", 1, model={"main": "a", "searcher": "b"}, searcher=2),
        None,
        None,
    ]
    owners = [row.model_id if row is not None else "a" for row in rows]
    assert owners == ["a", "b", "a", "b", "b", "a", "a"]
    weights = loss_weights(rows, np.array([1.0, 2, 1, 0, 1]), owners, step(), prompts=1, sessions=2)
    assert weights.tolist() == pytest.approx([4 / 2, 2 * 3 / 4, 4 / 2, 0, 3 / 4, 1, 1])


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    """Searcher: 1, 3, 0, 5 and 0 calls in five sessions, D 2; coder: 4, 0, 0, 1 and 2, D 3."""
    copies = np.ones(len(ROWS))
    own = {agent: [i for i, row in enumerate(ROWS) if row.agent_id == agent] for agent in SUBS}
    copies[own["searcher"]] = [2, 1, 1, 0, 0, 2, 0, 0, 0]
    copies[own["coder"]] = [1, 1, 0, 1, 3, 1, 2]
    metrics = alignment_metrics(ROWS, copies, step(), calls_by_session(ROWS, SUBS))
    assert metrics == pytest.approx(
        {
            "drmas/alignment/searcher/target": 2,
            "drmas/alignment/searcher/calls/mean": 9 / 5,
            "drmas/alignment/searcher/calls/max": 5,
            "drmas/alignment/searcher/share_without_call": 2 / 5,
            "drmas/alignment/searcher/share_above_target": 2 / 5,
            "drmas/alignment/searcher/dropped": 5,
            "drmas/alignment/searcher/copies_added": 2,
            "drmas/alignment/searcher/copies/max": 2,
            "drmas/alignment/searcher/histogram/calls_0": 2 / 5,
            "drmas/alignment/searcher/histogram/calls_1": 1 / 5,
            "drmas/alignment/searcher/histogram/calls_2": 0,
            "drmas/alignment/searcher/histogram/calls_3_or_more": 2 / 5,
            "drmas/alignment/coder/target": 3,
            "drmas/alignment/coder/calls/mean": 7 / 5,
            "drmas/alignment/coder/calls/max": 4,
            "drmas/alignment/coder/share_without_call": 2 / 5,
            "drmas/alignment/coder/share_above_target": 1 / 5,
            "drmas/alignment/coder/dropped": 1,
            "drmas/alignment/coder/copies_added": 3,
            "drmas/alignment/coder/copies/max": 3,
            "drmas/alignment/coder/histogram/calls_0": 2 / 5,
            "drmas/alignment/coder/histogram/calls_1": 1 / 5,
            "drmas/alignment/coder/histogram/calls_2": 1 / 5,
            "drmas/alignment/coder/histogram/calls_3": 0,
            "drmas/alignment/coder/histogram/calls_4_or_more": 1 / 5,
        }
    )
    assert all(type(value) is float for value in metrics.values())
    at_target = alignment_metrics(ROWS, copies, step(target=(3, 2)), calls_by_session(ROWS, SUBS))
    assert [at_target[f"drmas/alignment/{agent}/share_above_target"] for agent in SUBS] == [1 / 5, 1 / 5]


def test_an_agent_that_nobody_called_has_numbers_too():
    rows = session("p", 0)
    metrics = alignment_metrics(rows, np.ones(1), step(), calls_by_session(rows, SUBS))
    own = {name.removeprefix("drmas/alignment/coder/"): v for name, v in metrics.items() if "/coder/" in name}
    assert (own["share_without_call"], own["dropped"], own["copies_added"]) == (1, 0, 0)
    assert "copies/max" not in own
