r"""The math reward: 1 when the last `\boxed{...}` of a text equals the gold answer, else 0, with the reason.

math-verify decides equality. Its own time-out is `signal.alarm`, which raises in threads and cannot stop C code, so it
runs in a child process that is killed at the deadline (`timebox`). Nothing is evaluated as Python.
"""

import asyncio
import functools
import importlib.util
import re
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from verl_drmas.rewards.thinking import after_thinking
from verl_drmas.rewards.timebox import Boxed, TimeBox

Reason = Literal[
    "equal",  # the only one that scores 1
    "different",
    "empty",  # no text at all
    "open_think",  # a <think> that never closes: no answer was given
    "no_box",
    "open_box",  # the last box never closes (a cut response); an earlier box is not taken for it
    "empty_box",
    "too_long",  # the answer exceeds MAX_ANSWER_CHARS
    "unparsable",  # math-verify reads nothing in the answer
    "gold_unparsable",  # math-verify reads nothing in the gold answer: look at the data
    "timeout",
    "crash",  # math-verify raised or its process died, twice, on this expression (stack, memory)
]

MAX_ANSWER_CHARS = 1024  # no gold of the usual benchmarks has 250
MAX_DEPTH = 30  # brackets within brackets: the parser recurses over them, and real answers have fewer than ten

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"(?:(?!\\[)\]])[^\s$])+")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}\\]*)\}")
_DOLLAR = re.compile(r"(?<!\\)\$")
_INTEGER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, slots=True)
class MathScore:
    """The score of one text.

    Attributes:
        score: 1.0 or 0.0.
        correct: score as a bool.
        answer: content of the last box, or None when there is none.
        reason: one of `Reason`; each is explained there.
    """

    score: float
    correct: bool
    answer: str | None
    reason: Reason


def extract_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed` or `\fbox`, stripped; None when there is none or it never closes.

    Braces may nest and escaped braces (`\{`) do not count. Without braces (`\boxed 5`) the next word is the content.
    """
    return _last_box(text)[0]


def math_score(text: str, gold: str, *, timeout: float = 5.0, exact: bool = True) -> MathScore:
    r"""Score a text against the gold answer (0/1 outcome reward of Dr. MAS' math task).

    Equal strings and plain integers are decided at once; all else costs a few milliseconds in a child process, whose
    first start takes about two seconds. Safe from any thread, from a Ray actor and after a fork.

    Args:
        text: an agent's output; only what follows its last `</think>` counts.
        gold: the answer without a box.
        timeout: seconds math-verify may take before the answer scores 0 with reason `timeout`.
        exact: False sends also equal strings through math-verify (to check a data set's golds).

    Raises:
        ValueError: the gold is empty.
        ImportError: math-verify is not installed.
        RuntimeError: no child process could be started.
    """
    answer, decided = _decide(text, gold, exact)
    if decided is None:
        decided = _reason(_submit(gold, answer, timeout).result())
    return _score(answer, decided)


async def math_score_async(text: str, gold: str, *, timeout: float = 5.0, exact: bool = True) -> MathScore:
    """`math_score` that leaves the event loop free while a child process works."""
    answer, decided = _decide(text, gold, exact)
    if decided is None:
        decided = _reason(await asyncio.wrap_future(_submit(gold, answer, timeout)))
    return _score(answer, decided)


def _decide(text: str, gold: str, exact: bool) -> tuple[str | None, Reason | None]:
    """The answer, and the reason where no algebra is needed."""
    wanted = _clean(gold)
    if not wanted:
        raise ValueError(f"the gold answer is {gold!r}: every row needs one (reward_model.ground_truth)")
    if not text.strip():
        return None, "empty"
    spoken = after_thinking(text)
    if spoken is None:
        return None, "open_think"
    answer, reason = _last_box(spoken)
    if answer is None:
        return None, reason
    if len(answer) > MAX_ANSWER_CHARS or _depth(answer) > MAX_DEPTH:
        return answer, "too_long"
    found = _clean(answer)
    if not found:
        return answer, "empty_box"
    if not exact:
        return answer, None
    if found == wanted:
        return answer, "equal"
    if len(wanted) <= MAX_ANSWER_CHARS and _INTEGER.fullmatch(found) and _INTEGER.fullmatch(wanted):
        return answer, "equal" if int(found) == int(wanted) else "different"
    return answer, None


def _last_box(text: str) -> tuple[str | None, Reason | None]:
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None, "no_box"
    start = boxes[-1].end()
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return (bare.group().rstrip(".,;:"), None) if bare else (None, "open_box")
    depth, at = 1, start + 1
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1  # whatever it escapes is no delimiter
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at].strip(), None
        at += 1
    return None, "open_box"


def _clean(answer: str) -> str:
    """The same answer without dollars, surplus white space, a final full stop and a text command around all of it."""
    answer = " ".join(_DOLLAR.sub("", answer).split()).removesuffix(".").rstrip()
    whole = _TEXT.fullmatch(answer)
    return whole.group(1).strip() if whole else answer


def _depth(answer: str) -> int:
    depth = deepest = 0
    for character in answer:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _score(answer: str | None, reason: Reason) -> MathScore:
    correct = reason == "equal"
    return MathScore(score=float(correct), correct=correct, answer=answer, reason=reason)


def _reason(boxed: Boxed) -> Reason:
    return boxed.fault or boxed.value


def _submit(gold: str, answer: str | None, timeout: float) -> "Future[Boxed]":
    _require_math_verify()
    return _CHILDREN.submit(_compare, _clean(gold), _clean(answer or ""), timeout=timeout)


@functools.cache
def _require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("the math reward needs math-verify: pip install 'verl-drmas[math]'")


def _warm_up() -> None:
    _compare("1", "2")


_CHILDREN = TimeBox(_warm_up)

# Below: what runs in the child process.


@functools.lru_cache(maxsize=4096)
def _parse(answer: str) -> list:
    from math_verify import parse

    return parse(rf"\boxed{{{answer}}}", parsing_timeout=None)


def _compare(gold: str, answer: str) -> Reason:
    from math_verify import verify

    wanted, found = _parse(gold), _parse(answer)
    if verify(wanted, found, timeout_seconds=None):
        return "equal"
    # What math-verify can't read stays a string in its result, which only an equal string matches.
    if all(isinstance(reading, str) for reading in wanted):
        return "gold_unparsable"
    return "unparsable" if all(isinstance(reading, str) for reading in found) else "different"
