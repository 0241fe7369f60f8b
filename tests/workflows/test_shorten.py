"""Cutting over-long prompts: what fits is untouched, what is cut leaves head, tail and question."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from verl_drmas.workflows import PromptTooLong
from verl_drmas.workflows.shorten import GAP, shorten


def size(messages):
    """A token is a character, and every message costs four more (a template)."""
    return sum(4 + len(m["content"]) for m in messages)


def user(*texts):
    return [{"role": "user", "content": text} for text in texts]


def texts(messages):
    return [m["content"] for m in messages]


def test_what_fits_is_not_touched():
    messages = user("a" * 20, "b")
    result, cut = shorten(messages, limit=size(messages), count=size, keep="")
    assert result == messages and cut == 0


def test_the_middle_goes_head_and_tail_stay():
    messages = user("".join(chr(ord("a") + i % 26) for i in range(100)))
    result, cut = shorten(messages, limit=50, count=size, keep="")
    (text,) = texts(result)
    head, tail = text.split(GAP)
    whole = messages[0]["content"]
    assert size(result) == 50  # not a character more than needed
    assert whole.startswith(head) and whole.endswith(tail) and 0 <= len(head) - len(tail) <= 1
    assert cut == len(whole) - len(head) - len(tail)


def test_the_callers_messages_and_other_fields_stay():
    messages = [{"role": "user", "content": "x" * 100, "name": "solver"}]
    result, _ = shorten(messages, limit=40, count=size, keep="")
    assert messages[0]["content"] == "x" * 100
    assert (result[0]["role"], result[0]["name"]) == ("user", "solver")


def test_the_longest_text_is_cut_first():
    result, _ = shorten(user("a" * 30, "b" * 90, "c" * 30), limit=130, count=size, keep="")
    assert texts(result)[0] == "a" * 30 and texts(result)[2] == "c" * 30


def test_the_next_longest_follows_when_one_is_not_enough():
    result, cut = shorten(user("a" * 30, "b" * 90, "c" * 25), limit=70, count=size, keep="")
    first, second, third = texts(result)
    assert second == GAP and GAP in first and third == "c" * 25
    assert size(result) == 70 and cut == 90 + 30 - (len(first) - len(GAP))


def test_the_question_survives_though_it_stands_in_the_longest_text():
    question = "How many primes are below 100?"
    result, _ = shorten(user("h" * 60 + question + "t" * 300), limit=130, count=size, keep=question)
    text = texts(result)[0]
    assert question in text and text.startswith("h" * 60) and text.endswith("tt") and size(result) == 130


def test_an_agents_copies_of_the_question_may_go():
    question = "What is 12 times 12? Think."
    messages = user(f"Problem: {question}", f"Solution: {question} {question} {question} 144")
    result, _ = shorten(messages, limit=80, count=size, keep=question)
    assert question in texts(result)[0] and size(result) <= 80


@pytest.mark.parametrize("limit", [0, 20, len("the question") + 4 - 1])
def test_a_question_that_does_not_fit_alone_is_refused(limit):
    with pytest.raises(PromptTooLong, match=f"the limit is {limit}$") as caught:
        shorten(user("a" * 50 + "the question"), limit=limit, count=size, keep="the question")
    assert caught.value.reason == "prompt_too_long"


TEXT = st.text(alphabet="abc \n", max_size=80)


@settings(deadline=None)  # two busy cores
@given(st.lists(TEXT, max_size=3), TEXT, st.text(alphabet="abcq", max_size=12), TEXT, st.integers(0, 250))
@example([], "a", "a", "b" * 40, 20)  # a question that also stands in other text
@example(["q" * 50], "b" * 30, "q", "c" * 70, 60)
def test_properties(others, before, question, after, limit):
    messages = user(*others, before + question + after)
    total = size(messages)
    try:
        result, cut = shorten(messages, limit=limit, count=size, keep=question)
    except PromptTooLong:
        # Nothing that could have been cut would have made room: every text but the question is at most one gap long.
        stretches = len(messages) + 1
        assert limit < 4 * len(messages) + len(question) + stretches * len(GAP)
        return
    assert size(result) <= limit
    assert len(result) == len(messages)
    assert any(question in text for text in texts(result))
    assert (cut == 0) == (result == messages) == (total <= limit)
    assert cut == total - size(result) + sum(text.count(GAP) for text in texts(result)) * len(GAP)


@settings(deadline=None)  # two busy cores
@given(TEXT.filter(lambda t: len(t) > 20), st.integers(0, 100))
def test_head_and_tail_of_a_lone_text(text, limit):
    assume(len(GAP) + 4 <= limit < size(user(text)))
    result, _ = shorten(user(text), limit=limit, count=size, keep="")
    head, tail = texts(result)[0].split(GAP)
    assert text.startswith(head) and text.endswith(tail) and abs(len(head) - len(tail)) <= 1


@settings(deadline=None)  # two busy cores
@given(st.integers(1, 30), st.integers(12 + 2 * len(GAP), 120))
def test_a_coarse_tokenizer_is_no_obstacle(width, limit):
    def coarse(messages):
        return sum(-(-len(m["content"]) // width) for m in messages)

    messages = user("x" * 900, "the question", "y" * 700)
    result, cut = shorten(messages, limit=limit, count=coarse, keep="the question")
    assert coarse(result) <= limit and texts(result)[1] == "the question"
    assert (cut > 0) == (coarse(messages) > limit)
