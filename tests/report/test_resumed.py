"""Runs that were resumed, killed or ill: what counts of steps that were logged twice, and what is no number."""

import json
import math

import pytest
from simulated_runs import make_records, write_records

from verl_drmas.report.runlog import read_run


def trained(step, **metrics):
    return step, {"training/global_step": step, **metrics}


def test_a_step_trained_again_replaces_the_first_attempt_wholly(write_log):
    """What only the first attempt logged, such as a failure, didn't happen in the run that counts."""
    first = [trained(1, a=1.0), trained(2, a=2.0, **{"drmas/sessions/failed/timeout": 3.0})]
    log = read_run(write_log([*first, trained(2, a=5.0), trained(3, a=6.0)]))
    assert log.series("a") == ([1, 2, 3], [1.0, 5.0, 6.0])
    assert "drmas/sessions/failed/timeout" not in log.names()
    assert log.again == (2,)


def test_steps_beyond_a_resume_are_given_up_until_they_are_trained_again(write_log):
    log = read_run(
        write_log([*(trained(step, a=1.0) for step in range(1, 46)), *(trained(s, a=2.0) for s in (41, 42))])
    )
    steps, values = log.series("a")
    assert steps == list(range(1, 43))
    assert values == [1.0] * 40 + [2.0] * 2
    assert log.again == (41, 42, 43, 44, 45)


def test_a_test_before_the_resumed_training_joins_the_step_before(write_log):
    log = read_run(
        write_log([trained(40, a=1.0, **{"val/x/avg@1": 0.5}), (40, {"val/x/avg@1": 0.6}), trained(41, a=2.0)])
    )
    assert log.steps[0].metrics == {"training/global_step": 40.0, "a": 1.0, "val/x/avg@1": 0.6}
    assert log.again == ()


def test_numbers_that_are_not_finite_are_kept_apart(tmp_path):
    path = tmp_path / "run.jsonl"
    first = '{"step": 1, "data": {"a": NaN, "b": Infinity, "c": null, "d": 1}}'
    path.write_text(first + '\n{"step": 1, "data": {"a": 2.0, "d": null}}\n')
    (step,) = read_run(path).steps
    assert step.metrics == {"a": 2.0}
    assert step.lost == {"b", "c", "d"}


def test_verls_own_logger_writes_infinity_as_it_writes_nan(tmp_path, monkeypatch):
    tracking = pytest.importorskip("verl.utils.tracking")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "run.jsonl"))
    logger = tracking.FileLogger("p", "e")
    logger.log({"actor/grad_norm": math.inf, "nan": math.nan, "a": 1.0}, step=1)
    logger.finish()
    (step,) = read_run(tmp_path / "run.jsonl").steps
    assert (step.metrics, step.lost) == ({"a": 1.0}, {"actor/grad_norm", "nan"})


def test_a_log_cut_anywhere_in_its_last_line_reads_up_to_it(tmp_path):
    truth = make_records(steps=3)
    path = write_records(tmp_path / "run.jsonl", truth.records)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in (start + 1, start + 30, len(whole) - 2):
        path.write_bytes(whole[:end])
        log = read_run(path)
        assert [step.step for step in log.steps] == [1, 2]
        assert log.cut


def test_characters_that_end_a_line_elsewhere_dont_end_one_here(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"step": 1, "data": {"a\u2028b\x85": 1.0}}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_run(path).names() == {"a\u2028b\x85"}
    assert not read_run(path).cut
