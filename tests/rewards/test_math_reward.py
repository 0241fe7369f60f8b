"""The math reward: what counts as the answer, what as equal, and that nothing stalls or breaks it."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_drmas.rewards import extract_boxed, math_score, math_score_async

pytestmark = pytest.mark.process

STUCK = r"\boxed{\binom{10^9}{10^8}}"  # minutes of work inside C code, which no Python-level time-out interrupts


@pytest.fixture(scope="module", autouse=True)
def started():
    math_score(r"\boxed{x}", "y", timeout=60)  # so that the tests time the calls and not the first start


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1}, no, \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x : x>0\right.}", r"\left\{x : x>0\right."),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed {9}", "9"),
        (r"$\boxed 42$.", "42"),
        (r"\(\boxed 5\) apples", "5"),
        (r"\boxed\frac{1}{2} .", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        ("the answer is 5", None),
        (r"\boxedfoo{5}", None),
        (r"\boxed{1} then \boxed{2", None),
        (r"ends with \boxed", None),
    ],
)
def test_extract_boxed(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "gold", "reason"),
    [
        (r"\boxed{5}", "5", "equal"),
        (r"\boxed{025}", "25", "equal"),
        (r"\boxed{24}", "25", "different"),
        (r"\boxed{$\text{Evelyn}$.}", "Evelyn", "equal"),
        (r"\boxed{1/2}", r"\frac12", "equal"),
        (r"\boxed{x^2+1}", "1+x^{2}", "equal"),
        (r"\boxed{(0,1)}", "[0,1]", "different"),
        (r"\boxed{1,2,3,4,5}", "5", "different"),
        (r"\boxed{I think 3 or 5}", "5", "different"),
        (r"\boxed{**??**}", "5", "unparsable"),
        (r"\boxed{x}", "???", "gold_unparsable"),
        ("", "5", "empty"),
        (" \n", "5", "empty"),
        ("5", "5", "no_box"),
        (r"\boxed{5", "5", "open_box"),
        (r"\boxed{ $ $ }", "5", "empty_box"),
        (r"<think>\boxed{4}</think> so \boxed{5}", "5", "equal"),
        (r"<think>\boxed{5}</think> so 5", "5", "no_box"),
        (r"<think>\boxed{5}", "5", "open_think"),
        (r"<think>a</think><think>\boxed{5}", "5", "open_think"),
        (r"opened by the template</think>\boxed{5}", "5", "equal"),
        (rf"\boxed{{{'9' * 10_000}}}", "5", "too_long"),
        (rf"\boxed{{{'{' * 400}1{'}' * 400}}}", "1", "too_long"),
    ],
)
def test_reason(text, gold, reason):
    score = math_score(text, gold)
    assert score.reason == reason
    assert score.correct == (reason == "equal")
    assert score.score == float(score.correct)


def test_an_empty_gold_is_an_error_of_the_data():
    with pytest.raises(ValueError, match="ground_truth"):
        math_score(r"\boxed{5}", " ")


@pytest.mark.parametrize("text", [STUCK, r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{10**10**10}"])
def test_a_hostile_expression_ends_at_the_deadline_and_the_next_call_works(text):
    begin = time.monotonic()
    score = math_score(text, "0.5", timeout=1.0)
    assert time.monotonic() - begin < 2.0
    assert score.score == 0.0
    assert score.reason in ("timeout", "crash") or "**" in text  # which LaTeX does not know as a power
    assert math_score(r"\boxed{1/2}", "0.5").reason == "equal"


def test_a_stuck_call_does_not_hold_up_the_others():
    with ThreadPoolExecutor(9) as threads:  # more callers than children
        stuck = threads.submit(math_score, STUCK, "3", timeout=6.0)
        time.sleep(0.1)
        scores = list(threads.map(lambda n: math_score(rf"\boxed{{\frac{{{n}}}{{7}}}}", r"\frac{3}{7}"), range(8)))
        assert not stuck.done()
        assert [score.correct for score in scores] == [n == 3 for n in range(8)]
        assert stuck.result().reason == "timeout"


def test_async_leaves_the_event_loop_free():
    beats = 0

    async def heart():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    async def session():
        beat = asyncio.create_task(heart())
        scores = await asyncio.gather(
            math_score_async(STUCK, "3", timeout=1.0),
            math_score_async(r"\boxed{2/4}", "0.5"),
            math_score_async("nothing", "0.5"),
        )
        beat.cancel()
        return [score.reason for score in scores]

    assert asyncio.run(session()) == ["timeout", "equal", "no_box"]
    assert beats >= 20  # about 100 on an idle machine, 0 or 1 when a call blocks the loop


@settings(deadline=None, max_examples=40)
@given(
    text=st.text(), boxed=st.text(alphabet=r"\{}()[]^_$%&12xy.,=<> frac sqrt", max_size=30), gold=st.text(min_size=1)
)
def test_any_text_gets_a_score(text, boxed, gold):
    score = math_score(text + r"\boxed{" + boxed + "}", "g" + gold, timeout=1.0)
    assert score.score in (0.0, 1.0)
    assert score.correct == (score.reason == "equal")


@given(inner=st.recursive(st.text(alphabet="abc12 ", max_size=4), lambda s: st.builds("{{{}}}{}".format, s, s)))
def test_balanced_content_comes_back_whole(inner):
    assert extract_boxed("first \\boxed{0} then \\boxed{" + inner + "} end } {") == inner.strip()
