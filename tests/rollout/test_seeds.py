"""Request seeds: the same call gives the same seed in every run, and nothing but the call decides it."""

import random
import subprocess
import sys

import pytest

from verl_drmas.rollout.seeds import call_seed

CALL = {"index": 3, "session": 1, "step": 5, "path": "solver.0/turn.0"}


def test_value_is_pinned():
    """A change here would make resumed runs sample differently from the runs they resume."""
    assert call_seed(1, **CALL) == 1007110367


def test_value_is_the_same_in_another_process():
    code = f"from verl_drmas.rollout.seeds import call_seed; print(call_seed(1, **{CALL!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "VERL_USE_EXTERNAL_PLUGINS": "none"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == call_seed(1, **CALL)


@pytest.mark.parametrize(
    "change", [{"index": 4}, {"session": 2}, {"step": 6}, {"path": "solver.0/turn.1"}, {"validate": True}]
)
def test_every_argument_matters(change):
    assert call_seed(1, **{**CALL, **change}) != call_seed(1, **CALL)
    assert call_seed(2, **CALL) != call_seed(1, **CALL)


def test_numbers_do_not_run_together():
    seeds = [call_seed(1, **{**CALL, "index": a, "session": b}) for a, b in ((1, 11), (11, 1), (1, 1), (11, 11))]
    assert len(set(seeds)) == 4


def test_order_of_calls_does_not_matter():
    calls = [{**CALL, "index": i, "path": f"{a}.0/turn.{t}"} for i in range(5) for a in "ab" for t in range(3)]
    before = [call_seed(1, **c) for c in calls]
    shuffled = list(range(len(calls)))
    random.Random(0).shuffle(shuffled)
    after = {i: call_seed(1, **calls[i]) for i in shuffled}
    assert [after[i] for i in range(len(calls))] == before


def test_seeds_fit_vllm_and_spread():
    seeds = [call_seed(0, index=i, session=s, step=1, path="a.0/turn.0") for i in range(200) for s in range(8)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) > 1590
    assert 0.45 < sum(seed % 2 for seed in seeds) / len(seeds) < 0.55


def test_numpy_and_plain_integers_agree():
    np = pytest.importorskip("numpy")
    assert call_seed(1, **{**CALL, "index": np.int64(3), "session": np.int32(1)}) == call_seed(1, **CALL)
