"""The search team's CPU job: its lessons, tokenizer, warm start and command. Its full length is seen by the job itself.

The lessons are held against the real workflow over a real index, with the settings of the job's own configuration.
"""

import asyncio
import dataclasses
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from recipes import cpu_job
from recipes.cpu_arithmetic import tiny_model
from recipes.cpu_arithmetic.warm_start import WarmStartError, limit_threads, sequence_log_prob
from recipes.cpu_search import train, warm_start
from recipes.cpu_search.lessons import Lesson, TitleRetriever, session
from recipes.cpu_search.teaching import Settings, Taught, Teacher, measure, teach
from recipes.cpu_search.tokens import build_tokenizer
from recipes.cpu_search.warm_start import WarmStart, play_lessons, train_model
from verl_drmas.data.parquet import check_indices, check_prompts, read_rows
from verl_drmas.data.passages import write_passages
from verl_drmas.data.world import World, world_rows
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.retrieval.index import open_index
from verl_drmas.retrieval.local import LocalRetriever
from verl_drmas.workflows import Task
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.search_hierarchy import SearchHierarchy

pytestmark = pytest.mark.process

AGENTS = SearchHierarchy.agents
JOB = OmegaConf.load(Path(cpu_job.__file__).parents[1] / "configs" / "cpu_search.yaml")
FORMS = {
    "verifier": r"<verdict>(yes|no)</verdict>",
    "search": r"<search>(\w+)</search>",
    "answer": r"<answer>(\w+)</answer>",
}
QUICK = Settings(
    threads=1, batch=6, worlds=3, sessions=3, clean_steps=2, extra_rounds=0, noisy_steps=2, clean_gate={}, bands={}
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """What is this small is slower on more."""
    with limit_threads(1):
        yield


def workflow_of(world, hops=2):
    turns = max(4, hops + 1)
    settings = SearchHierarchy.Settings(retrieval={"local": "."}, max_turns=turns, **JOB.drmas.workflow)
    return SearchHierarchy(settings, retriever=TitleRetriever(world))


def lessons_of(seeds, hops=(1, 2), astray=0.15, sessions=12):
    worlds = [World.build(seed=seed) for seed in seeds]
    draw = random.Random(0)
    asked = Settings(sessions=sessions)
    return play_lessons(workflow_of(worlds[0]), asked, worlds, hops, draw, astray=astray)


def flat(lessons):
    return [lesson for part in lessons.values() for lesson in part]


def texts(lessons):
    return sorted({text for lesson in lessons for text in (lesson.prompt, lesson.said, *lesson.wrong)})


@pytest.fixture(scope="module")
def known():
    """Lessons of ten worlds, by agent."""
    return lessons_of(range(-10, 0), hops=(1, 2, 3), sessions=18)


@pytest.fixture(scope="module")
def tokenizer(known):
    """Built from the known lessons alone."""
    return build_tokenizer(World.build(), flat(known))


# Lessons


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A world, and the job's workflow over a real index of it."""
    folder = tmp_path_factory.mktemp("searched")
    world = World.build(seed=6)
    corpus = write_passages(world.passages(), folder / "corpus.jsonl")
    build_index([corpus], folder / "index", IndexSettings(kind="words"))
    workflow = workflow_of(world)
    workflow.retriever = LocalRetriever(folder / "index")
    return world, workflow


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_the_workflow_shows_what_the_lessons_read_and_rewards_what_they_say(searched, tokenizer, hops):
    """Within the job's limits of a prompt, which cut nothing."""
    world, retriever = searched[0], searched[1].retriever
    for question in random.Random(hops).sample(world.questions(hops), 12):
        played = session(workflow_of(world, hops), world, question, random.Random(0), astray=0.0)
        team = ScriptedTeam({a: [lesson.said for lesson in played if lesson.agent_id == a] for a in AGENTS})
        for agent_id in AGENTS:
            team[agent_id].prompt_length = JOB.data.max_prompt_length
            team[agent_id].count_tokens = lambda text: len(tokenizer(text)["input_ids"])
        workflow = workflow_of(world, hops)
        workflow.retriever = retriever
        outcome = asyncio.run(workflow.run(Task(question=question.text, answer=[question.answer]), team))
        assert (outcome.reward, outcome.metrics["searches"], outcome.metrics["cut_prompts"]) == (1.0, hops, 0.0)
        assert team.seen == [(x.agent_id, [{"role": "user", "content": x.prompt}]) for x in played]
        assert all(action.valid for action in team.actions)


@pytest.mark.parametrize(("agent_id", "reward", "searches"), [("answer", 0.0, 2), ("verifier", 1.0, 3)])
def test_a_mistake_costs_the_reward_or_a_search(searched, agent_id, reward, searches):
    world, workflow = searched
    for question in random.Random(0).sample(world.questions(2), 10):
        played = session(workflow_of(world), world, question, random.Random(0), astray=0.0)
        says = {a: [lesson.said for lesson in played if lesson.agent_id == a] for a in AGENTS}
        last = [lesson for lesson in played if lesson.agent_id == agent_id][-1]
        says[agent_id][-1] = last.wrong[0]
        says["search"] *= 2  # a session without the verdict goes on
        outcome = asyncio.run(workflow.run(Task(question=question.text, answer=[question.answer]), ScriptedTeam(says)))
        assert (outcome.reward, outcome.metrics["searches"]) == (reward, searches)


@pytest.mark.parametrize("astray", [0.0, 0.15, 1.0])
def test_what_is_wrong_has_the_form_of_what_is_right_and_another_content(astray):
    people = set(World.build().people)
    found = flat(lessons_of((0, 1), hops=(1, 2, 3), astray=astray))
    for lesson in found:
        said = re.fullmatch(FORMS[lesson.agent_id], lesson.said)[1]
        wrong = [re.fullmatch(FORMS[lesson.agent_id], text)[1] for text in lesson.wrong]
        assert wrong and said not in wrong and len(set(wrong)) == len(wrong)
        if lesson.agent_id == "search" and "Evidence: none yet." in lesson.prompt:
            assert len(wrong) == 1 and set(wrong) < people
        else:
            assert all(word in lesson.prompt for word in wrong)  # a mistake that the prompt invites
    assert {lesson.agent_id for lesson in found} == set(AGENTS)


def label(world, prompt):
    """What is right for a prompt: the support that its evidence lacks, else None; and the answer. From its text."""
    path, start = re.search(r"Question: Who is the (.*) of (\w+)\?", prompt).groups()
    people = [start]
    for relation in reversed(path.split(" of the ")):
        people.append(world.facts[people[-1], relation])
    read = re.findall(r"^\[\d+\] (\w+): ", prompt, re.MULTILINE)
    return next((person for person in people[:-1] if person not in read), None), people[-1]


@pytest.mark.parametrize("astray", [0.0, 0.15, 0.5, 1.0])
def test_a_search_that_goes_astray_leaves_the_right_label_in_place(astray):
    world, draw = World.build(seed=3), random.Random(5)
    missed, guessed = 0, []
    for question in draw.sample(world.questions(2), 40):
        played = session(workflow_of(world), world, question, draw, astray)
        for lesson in played:
            lacking, answer = label(world, lesson.prompt)
            said = re.fullmatch(FORMS[lesson.agent_id], lesson.said)[1]
            if lesson.agent_id == "answer" and lacking:
                guessed.append(said)  # nobody could know
                continue
            assert (
                said == {"verifier": "no" if lacking else "yes", "search": lacking, "answer": answer}[lesson.agent_id]
            )
        missed += len([lesson for lesson in played if lesson.agent_id == "search"]) > 2
    assert missed == 0 if astray == 0 else 40 * astray <= missed <= 40
    assert set(guessed) <= set(world.people) and bool(guessed) is (astray > 0)


def test_sessions_are_drawn_from_every_world_and_number_of_hops():
    found = lessons_of(range(4), hops=(1, 2), astray=0.0, sessions=5)
    assert {agent_id: len(part) for agent_id, part in found.items()} == {
        "verifier": 4 * 5 * (2 + 3),
        "search": 4 * 5 * (1 + 2),
        "answer": 4 * 5 * 2,
    }
    assert found == lessons_of(range(4), hops=(1, 2), astray=0.0, sessions=5)
    few = play_lessons(
        workflow_of(World.build()), Settings(sessions=999), [World.build()], (1,), random.Random(0), astray=0.0
    )
    assert len(few["answer"]) == 120  # all there are


def test_the_retriever_of_lessons_finds_names_and_nothing_else():
    world = World.build()
    retriever = TitleRetriever(world)
    name = world.people[7]
    (hit,) = asyncio.run(retriever.search(name, 1))
    assert (hit.passage.title, hit.passage.text) == (name, world.passage(name))
    assert asyncio.run(retriever.search(f"the mentor of {name}", 1)) == []


# Tokenizer


def test_every_text_of_other_worlds_is_known_and_decodes_to_itself(known, tokenizer):
    other = texts(flat(lessons_of(range(100, 105), hops=(1, 2, 3))))
    assert len(set(other) - set(texts(flat(known)))) > 300
    for text in other:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_names_and_verdicts_are_tokens_and_all_else_is_pieces_between_them(known, tokenizer):
    world = World.build()
    vocabulary = tokenizer.get_vocab()
    assert set(world.people) | {"yes", "no", "<search>", "</search>", "'s mentor is "} <= set(vocabulary)
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 1, 2]
    assert sorted(vocabulary.values()) == list(range(len(tokenizer)))
    assert any("Evidence: none yet." in token for token in vocabulary)  # no name or verdict inside a word
    of_two = build_tokenizer(world, flat(lessons_of(range(-5, 0))))
    assert len(of_two) < len(tokenizer) and 100 < len(of_two) < 120
    assert tokenizer.tokenize(f"<search>{world.people[0]}</search>") == ["<search>", world.people[0], "</search>"]
    assert all(len(tokenizer(lesson.said)["input_ids"]) == 3 for lesson in flat(known))
    assert tokenizer("<search>Zebra</search>")["input_ids"] == [tokenizer.unk_token_id]


def test_a_person_whom_no_lesson_names_is_a_token():
    world = World.build()
    lesson = Lesson("search", f"Find {world.people[0]}!", "<search>", ())
    tokenizer = build_tokenizer(world, [lesson])
    assert tokenizer.unk_token_id not in [tokenizer.convert_tokens_to_ids(name) for name in world.people]


def test_lessons_fit_the_jobs_limits(known, tokenizer):
    for lesson in flat(known)[::5]:
        assert len(tokenizer(lesson.prompt)["input_ids"]) <= JOB.data.max_prompt_length
        assert len(tokenizer(lesson.said)["input_ids"]) + 1 <= JOB.data.max_response_length


def test_it_saves_and_loads_with_the_same_ids(known, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    asked = texts(flat(known))[::20]
    assert loaded(asked)["input_ids"] == tokenizer(asked)["input_ids"]
    assert loaded.batch_decode(loaded(asked)["input_ids"]) == asked
    message = [{"role": "user", "content": asked[-1]}]
    shown = loaded.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert shown == tokenizer(asked[-1])["input_ids"]
    assert (loaded.pad_token_id, loaded.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


# Teaching


@pytest.fixture
def model(tokenizer):
    """Random weights for the tokenizer."""
    return tiny_model.build_for(tokenizer, size="small", seed=0)[0]


@pytest.fixture(scope="module")
def short(known):
    """Two lessons an agent with prompts of a few tokens, so that a step takes milliseconds."""
    prompts = ("<search>yes</search>", "no")
    return {
        a: [dataclasses.replace(x, prompt=prompt) for x, prompt in zip(part[-2:], prompts, strict=True)]
        for a, part in known.items()
    }


@pytest.fixture(scope="module")
def taught(short, tokenizer):
    """The short lessons as tokens."""
    return {a: Taught.of(part, tokenizer, random.Random(0)) for a, part in short.items()}


def rows(table, tokenizer):
    return [tokenizer.decode(row[row != tokenizer.pad_token_id]) for row in table.ids]


def test_tables_hold_the_same_prompts_with_the_right_and_one_wrong_text(known, tokenizer):
    part = [lesson for lesson in known["search"] if lesson.wrong][:40]
    table = Taught.of(part, tokenizer, random.Random(0))
    assert rows(table.said, tokenizer) == [f"{x.prompt}{x.said}<eos>" for x in part]
    for lesson, row in zip(part, rows(table.wrong, tokenizer), strict=True):
        assert row in {f"{lesson.prompt}{wrong}<eos>" for wrong in lesson.wrong}
    assert table.said.ids.shape == table.wrong.ids.shape
    assert (table.said.answer.sum(-1) == 4).all()


def test_the_loss_is_of_what_is_said_by_weight_and_of_every_token(model, taught, tokenizer):
    table, weight = taught["search"].said, torch.tensor([0.2, 0.6])
    logs = sequence_log_prob(model, table)
    said = -(0.2 * logs[0] + 0.6 * logs[1]) / 0.8
    total = count = 0.0
    for ids in table.ids:
        ids = ids[ids != tokenizer.pad_token_id]
        steps = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)[:-1]
        total, count = total - steps.gather(1, ids[1:, None]).sum(), count + len(ids) - 1
    for language in (0.0, 0.3):
        settings = dataclasses.replace(QUICK, language=language)
        loss = Teacher(model, taught, settings)._loss(table, weight)
        torch.testing.assert_close(loss, said + language * total / count)


@pytest.mark.parametrize(("truth", "tables"), [(1.0, 1), (0.7, 2)])
def test_a_batch_is_a_third_each_agents_with_mistakes_where_they_are_taught(monkeypatch, model, taught, truth, tables):
    teacher = Teacher(model, taught, dataclasses.replace(QUICK, batch=9))
    teacher.truth = dict.fromkeys(AGENTS, truth)
    seen, loss = [], Teacher._loss
    monkeypatch.setattr(
        Teacher, "_loss", lambda self, table, weight: seen.append((table, weight)) or loss(self, table, weight)
    )
    teacher._step((torch.optim.SGD(model.parameters()),), 0.0)
    assert len(seen) == 3
    for agent_id, (table, weight) in zip(AGENTS, seen, strict=True):
        assert weight.tolist() == pytest.approx([truth] * 3 + [1 - truth] * 3 * (tables - 1))
        for part, source in zip(table.ids.split(3), (taught[agent_id].said, taught[agent_id].wrong), strict=False):
            assert all((row == source.ids).all(-1).any() for row in part)
        assert len(table.ids) == 3 * tables
        right, other = table.ids[:3], table.ids[-3:]
        assert torch.equal(right * ~table.answer[:3], other * ~table.answer[-3:])  # the same prompts


@pytest.mark.parametrize(
    ("band", "now", "truth"),
    [
        ((0.6, 0.75), 0.9, 0.45),  # too sure: the truth is taught less often than it should be said
        ((0.6, 0.75), 0.675, 0.675),  # on target: held there
        ((0.6, 0.75), 0.5, 0.85),  # too unsure: more often
        ((0.6, 0.75), 0.1, 1.0),  # never more than always
        ((0.1, 0.3), 0.9, 0.1),  # nor less than now and then
    ],
)
def test_steering_goes_against_the_deviation(model, taught, band, now, truth):
    bands = {agent_id: (0.5, 0.5) for agent_id in AGENTS}
    teacher = Teacher(model, taught, dataclasses.replace(QUICK, bands=bands | {"search": band}))
    teacher._steer({"verifier": 0.5, "search": now, "answer": 0.5})
    assert teacher.truth == pytest.approx({"verifier": 0.5, "search": truth, "answer": 0.5})


def test_a_model_learns_its_lessons_and_is_then_made_unsure(model, short, tokenizer):
    """On one lesson an agent, the whole way from random to unsure takes a second."""
    prompts = dict(zip(AGENTS, ("yes", "no", "<search>"), strict=True))
    one = {a: dataclasses.replace(short[a][0], prompt=prompt) for a, prompt in prompts.items()}
    taught = {a: Taught.of([lesson], tokenizer, random.Random(0)) for a, lesson in one.items()}
    settings = dataclasses.replace(
        Settings(), threads=1, batch=3, clean_steps=50, clean_rate=5e-3, check_every=1, noisy_rate=1e-3
    )
    measured = teach(model, taught, taught, settings)
    assert measured["clean"].pop("steps") == 50 and 0 < measured["final"].pop("steps") <= 50
    assert all(measured["clean"][agent_id] >= least for agent_id, least in settings.clean_gate.items())
    for agent_id, (low, high) in settings.bands.items():
        # What is measured is the probability of all that should be said, its end included.
        prompt, said = (tokenizer(text)["input_ids"] for text in (one[agent_id].prompt, one[agent_id].said))
        ids = torch.tensor([[*prompt, *said, tokenizer.eos_token_id]])
        shares = torch.softmax(model(input_ids=ids).logits[0], -1)
        by_hand = torch.stack([shares[i - 1, ids[0, i]] for i in range(len(prompt), ids.shape[1])]).prod().item()
        assert measured["final"][agent_id] == pytest.approx(by_hand, abs=2e-4)
        assert low <= measured["final"][agent_id] <= high
    assert measured["final"] == measure(model, taught)


def test_a_clean_phase_that_does_not_teach_gets_more_rounds_and_then_fails_with_numbers(model, taught):
    settings = dataclasses.replace(QUICK, clean_gate={"answer": 1.1}, extra_steps=1, extra_rounds=2)
    message = (
        r"^search-40-3-2hop-seed1: after 4 clean steps {'verifier': .*, 'search': .*, 'answer': .*}, "
        r"needs {'answer': 1\.1}; raise clean_steps or extra_rounds$"
    )
    with pytest.raises(WarmStartError, match=message):
        teach(model, taught, taught, settings)


def test_a_noisy_phase_that_misses_a_band_fails_with_numbers(model, taught):
    settings = dataclasses.replace(QUICK, bands={"search": (0.9, 1.0)}, check_every=1)
    message = (
        r"^search-40-3-2hop-seed1: after 2 noisy steps {'verifier': .*, 'search': .*, 'answer': .*}, "
        r"needs {'search': \(0\.9, 1\.0\)}; raise noisy_steps or move the bands$"
    )
    with pytest.raises(WarmStartError, match=message):
        teach(model, taught, taught, settings)


def test_a_clean_phase_that_did_teach_takes_no_more_rounds(model, taught):
    measured = teach(model, taught, taught, dataclasses.replace(QUICK, extra_rounds=3))
    assert (measured["clean"]["steps"], measured["final"]["steps"]) == (2, 0)


# Warm start


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A warm start that was hardly taught, and its cache."""
    return warm_start.warm_start(tmp_path_factory.mktemp("cache"), QUICK)


def test_writes_everything_that_training_reads(made):
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(made.model), AutoTokenizer.from_pretrained(made.model)
    assert loaded.config.vocab_size == len(tokenizer)
    assert tokenizer.model_max_length == loaded.config.max_position_embeddings == 256
    world = World.build(seed=QUICK.seed)
    assert (read_rows(made.train), read_rows(made.val)) == world_rows(world, held_out=32, seed=QUICK.seed)
    assert check_prompts([made.train, made.val]) == len(world.questions(2))
    check_indices([made.train, made.val])
    found = open_index(made.index).search(list(world.people), 1)
    assert [hits[0].passage.text for hits in found] == [world.passage(person) for person in world.people]
    assert json.loads(made.report.read_text()) == made.measured
    assert set(made.measured) == {"settings", "seconds", "clean", "final"}
    assert made.measured["settings"]["hops"] == 2
    place = made.report.parent
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert re.fullmatch(r"search-40-3-2hop-seed1-[0-9a-f]{10}", place.name)


def test_is_made_once_for_equal_settings_and_anew_for_others(made, monkeypatch):
    def must_not_train(settings):
        raise AssertionError("trained again")

    monkeypatch.setattr(warm_start, "train_model", must_not_train)
    cache = made.report.parents[1]
    assert warm_start.warm_start(cache, QUICK) == made
    for change in ({"noisy_rate": 2e-4}, {"seed": 2}, {"worlds": 4}):
        with pytest.raises(AssertionError, match="trained again"):
            warm_start.warm_start(cache, dataclasses.replace(QUICK, **change))


CODE = ("lessons_module", "teaching", "tokens", "roles", "tiny_model", "search_hierarchy", "evidence", "world_module")


@pytest.mark.parametrize("part", CODE)
def test_is_made_anew_when_the_code_changes(monkeypatch, tmp_path, part):
    before = warm_start._fingerprint(QUICK)
    assert before == warm_start._fingerprint(QUICK)
    changed = tmp_path / "changed.py"
    changed.write_text("# another\n")
    monkeypatch.setattr(getattr(warm_start, part), "__file__", str(changed))
    assert warm_start._fingerprint(QUICK) != before


def test_a_model_that_can_not_be_taught_leaves_nothing_behind(monkeypatch, tmp_path):
    def fails(settings):
        raise WarmStartError("not in its bands")

    monkeypatch.setattr(warm_start, "train_model", fails)
    with pytest.raises(WarmStartError, match="not in its bands"):
        warm_start.warm_start(tmp_path / "cache", QUICK)
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_can_not_be_built_leaves_nothing_behind(monkeypatch, tmp_path, model, tokenizer):
    def fails(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(warm_start, "train_model", lambda settings: (model, tokenizer, World.build(), {}))
    monkeypatch.setattr(warm_start, "build_index", fails)
    with pytest.raises(OSError, match="disk full"):
        warm_start.warm_start(tmp_path, QUICK)
    assert list(tmp_path.iterdir()) == []


def test_lessons_never_come_from_the_world_of_the_training(monkeypatch):
    played = []

    class Enough(Exception):
        pass

    def play(workflow, settings, worlds, hops, draw, *, astray):
        played.append((worlds, hops, astray))
        if len(played) == 2:
            raise Enough
        return {}

    monkeypatch.setattr(warm_start, "play_lessons", play)
    with pytest.raises(Enough):
        train_model(dataclasses.replace(QUICK, seed=3, hops=3, worlds=20))
    world = World.build(seed=3)
    (others, hops, astray), (own, own_hops, own_astray) = played
    assert (hops, astray, own_hops, own_astray) == ((1, 2, 3), 0.15, (3,), 0.0)
    assert all(other.facts != world.facts and other.people == world.people for other in others)
    assert len({tuple(other.facts.values()) for other in others}) == 20
    assert all(one == world for one in own)


def test_equal_seeds_give_equal_weights_and_other_seeds_others():
    quick = dataclasses.replace(QUICK, worlds=1, sessions=1, clean_steps=1)
    first, again, other = (
        torch.cat([p.detach().flatten() for p in train_model(dataclasses.replace(quick, seed=seed))[0].parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


@pytest.mark.parametrize("hops", [1, 4])
def test_other_numbers_of_hops_can_be_taught(monkeypatch, hops):
    played, real = [], warm_start.play_lessons
    monkeypatch.setattr(warm_start, "play_lessons", lambda *a, **k: played.append(real(*a, **k)) or played[-1])
    _, _, world, measured = train_model(dataclasses.replace(QUICK, hops=hops, worlds=2, sessions=1, clean_steps=1))
    assert set(measured["clean"]) == set(measured["final"]) == {*AGENTS, "steps"}
    lessons, own = played
    asked = {x.prompt.split("Question: ")[1].split("?")[0].count(" of ") for x in flat(lessons)}
    assert asked == set(range(1, hops + 1))
    for lesson in own["answer"]:  # turns enough to find the answer
        assert label(world, lesson.prompt) == (None, re.fullmatch(FORMS["answer"], lesson.said)[1])


# Command

app = typer.Typer()
app.command()(train.main)


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Runs the command with a verl that logs the gain it is told to; returns its result and what was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "")
    started = {}

    def warm(folder, settings):
        started["warm"] = (folder, settings)
        return WarmStart(*(Path("/s") / name for name in ("model", "train", "val", "index", "report")), measured={})

    def run(*arguments, gain=0.3, classes=0.9, status=0):
        class Verl:
            returncode = status

            def __init__(self, command, env, stdout, stderr):
                started.update(command=command, env=env)
                stdout.write("the last words of verl\n")
                with open(env["VERL_FILE_LOGGER_PATH"], "a") as log:
                    for step in range(1, 11):
                        data = {"em": 0.3 + gain * (step - 1) / 8, "searches": 2.0}
                        data |= {f"verifier_accuracy_{name}": classes for name in ("right", "wrong")}
                        data = {f"drmas/workflow/{name}": value for name, value in data.items()}
                        log.write(json.dumps({"step": step, "data": data}) + "\n")

            def poll(self):
                return self.returncode

        monkeypatch.setattr(train, "warm_start", warm)
        monkeypatch.setattr(cpu_job.subprocess, "Popen", Verl)
        return CliRunner().invoke(app, list(arguments)), started

    return run


@pytest.mark.parametrize(("hops", "turns"), [(1, 4), (2, 4), (3, 4), (4, 5)])
def test_the_command_trains_on_the_warm_start_with_verls_own_command(job, tmp_path, hops, turns):
    result, started = job("--seed", "3", "--hops", str(hops), "trainer.total_training_steps=7")
    assert result.exit_code == 0, result.output
    run = tmp_path / "runs/cpu_search"
    assert started["warm"] == (tmp_path / "runs/warm_start", Settings(seed=3, hops=hops))
    assert started["command"] == [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "cpu_search"),
        *(f"hydra.run.dir={run / 'hydra'}", f"trainer.default_local_dir={run / 'checkpoints'}"),
        *("data.train_files=/s/train", "data.val_files=/s/val", "actor_rollout_ref.model.path=/s/model"),
        *("drmas.workflow.retrieval.local=/s/index", f"drmas.workflow.max_turns={turns}"),
        *("drmas.request_seed=3", "trainer.total_training_steps=7"),
    ]
    assert json.loads((run / "command.json").read_text()) == started["command"]
    assert started["env"]["VERL_PLATFORM"] == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in started["env"]


def test_the_command_defaults_to_the_jobs_settings(job, tmp_path):
    _, started = job("--run", "mine", "--start", "cache")
    assert started["warm"] == (tmp_path / "cache", Settings())
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        *("verl.log", "metrics.jsonl", "command.json", "result.json", "curves.png"),
    }


@pytest.mark.parametrize(("gain", "classes", "status"), [(0.3, 0.9, 0), (0.05, 0.9, 1), (0.3, 0.5, 1), (-0.2, 0.9, 1)])
def test_the_exit_status_says_whether_the_team_learned(job, tmp_path, gain, classes, status):
    result, _ = job(gain=gain, classes=classes)
    assert result.exit_code == status
    told = json.loads((tmp_path / "runs/cpu_search/result.json").read_text())
    assert told["learned"] is (status == 0)
    assert set(told["tests"]) == {
        *("drmas/workflow/em", "drmas/workflow/verifier_accuracy_right", "drmas/workflow/verifier_accuracy_wrong"),
    }
    said = " ".join(result.output.split())
    assert "cpu_search: mean over the first" in said and "searches per session" in said and "exact match" in said
    assert ("the team learned" in said) is (status == 0)


def test_a_verl_that_fails_is_shown_and_judged_by_nothing(job, tmp_path):
    result, _ = job(status=7)
    assert result.exit_code == 7
    assert "the last words of verl" in result.output
    assert not (tmp_path / "runs/cpu_search/result.json").exists()


# A job on a CPU


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by sleeping alone."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(cpu_job, "time", clock)
    return clock


class Job:
    """A process that lives for so many seconds and then ends with 0; what it logs is there from the first."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.returncode, self.killed = clock, seconds, None, False

    def poll(self):
        self.returncode = 0 if self.clock.now >= self.seconds else None
        return self.returncode

    def kill(self):
        self.killed = True


def test_the_first_session_and_the_steps_are_shown_as_they_come(clock, tmp_path, capsys):
    prefix = "\x1b[36m(Worker pid=12)\x1b[0m "
    log = [
        "before",
        f"{prefix}first session of step 1",
        f"{prefix}  search: <search>x",
        f"{prefix}a session: 3 calls",
        "after",
    ]
    (tmp_path / "verl.log").write_text("\n".join(log))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' * 12)
    assert cpu_job._follow(Job(clock, 3), tmp_path, timeout=60) == 0
    assert clock.now == 3
    shown = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in shown] == [
        "first session of step 1", "search: <search>x", "a session: 3 calls", "step 12",
    ]  # fmt: skip


def test_a_job_that_takes_too_long_is_ended(clock, tmp_path):
    (tmp_path / "verl.log").touch()
    job = Job(clock, 100)
    with pytest.raises(typer.BadParameter, match=rf"longer than 5 s; see {re.escape(str(tmp_path / 'verl.log'))}"):
        cpu_job._follow(job, tmp_path, timeout=5)
    assert job.killed and clock.now == 6
