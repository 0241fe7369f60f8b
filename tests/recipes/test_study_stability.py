"""The study of estimators: its worlds, what it holds to be true of every group, its formulas, and its numbers twice."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recipes import cpu_job
from recipes.cpu_arithmetic.mappings import MAPPINGS, Name
from recipes.cpu_arithmetic.warm_start import WarmStart
from recipes.study_stability import confirm, figures, moments, penalties, results, study
from recipes.study_stability.exact import expected_success
from recipes.study_stability.policy import CLIP, DUAL_CLIP, Policy, gradient
from recipes.study_stability.probe import _draw, direction, probe, snapshots
from recipes.study_stability.retry import Retry
from recipes.study_stability.study import Scale, run_study
from recipes.study_stability.summary import Run, choose, paired
from recipes.study_stability.training import ESTIMATORS, Penalty, Setting, StudyError, Team, check_factors, train
from recipes.study_stability.worlds import ANSWERER, ROUTER, SEARCHER, TURNS, WORLDS, Draw, Sampler, first_tables
from verl_drmas import check
from verl_drmas.check_command import compose_as_verl
from verl_drmas.data.arithmetic import arithmetic_rows
from verl_drmas.data.parquet import write_rows
from verl_drmas.workflows import Task
from verl_drmas.workflows.scripted import ScriptedTeam

pytestmark = pytest.mark.long

SMALL = {"budget": 2000, "rate": 0.1}
FOLDER = Path(study.__file__).parent


def first_batch(world, seed=1, step=0):
    setting = Setting(world, "drmas", seed)
    return Team.of(setting).sample(step)


# The worlds.


@pytest.mark.parametrize("world", ["search", "rescue", "faulty"])
def test_who_acts_how_often_in_a_routed_session(world):
    batch = first_batch(world)
    calls = np.zeros((len(batch.success), 3), dtype=int)
    np.add.at(calls, (batch.session, batch.agent), 1)
    assert calls[:, ROUTER].min() >= 1 and calls[:, ROUTER].max() == TURNS
    assert set(calls[:, SEARCHER]) == {0, 1, 2, 3}
    assert set(calls[:, ANSWERER]) == {0, 1}
    unanswered = calls[:, ANSWERER] == 0
    assert (calls[unanswered, SEARCHER] == 3).all() and (batch.success[unanswered] == 0).all()


def test_everybody_acts_once_in_the_even_world():
    batch = first_batch("even")
    assert (np.bincount(batch.session * 3 + batch.agent) == 1).all()


def test_the_luck_of_a_step_is_the_same_for_every_estimator():
    starts = {name: next(train(Setting("search", name, 1, 1))) for name in ESTIMATORS}
    assert len({(step["success"], step["actions"]) for step in starts.values()}) == 1


def test_what_is_drawn_for_one_purpose_is_drawn_for_no_other(monkeypatch):
    """numpy fills seeds up with zeros: (1,) and (1, 0) are the same numbers."""
    seeds, real = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(tuple(seed)) or real(seed))
    setting = Setting("search", "drmas", 1, budget=3000)
    list(train(setting))
    list(_draw(setting, first_tables(WORLDS["search"], 1)[1], 6))
    assert len({seed[0] for seed in seeds}) == len(Draw)
    seeds = set(seeds)  # what is true is drawn anew where it is needed
    assert len({tuple(np.random.SeedSequence(seed).generate_state(4)) for seed in seeds}) == len(seeds)


def test_policies_are_probed_with_other_prompts_than_they_were_trained_on():
    setting = Setting("search", "drmas", 1)
    team = Team.of(setting)
    trained = [team.sample(step).context.tolist() for step in range(6)]
    assert not [batch for batch in _draw(setting, team.tables(), 3) if batch.context.tolist() in trained]


def test_an_agent_starts_with_its_world_s_skill():
    world = WORLDS["faulty"]
    truth, (router, searcher, answerer) = first_tables(world, 3)
    probability = np.exp(searcher) / np.exp(searcher).sum(-1, keepdims=True)
    assert probability[:, -1] == pytest.approx(world.malformed)
    right = probability[np.arange(world.keys), truth.query]
    assert right == pytest.approx(world.searcher * (1 - world.malformed))
    assert answerer.shape == (world.keys + 1, world.keys + 1) and router.shape == (2 * TURNS, 3)


# The policy.


def test_the_gradient_is_that_of_the_clipped_loss():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(5, 4))
    context, action = draw.integers(5, size=400), draw.integers(4, size=400)
    log_prob, advantage = np.log(draw.uniform(0.02, 0.9, size=400)), draw.normal(size=400)

    policy = Policy(logits, "sgd", 1.0)
    norms = policy.update(context, action, log_prob, advantage, 1)

    table = torch.tensor(logits, requires_grad=True)
    ratio = (torch.log_softmax(table, -1)[context, action] - torch.tensor(log_prob)).exp()
    a = torch.tensor(advantage)
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP))
    torch.where(a < 0, torch.minimum(loss, -a * DUAL_CLIP), loss).mean().backward()
    assert (ratio > DUAL_CLIP).any() and (ratio < 1 - CLIP).any()
    assert norms == pytest.approx([float(table.grad.norm())])
    moved = table.grad.numpy() * min(1.0, 1.0 / norms[0])  # the gradient is clipped to length 1
    assert logits - policy.logits == pytest.approx(moved, rel=1e-5)


def test_updates_share_the_rows_out():
    policy = Policy(np.zeros((1, 2)), "adamw", 0.1)
    columns = [np.zeros(3, dtype=int), np.array([0, 1, 0]), np.full(3, np.log(0.5)), np.ones(3)]
    assert len(policy.update(*columns, 2)) == 2
    assert len(policy.update(*columns, 5)) == 3  # a part without rows takes no step
    with pytest.raises(ValueError, match="adamw, sgd"):
        Policy(np.zeros((1, 2)), "adam", 0.1)


# What must hold of every group.


@pytest.fixture(scope="module")
def small():
    """Two seeds of every estimator in the even and an uneven world, a few steps each."""
    settings = [Setting(w, e, s, **SMALL) for w in ("search", "even") for e in ESTIMATORS for s in (1, 2)]
    return [Run(setting, list(train(setting))) for setting in settings]


def test_the_factor_stays_below_its_bound(small):
    largest = [
        value
        for run in choose(small, world="search")
        for a in run.steps[0]["agents"]
        for value in run.series(a, "f_max")[1]
    ]
    assert max(largest) <= Setting.sessions - 1 + 1e-9
    assert max(largest) > 2  # the bound is not one of a world without inflation


def test_a_broken_bound_ends_the_study():
    setting = Setting("search", "drmas", 1)
    check_factors(setting, {1: {"inflation_factor/mean": 2.0, "inflation_factor/max": 7.0}})
    with pytest.raises(StudyError, match=r"searcher is 7\.01, above N - 1 = 7"):
        check_factors(setting, {1: {"inflation_factor/mean": 2.0, "inflation_factor/max": 7.01}})
    inside = replace(setting, penalty=Penalty(0.1))
    check_factors(inside, {1: {"inflation_factor/max": 7.01}})  # nothing is claimed of it
    with pytest.raises(StudyError):
        check_factors(replace(setting, penalty=Penalty(0.1, "outside")), {1: {"inflation_factor/max": 7.01}})
    with pytest.raises(StudyError, match="it must be 1"):
        check_factors(
            replace(setting, world="even"), {0: {"inflation_factor/mean": 1.0, "inflation_factor/max": 1.001}}
        )


def test_the_factor_is_one_where_all_act_equally_often(small):
    for run in choose(small, world="even"):
        for agent in run.steps[0]["agents"]:
            assert run.series(agent, "f")[1] == pytest.approx([1.0] * len(run.steps), abs=1e-12)
            assert run.series(agent, "f_max")[1] == pytest.approx([1.0] * len(run.steps), abs=1e-12)


def test_agent_wise_statistics_change_nothing_where_all_act_equally_often(small):
    for mine, theirs in zip(*(choose(small, world="even", estimator=e) for e in ("drmas", "grpo_team")), strict=True):
        assert [step["success"] for step in mine.steps] == [step["success"] for step in theirs.steps]
        for agent in ("router", "searcher", "answerer"):
            assert mine.series(agent, "norm")[1] == pytest.approx(theirs.series(agent, "norm")[1], rel=1e-9)


def test_they_do_where_they_do_not(small):
    mine, theirs = (choose(small, world="search", estimator=e)[0] for e in ("drmas", "grpo_team"))
    assert mine.series("searcher", "norm")[1][0] != pytest.approx(theirs.series("searcher", "norm")[1][0], rel=1e-3)


@pytest.mark.parametrize("world", ["search", "rescue", "even"])
def test_both_sides_of_the_lemma_are_equal(world):
    setting = Setting(world, "drmas", 1)
    team = Team.of(setting)
    groups = list(moments.group_moments(team.sample(0), team.tables()))
    assert len(groups) > 30
    assert max(group["error"] for group in groups) < 1e-12
    without = [abs(g["shared"] - g["z2"] * g["f"]) / g["shared"] for g in groups]
    assert max(without) > 0.01  # neither side is trivial: Delta is needed


@pytest.mark.parametrize("sessions", [2, 5, 8, 16])
@pytest.mark.parametrize("calls", [1, 3])
def test_the_bound_is_reached_exactly_where_drmas_is_silent(sessions, calls):
    found = moments.extreme(sessions, calls)
    assert found["f"] == pytest.approx(sessions - 1)
    assert found["grpo_team"] == pytest.approx((sessions - 1) / np.sqrt(sessions), rel=1e-5)
    assert found["drmas"] == 0


def test_the_expected_factor():
    assert moments.expected_factor(0.3, 0.3) == pytest.approx(1)
    assert moments.expected_factor(0.5, 0.9) == pytest.approx(1)
    assert moments.expected_factor(7 / 8, 0.0) == pytest.approx(7)


# Penalties.


@pytest.mark.parametrize("size", penalties.SIZES)
@pytest.mark.parametrize("coefficient", [0.01, 0.1, 1.0])
def test_a_penalty_inside_pushes_at_full_size_whatever_it_costs(size, coefficient):
    full = -(size - 1) / np.sqrt(size)
    assert penalties.measured(size, coefficient, place="inside") == pytest.approx(full, rel=1e-3)


def test_what_changes_that():
    assert penalties.measured(8, 0.01, place="outside") == -0.01
    assert penalties.measured(8, 0.01, place="inside", std_floor=0.1) == pytest.approx(-0.0875, rel=1e-4)
    assert penalties.measured(8, 1.0, place="inside", std_floor=0.1) == pytest.approx(-7 / np.sqrt(8), rel=1e-4)


def test_the_formulas_are_what_the_code_does():
    rows = list(penalties.table())
    assert len(rows) == len(penalties.WAYS) * len(penalties.SIZES) * len(penalties.COEFFICIENTS)
    for row in rows:
        assert row["measured"] == pytest.approx(row["predicted"], rel=1e-9, abs=1e-12)


def test_whom_a_fault_reaches():
    found = penalties.reach(sessions=8, calls=3)
    assert (found["grpo_team"]["pushed"], found["grpo_team"]["other"]) == (6, 3)
    assert (found["drmas"]["pushed"], found["drmas"]["other"]) == (1, 0)
    assert found["drmas"]["faulty"] == pytest.approx(-23 / np.sqrt(24), rel=1e-3)


def test_penalties_alone_push_only_where_they_are_inside():
    def pushed(penalty):
        return Run(setting := Setting("faulty", "drmas", 1, 1000, penalty=penalty), list(train(setting))).flat_mass

    assert pushed(None) == 0
    assert pushed(Penalty(0.01)) > 0.05
    assert 0 < pushed(Penalty(0.01, std_floor=0.1)) < 0.5 * pushed(Penalty(0.01))
    assert 0 < pushed(Penalty(0.01, "outside")) < 0.01


# Policies held still.


@pytest.mark.parametrize("name", ["search", "rescue", "even"])
def test_the_expected_success_is_what_sampling_comes_to(name):
    world, step = WORLDS[name], 1e-5
    truth, tables = first_tables(world, 1)
    draw = np.random.default_rng(2)
    tables = [table + draw.normal(size=table.shape) for table in tables]
    value, slopes = expected_success(world, truth, tables)
    sampler = Sampler(world, truth, 1500, 1, Draw.TRAINING, 1)
    found = np.concatenate([sampler.sample(tables, number).success for number in range(20)])
    assert found.mean() == pytest.approx(value, abs=4 * np.sqrt(value * (1 - value) / len(found)))
    for agent, slope in enumerate(slopes):
        where = np.unravel_index(np.abs(slope).argmax(), slope.shape)
        moved = [table.copy() for table in tables]
        moved[agent][where] += step
        assert (expected_success(world, truth, moved)[0] - value) / step == pytest.approx(slope[where], rel=1e-3)


def test_there_is_no_formula_for_malformed_actions():
    world = WORLDS["faulty"]
    with pytest.raises(ValueError, match="'faulty' has malformed actions"):
        expected_success(world, *first_tables(world, 1))


def test_a_direction_is_freed_of_noise():
    draw, true = np.random.default_rng(0), np.array([3.0, 0.0, 0.0])
    biased = np.array([1.0, 1.0, 0.0]) + draw.normal(size=(4000, 3))
    assert direction(biased, true)["cosine"] == pytest.approx(np.sqrt(0.5), abs=0.05)
    assert direction(draw.normal(size=(50, 3)) + 1e-3, true)["cosine"] is None
    exact = direction(np.tile([2.0, 0.0, 0.0], (5, 1)), true)
    assert exact == {"alignment": 1.0, "cosine": 1.0, "norm": 2.0}


def test_pooling_over_activations_biases_who_decides_how_many_there_are():
    setting = Setting("search", "grpo_team", 1)
    (tables,) = snapshots(setting, (0.0,))
    rows, groups = probe(setting, tables, 60)
    cosine = {row["estimator"]: row["cosine"] for row in rows if row["agent"] == "router"}
    assert cosine["grpo_team"] > 0.98
    assert max(cosine[name] for name in ESTIMATORS[1:]) < 0.93
    silent = {row["estimator"]: row["silent"] for row in rows if row["agent"] == "searcher"}
    assert silent["grpo_team"] == silent["grpo_activation"] == 0
    assert silent["drmas"] > 0.1
    assert groups and {"f", "shared", "own"} <= groups[0].keys()


def test_the_gradient_of_no_rows_is_nothing():
    empty = np.zeros(0, dtype=int)
    assert not gradient(np.ones((2, 3)), empty, empty, np.zeros(0)).any()


# The whole.


def test_a_setting_gives_the_same_numbers_twice(small):
    run = choose(small, world="search", estimator="drmas", seed=2)[0]
    assert list(train(run.setting)) == run.steps
    assert next(train(replace(run.setting, seed=3))) != run.steps[0]


def test_the_estimators_are_given_the_same_budget(small):
    for run in small:
        assert SMALL["budget"] <= run.steps[-1]["actions"] < SMALL["budget"] + 600


def test_differences_are_between_the_same_seeds(small):
    runs, base = (choose(small, world="search", estimator=e) for e in ("drmas", "grpo_team"))
    difference, above = paired(runs, base[:1], lambda run: run.setting.seed + (run.setting.estimator == "drmas"))
    assert (difference.mean, difference.n, above) == (1.0, 1, 1)


def test_one_seed_has_no_standard_error(small):
    alone = [run for run in small if run.setting.seed == 1]
    assert results._shown(results.estimate(alone[:1], lambda run: 0.5)) == "0.500"
    assert results._shown(results.estimate(alone[:2], lambda run: 0.5)) == "0.500 ± 0.000"
    assert results._difference(*paired(alone[:1], alone[:1], lambda run: 0.5), 1) == "+0.000 (0 of 1)"
    assert [results._bias(told) for told in ([0.5, None], [None], [0.5])] == ["0.500 (1 of 2)", "noise", "0.500"]


def test_the_study_writes_its_files_and_the_same_twice(tmp_path, monkeypatch):
    class Serial(ThreadPoolExecutor):
        def __init__(self, processes, mp_context):
            super().__init__(1)

    monkeypatch.setattr(study, "ProcessPoolExecutor", Serial)
    captions, real = {}, figures.draw
    monkeypatch.setattr(figures, "draw", lambda *given: captions.update(real(*given)) or captions)
    run_study(tmp_path / "one", Scale((1, 2), 400, 2), 1)
    monkeypatch.setattr(figures, "draw", lambda *given: captions)  # pictures aren't compared
    run_study(tmp_path / "two", Scale((1, 2), 400, 2), 1)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"steps.jsonl", "runs.jsonl", "probe.jsonl", "moments.jsonl", "penalty.jsonl", "results.md"} <= names
    for name in names:
        if not name.endswith(".png"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    page = (tmp_path / "one/results.md").read_text()
    assert "nan" not in page.replace("learning", "") and "not run" not in page
    for name in names:
        if name.endswith(".png"):
            assert f"({name})" in page
    runs = [json.loads(line) for line in (tmp_path / "one/runs.jsonl").read_text().splitlines()]
    assert len(runs) == len(study.grid(Scale((1, 2), 400, 2)))
    assert len(
        {json.dumps({k: r[k] for k in ("world", "estimator", "seed", "optimiser", "rate", "penalty")}) for r in runs}
    ) == len(runs)


def test_the_published_pictures_are_there_and_small():
    for page in (FOLDER / "README.md", FOLDER / "published/results.md"):
        text = page.read_text()
        shown = [part.split(")")[0] for part in text.split("](")[1:] if ".png" in part.split(")")[0]]
        assert shown
        for name in shown:
            assert (page.parent / name).stat().st_size < 200_000, name


# Through real verl.


async def retry(solver, verifier, rounds=3):
    workflow = Retry(Retry.Settings(max_rounds=rounds))
    team = ScriptedTeam({"solver": solver, "verifier": verifier})
    outcome = await workflow.run(Task(question="3+4", answer="7"), team)
    return outcome, team


def test_the_solver_tries_again_until_the_verifier_is_content():
    import asyncio

    outcome, team = asyncio.run(retry(["8", "x", "7"], ["n", "?"]))
    assert outcome.reward == 1.0
    assert [action.agent_id for action in team.actions] == ["solver", "verifier", "solver", "verifier", "solver"]
    assert [action.valid for action in team.actions] == [True, True, False, False, True]
    assert [messages[0]["content"] for _, messages in team.seen][:4] == ["S:3+4=", "V:3+4=8?", "S:3+4=", "V:3+4=x?"]
    outcome, team = asyncio.run(retry(["8"], ["y"]))
    assert outcome.reward == 0.0 and len(team.actions) == 2


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Warm starts without training."""
    folder = tmp_path_factory.mktemp("starts")
    files = [
        write_rows(rows, folder / f"{name}.parquet")
        for name, rows in zip(("train", "val"), arithmetic_rows(), strict=True)
    ]
    made = {}
    for model_id in MAPPINGS[Name.SEPARATE].models:
        (folder / model_id).mkdir()
        (folder / model_id / "config.json").write_text("{}")
        made[model_id] = WarmStart(folder / model_id, *files, folder / "report", {})
    return made


@pytest.mark.parametrize("estimator", confirm.ESTIMATORS)
def test_the_jobs_pass_the_check(starts, monkeypatch, estimator):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    team = MAPPINGS[Name.SEPARATE]
    own = confirm.own_overrides(team, starts, estimator, 2, 7)
    config = compose_as_verl(["--config-name", team.config, *own])
    assert config.algorithm.adv_estimator == estimator and config.trainer.total_training_steps == 7
    check.prepare(config)


def test_what_the_jobs_logged_is_told(starts, tmp_path, monkeypatch):
    def job(config, run, overrides, timeout):
        run.mkdir(parents=True)
        drmas = "algorithm.adv_estimator=drmas" in overrides
        with (run / "metrics.jsonl").open("w") as log:
            for step in range(1, 8):
                data = {"training/global_step": step, "drmas/workflow/solver_success": 0.1 * step}
                for agent, model in confirm.MODELS.items():
                    data[f"drmas/agent/{agent}/activations_per_session"] = 1.5
                    data[f"drmas/agent/{agent}/inflation_factor/mean"] = 1.25
                    data[f"drmas/agent/{agent}/inflation_factor/max"] = 3.0 + step / 10
                    data[f"drmas/model/{model}/grad_norm"] = 6.0 if step == 7 and not drmas else 1.0
                log.write(json.dumps({"step": step, "data": data}) + "\n")

    import typer

    monkeypatch.setattr(confirm, "prepare", lambda folder, models, seed: starts)
    monkeypatch.setattr(cpu_job, "train", job)
    app = typer.Typer()
    app.command()(confirm.main)
    result = CliRunner().invoke(app, ["--run", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "runs/confirm.md").read_text()
    cells = "0.15 to 0.65 | 1.50 | 1.25 | 3.70 | 1.000"
    assert f"| grpo_team-seed1 | solver | {cells} | 6.000 | 1 of 2 |" in page
    assert f"| drmas-seed1 | verifier | {cells} | 1.000 | 0 of 2 |" in page
