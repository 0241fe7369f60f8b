"""The paper's cells: which a configuration belongs to, and how far it is from the paper's own run."""

from math import fsum

import pytest
from simulated_runs import SEPARATE

from verl_drmas.report.paper import AVERAGE, cell_of, dataset_of, tables, unlike

SEARCH = {"verifier": "base", "search": "base", "answer": "base"}
SEVEN = "Qwen/Qwen2.5-7B"
APART = {agent: agent for agent in SEARCH}


def test_every_model_has_every_data_set_and_method_and_averages_that_are_means():
    for table in tables()["tables"].values():
        for model in table["models"].values():
            assert model.keys() == {*table["datasets"], AVERAGE}
            assert all(len(row) == len(tables()["methods"]) for row in model.values())
            for method in range(len(tables()["methods"])):
                for kind in (0, 1):
                    each = [row[method][kind] for name, row in model.items() if name != AVERAGE]
                    assert fsum(each) / len(each) == pytest.approx(model[AVERAGE][method][kind], abs=0.06)


@pytest.mark.parametrize(
    ("changes", "sources", "cell"),
    [
        ({}, (), ("math", "Qwen3-4B", "shared_drmas", None)),
        ({"estimator": "grpo_team", "agents": SEPARATE}, (), ("math", "Qwen3-4B", "separate_grpo", None)),
        ({"model": "/models/qwen3-8b"}, (), ("math", "Qwen3-8B", "shared_drmas", None)),
        (
            {"workflow": "search_hierarchy", "agents": APART, "model": SEVEN},
            (),
            ("search", "Qwen2.5-7B", "separate_drmas", "drmas"),
        ),
        (
            {"workflow": "search_hierarchy", "agents": APART, "model": SEVEN, "estimator": "drmas_std"},
            (),
            ("search", "Qwen2.5-7B", None, "drmas_std"),
        ),
        (
            {"workflow": "search_hierarchy", "agents": SEARCH, "model": "Qwen/Qwen2.5-3B"},
            (),
            ("search", "Qwen2.5-3B", "shared_drmas", None),
        ),
        (
            {"workflow": None, "agents": {}, "estimator": "grpo"},
            ("aime24", "other"),
            ("math", "Qwen3-4B", "single_grpo", None),
        ),
    ],
)
def test_a_configurations_cell_is_found(settings, changes, sources, cell):
    found, why = cell_of(settings(**changes), sources)
    assert (found.task, found.model, found.method, found.ablation) == cell
    assert why == found.shown()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"workflow": "arithmetic"}, "workflow arithmetic is none of the paper's"),
        ({"model": "Qwen/Qwen3-4B-Base"}, "the model Qwen/Qwen3-4B-Base is none"),
        ({"estimator": "grpo_activation"}, "grpo_activation with shared models"),
        ({"estimator": "drmas_mean"}, "drmas_mean with shared models"),
        ({"agents": SEPARATE, "own_models": {"solver": "Qwen/Qwen3-8B"}}, "heterogeneous"),
        ({"workflow": None, "agents": {}, "estimator": "grpo"}, "none of the paper's data sets"),
    ],
)
def test_a_configuration_without_a_cell_is_told_why(settings, changes, why):
    found, told = cell_of(settings(**changes), ())
    assert found is None
    assert why in told


@pytest.mark.parametrize(
    ("task", "source", "dataset"),
    [
        ("math", "aime24", "AIME24"),
        ("math", "HuggingFaceH4/aime_2024", "AIME24"),
        ("math", "MATH-500", "MATH500"),
        ("search", "searchR1_nq", "NQ"),
        ("search", "2wikimultihopqa", "2Wiki"),
        ("search", "aime24", None),
        ("math", "gsm8k", None),
    ],
)
def test_data_sources_are_known_by_their_usual_names(task, source, dataset):
    assert dataset_of(task, source) == dataset


def test_values_unlike_the_papers_are_listed_and_equal_ones_are_not(settings):
    assert unlike(settings(steps=None), "math") == []
    assert unlike(settings(steps=None, epochs=3), "math") == ["trainer.total_epochs 3 (paper: 2)"]
    assert unlike(settings(steps=40), "math") == ["trainer.total_training_steps 40 (paper: none)"]
    found = unlike(settings(batch=16, lr=0.00001, more="extra: 1", steps=None), "math")
    assert found == ["data.train_batch_size 16 (paper: 32)", "actor_rollout_ref.actor.optim.lr 1e-05 (paper: 1e-06)"]
    assert any(
        line.startswith("drmas.agents.*.invalid_penalty 0.1 (paper: 0.01)") for line in unlike(settings(), "search")
    )
