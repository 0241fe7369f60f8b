"""The question-answering reward: exact match and token F1 of the tagged answer against any of several golds.

`squad` is the rule of SQuAD's own evaluation, under which the field reports; `wide` also reads Unicode, numbers and
dates, for golds and models that write the same thing in different ways. Neither is a subset of the other: SQuAD takes
`3.0` for `30`, because it deletes the point.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from verl_drmas.rewards.thinking import after_thinking
from verl_drmas.rewards.wide import normalise_wide

Style = Literal["squad", "wide"]

Reason = Literal[
    "ok",  # the only one with an answer
    "empty",  # no text at all
    "open_think",  # a <think> that never closes: nothing was said
    "no_tag",
    "open_tag",  # the tag never closes (a cut response)
    "unopened_tag",  # it closes without having been opened before
    "several",  # more than one opening or closing tag: which one is meant is a guess, so none is taken
    "empty_tag",
    "too_long",  # the content exceeds the limit
]

MAX_ANSWER_CHARS = 1024  # golds of the usual sets have fewer than 300

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


@dataclass(frozen=True, slots=True)
class QaScore:
    """The score of one text.

    Attributes:
        em: 1.0 if the answer equals a gold after normalisation, else 0.0.
        f1: Token F1 with the nearest gold, in 0..1.
        answer: What was scored, or None when there is none.
        reason: One of `Reason`; each is explained there.
    """

    em: float
    f1: float
    answer: str | None
    reason: Reason


def qa_score(
    text: str,
    golds: Any,
    *,
    tag: str | None = "answer",
    style: Style = "squad",
    closed_exact: bool = False,
    max_chars: int = MAX_ANSWER_CHARS,
) -> QaScore:
    """Score a text against the golds.

    Args:
        text: An agent's output; only what follows its last `</think>` counts.
        golds: Whatever `golds_of` takes.
        tag: Where the answer stands (`extract_answer`); None if the text is the answer itself.
        style: How answers are normalised.
        closed_exact: See `f1`.
        max_chars: Longer answers score 0 with reason `too_long`.

    Raises:
        ValueError: There is no gold.
    """
    golds = golds_of(golds)
    if tag is None:
        answer, reason = _said(text)
        if answer is not None and len(answer) > max_chars:
            answer, reason = None, "too_long"
    else:
        answer, reason = extract_answer(text, tag, max_chars=max_chars)
    if answer is None:
        return QaScore(0.0, 0.0, None, reason)
    em = exact_match(answer, golds, style=style)
    return QaScore(em, f1(answer, golds, style=style, closed_exact=closed_exact), answer, reason)


def extract_answer(text: str, tag: str = "answer", *, max_chars: int = MAX_ANSWER_CHARS) -> tuple[str | None, Reason]:
    """Content of the one `<tag>...</tag>` after thinking, stripped; None with the reason where there isn't just one.

    Tags are read in any case and without attributes. More than one opening or closing tag counts as none (`several`).

    Args:
        text: An agent's output.
        tag: Name of the tag, such as `answer` or `search`.
        max_chars: Longer content counts as none (`too_long`).
    """
    spoken, reason = _said(text)
    if spoken is None:
        return None, reason
    # ASCII, because a long s is an s to a Unicode pattern that ignores case.
    marks = list(re.finditer(rf"<(/?){re.escape(tag)}>", spoken, re.IGNORECASE | re.ASCII))
    opened = [mark for mark in marks if not mark[1]]
    closed = [mark for mark in marks if mark[1]]
    if not marks:
        return None, "no_tag"
    if len(opened) > 1 or len(closed) > 1:
        return None, "several"
    if not closed:
        return None, "open_tag"
    if not opened or closed[0].start() < opened[0].end():
        return None, "unopened_tag"
    content = spoken[opened[0].end() : closed[0].start()].strip()
    if not content:
        return None, "empty_tag"
    return (content, "ok") if len(content) <= max_chars else (None, "too_long")


def exact_match(prediction: str, golds: Any, *, style: Style = "squad") -> float:
    """1.0 if the prediction equals one of the golds after normalisation, else 0.0.

    A text of which normalisation leaves nothing (`The`, `?!`) is compared in lower case instead, so that it equals
    itself and nothing else. A blank prediction scores 0.

    Args:
        prediction: The answer, without tags.
        golds: Whatever `golds_of` takes.
        style: How both sides are normalised.

    Raises:
        ValueError: There is no gold.
    """
    wanted = {_key(gold, style) for gold in golds_of(golds)}
    return float(_key(prediction, style) in wanted)


def f1(prediction: str, golds: Any, *, style: Style = "squad", closed_exact: bool = False) -> float:
    """Harmonic mean of token precision and recall, with the gold for which it is highest; in 0..1.

    Tokens are counted with repeats. What normalises to nothing, and a blank prediction: as in `exact_match`.

    Args:
        prediction: The answer, without tags.
        golds: Whatever `golds_of` takes.
        style: How both sides are normalised.
        closed_exact: HotpotQA's rule: where either side is yes, no or noanswer, overlap counts for nothing and only
            equality scores.

    Raises:
        ValueError: There is no gold.
    """
    said = _key(prediction, style)
    tokens = Counter(said.split())
    best = 0.0
    for gold in golds_of(golds):
        wanted = _key(gold, style)
        if closed_exact and said != wanted and not _CLOSED_ANSWERS.isdisjoint((said, wanted)):
            continue
        wanted_tokens = Counter(wanted.split())
        best = max(best, 2 * (tokens & wanted_tokens).total() / (tokens.total() + wanted_tokens.total()))
    return best


def normalise(text: str, *, style: Style = "squad") -> str:
    """The text as answers are compared.

    Args:
        text: An answer.
        style: `squad`: lower case, ASCII punctuation deleted, the articles a, an, the dropped, white space collapsed,
            just as SQuAD's evaluation does it. `wide`: see `normalise_wide`.

    Raises:
        ValueError: The style is unknown.
    """
    if style == "squad":
        return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
    if style == "wide":
        return normalise_wide(text)
    raise ValueError(f"style is {style!r}: choose squad or wide")


def golds_of(ground_truth: Any) -> list[str]:
    """The golds of a data row, each once.

    Args:
        ground_truth: `reward_model.ground_truth`: a string or number, a list or array of them, or Search-R1's
            `{"target": ...}` around either. Blank ones are passed over.

    Raises:
        ValueError: None is left, or one is neither text nor number.
    """
    inner = ground_truth
    if isinstance(inner, dict) and "target" in inner:
        inner = inner["target"]
    if hasattr(inner, "tolist"):  # of numpy
        inner = inner.tolist()
    golds: dict[str, None] = {}
    for gold in inner if isinstance(inner, list | tuple) else [inner]:
        try:
            text = gold_text(gold)
        except TypeError as error:
            raise ValueError(f"{error}: correct reward_model.ground_truth") from None
        if text:
            golds[text] = None
    if not golds:
        raise ValueError(f"the gold answer is {ground_truth!r:.80}: every row needs one (reward_model.ground_truth)")
    return list(golds)


def gold_text(gold: Any) -> str:
    """A gold as text: stripped; a whole float without its `.0`; blank for None and for a float that is no number.

    Raises:
        TypeError: It is neither text nor number.
    """
    if gold is None or gold != gold:
        return ""
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise TypeError(f"a gold answer is {type(gold).__name__}, neither text nor number")
    return str(int(gold) if isinstance(gold, float) and gold.is_integer() else gold).strip()


def _said(text: str) -> tuple[str | None, Reason]:
    """What follows the thinking, stripped."""
    if not text.strip():
        return None, "empty"
    spoken = after_thinking(text)
    if spoken is None:
        return None, "open_think"
    spoken = spoken.strip()
    return (spoken, "ok") if spoken else (None, "empty")


def _key(text: str, style: Style) -> str:
    """What is compared; blank only for a blank text."""
    return normalise(text, style=style) or " ".join(text.lower().split())
