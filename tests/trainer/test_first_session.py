"""The printed first session shows prompts, special tokens and masks as the model saw them."""

import numpy as np

from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.first_session import describe_session


class Tokenizer:
    """Letters for ids, 0 is the end token."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens is False
        return "".join("<end>" if i == 0 else chr(96 + i) for i in ids)


class Judge(Tokenizer):
    """Another alphabet."""

    def decode(self, ids, skip_special_tokens):
        return super().decode(ids, skip_special_tokens).upper()


TOKENIZERS = {"base": Tokenizer(), "judge": Judge()}
ROWS = [
    Row("u", 2, 0, 7, "solver", "base", path="solver.0", metrics={"outcome": 1.0, "rounds": 2.0}),
    Row("u", 2, 1, 7, "verifier", "judge", valid=False),
]


def described(masks, responses=((3, 4, 5, 0, 6), (1,))):
    return describe_session(ROWS, [[1, 2, 0], [2]], responses, masks, TOKENIZERS)


def test_shows_prompts_special_tokens_and_what_is_masked():
    lines = described([[1, 1, 0, 0, 1], [1]]).splitlines()
    assert lines == [
        "first session (dataset index 7, session 2); masked text in {{ }}",
        "-- solver.0 [base], valid: True",
        "   prompt, 3 tokens: 'ab<end>'",
        "   response, 5 tokens, 3 trained: 'cd{{e<end>}}f'",
        "-- verifier [judge], valid: False",
        "   prompt, 1 tokens: 'B'",  # each model's own tokenizer
        "   response, 1 tokens, 1 trained: 'A'",
        "   session: outcome=1, rounds=2",
    ]


def test_a_mask_that_begins_or_ends_masked():
    assert "'{{cd}}e{{<end>f}}'" in described([[0, 0, 1, 0, 0], [1]])


def test_takes_arrays_too():
    masks = [np.array([1, 1, 0, 0, 1], dtype=np.int64), np.array([True])]
    responses = [np.array([3, 4, 5, 0, 6]), np.array([1])]
    assert described(masks, responses) == described([[1, 1, 0, 0, 1], [1]])


def test_rows_of_a_stock_loop_have_no_numbers_of_their_session():
    text = describe_session([Row("u", 0, 0, 0, "default", "base")], [[1]], [[2]], [[1]], TOKENIZERS)
    assert "session:" not in text
    assert "-- default [base]" in text
