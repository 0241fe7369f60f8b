"""The warm start's parts: examples, measures, gates and cache. Its full length is seen by the CPU job itself."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.cpu_arithmetic import roles, tiny_model, warm_start
from recipes.cpu_arithmetic.roles import Lessons, Problem
from recipes.cpu_arithmetic.warm_start import Settings, WarmStartError, measure, train_model
from verl_drmas.data.parquet import read_rows

pytestmark = pytest.mark.process

ANYTHING = (0.0, 1.0)
QUICK = Settings(
    threads=1,
    batch=16,
    clean_steps=2,
    clean_solver=0.0,
    clean_verifier=0.0,
    noisy_steps=2,
    check_every=2,
    solver_band=ANYTHING,
    verifier_band=ANYTHING,
    verifier_class_floor=0.0,
)


@pytest.fixture(scope="module")
def llama():
    """Returns a random model with its tokenizer."""
    return tiny_model.build("llama", seed=0)


def test_near_misses_are_wrong_and_not_negative():
    assert Problem("0+1", 1).near_misses() == [0, 2, 3, 11]
    assert Problem("9+9", 18).near_misses() == [8, 16, 17, 19, 20, 28]


def test_lessons_hold_the_prompts_of_training_with_true_and_opposite_answers(llama):
    _, tokenizer = llama
    lessons = Lessons.of([Problem("3+4", 7)], tokenizer)

    def texts(table):
        return {tokenizer.decode(row[row != tokenizer.pad_token_id]) for row in table.ids}

    assert texts(lessons.problems) == {"S:3+4=7<eos>"} and len(lessons.problems) == 1
    assert texts(lessons.solver[0]) == {"S:3+4=7<eos>"}
    assert texts(lessons.solver[1]) == {f"S:3+4={wrong}<eos>" for wrong in (5, 6, 8, 9, 17)}
    assert texts(lessons.right[0]) == {"V:3+4=7?y<eos>"}
    assert texts(lessons.right[1]) == {"V:3+4=7?n<eos>"}
    assert texts(lessons.wrong[0]) == {f"V:3+4={wrong}?n<eos>" for wrong in (5, 6, 8, 9, 17)}
    assert all(len(a) == len(b) for a, b in (lessons.solver, lessons.right, lessons.wrong))
    answer = lessons.right[0].ids[0][lessons.right[0].answer[0]]
    assert tokenizer.decode(answer) == "y<eos>"


def test_a_pair_too_long_for_its_table_is_refused(llama):
    with pytest.raises(ValueError, match="5 tokens long; the table's rows hold 4"):
        roles.tokenise([("S:=", "1")], llama[1], 4)


def test_log_probabilities_do_not_depend_on_padding(llama):
    model, tokenizer = llama
    pairs = [("S:3+4=", "7"), ("V:9+9=28?", "n")]
    short, long = (warm_start.sequence_log_prob(model, roles.tokenise(pairs, tokenizer, n)) for n in (11, 20))
    torch.testing.assert_close(short, long)
    # By hand for the first: two tokens, each given what stands before it.
    ids = torch.tensor([tokenizer("S:3+4=7")["input_ids"] + [tokenizer.eos_token_id]])
    logs = torch.log_softmax(model(input_ids=ids).logits[0], -1)
    torch.testing.assert_close(short[0], logs[5, ids[0, 6]] + logs[6, ids[0, 7]])


def test_measures_of_a_model_that_always_says_yes():
    model, tokenizer = tiny_model.build("llama", seed=0)
    lessons = Lessons.of([Problem("3+4", 7), Problem("5+5", 10)], tokenizer)
    accepting = roles.stack([lessons.right[0], lessons.wrong[1]])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        optimiser.zero_grad()
        (-warm_start.sequence_log_prob(model, accepting).mean()).backward()
        optimiser.step()
    measured = measure(model, lessons)
    assert measured["verifier_right"] > 0.9
    assert measured["verifier_wrong"] < 0.1
    assert measured["verifier"] == pytest.approx(0.5, abs=0.05)


def test_writes_everything_and_reuses_it(tmp_path, monkeypatch):
    made = warm_start.warm_start(tmp_path, QUICK)

    assert AutoModelForCausalLM.from_pretrained(made.model).num_parameters() > 7e5
    train, val = read_rows(made.train), read_rows(made.val)
    assert (len(train), len(val)) == (84, 16)
    assert train[0]["data_source"] == "arithmetic"
    assert json.loads(made.report.read_text()) == made.measured
    assert set(made.measured) == {"settings", "seconds", "clean", "final"}
    assert [path.name for path in tmp_path.iterdir()] == [made.report.parent.name]

    def must_not_train(settings):
        raise AssertionError("trained again")

    monkeypatch.setattr(warm_start, "train_model", must_not_train)
    assert warm_start.warm_start(tmp_path, QUICK) == made
    with pytest.raises(AssertionError, match="trained again"):
        warm_start.warm_start(tmp_path, dataclasses.replace(QUICK, noisy_rate=2e-4))


@pytest.mark.parametrize(
    ("taught", "measured", "rows"),
    [
        (("solver",), {"solver"}, 6),
        (("verifier",), {"verifier", "verifier_right", "verifier_wrong"}, 10),
        (warm_start.ROLES, {"solver", "verifier", "verifier_right", "verifier_wrong"}, 16),
    ],
)
def test_a_role_that_is_not_taught_costs_nothing_and_fails_no_gate(monkeypatch, taught, measured, rows):
    model, tokenizer = tiny_model.build("llama", seed=0)
    impossible = {
        key: value
        for role in set(warm_start.ROLES) - set(taught)
        for key, value in ((f"clean_{role}", 2.0), (f"{role}_band", (2.0, 2.0)))
    }
    settings = dataclasses.replace(QUICK, roles=taught, extra_rounds=0, **impossible)
    sizes, stack = set(), roles.stack
    monkeypatch.setattr(roles, "stack", lambda tables: sizes.add(sum(map(len, tables))) or stack(tables))
    lessons = Lessons.of([Problem("3+4", 7)], tokenizer)
    seen = warm_start.teach(model, lessons, lessons, settings, torch.Generator().manual_seed(0))
    assert set(seen["clean"]["train"]) == set(seen["final"]["held_out"]) == measured
    assert sizes == {rows, 2 * rows}  # clean, and noisy with both answers


def test_a_warm_start_is_named_by_what_it_is(tmp_path):
    made = warm_start.warm_start(tmp_path, dataclasses.replace(QUICK, style="qwen3", size="small", roles=("solver",)))
    assert made.report.parent.name.startswith("qwen3-small-solver-seed1-")
    assert AutoModelForCausalLM.from_pretrained(made.model).num_parameters() < 5e5
    assert made.measured["settings"]["roles"] == ["solver"]


def test_equal_seeds_give_equal_weights_and_other_seeds_others():
    first, again, other = (
        torch.cat([p.detach().flatten() for p in train_model(dataclasses.replace(QUICK, seed=seed))[0].parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_clean_phase_that_does_not_teach_gets_more_rounds_and_then_fails_with_numbers(tmp_path):
    settings = dataclasses.replace(QUICK, clean_solver=1.0, extra_steps=3, extra_rounds=2)
    with pytest.raises(WarmStartError, match=r"after 8 clean steps .*'solver'.*solver >= 1\.0.*raise clean_steps"):
        warm_start.warm_start(tmp_path, settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [{"solver_band": (0.9, 1.0)}, {"verifier_band": (0.9, 1.0)}, {"verifier_class_floor": 0.9}],
)
def test_a_noisy_phase_that_misses_its_bands_fails_with_numbers(change):
    with pytest.raises(WarmStartError, match=r"after 2 noisy steps .*'solver'.*raise noisy_steps"):
        train_model(dataclasses.replace(QUICK, **change))


@pytest.mark.parametrize(
    ("measured", "truth"),
    [
        ({"solver": 0.9, "verifier": 0.9}, {"solver": 0.1, "verifier": 0.5}),  # nearly perfect: as unsure as is allowed
        ({"solver": 0.4, "verifier": 0.6}, {"solver": 0.4, "verifier": 0.6}),  # on target: the target holds it there
        (
            {"solver": 0.3, "verifier": 0.55},
            {"solver": 0.7, "verifier": 0.75},
        ),  # too low: pulled up, three times as hard
    ],
)
def test_steering_goes_against_the_deviation(llama, measured, truth):
    model, tokenizer = llama
    settings = dataclasses.replace(QUICK, solver_target=0.4, verifier_target=0.6)
    teacher = warm_start._Teacher(model, Lessons.of([Problem("3+4", 7)], tokenizer), settings, torch.Generator())
    teacher.steer(measured)
    assert teacher.truth == pytest.approx(truth)


def test_the_noisy_phase_brings_a_model_into_the_bands():
    """On two problems, which a model knows after a few steps, the whole way from random to unsure takes seconds."""
    model, tokenizer = tiny_model.build("llama", seed=0)
    lessons = Lessons.of([Problem("3+4", 7), Problem("2+2", 4)], tokenizer)
    settings = dataclasses.replace(
        Settings(), threads=1, batch=16, clean_steps=60, check_every=1, clean_verifier=0.9, noisy_rate=3e-4
    )
    measured = warm_start.teach(model, lessons, lessons, settings, torch.Generator().manual_seed(0))
    assert measured["clean"]["train"]["solver"] >= settings.clean_solver
    final = measure(model, lessons)
    assert final == measured["final"]["train"]
    assert settings.solver_band[0] <= final["solver"] <= settings.solver_band[1]
    assert settings.verifier_band[0] <= final["verifier"] <= settings.verifier_band[1]
    assert min(final["verifier_right"], final["verifier_wrong"]) >= settings.verifier_class_floor
