"""What a configuration tells of a run, and which runs are seeds of one."""

import pytest
from simulated_runs import SEPARATE

from verl_drmas.report.groups import _letter, differences, group_runs, seeds_of
from verl_drmas.report.settings import model_name, without_seed

THREE = {"verifier": "a", "search": "b", "answer": "b"}


@pytest.mark.parametrize(
    ("changes", "mapping", "model"),
    [
        ({}, "shared", "Qwen/Qwen3-4B"),
        ({"agents": SEPARATE}, "separate", "Qwen/Qwen3-4B"),
        ({"agents": THREE}, "partly shared", "Qwen/Qwen3-4B"),
        ({"agents": SEPARATE, "own_models": {"verifier": "/m/Llama-3B/"}}, "heterogeneous", "Qwen/Qwen3-4B + Llama-3B"),
        ({"agents": {}, "workflow": None}, "single", "Qwen/Qwen3-4B"),
    ],
)
def test_mapping_and_models_come_from_agents_and_models(settings, changes, mapping, model):
    found = settings(**changes)
    assert (found.mapping, found.model) == (mapping, model)


def test_values_come_through_and_what_cant_be_resolved_stays(settings):
    found = settings(more="extra: {copy: '${data.train_batch_size}', list: [1, 2]}")
    assert found.get("extra.copy") == 32
    assert found.get("actor_rollout_ref.rollout.mode") == "${oc.env:NO_SUCH_VARIABLE}"
    assert found.get("extra.list") == "[1, 2]"
    assert (found.estimator, found.workflow, found.last_step) == ("drmas", "solver_verifier", 40)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/models/Qwen3-4B/", "Qwen3-4B"),
        ("~/hub/models--Qwen--Qwen3-4B/snapshots/" + "0a" * 20, "Qwen/Qwen3-4B"),
        ("/runs/llama-medium-seed12-3b2aca700d/model", "llama-medium"),
        ("/ck/exp/global_step_20/actor/huggingface", "exp"),
    ],
)
def test_a_model_is_called_the_same_wherever_it_lies(path, name):
    assert model_name(path) == name


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("math-seed3", "math"),
        ("math_seed_3", "math"),
        ("seed3_math", "_math"),
        ("math/seed12", "math/"),
        ("qwen3-4b", "qwen3-4b"),
        ("k-4", "k-4"),
        ("seed1", "seed1"),
    ],
)
def test_names_lose_their_seed_and_nothing_else(name, plain):
    assert without_seed(name) == plain


def test_seeds_folders_and_names_dont_part_runs_and_all_else_does(settings):
    one = settings(seed=1, experiment="a_seed1", model="/w/tiny-seed1-0123456789/model").identity
    two = settings(seed=2, experiment="a_seed2", model="/w/tiny-seed2-9876543210/model").identity
    assert one == two
    assert settings(lr=2e-6, model="/w/tiny-seed1-0123456789/model").identity != one
    apart = differences([settings(), settings(lr=2e-6, steps=60)])
    assert apart == {
        "actor_rollout_ref.actor.optim.lr": ["1e-06", "2e-06"],
        "trainer.total_training_steps": ["40", "60"],
    }


def test_runs_are_grouped_by_configuration_whatever_they_are_called(runs):
    groups = group_runs(
        runs(
            x=dict(seed=1, steps=3, config={"estimator": "drmas"}),
            y=dict(seed=2, steps=3, config={"estimator": "drmas"}),
            z=dict(seed=1, steps=4, config={"estimator": "grpo_team", "steps": 3}),
        )
    )
    assert [(group.label, group.title, [run.name for run in group.runs]) for group in groups] == [
        ("A", "drmas", ["x", "y"]),
        ("B", "grpo_team", ["z"]),
    ]
    assert [seeds_of(group) for group in groups] == [["1", "2"], ["1"]]
    assert groups[0].labels() == ["A1", "A2"]


def test_what_two_titles_share_is_told_apart(runs):
    groups = group_runs(runs(x=dict(steps=3), y=dict(steps=4, seed=2, config={"lr": 2e-6, "steps": 3})))
    assert {group.title for group in groups} == {"drmas, lr 1e-06", "drmas, lr 2e-06"}


def test_a_title_names_what_isnt_the_same_in_all(runs):
    groups = group_runs(runs(x=dict(steps=3), y=dict(steps=3, seed=2, agents=SEPARATE)))
    assert [group.title for group in groups] == ["drmas, separate", "drmas, shared"]
    (alone,) = group_runs(groups[1].runs)
    assert alone.title == "drmas, shared, solver_verifier, Qwen/Qwen3-4B"


def test_without_a_configuration_the_name_decides_and_numbers_sort_as_numbers(runs):
    (a, b) = group_runs(
        runs(
            **{f"a_seed{seed}": dict(seed=seed, steps=3, config=False) for seed in (10, 9, 1)},
            b=dict(seed=7, config=False),
        )
    )
    assert [run.name for run in a.runs] == ["a_seed1", "a_seed9", "a_seed10"]
    assert (a.title, b.title) == ("a", "b")
    assert a.settings is None


def test_letters_go_on_after_z():
    assert [_letter(n) for n in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]
