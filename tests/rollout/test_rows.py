"""What the trainer reads of a row, from verl's key and the row's extra fields."""

import subprocess
import sys

import pytest

from verl_drmas.rollout.rows import DEFAULT_AGENT, Row

FIELDS = {
    "agent_id": "solver",
    "model_id": "base",
    "valid": False,
    "path": "solver.1",
    "session_metrics": {"outcome": 1.0},
    "counts": {"turns": 2.0},
}


def test_reads_key_and_fields():
    row = Row.read("0f-ab_3_12", FIELDS, index=7, model_id="other")
    assert row == Row(
        uid="0f-ab",
        session=3,
        activation=12,
        index=7,
        agent_id="solver",
        model_id="base",
        valid=False,
        path="solver.1",
        metrics={"outcome": 1.0},
        counts={"turns": 2.0},
    )


def test_a_stock_row_is_the_default_agent_of_the_only_model():
    row = Row.read("u_0_0", {}, index="4", model_id="base")
    assert (row.agent_id, row.model_id, row.valid, row.index) == (DEFAULT_AGENT, "base", True, 4)
    assert row.metrics is None
    assert row.counts == {}


def test_uid_may_hold_underscores():
    assert Row.read("a_b_1_2", {}, 0, "m").uid == "a_b"


def test_an_explicit_none_counts_as_absent():
    row = Row.read("u_0_0", {"model_id": None, "counts": None}, 0, "base")
    assert (row.model_id, row.counts) == ("base", {})


def test_a_foreign_key_is_refused():
    with pytest.raises(ValueError, match=r"unpack|invalid literal"):
        Row.read("nokey", {}, 0, "m")


def test_order_depends_on_data_only():
    keys = [("z", 1, 0, 0), ("z", 0, 1, 0), ("a", 0, 0, 5), ("z", 0, 0, 0)]
    rows = [Row.read(f"{u}_{s}_{a}", {}, i, "m") for u, s, a, i in keys]
    assert [r.order for r in sorted(rows, key=lambda r: r.order)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (5, 0, 0)]


def test_imports_neither_ray_nor_verl():
    code = (
        "import sys; import verl_drmas.rollout.rows, verl_drmas.trainer.step; "
        "assert not {'ray', 'verl'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
