"""Passages are read from JSONL and found again by row; what can't be read is named."""

import gzip
import json

import pytest

from verl_drmas.retrieval import IndexProblem, Passage
from verl_drmas.retrieval import corpus as corpus_module
from verl_drmas.retrieval.corpus import Corpus, check_inputs, write_corpus


def write(tmp_path, *lines, name="in.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_both_ways_of_writing_a_passage_give_the_same(corpus_file, tmp_path):
    assert write_corpus([corpus_file], tmp_path) == 5
    corpus = Corpus.open(tmp_path)
    assert len(corpus) == 5
    assert corpus[0] == Passage("a", "Amsterdam", "Amsterdam is the capital of the Netherlands.")
    assert corpus[2] == Passage("c", "Canberra", "Canberra is the capital city of Australia.")
    assert [passage.id for passage in corpus] == list("abcde")
    assert [passage.id for passage in corpus.take([4, 0, 0])] == ["e", "a", "a"]
    assert [[p.id for p in batch] for batch in corpus.batches(2, start=1)] == [["b", "c"], ["d", "e"]]
    with pytest.raises(IndexError):
        corpus[5]
    with pytest.raises(IndexError):
        corpus[-1]


def test_rows_are_found_across_batches_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "BATCH_ROWS", 3)
    path = write(tmp_path, *({"text": f"number {i}"} for i in range(10)))
    write_corpus([path], tmp_path)
    corpus = Corpus.open(tmp_path)
    assert [corpus[row].text for row in range(10)] == [f"number {i}" for i in range(10)]
    assert len(corpus) == 10


def test_missing_ids_are_line_numbers_through_all_files(tmp_path):
    first = write(tmp_path, {"text": "one"}, "", {"id": 7, "text": "three"}, name="1.jsonl")
    second = tmp_path / "2.jsonl.gz"
    second.write_bytes(gzip.compress(b'{"contents": "four"}\n{"id": null, "title": null, "text": "f\xc3\xbcnf"}'))
    write_corpus([first, second], tmp_path)
    assert [(p.id, p.text) for p in Corpus.open(tmp_path)] == [
        ("1", "one"),
        ("7", "three"),
        ("4", "four"),
        ("5", "fünf"),
    ]


def test_progress_ends_at_the_size_of_the_files(corpus_file, tmp_path):
    ticks = []
    write_corpus([corpus_file], tmp_path, lambda done, total: ticks.append((done, total)))
    assert ticks[-1] == (corpus_file.stat().st_size,) * 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'id': 1}", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (b'{"text": "\xff"}', "no JSON"),
        ('["a"]', "list, no object"),
        ({"id": "x", "title": "only"}, "neither text nor contents among ['id', 'title']"),
        ({"id": "x", "text": " \n"}, "text of passage 'x' is empty"),
        ({"id": "x", "contents": '"Title"\n'}, "contents of passage 'x' is empty"),
        ({"id": "x", "text": ["a"]}, "text is list"),
        ({"id": "x", "title": 3, "text": "a"}, "title is int"),
        ({"id": 1.5, "text": "a"}, "id is float"),
        ({"id": True, "text": "a"}, "id is bool"),
        ({"id": "x", "text": "\ud800"}, "half a character"),
        ({"id": "ok", "text": "again"}, "id 'ok' stands in"),
    ],
)
def test_a_line_that_is_no_passage_is_named(tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    data = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path.write_bytes(b'{"id": "ok", "text": "fine"}\n' + data + b"\n")
    with pytest.raises(IndexProblem) as problem:
        write_corpus([path], tmp_path)
    assert f"{path}: line 2: " in str(problem.value) and said in str(problem.value)
    assert "; " in str(problem.value) and "\n" not in str(problem.value)
    assert not (tmp_path / corpus_module.FILE).exists()


def test_an_id_that_stands_twice_is_named_with_both_places(tmp_path):
    first = write(tmp_path, {"id": "x", "text": "a"}, {"id": "y", "text": "b"}, name="1.jsonl")
    second = write(tmp_path, {"id": "z", "text": "c"}, {"id": "y", "text": "d"}, name="2.jsonl")
    with pytest.raises(IndexProblem, match=r"2\.jsonl: line 2: id 'y' stands in .*1\.jsonl: line 2 already"):
        write_corpus([first, second], tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"plain text", lambda data: data[:12] + b"x" * 9]
)
def test_broken_gzip_is_named(tmp_path, damage):
    path = tmp_path / "broken.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"text": "a"}\n' * 50)))
    with pytest.raises(IndexProblem, match="broken gzip"):
        write_corpus([path], tmp_path)


def test_no_passages_are_a_problem(tmp_path):
    with pytest.raises(IndexProblem, match="no passages"):
        write_corpus([write(tmp_path, "", "  ")], tmp_path)
    assert not (tmp_path / corpus_module.FILE).exists()


def test_files_that_cant_be_a_corpus_are_refused(tmp_path, corpus_file):
    check_inputs([corpus_file])
    for inputs, said in (
        ([], "no input files"),
        ([tmp_path / "no.jsonl"], "no such file"),
        ([tmp_path], "no such file"),
    ):
        with pytest.raises(IndexProblem, match=said):
            check_inputs(inputs)
    with pytest.raises(IndexProblem, match=r"not a \.jsonl"):
        check_inputs([write(tmp_path, "x", name="corpus.csv")])


def test_a_damaged_file_is_a_problem(tmp_path, corpus_file):
    write_corpus([corpus_file], tmp_path)
    path = tmp_path / corpus_module.FILE
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(IndexProblem, match="--force"):
        Corpus.open(tmp_path)
