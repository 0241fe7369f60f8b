"""The small world to search: what its questions promise, read off the passages' text, and the files it is in."""

import asyncio
import json
import re
from collections import Counter
from itertools import product

import pytest
from typer.testing import CliRunner

from verl_drmas.data.commands import data_app
from verl_drmas.data.parquet import check_indices, check_prompts, read_rows
from verl_drmas.data.passages import write_passages
from verl_drmas.data.world import MAX_HOPS, RELATIONS, World, world_rows
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.retrieval.index import open_index
from verl_drmas.retrieval.local import LocalRetriever

SHAPES = pytest.mark.parametrize(
    ("people", "relations", "seed"), [(5, 3, 0), (12, 2, 1), (12, 3, 2), (20, 4, 3), (40, 3, 0), (9, 1, 5)]
)
FACT = re.compile(r"(\w+)'s (\w+) is (\w+)\.")
QUESTION = re.compile(r"Who is the (\w+(?: of the \w+)*) of (\w+)\?")


def read_world(world):
    """Facts and passages as a reader of the corpus knows them: {(person, relation): other} and {title: whole text}."""
    passages = world.passages()
    facts = {(who, what): other for passage in passages for who, what, other in FACT.findall(passage["text"])}
    return facts, {passage["title"]: f"{passage['title']} {passage['text']}" for passage in passages}


def names(text):
    return set(re.findall(r"\w+", text))


def follow(facts, text):
    """Everybody on the way of a question, from its text alone."""
    path, start = QUESTION.fullmatch(text).groups()
    people = [start]
    for relation in reversed(path.split(" of the ")):
        people.append(facts[people[-1], relation])
    return people


@SHAPES
def test_all_relations_of_a_person_lead_to_different_others(people, relations, seed):
    world = World.build(people=people, relations=relations, seed=seed)
    assert len(set(world.people)) == people and world.relations == RELATIONS[:relations]
    assert set(world.facts) == set(product(world.people, world.relations))
    for person in world.people:
        others = {world.facts[person, relation] for relation in world.relations}
        assert len(others) == relations and person not in others and others <= set(world.people)


@SHAPES
def test_a_passage_tells_all_facts_of_one_person_and_no_more(people, relations, seed):
    world = World.build(people=people, relations=relations, seed=seed)
    passages = world.passages()
    assert [passage["id"] for passage in passages] == [str(i) for i in range(people)]
    assert [passage["title"] for passage in passages] == list(world.people)
    for passage in passages:
        told = FACT.findall(passage["text"])
        assert " ".join(f"{who}'s {what} is {other}." for who, what, other in told) == passage["text"]
        assert [(who, what) for who, what, _ in told] == [(passage["title"], what) for what in world.relations]
    assert read_world(world)[0] == world.facts


def test_the_seed_decides_the_facts_and_nothing_else():
    first, again, other = (World.build(seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.facts != other.facts
    assert first.people == other.people and first.relations == other.relations


@pytest.mark.parametrize("people", [3, 40, 41, 84, 85, 168])
def test_names_are_short_and_distinct(people):
    world = World.build(people=people, relations=1)
    assert len(set(world.people)) == people
    assert all(re.fullmatch(r"[A-Z][a-z]{3}", name) for name in world.people)


def test_few_of_the_default_names_begin_alike():
    assert max(Counter(name[:2] for name in World.build().people).values()) == 3


@SHAPES
@pytest.mark.parametrize("hops", range(1, MAX_HOPS + 1))
def test_questions_are_all_those_without_a_shortcut(people, relations, seed, hops):
    """Every question there could be is asked if and only if its answer takes all of its searches, in order."""
    world = World.build(people=people, relations=relations, seed=seed)
    facts, texts = read_world(world)
    expected = {}
    for start, path in product(world.people, product(world.relations, repeat=hops)):
        text = f"Who is the {' of the '.join(reversed(path))} of {start}?"
        way = follow(facts, text)
        named = [names(texts[person]) for person in way[:-1]]
        # A person on the way is named by the passage before, and by none before that; nobody comes twice.
        if len(set(way)) == len(way) and all(
            way[j] not in named[i] for i in range(hops) for j in range(i + 2, hops + 1)
        ):
            expected[text] = way
    questions = world.questions(hops)
    assert {question.text: list(question.people) for question in questions} == expected
    assert len(questions) == len(expected) == len({question.text for question in questions})
    assert questions == World.build(people=people, relations=relations, seed=seed).questions(hops)


def test_an_answer_stands_in_the_last_passage_on_the_way_alone():
    world = World.build(seed=4)
    facts, texts = read_world(world)
    for hops in range(1, MAX_HOPS + 1):
        questions = world.questions(hops)
        assert len(questions) > 60
        for question in questions:
            assert question.answer == follow(facts, question.text)[-1] not in names(question.text)
            assert len(question.support) == hops == len(question.path)
            holds = [question.answer in names(texts[person]) for person in question.support]
            assert holds == [False] * (hops - 1) + [True]
            # Only its passage tells whom to look for next.
            for i, person in enumerate(question.support[1:], start=1):
                known = [j for j, read in enumerate(question.support[:i]) if person in names(texts[read])]
                assert known == [i - 1] and person not in names(question.text)


def test_the_last_relation_of_a_question_stands_first():
    question = next(q for q in World.build().questions(3) if q.path == ("mentor", "rival", "neighbour"))
    assert question.text == f"Who is the neighbour of the rival of the mentor of {question.start}?"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"relations": 0}, "relations is 0: give 1 to 8"),
        ({"relations": 9}, "relations is 9: give 1 to 8"),
        ({"people": 4}, "people is 4: give 5 to 168 with 3 relations"),
        ({"people": 169, "relations": 8}, "people is 169: give 10 to 168 with 8 relations"),
    ],
)
def test_a_world_of_another_size_is_refused(asked, message):
    with pytest.raises(ValueError) as caught:
        World.build(**asked)
    assert str(caught.value) == message


@pytest.mark.parametrize("asked", [{"people": 3, "relations": 1}, {"people": 10, "relations": 8}, {"people": 168}])
def test_the_bounds_themselves_are_sizes(asked):
    assert World.build(**asked).questions(1)


@pytest.mark.parametrize("hops", [0, 5])
def test_other_numbers_of_hops_are_refused(hops):
    with pytest.raises(ValueError, match=rf"^hops is {hops}: give 1 to 4$"):
        World.build().questions(hops)
    with pytest.raises(ValueError, match=rf"^hops is {hops}: give 1 to 4$"):
        world_rows(World.build(), hops=(1, hops))


def test_rows_carry_question_gold_kind_and_the_passages_that_lead_there():
    world = World.build(seed=2)
    facts, _ = read_world(world)
    train, test = world_rows(world, hops=(2, 3), count=200, held_out=30)
    assert (len(train), len(test)) == (170, 30)
    for split, rows in (("train", train), ("test", test)):
        for row in rows:
            extra = row["extra_info"]
            way = follow(facts, extra["question"])
            assert row["prompt"] == [{"role": "user", "content": extra["question"]}]
            assert row["reward_model"]["ground_truth"] == way[-1:]
            assert extra["support_titles"] == way[:-1]
            assert extra["type"] == f"{len(way) - 1}-hop"
            assert (extra["split"], row["data_source"]) == (split, "world")
        kinds = [row["extra_info"]["type"] for row in rows]
        assert set(kinds) == set(kinds[: len(kinds) // 2]) == {"2-hop", "3-hop"}  # mixed on both sides
    assert sorted(row["extra_info"]["index"] for row in train + test) == list(range(200))
    assert len({row["extra_info"]["question"] for row in train + test}) == 200


@pytest.mark.parametrize(
    ("hops", "count", "shares"),
    [
        ((2,), 50, {"2-hop": 50}),
        ((3, 1, 2), 50, {"1-hop": 17, "2-hop": 17, "3-hop": 16}),
        ((1, 2, 3, 4), 402, {"1-hop": 101, "2-hop": 101, "3-hop": 100, "4-hop": 100}),
        ((2, 1, 2), 30, {"1-hop": 15, "2-hop": 15}),
    ],
)
def test_every_number_of_hops_has_an_equal_share(hops, count, shares):
    train, test = world_rows(World.build(), hops=hops, count=count, held_out=10)
    assert Counter(row["extra_info"]["type"] for row in train + test) == shares


def test_without_a_count_all_questions_are_taken():
    world = World.build()
    train, test = world_rows(world, hops=(1, 2))
    assert len(test) == 64
    assert {row["extra_info"]["question"] for row in train + test} == {
        question.text for hops in (1, 2) for question in world.questions(hops)
    }


def test_the_seed_of_the_rows_decides_choice_and_split():
    world = World.build()
    first, again, other = (world_rows(world, count=100, held_out=20, seed=seed) for seed in (1, 1, 2))
    assert first == again

    def questions(rows):
        return {row["extra_info"]["question"] for row in rows}

    assert questions(first[1]) != questions(other[1])
    assert questions(first[0] + first[1]) != questions(other[0] + other[1])


def test_more_questions_than_there_are_is_refused():
    world = World.build(people=5)
    there = len(world.questions(1))
    assert there == 15
    message = r"^16 questions of 1 hops are asked for, and this world has 15: .*take more people or relations$"
    with pytest.raises(ValueError, match=message):
        world_rows(world, hops=(1,), count=16, held_out=1)
    assert len(world_rows(world, hops=(1,), count=15, held_out=1)[0]) == 14


@pytest.mark.parametrize("held_out", [0, -1, 20, 21])
def test_an_empty_side_is_refused(held_out):
    message = rf"^held_out is {held_out} of 20 questions: leave both sides at least one of each number of hops$"
    with pytest.raises(ValueError, match=message):
        world_rows(World.build(), count=20, held_out=held_out)
    assert [len(rows) for rows in world_rows(World.build(), count=20, held_out=19)] == [1, 19]


def run(*arguments):
    return CliRunner().invoke(data_app, ["world", *map(str, arguments)])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns the folder that the command wrote, and what it said."""
    folder = tmp_path_factory.mktemp("world") / "new"
    asked = ("--people", 30, "--relations", 4, "--hops", 1, "--hops", 2, "--questions", 80, "--held-out", 20)
    result = run("-o", folder, *asked, "--seed", 7)
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_the_command_writes_files_that_training_accepts(written):
    folder, said = written
    files = [folder / "train.parquet", folder / "test.parquet"]
    assert check_prompts(files) == 80
    check_indices(files)
    world = World.build(people=30, relations=4, seed=7)
    expected = world_rows(world, hops=(1, 2), count=80, held_out=20, seed=7)
    assert tuple(read_rows(file) for file in files) == expected
    assert [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()] == world.passages()
    assert said.splitlines() == [
        f"wrote 30 passages to {folder / 'corpus.jsonl'}",
        f"wrote 60 prompts to {files[0]}",
        f"wrote 20 prompts to {files[1]}",
    ]


def test_the_command_asks_two_hops_of_forty_people_by_default(tmp_path):
    assert run("-o", tmp_path).exit_code == 0
    test = read_rows(tmp_path / "test.parquet")
    assert test == world_rows(World.build())[1] and len(test) == 64
    assert {row["extra_info"]["type"] for row in test} == {"2-hop"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("--people", 3), "people is 3: give 5 to 168 with 3 relations"),
        (("--relations", 9), "relations is 9: give 1 to 8"),
        (("--hops", 5), "hops is 5: give 1 to 4"),
        (("--questions", 9999), "9999 questions of 2 hops are asked for"),
        (("--held-out", 0), "held_out is 0 of"),
    ],
)
def test_a_refused_command_says_why_in_one_line_and_writes_nothing(tmp_path, asked, message):
    result = run("-o", tmp_path / "new", *asked)
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {message}") and result.output.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_its_corpus_makes_an_index_where_a_name_finds_its_own_passage(written, tmp_path):
    pytest.importorskip("bm25s")
    build_index([written[0] / "corpus.jsonl"], tmp_path / "index", IndexSettings(kind="words"))
    retriever = LocalRetriever(tmp_path / "index")
    world = World.build(people=30, relations=4, seed=7)

    async def found():
        return [(await retriever.search(person, 1))[0].passage for person in world.people]

    passages = asyncio.run(found())
    assert [passage.title for passage in passages] == list(world.people)
    assert [passage.text for passage in passages] == [world.passage(person) for person in world.people]


@pytest.mark.parametrize(
    ("people", "relations", "seeds"),
    [(3, 1, range(3)), (40, 3, range(8)), (97, 2, range(3)), (168, 1, range(3)), (168, 3, range(3)), (168, 8, (0, 9))],
)
def test_a_name_finds_its_own_passage_first_in_any_world(tmp_path, people, relations, seeds):
    pytest.importorskip("bm25s")
    for seed in seeds:
        world = World.build(people=people, relations=relations, seed=seed)
        corpus = write_passages(world.passages(), tmp_path / f"{seed}.jsonl")
        build_index([corpus], tmp_path / str(seed), IndexSettings(kind="words"))
        found = open_index(tmp_path / str(seed)).search(list(world.people), 1)
        assert [hits[0].passage.title for hits in found] == list(world.people)


@pytest.mark.parametrize("hops", [(1, 2, 3, 4), (2, 4)])
def test_every_number_of_hops_has_its_share_of_both_sides(hops):
    train, test = world_rows(World.build(), hops=hops, count=40, held_out=len(hops) * 2, seed=1)
    for rows, each in ((test, 2), (train, 40 // len(hops) - 2)):
        kinds = [row["extra_info"]["type"] for row in rows]
        assert all(kinds.count(f"{h}-hop") == each for h in hops)


def test_fewer_questions_than_numbers_of_hops_are_refused():
    with pytest.raises(ValueError, match="count is -5: ask for at least one question of each of 1"):
        world_rows(World.build(), count=-5)
