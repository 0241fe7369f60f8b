"""An index is opened and searched, or says in one line why not."""

import json

import pytest

from verl_drmas.retrieval import IndexProblem
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.retrieval.encoder import EncoderSettings, load_encoder
from verl_drmas.retrieval.index import open_index
from verl_drmas.retrieval.manifest import SCHEMA

for module in ("bm25s", "Stemmer", "faiss"):
    pytest.importorskip(module)


@pytest.fixture
def folders(corpus_file, tmp_path, stub_path):
    """An index of each kind of the same five passages."""
    for kind in ("words", "dense", "hybrid"):
        encoder = None if kind == "words" else EncoderSettings(stub_path)
        build_index([corpus_file], tmp_path / kind, IndexSettings(kind, encoder=encoder))
    return tmp_path


def opened(folder):
    """With the encoder it was built with, which must be named."""
    return open_index(folder, encoder=None if folder.name == "words" else "stub_encoder:Stub")


def ids(found):
    return [[hit.passage.id for hit in hits] for hits in found]


@pytest.mark.parametrize("kind", ["words", "dense", "hybrid"])
def test_each_kind_finds_the_passage(folders, kind):
    index = opened(folders / kind)
    assert (index.kind, len(index)) == (kind, 5)
    found = index.search(["Kangaroos hop across Australia", "Berlin is the capital of Germany"], 2)
    assert [hits[0] for hits in ids(found)] == ["e", "b"]
    assert all(hits[0].score >= hits[1].score for hits in found)
    assert found[0][0].passage.text == "Kangaroos hop across Australia."
    assert index.search([], 3) == []
    assert [len(hits) for hits in index.search(["capital"], 50)] == [3 if kind == "words" else 5]
    with pytest.raises(ValueError, match="k is 0"):
        index.search(["capital"], 0)


def test_a_hybrid_joins_both_by_rank(folders):
    query = ["capital of the Netherlands"]
    words, dense = (ids(opened(folders / kind).search(query, 100))[0] for kind in ("words", "dense"))
    scores = {p: sum(1 / (61 + r.index(p)) for r in (words, dense) if p in r) for p in "abcde"}
    (hits,) = opened(folders / "hybrid").search(query, 5)
    assert [hit.passage.id for hit in hits] == sorted(scores, key=lambda p: (-scores[p], p))
    assert [hit.score for hit in hits] == pytest.approx(sorted(scores.values(), reverse=True))
    assert opened(folders / "hybrid").search(query, 2) == [hits[:2]]


def test_queries_are_encoded_as_queries(folders, monkeypatch):
    index = opened(folders / "dense")
    monkeypatch.setattr("stub_encoder.Stub.encode_passages", None)
    assert len(index.search(["capital"], 2)[0]) == 2


def test_words_without_a_match_find_nothing(folders):
    assert opened(folders / "words").search(["zebra", ""], 3) == [[], []]


@pytest.mark.parametrize("kind", ["words", "dense", "hybrid"])
def test_halves_of_characters_do_no_harm(folders, kind):
    assert ids(opened(folders / kind).search(["\ud800 Kangaroos hop across Australia \udfff"], 1)) == [["e"]]


def test_an_index_describes_itself(folders, stub_path):
    about = opened(folders / "hybrid").describe()
    assert about["kind"] == "hybrid" and about["passages"] == 5
    assert about["encoder"]["model"] == stub_path and about["faiss"] == "IndexFlatIP" and about["faiss_on"] == "cpu"
    json.dumps(about)
    assert "encoder" not in opened(folders / "words").describe()


def test_another_encoder_can_stand_in(folders, stub_path):
    expected = opened(folders / "dense").search(["capital"], 3)
    given = load_encoder(EncoderSettings(stub_path))
    change_encoder(folders / "dense", "gone.away:Stub")
    with pytest.raises(IndexProblem, match="can't be imported"):
        open_index(folders / "dense", encoder="gone.away:Stub")
    for encoder in (given, stub_path):
        assert open_index(folders / "dense", encoder=encoder).search(["capital"], 3) == expected
    with pytest.raises(IndexProblem, match="vectors of 24 numbers, the encoder's have 25"):
        open_index(folders / "dense", encoder="stub_encoder:Wide")


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_code_that_an_index_names_is_not_imported(folders, tmp_path, kind):
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    change_encoder(folders / kind, "planted:Encoder")
    with pytest.raises(IndexProblem, match=r"its encoder is code, 'planted:Encoder'.*: --encoder planted:Encoder$"):
        open_index(folders / kind)
    assert not (tmp_path / "ran").exists()


def test_folders_of_this_machine_are_told_by_their_last_name(folders, tmp_path):
    change_encoder(folders / "dense", str(tmp_path / "models" / "mine"))
    about = opened(folders / "dense").describe()
    assert (about["folder"], about["encoder"]["model"]) == ("dense", "mine")
    assert str(tmp_path) not in json.dumps(about)


@pytest.mark.parametrize("option", [{"faiss_gpu": True}, {"encoder": "stub_encoder:Stub"}, {"device": "cpu"}])
def test_what_words_have_no_use_for_is_refused(folders, option):
    with pytest.raises(IndexProblem, match=f"leave out {next(iter(option))}"):
        open_index(folders / "words", **option)


def change(folder, **keys):
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, **keys}))


def change_encoder(folder, model):
    settings = json.loads((folder / "manifest.json").read_text())["settings"]
    change(folder, settings={**settings, "encoder": {**settings["encoder"], "model": model}})


def test_a_folder_that_is_no_index_is_named(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    for name, said in (
        ("none", "no such folder"),
        ("empty", "is empty"),
        ("foreign", "is no index"),
        ("corpus.jsonl", "is a file"),
    ):
        with pytest.raises(IndexProblem, match=f"{said}.*verl-drmas retriever index") as problem:
            open_index(tmp_path / name)
        assert str(tmp_path / name) in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"schema": SCHEMA + 1}, "newer version"),
        ({"schema": "one"}, "schema 'one' is unknown"),
        ({"kind": "picture"}, "no manifest of an index"),
        ({"colour": "red"}, "no manifest of an index"),
        ({"stages": {"corpus": {"passages": 5}}}, "half built .words and dense missing."),
        ({"stages": {"corpus": {"passages": 4}, "words": {}, "dense": {}}}, "has 5 passages, its manifest says 4"),
        ({"settings": {}}, "no proper"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_manifest_that_is_wrong_is_named(folders, keys, said):
    change(folders / "hybrid", **keys)
    with pytest.raises(IndexProblem, match=said) as problem:
        opened(folders / "hybrid")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("name", ["passages.arrow", "dense.faiss", "words/vocab.index.json", "manifest.json"])
def test_a_file_that_is_missing_or_cut_is_named(folders, name):
    file = folders / "hybrid" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(IndexProblem) as problem:
        opened(folders / "hybrid")
    assert "\n" not in str(problem.value)
    file.unlink()
    with pytest.raises(IndexProblem):
        opened(folders / "hybrid")
