"""Whether an answer says the same as the gold, judged by a model: for benchmarks whose answers are sentences.

Exact match calls "on March 21" wrong where the gold is "The deadline is March 21, 2025." What is judged, and how it is
kept from passing for our own words, is `judge_rubric`'s.
"""

from __future__ import annotations

from verl_drmas.rewards.judge import JudgeRequest, golds_or_none
from verl_drmas.rewards.judge_rubric import NoScore, Rubric, framed, said_before
from verl_drmas.rewards.qa import extract_answer

RIGHT, WRONG = "right", "wrong"
ANSWER_RUBRIC = f"""\
You check an answer to a question against the answer that is known to be right. Judge by the known answer alone: do not
solve the question again, and do not ask whether the known answer is true.

- {RIGHT}: the answer says what the known answer says. Other words, another language, another order, units or formats
  that mean the same, and rounding that the question allows make no difference; nor does more than was asked, if nothing
  in it speaks against the known answer. Where several known answers are given, one of them is enough.
- {WRONG}: anything else. A part of the known answer is missing, a number or name differs, several answers are offered
  to choose from, it is left open, or nothing is said.

Say in at most two sentences what decided it. Then end with one line that holds the verdict and nothing else, such as
<verdict>{WRONG}</verdict>
"""


def write_answer(request: JudgeRequest) -> list[dict[str, str]]:
    """The chat that asks whether `request.result` says what one of `request.gold` says.

    Raises:
        ValueError: There is no gold.
    """
    golds = golds_or_none(request.gold)
    if not golds:
        raise ValueError("an answer can't be judged without a gold (reward_model.ground_truth)")
    known = {"The question": request.question, "The known answer": " | ".join(golds)}
    return framed(ANSWER_RUBRIC, request.question, known, {"answer": request.result or "(nothing)"})


def read_verdict(reply: str) -> tuple[float, str]:
    """1 for right and 0 for wrong, and what the judge said before it in a line.

    Raises:
        NoScore: There isn't just one `<verdict>` tag after the thinking, or another word in it.
    """
    content, reason = extract_answer(reply, "verdict")
    if content is None:
        raise NoScore(reason)
    word = content.lower().rstrip(".")
    if word not in (RIGHT, WRONG):
        raise NoScore(f"neither {RIGHT} nor {WRONG}")
    return float(word == RIGHT), said_before("verdict", reply)


ANSWER = Rubric(write_answer, read_verdict)
