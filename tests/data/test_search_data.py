"""Questions with several golds, and the passages beside them, from the forms in which sets are published."""

import json
import os
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from verl_drmas.data.commands import data_app
from verl_drmas.data.parquet import check_indices, check_prompts, read_rows
from verl_drmas.data.passages import load_passages
from verl_drmas.data.search import HUB, SEARCH_SCHEMA, SOURCES, convert_rows, load_questions
from verl_drmas.rewards.qa import golds_of, qa_score


def convert(*raw: dict, **options):
    return convert_rows(raw, file="f.json", name="s", split="train", **options)


def run(*arguments):
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments])


def save(path: Path, *rows: dict) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(scope="session")
def hotpotqa() -> Path:
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    file = Path(os.environ.get("VERL_DRMAS_TEST_DATA", beside)) / "hotpotqa" / "train.jsonl"
    if not file.is_file():
        pytest.skip(f"real questions not found in {file}: set VERL_DRMAS_TEST_DATA")
    return file


@pytest.mark.parametrize(
    ("row", "golds"),
    [
        ({"answer": "Rome"}, ["Rome"]),
        ({"answer": 1999.0}, ["1999"]),
        ({"answers": [" Rome", "Roma", "Rome", "", None]}, ["Rome", "Roma"]),
        ({"golden_answers": ["Rome"], "answer": "other"}, ["Rome"]),
        ({"answer": "Rome", "answer_aliases": ["Roma"]}, ["Rome", "Roma"]),  # MuSiQue
        ({"possible_answers": '["politician", "political leader"]'}, ["politician", "political leader"]),  # PopQA
        ({"answer": "[sic]"}, ["[sic]"]),
        ({"answer": {"value": "Rome", "aliases": ["Roma"], "type": "WikipediaEntity"}}, ["Rome", "Roma"]),  # TriviaQA
        ({"answers": {"text": ["Rome"], "answer_start": [3]}}, ["Rome"]),  # SQuAD
        ({"reward_model": {"style": "rule", "ground_truth": {"target": ["Rome", "Roma"]}}}, ["Rome", "Roma"]),
        ({"reward_model": {"ground_truth": ["Rome"]}}, ["Rome"]),  # our own
        ({"extra_info": {"question": "no", "answer": "Rome"}}, ["Rome"]),
    ],
)
def test_golds_in_their_published_forms(row, golds):
    (made,) = convert({"question": " who? ", **row}).rows
    assert made["reward_model"] == {"style": "rule", "ground_truth": golds}
    assert made["prompt"] == [{"role": "user", "content": "who?"}]
    assert (made["data_source"], made["ability"]) == ("s", "question-answering")


@pytest.mark.parametrize(
    "facts",
    [
        {"support_titles": ["A", "B", "A"]},
        {"support_titles": [], "supporting_facts": [{"title": "A", "sent_id": 0}, {"title": "B", "sent_id": 1}]},
        {"supporting_facts": [["A", 0], ["B", 2], ["A", 1]]},
        {"supporting_facts": {"title": ["A", "B"], "sent_id": [0, 1]}},
        {"metadata": {"supporting_facts": {"title": ["A", "B"]}, "context": {"title": ["A"], "sentences": [["s"]]}}},
        {"paragraphs": [{"title": t, "is_supporting": t < "C", "paragraph_text": "s"} for t in "ABC"]},
    ],
)
def test_what_is_known_of_a_question_is_kept(facts, tmp_path):
    row = {"question": "q", "answer": "a", "type": "bridge", "level": 3, **facts}
    told = {"split": "train", "index": 0, "question": "q", "type": "bridge", "level": "3"}
    told |= {"support_titles": ["A", "B"], "facts": []}
    assert convert(row).rows[0]["extra_info"] == told
    if not isinstance(facts.get("supporting_facts"), list):  # of text and numbers, which parquet doesn't hold
        pq.write_table(pa.Table.from_pylist([{**row, "level": "3", "context": "long"}] * 2), tmp_path / "t.parquet")
        assert load_questions([str(tmp_path / "t.parquet")]).rows[1]["extra_info"] == {**told, "index": 1}
    for odd in (["A", "B"], 3, {"sent_id": [1]}, "A"):
        titles = convert({"question": "q", "answer": "a", "supporting_facts": odd}).rows[0]["extra_info"]
        assert titles["support_titles"] == (odd if isinstance(odd, list) else [])
    bare = convert({"question": "q", "answer": "a"}).rows[0]["extra_info"]
    assert (bare["type"], bare["level"], bare["support_titles"]) == (None, None, [])


def test_keys_are_found_or_named():
    both = {"q": "what", "a": "1", "question": "other", "answer": "2", "answer_aliases": ["3"]}
    row = convert(both, question_key="q", answer_key="a").rows[0]
    assert (row["extra_info"]["question"], row["reward_model"]["ground_truth"]) == ("what", ["1"])
    with pytest.raises(ValueError, match=r"f.json: no column 'gold' \(--answer-key\); its columns are q, a"):
        convert(both, answer_key="gold")
    with pytest.raises(ValueError, match=r"no answer column among question, hint; name it with --answer-key"):
        convert({"question": "q", "hint": "h"})


@pytest.mark.parametrize("empty", [None, "", [], [""], {"target": []}, float("nan"), "[]"])
def test_a_missing_gold_is_refused_or_dropped(empty):
    raw = [{"question": "a", "answer": "1"}, {"question": "b", "answer": empty}, {"question": "c", "answer": "3"}]
    with pytest.raises(ValueError, match=r"^f.json: row 1: answer is missing or empty"):
        convert(*raw)
    rows, notes = convert(*raw, drop_missing=True)
    assert [(row["extra_info"]["question"], row["extra_info"]["index"]) for row in rows] == [("a", 0), ("c", 1)]
    assert notes == ["f.json: dropped 1 of 3 rows without question or gold"]
    with pytest.raises(ValueError, match="none of 1 rows has both question and answer"):
        convert(raw[1], drop_missing=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": " ", "answer": "1"}, "row 0: question is missing"),
        ({"question": 3, "answer": "1"}, "row 0: question is int"),
        ({"question": "q", "answer": True}, "row 0: answer: a gold answer is bool"),
        ({"question": "q", "answer": {"start": 3, "end": 5}}, "row 0: answer holds start, end: name the golds' column"),
        ({"question": "q", "answer": ["x" * 2000]}, "row 0: answer has more than 1024 characters"),
        ({"prompt": [{"role": "user", "content": "a"}] * 2, "answer": "1"}, "row 0: prompt has 2 user messages"),
    ],
)
def test_bad_cells_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        convert(row)


def test_an_overlong_gold_among_others_is_left_out_and_said():
    rows, notes = convert({"question": "q", "answers": ["x" * 2000, "Rome"]})
    assert rows[0]["reward_model"]["ground_truth"] == ["Rome"]
    assert notes == ["f.json: 1 rows lost golds of more than 1024 characters"]


def test_order_of_the_whole(tmp_path):
    rows = [{"question": f"q{n}", "answer": "a", "data_source": "odd" if n % 2 else "even"} for n in range(8)]
    file = str(save(tmp_path / "t.jsonl", *rows, {"question": "q0 ", "answer": "b", "data_source": "new"}))

    def asked(**options):
        loaded = load_questions([file], **options)
        assert [row["extra_info"]["index"] for row in loaded.rows] == list(range(len(loaded.rows)))
        return [(row["extra_info"]["question"], row["data_source"]) for row in loaded.rows], loaded.notes

    assert asked(per_source=1)[0] == [("q0", "even"), ("q1", "odd"), ("q0", "new")]
    assert asked(per_source=1, data_source="all")[0] == [("q0", "all")]
    rest, notes = asked(drop_repeated=True)
    assert rest == [(f"q{n}", "odd" if n % 2 else "even") for n in range(8)]  # of the two q0 the first
    assert notes == ["dropped 1 of 9 rows whose question came before"]
    assert asked()[1] == []
    assert asked(limit=2)[0] == [("q0", "even"), ("q1", "odd")]
    shuffled = asked(shuffle_seed=1)[0]
    assert shuffled == asked(shuffle_seed=1)[0] != asked()[0] and sorted(shuffled) == sorted(asked()[0])
    assert set(asked(per_source=1, shuffle_seed=1)[0]) == {("q0", "even"), ("q1", "odd"), ("q0", "new")}
    for bad in ("limit", "per_source"):
        with pytest.raises(ValueError, match=rf"--{bad.replace('_', '-')} is 0"):
            load_questions([file], **{bad: 0})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub's two files in small, without a network: every set has a hundredth of its rows, at least 40."""
    counts = {
        "train": {"nq": 30, "hotpotqa": 50},
        "test": {name: max(40, size // 100) for name, size in SOURCES.items()},
    }
    page = {"type": "bridge", "context": {"title": ["T"], "sentences": [["s"]]}}
    for name, sets in counts.items():
        rows = [
            {"id": f"{name}_{n}", "question": f"{source} {n}", "golden_answers": ["a", "b"], "metadata": page}
            | {"data_source": f"searchR1_{source}" if source == "popqa" else source, "prompt": [{"role": "user"}]}
            for source, count in sets.items()
            for n in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")

    def download(repo, name, *, repo_type):
        assert (repo, repo_type) == (HUB, "dataset")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return counts


def sets(rows):
    return {name: sum(row["data_source"] == name for row in rows) for name in {row["data_source"] for row in rows}}


def test_the_papers_files_by_name(hub):
    rows, notes = load_questions(["paper-train"])
    assert sets(rows) == hub["train"]
    assert {row["extra_info"]["split"] for row in rows} == {"train"}
    assert notes == [f"paper-train: {HUB} has 80 rows, expected were 169615"]
    rows, notes = load_questions(["paper-test"])
    assert sets(rows) == hub["test"] and len(notes) == 7
    assert {row["extra_info"]["split"] for row in rows} == {"test"}
    rows, _ = load_questions(["paper-test-sampled"])
    assert sets(rows) == dict.fromkeys(SOURCES, 30)
    assert rows[30]["extra_info"] == {
        **{"split": "test", "index": 30, "question": "triviaqa 0", "type": "bridge", "level": None},
        "support_titles": [],
        "facts": [],
    }
    assert len(load_questions(["paper-test-sampled"], data_source="all").rows) == 210


@pytest.mark.parametrize("name", SOURCES)
def test_each_set_by_name(hub, monkeypatch, name):
    rows, notes = load_questions([name])
    assert sets(rows) == {name: hub["test"][name]}
    assert notes == [f"{name}: {HUB} has {len(rows)} rows, expected were {SOURCES[name]}"]
    monkeypatch.setitem(SOURCES, name, len(rows))
    assert load_questions([name]).notes == []


def test_names_that_are_not_there(hub, monkeypatch):
    with pytest.raises(ValueError, match=r"hotpotqaa: neither a known set .* did you mean 'hotpotqa'"):
        load_questions(["hotpotqaa"])
    monkeypatch.setitem(SOURCES, "other", 3)
    with pytest.raises(ValueError, match=r"^other: .* has none of other; its data sources are nq, triviaqa"):
        load_questions(["other"])

    def fail(*_, **__):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"can't load test.parquet .*OSError: no network.* give the file$"):
        load_questions(["nq"])


def test_a_data_set_of_the_hub_by_id(monkeypatch):
    def load(name, split):
        if split != "dev":
            raise ValueError(f'Unknown split "{split}"')
        return datasets.Dataset.from_list([{"question": "q", "answers": ["a"], "context": name}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (row,) = load_questions(["some/questions"], split="dev").rows
    assert row["data_source"] == "some/questions" and row["extra_info"]["split"] == "dev"
    with pytest.raises(ValueError, match=r"^some/questions: can't load split 'train' .*give the file$"):
        load_questions(["some/questions"])


def test_real_questions_through_the_command(hotpotqa, tmp_path):
    output = tmp_path / "q.parquet"
    result = run("search", hotpotqa, "-o", output, "--data-source", "hotpotqa", "--shuffle", 1, "--limit", 150)
    assert result.exit_code == 0 and "wrote 150 prompts" in result.output, result.output
    rows = read_rows(output)
    assert pq.read_schema(output).equals(SEARCH_SCHEMA)
    assert check_prompts(output) == 150
    check_indices([output])
    published = {row["question"].strip(): row for row in map(json.loads, hotpotqa.read_text().splitlines())}
    for row in rows:
        source = published[row["extra_info"]["question"]]
        golds = golds_of(row["reward_model"]["ground_truth"])
        assert golds == [source["answer"]] and row["extra_info"]["level"] == source["level"]
        assert set(row["extra_info"]["support_titles"]) == set(source["support_titles"])
        assert qa_score(f"<answer>{source['answer']}</answer>", golds).em == 1.0
    assert datasets.load_dataset("parquet", data_files=str(output), cache_dir=str(tmp_path))["train"].to_list() == rows
    assert load_questions([str(output)]).rows == rows  # our own files are read too


def test_the_command_fails_with_one_line(tmp_path):
    file = save(tmp_path / "bad.jsonl", {"question": "a", "answer": "1"}, {"question": "b", "answer": []})
    output = tmp_path / "t.parquet"
    result = run("search", file, "-o", output)
    assert result.exit_code == 1 and "bad.jsonl: row 1: answer is missing or empty" in result.output
    assert not output.exists()
    result = run("search", file, "-o", output, "--drop-missing")
    assert result.exit_code == 0 and "note: " in result.output and "dropped 1 of 2 rows" in result.output
    for command, ending in (("search", ".parquet"), ("passages", ".jsonl")):
        result = run(command, file, "-o", tmp_path / "t.txt")
        assert result.exit_code == 1 and f"give a file that ends in {ending}" in result.output


SENTENCES = ["One  sentence.", " Another."]


@pytest.mark.parametrize(
    "row",
    [
        {
            "docs": [
                {"title": "A", "text": "One  sentence.  Another.", "sentences": SENTENCES},
                {"title": "B", "text": ""},
            ]
        },
        {"docs": [{"title": "A", "sentences": SENTENCES}]},
        {"context": [["A", SENTENCES], ["B", []]]},
        {"context": {"title": ["A", "B"], "sentences": [SENTENCES, [" "]]}},
        {"metadata": {"context": {"title": ["A"], "sentences": [SENTENCES]}}},
        {"paragraphs": [{"idx": 0, "title": "A", "paragraph_text": "One sentence.\nAnother.", "is_supporting": True}]},
    ],
)
def test_paragraphs_in_their_published_forms(tmp_path, row):
    file = save(tmp_path / "t.jsonl", {"question": "q", **row})
    assert load_passages([str(file)]).passages == [{"id": "0", "title": "A", "text": "One sentence. Another."}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "row 1: no docs, context, paragraphs among question"),
        ({"context": "a page"}, "row 1: context holds no title and text"),
        ({"context": [["A", ["s"], 3]]}, "row 1: context holds no title and text"),
        ({"context": {"title": ["A", "B"], "sentences": [["s"]]}}, "row 1: context holds no title and text"),
        ({"docs": [{"title": 3, "text": "s"}]}, "row 1: docs holds no title and text"),
    ],
)
def test_rows_without_paragraphs_are_named(tmp_path, row, message):
    file = save(tmp_path / "t.jsonl", {"docs": [{"title": "A", "text": "s"}]}, row)
    with pytest.raises(ValueError) as error:
        load_passages([str(file)])
    assert message in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_files_without_passages_are_refused(tmp_path):
    with pytest.raises(ValueError, match="some/questions: not a"):
        load_passages(["some/questions"])
    with pytest.raises(ValueError, match="no paragraph has text"):
        load_passages([str(save(tmp_path / "t.jsonl", {"docs": []}))])


def test_real_passages_through_the_command(hotpotqa, tmp_path):
    output = tmp_path / "corpus.jsonl"
    result = run("passages", hotpotqa, hotpotqa, "-o", output)
    assert result.exit_code == 0, result.output
    passages = read_rows(output)
    assert f"wrote {len(passages)} passages (3966 paragraphs of 400 questions)" in result.output
    assert [passage["id"] for passage in passages] == [str(number) for number in range(len(passages))]
    assert len({(passage["title"], passage["text"]) for passage in passages}) == len(passages) == 1976
    titles = {passage["title"] for passage in passages}
    rows = load_questions([str(hotpotqa)]).rows
    assert all(titles.issuperset(row["extra_info"]["support_titles"]) for row in rows)
