"""BM25: what shares words is found, the same way each time."""

import math

import pytest

from verl_drmas.retrieval import IndexProblem
from verl_drmas.retrieval.words import WordIndex, WordsSettings, build_words

pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")

TEXTS = [
    "The cat sat on the mat",
    "Dogs chase cats",
    "A dog and a dog",
    "...",  # no word at all
    "Züge fahren nach Köln",
]


def built(tmp_path, texts=TEXTS, **settings):
    folder = tmp_path / "words"
    folder.mkdir()
    settings = WordsSettings(**settings)
    build_words(texts, folder, settings)
    return WordIndex.open(folder, settings, len(texts))


def rows(found):
    return [[row for row, _ in ranking] for ranking in found]


def test_passages_that_share_a_stem_are_hits_and_no_others(tmp_path):
    index = built(tmp_path)
    assert rows(index.search(["cat", "running dogs", "KÖLN", "nothing known", "", "the of and"], k=5)) == [
        [0, 1],
        [2, 1],
        [4],
        [],
        [],
        [],
    ]
    assert rows(index.search(["cats dogs"], k=1)) == [[1]]
    assert index.search([], k=3) == []


def test_scores_are_lucenes(tmp_path):
    texts = ["red red blue", "blue green", "green"]
    index = built(tmp_path, texts, k1=1.2, b=0.5)
    idf = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 2 / (2 + 1.2 * (1 - 0.5 + 0.5 * 3 / 2))
    ((row, score),) = index.search(["red"], k=3)[0]
    assert row == 0 and score == pytest.approx(expected, rel=1e-5)


def test_equal_scores_go_by_row_also_where_k_cuts(tmp_path):
    index = built(tmp_path, ["same words"] * 50 + ["other"])
    assert rows(index.search(["same words"], k=3)) == [[0, 1, 2]]
    assert rows(index.search(["same words"], k=100)) == [list(range(50))]


def test_a_digit_or_letter_alone_is_a_word_but_no_initial_and_no_end_of_a_word(tmp_path):
    texts = [
        "Apollo 8 flew round the Moon.",
        "Apollo 9 stayed near the Earth.",
        "The launch was that of Apollo 8.",
        "Henry VI lost it all",
        "Henry V won at Agincourt",
        "Ada's dog doesn't bark; J. K. sued v. him",
    ]
    index = built(tmp_path, texts)
    assert rows(index.search(["8", "9", "king henry v", "s", "t", "k"], k=2)) == [[2, 0], [1], [4, 3], [], [], []]


def test_settings_decide_what_a_word_is(tmp_path):
    plain = built(tmp_path, stopwords=None, stemmer=None)
    assert rows(plain.search(["cat", "the"], k=5)) == [[0], [0]]
    (tmp_path / "digits").mkdir()
    digits = built(tmp_path / "digits", ["year 1984", "1984", "year"], pattern=r"\d+")
    assert sorted(rows(digits.search(["the year 1984"], k=5))[0]) == [0, 1]
    assert rows(digits.search(["year"], k=5)) == [[]]


def test_progress_ends_before_four_passes(tmp_path):
    ticks = []
    build_words((f"word{i}" for i in range(5000)), tmp_path, WordsSettings(), ticks.append)
    assert ticks == [4096, 8192, 12288, 16384]


def test_texts_are_read_once_and_nothing_but_the_index_stays(tmp_path):
    build_words(iter(TEXTS), tmp_path, WordsSettings())
    names = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert names == ["data", "indices", "indptr", "params", "vocab"]


@pytest.mark.parametrize(
    "settings",
    [{"k1": -1}, {"b": 1.5}, {"pattern": "("}, {"stemmer": "klingon"}, {"stopwords": "klingon"}],
    ids=lambda given: str(given),
)
def test_wrong_settings_are_named(tmp_path, settings):
    with pytest.raises(IndexProblem, match=f"words.{next(iter(settings))} is"):
        built(tmp_path, **settings)


def test_a_corpus_without_words_is_a_problem(tmp_path):
    with pytest.raises(IndexProblem, match="no passage has a word"):
        built(tmp_path, ["...", "the a"])


def test_a_damaged_or_foreign_folder_is_a_problem(tmp_path):
    built(tmp_path)
    with pytest.raises(IndexProblem, match="has 5 passages, the corpus 6"):
        WordIndex.open(tmp_path / "words", WordsSettings(), 6)
    (tmp_path / "words" / "data.csc.index.npy").unlink()
    with pytest.raises(IndexProblem, match="--force"):
        WordIndex.open(tmp_path / "words", WordsSettings(), 5)
