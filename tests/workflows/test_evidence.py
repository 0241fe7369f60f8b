"""Evidence: what is kept once, how it reads, and what is cut first under a budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_drmas.retrieval import Passage
from verl_drmas.workflows.evidence import GAP, NOTHING, Evidence


def words(text):
    return len(text.split())


def passage(name, length=8):
    return Passage(name, name, " ".join(f"{name.lower()}{i}" for i in range(length)))


@pytest.fixture
def evidence():
    found = Evidence()
    found.add("first query", [passage("A"), passage("B")])
    found.add("second query", [passage("B"), passage("C")])
    return found


def test_it_reads_oldest_first_and_shows_a_passage_once(evidence):
    text, cut = evidence.render(words)
    assert text.splitlines()[0] == "Search 1: first query"
    assert [line[:6] for line in text.splitlines()] == ["Search", "[1] A:", "[2] B:", "Search", "[3] C:"]
    assert (cut.passages, cut.tokens) == (0, 0)


def test_a_search_that_found_nothing_says_so():
    found = Evidence()
    assert found.render(words) == ("", found.render(words)[1])
    found.add("q", [])
    assert found.render(words)[0] == f"Search 1: q\n{NOTHING}"
    assert found.add("again", [passage("A"), passage("A")]) == [passage("A")]
    assert found.add("again", [passage("A")]) == []
    assert found.render(words)[0].endswith(f"Search 3: again\n{NOTHING}")


def test_a_passage_without_a_title():
    found = Evidence()
    found.add("q", [Passage("1", "", "only text")])
    assert found.render(words)[0].endswith("\n[1] only text")


def test_the_oldest_passage_of_lowest_rank_loses_its_end_first(evidence):
    whole = words(evidence.render(words)[0])
    text, cut = evidence.render(words, whole - 3)
    lines = text.splitlines()
    assert lines[2] == f"[2] B: b0 b1 b2 b3 {GAP}"  # three words and one for the mark
    assert (lines[1], lines[4]) == (f"[1] A: {passage('A').text}", f"[3] C: {passage('C').text}")
    assert (cut.passages, cut.tokens) == (1, 3)


def test_the_newest_is_cut_last(evidence):
    text, cut = evidence.render(words, 20)
    assert [line for line in text.splitlines() if line.startswith("[")] == [
        f"[1] A: {GAP}",
        f"[2] B: {GAP}",
        f"[3] C: c0 c1 c2 {GAP}",
    ]
    assert (cut.passages, cut.tokens) == (3, words(evidence.render(words)[0]) - words(text))


def test_titles_go_when_nothing_else_is_left_and_then_searches(evidence):
    titles, _ = evidence.render(words, 12)
    assert titles == f"Search 1: first query\nSearch 2: second query\n[3] C: {GAP}"
    searches, cut = evidence.render(words, 5)
    assert searches == "Search 2: second query"
    assert cut.passages == 3
    assert evidence.render(words, 1)[0] == ""


@given(
    st.lists(st.tuples(st.text(max_size=20), st.lists(st.text(max_size=60), max_size=3)), max_size=4),
    st.integers(1, 60),
)
def test_it_always_fits_and_counts_every_cut(searches, budget):
    found = Evidence()
    for number, (query, texts) in enumerate(searches):
        found.add(query, [Passage(f"{number}.{i}", f"T{number}{i}", text) for i, text in enumerate(texts)])
    whole, nothing = found.render(len)
    text, cut = found.render(len, budget)
    assert len(text) <= max(budget, 0) or text == ""
    assert cut.tokens == len(whole) - len(text)
    assert (cut.tokens > 0) == (text != whole)
    assert (nothing.tokens, nothing.passages) == (0, 0)
