import json
import math

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_drmas.body import Refused
from verl_drmas.gateway.wire import read_answer, read_request, write_answer, write_request

GOOD = {
    "id": "a",
    "role": "sub",
    "prompt_ids": [1, 2],
    "sampling": {"max_tokens": 4, "temperature": 0.7},
    "min_version": 3,
}


def refusal(body, role="sub"):
    with pytest.raises(Refused) as refused:
        read_request(body if isinstance(body, bytes) else json.dumps(body).encode(), role)
    return refused.value


def test_what_is_written_is_read():
    asked = read_request(write_request("a", "sub", [1, 2], GOOD["sampling"], 3), "sub")
    assert (asked.id, asked.prompt_ids, asked.min_version) == ("a", [1, 2], 3)
    assert asked.parameters() == GOOD["sampling"]


def test_what_a_rollout_has_at_hand_can_be_sent():
    """NumPy's numbers and arrays, tuples, OmegaConf's lists, whole numbers for fractions, None for what isn't set."""
    sampling = {
        "max_tokens": np.int64(4),
        "temperature": np.float32(1),
        "top_p": 1,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "stop": OmegaConf.create(["x", "y"]),
        "stop_token_ids": (7, 8),
        "seed": None,
    }
    asked = read_request(write_request("a", "sub", np.array([1, 2]), sampling, np.int64(3)), "sub")
    assert asked.parameters() == {
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "stop": ["x", "y"],
        "stop_token_ids": [7, 8],
    }


def without(key):
    return {k: v for k, v in GOOD.items() if k != key}


def sampling(**changes):
    return {**GOOD, "sampling": {**GOOD["sampling"], **changes}}


MALFORMED = {
    "no JSON": b"{",
    "no object": b"[]",
    "not text": b"\xff\xfe",
    "empty": b"",
    "no id": without("id"),
    "no role": without("role"),
    "no prompt": without("prompt_ids"),
    "no sampling": without("sampling"),
    "no version": without("min_version"),
    "an unknown key": {**GOOD, "priority": 3},
    "an empty id": {**GOOD, "id": ""},
    "a long id": {**GOOD, "id": "a" * 129},
    "an empty prompt": {**GOOD, "prompt_ids": []},
    "a text for ids": {**GOOD, "prompt_ids": "12"},
    "ids as text": {**GOOD, "prompt_ids": ["1", "2"]},
    "ids as fractions": {**GOOD, "prompt_ids": [1.0]},
    "ids as truth": {**GOOD, "prompt_ids": [True]},
    "a negative id": {**GOOD, "prompt_ids": [1, -1]},
    "an id above every vocabulary": {**GOOD, "prompt_ids": [2**31]},
    "a nested id": {**GOOD, "prompt_ids": [[1]]},
    "a negative version": {**GOOD, "min_version": -1},
    "no limit": {**GOOD, "sampling": {"temperature": 1.0}},
    "no room": sampling(max_tokens=0),
    "a limit as text": sampling(max_tokens="4"),
    "an unknown parameter": sampling(n=1000),
    "a parameter of the engine": sampling(extra_args={"x": 1}),
    "all log-probs": sampling(prompt_logprobs=10),
    "a temperature below 0": sampling(temperature=-1),
    "a temperature that is none": json.dumps(sampling(temperature=math.nan)).encode(),
    "endless": json.dumps(sampling(temperature=math.inf)).encode(),
    "top_p of 0": sampling(top_p=0),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_body_is_refused(body):
    refused = refusal(body)
    assert (refused.status, refused.reason) == (422, "malformed")
    assert 0 < len(refused.text) < 400


def test_the_refusal_names_the_place_and_repeats_nothing():
    refused = refusal({**GOOD, "prompt_ids": [1, -918273645]})
    assert "prompt_ids.1" in refused.text and "918273645" not in refused.text
    assert "sampling.max_tokens" in refusal({**GOOD, "sampling": {}}).text
    assert "918273645" not in refusal(b'{"prompt_ids": [918273645, oops').text


@given(st.binary(max_size=200) | st.from_type(dict).map(lambda d: repr(d).encode()))
def test_any_bytes_are_read_or_refused(body):
    try:
        read_request(body, "sub")
    except Refused as refused:
        assert refused.status in (404, 422)


def test_another_role_is_not_found():
    refused = refusal(GOOD, "other")
    assert (refused.status, refused.reason) == (404, "role")


def test_the_digest_tells_calls_apart_and_not_their_spelling():
    def digest(**changes):
        return read_request(json.dumps({**GOOD, **changes}).encode(), "sub").digest()

    assert digest() == digest(id="b") == digest(sampling={"temperature": 0.7, "max_tokens": 4})
    others = [digest(prompt_ids=[1, 3]), digest(sampling={"max_tokens": 5, "temperature": 0.7}), digest(min_version=4)]
    assert len({digest(), *others}) == 4


ANSWER = {
    "token_ids": [3, 4],
    "log_probs": [-0.1, -0.2],
    "stop_reason": "completed",
    "min_version": 2,
    "max_version": 3,
    "num_preempted": 0,
    "num_cached_tokens": None,
}


def test_log_probs_come_over_to_the_last_bit():
    values = [float(v) for v in np.random.default_rng(0).normal(size=500).astype(np.float32)] + [-1e-45, -0.0]
    answer = read_answer(write_answer({**ANSWER, "token_ids": list(range(502)), "log_probs": values}))
    assert np.array(answer.log_probs).tobytes() == np.array(values).tobytes()


def test_a_log_prob_that_is_no_number_stays_one():
    answer = read_answer(write_answer({**ANSWER, "log_probs": [math.nan, -0.5]}))
    assert math.isnan(answer.log_probs[0]) and answer.log_probs[1] == -0.5
    assert read_answer(write_answer({**ANSWER, "log_probs": None})).log_probs is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        orjson.dumps({**ANSWER, "token_ids": ["3", "4"]}),
        orjson.dumps({**ANSWER, "log_probs": [-0.1]}),
        orjson.dumps({**ANSWER, "min_version": 4}),
        orjson.dumps({**ANSWER, "min_version": None}),
        orjson.dumps({k: v for k, v in ANSWER.items() if k != "token_ids"}),
    ],
)
def test_what_is_no_answer_is_not_taken_for_one(body):
    with pytest.raises(ValueError):
        read_answer(body)
