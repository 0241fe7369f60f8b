"""Exported rows are read without us, and hold what was played."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from played import play, row, session, tamper

from verl_drmas.store.errors import StoreError
from verl_drmas.store.export import export


@pytest.fixture
def played(producer):
    first = play(producer, 1, rows=2)
    producer.open_step(2, [4], 1)
    strange = replace(row(3), logprobs=np.array([math.nan] * 7, np.float32), reward=math.nan, fields={"a": ["é", None]})
    last = replace(session(2, 4, 0, outcome=None, ended=False, reason="late"), rows=(strange,))
    producer.put_session(last)
    return (*first, last)


def test_json_lines(store, played, tmp_path):
    target = tmp_path / "new" / "rows.jsonl"
    assert export(store, target) == 9

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=no_constant) for line in target.read_text().splitlines()]
    kept = [(one, position, packed) for one in played for position, packed in enumerate(one.rows)]
    assert len(lines) == len(kept) == 9
    for line, (one, position, packed) in zip(lines, kept, strict=True):
        assert (line["step"], line["prompt"], line["session"]) == (one.step, one.prompt, one.session)
        assert (line["role"], line["position"], line["agent_id"]) == ("sub", position, "finder")
        assert (line["ended"], line["reason"], line["outcome"]) == (one.ended, one.reason, one.outcome)
        assert line["prompt_ids"] == packed.prompt_ids.tolist()
        assert line["response_mask"] == packed.response_mask.tolist()
        assert line["fields"] == packed.fields
    assert lines[0]["logprobs"] == played[0].rows[0].logprobs.tolist()
    assert (lines[0]["state"], lines[0]["listed"], lines[0]["reward"]) == ("ready", True, played[0].rows[0].reward)
    assert (lines[-1]["state"], lines[-1]["listed"], lines[-1]["reward"]) == ("open", None, None)
    assert lines[-1]["logprobs"] == [None] * 7


def test_parquet(store, played, tmp_path):
    import pandas as pd

    target = tmp_path / "rows.parquet"
    assert export(store, target, role="sub") == 9
    frame = pd.read_parquet(target)
    assert len(frame) == 9
    assert frame["prompt_ids"][0].tolist() == played[0].rows[0].prompt_ids.tolist()
    assert json.loads(frame["fields"][8]) == {"a": ["é", None]}
    assert frame["logprobs"][1].dtype == np.float32
    assert export(store, target, role="nobody") == 0
    assert len(pd.read_parquet(target)) == 0


def test_a_damaged_row_is_left_out_and_named(store, played, tmp_path, caplog):
    tamper(store, "UPDATE drmas_row SET data = checksum WHERE prompt = 1 AND session = 1 AND position = 0")
    assert export(store, tmp_path / "rows.jsonl") == 8
    assert "row 0 of session 1 of prompt 1" in caplog.text


def test_freed_rows_are_gone(store, producer, tmp_path):
    from verl_drmas.store.gc import gc

    play(producer, 1)
    producer.drop_stale(2, 0)
    gc(store, keep_steps=0, older_than=0)
    assert export(store, tmp_path / "rows.jsonl") == 0


def test_another_kind_of_file_is_refused_and_a_half_one_is_not_left(store, played, tmp_path, monkeypatch):
    with pytest.raises(StoreError, match=r"ends in \.jsonl or \.parquet"):
        export(store, tmp_path / "rows.csv")
    target = tmp_path / "rows.jsonl"
    target.write_text("old")
    from verl_drmas.store import export as module

    def broken(row):
        raise OSError("no space")

    monkeypatch.setattr(module, "read_row", broken)
    with pytest.raises(OSError, match="no space"):
        export(store, target)
    assert [path.name for path in tmp_path.glob("rows*")] == ["rows.jsonl"]
    assert target.read_text() == "old"
