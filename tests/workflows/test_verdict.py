"""Verdicts are read strictly: one tag, one known word."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_drmas.workflows.verdict import parse_verdict

WORDS = ("approve", "reject")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("<verdict>approve</verdict>", "approve"),
        ("All steps hold.\n<verdict> reject\n</verdict>\n", "reject"),
        ("<VERDICT>Approve</Verdict>", "approve"),  # case carries no meaning
        ("text after <verdict>reject</verdict> the tag", "reject"),
        ("", None),
        ("approve", None),
        ("verdict: approve", None),
        ("<verdict></verdict>", None),
        ("<verdict>accept</verdict>", None),
        ("<verdict>approve reject</verdict>", None),
        ("<verdict>not approve</verdict>", None),
        ("<verdict>approve", None),
        ("approve</verdict>", None),
        ("</verdict>approve<verdict>", None),
        ("<verdict>approve<verdict>", None),
        ("<verdict>approve</verdict><verdict>approve</verdict>", None),  # doubled, even if both agree
        ("<verdict>approve</verdict> or <verdict>reject</verdict>", None),
        ("<verdict><verdict>approve</verdict>", None),
        ("<verdict>approve</verdict></verdict>", None),
        ("<verdict>approve</verdict> <verdict>", None),  # a second one begun and cut off
        ("< verdict>approve</ verdict>", None),
    ],
)
def test_verdict(text, verdict):
    assert parse_verdict(text, words=WORDS) == verdict


PIECES = st.sampled_from(["<verdict>", "</verdict>", "approve", "reject", "maybe", " ", "\n", "x", "<", ">"])


@settings(deadline=None)  # two busy cores
@given(st.lists(PIECES, max_size=12))
def test_a_verdict_is_read_only_from_a_text_with_one_tag_around_it(pieces):
    text = "".join(pieces)
    verdict = parse_verdict(text, words=WORDS)
    if verdict is not None:
        assert (text.count("<verdict>"), text.count("</verdict>")) == (1, 1)
        assert text.split("<verdict>")[1].split("</verdict>")[0].strip() == verdict


def test_what_was_thought_is_no_verdict():
    words = ("approve", "reject")
    thought = "<think>maybe <verdict>approve</verdict></think> No. <verdict>reject</verdict>"
    assert parse_verdict(thought, words=words) == "reject"
    assert parse_verdict("<think><verdict>approve</verdict>", words=words) is None
