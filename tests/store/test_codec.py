"""Rows as bytes: nothing is lost, nothing damaged passes, and the layout is the documented one."""

import json
import math
import struct
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played import row

from verl_drmas.store.codec import checksum, pack, unpack
from verl_drmas.store.errors import Corrupt, StoreError

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)  # a busy machine
@given(ids, ids, st.data(), st.dictionaries(st.text(), json_values, max_size=4), st.text())
def test_a_row_comes_back_as_it_was(prompt, response, data, fields, agent):
    length = len(response)
    mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    floats = st.lists(st.floats(width=32), min_size=length, max_size=length)
    logprobs = data.draw(st.none() | floats)
    reward = data.draw(st.none() | st.floats())
    made = replace(row(), agent_id=agent, prompt_ids=prompt, response_ids=response, response_mask=mask, fields=fields)
    made = replace(made, logprobs=logprobs, reward=reward, min_version=3, max_version=2**40)
    back = unpack(pack(made))
    assert (back.prompt_ids.tolist(), back.response_ids.tolist(), back.response_mask.tolist()) == (
        prompt,
        response,
        mask,
    )
    assert (back.prompt_ids.dtype, back.response_ids.dtype, back.response_mask.dtype) == (np.int32, np.int32, np.bool_)
    if logprobs is None:
        assert back.logprobs is None
    else:
        assert back.logprobs.dtype == np.float32
        np.testing.assert_array_equal(back.logprobs, np.array(logprobs, np.float32))
    assert (back.agent_id, back.fields, back.min_version, back.max_version) == (agent, fields, 3, 2**40)
    assert back.reward == reward or (math.isnan(back.reward) and math.isnan(reward))
    assert back == made


def test_the_bits_of_a_nan_survive():
    strange = np.array([0x7FC00001, 0xFFC12345, 0x7F800000, 0x80000000], "<u4").view("<f4")
    back = unpack(pack(replace(row(response=4), logprobs=strange)))
    assert back.logprobs.view("<u4").tolist() == strange.view("<u4").tolist()


def test_the_layout_is_the_documented_one():
    made = row(prompt=2, response=9, agent_id="a", reward=None, fields={"é": 1})
    made = replace(made, prompt_ids=[1, 2], response_ids=range(9), response_mask=[1, 0, 0, 0, 0, 0, 0, 1, 1])
    rest = json.dumps(
        {"agent_id": "a", "reward": None, "min_version": 0, "max_version": 1, "fields": {"é": 1}},
        separators=(",", ":"),
    ).encode()
    by_hand = struct.pack("<4sHHIII", b"DRMR", 1, 1, 2, 9, len(rest)) + struct.pack("<2i", 1, 2)
    by_hand += struct.pack("<9i", *range(9)) + struct.pack("<9f", *made.logprobs) + bytes([0b10000001, 0b10000000])
    assert pack(made) == by_hand + rest
    assert checksum(b"x") == blake2b(b"x", digest_size=16).digest()


def test_arrays_of_a_row_are_ones_own():
    back = unpack(pack(row()))
    back.response_ids[0] = 3  # a view of the bytes could not be written to
    assert back.response_ids[0] == 3


def test_every_damaged_length_is_noticed():
    data = pack(row())
    for cut in [0, 3, 19, len(data) - 1]:
        with pytest.raises(Corrupt):
            unpack(data[:cut])
    with pytest.raises(Corrupt, match="header says"):
        unpack(data + b"x")
    with pytest.raises(Corrupt, match="begin with"):
        unpack(b"XXXX" + data[4:])
    with pytest.raises(Corrupt, match="JSON"):
        unpack(data[:-1] + b"]")


def test_every_flipped_bit_changes_the_checksum():
    data = pack(row())
    for at in range(len(data)):
        assert checksum(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) != checksum(data)


def test_a_newer_format_asks_for_an_upgrade_and_is_not_damage():
    data = bytearray(pack(row()))
    data[4] = 2
    with pytest.raises(StoreError, match=r"format 2.*upgrade") as error:
        unpack(bytes(data))
    assert not isinstance(error.value, Corrupt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": [1.5]}, "prompt_ids"),
        ({"prompt_ids": [[1]]}, "prompt_ids"),
        ({"response_ids": [-1] * 7}, "response_ids holds -1"),
        ({"response_ids": [2**31] * 7}, "int32"),
        ({"response_mask": [1] * 6}, "response_mask"),
        ({"response_mask": [2] * 7}, "response_mask"),
        ({"logprobs": [0.0] * 8}, "logprobs"),
        ({"fields": {"x": object()}}, "fields of a row of 'finder'"),
        ({"fields": {"x": np.float32(1)}}, "fields"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        pack(replace(row(), **change))
