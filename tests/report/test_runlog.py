"""The log reader: against verl's own logger, and against the ways in which a run's log can be broken."""

import math

import numpy as np
import pytest

from verl_drmas.report.runlog import RunLogError, log_path, mean, read_run


def test_reads_what_verls_own_logger_writes(tmp_path, monkeypatch):
    tracking = pytest.importorskip("verl.utils.tracking")
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    logger = tracking.FileLogger("project", "experiment")
    logger.log({"actor/grad_norm": np.float32(0.5), "count": np.int64(3), "nan": math.nan, "text": "x"}, step=1)
    logger.finish()

    log = read_run(log_path("project", "experiment"))

    assert log.name == "experiment"
    assert log.steps[0].step == 1
    assert log.steps[0].metrics == {"actor/grad_norm": 0.5, "count": 3.0}


def test_log_path_prefers_the_path_variable_as_verl_does(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", "/elsewhere")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "run.jsonl"))
    assert log_path("project", "experiment") == tmp_path / "run.jsonl"


def test_entries_of_one_step_are_joined_and_steps_sorted(write_log):
    log = read_run(write_log([(2, {"a": 2.0}), (1, {"a": 1.0}), (2, {"b": 5.0}), (1, {"a": 9.0})]))
    assert [(step.step, dict(step.metrics)) for step in log.steps] == [(1, {"a": 9.0}), (2, {"a": 2.0, "b": 5.0})]


def test_a_last_line_cut_short_is_dropped(write_log):
    path = write_log([(1, {"a": 1.0}), (2, {"a": 2.0})])
    path.write_text(path.read_text().rstrip("\n")[:-4])
    assert [step.step for step in read_run(path).steps] == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "data": {}\n{"step": 2, "data": {}}\n', ":1: not JSON"),
        ('{"step": 1}\n', "not of the form"),
        ("[1]\n", "not of the form"),
        ("", "holds no step"),
    ],
)
def test_broken_logs_name_file_and_fault(tmp_path, text, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(RunLogError, match=message) as caught:
        read_run(path)
    assert str(path) in str(caught.value)


def test_an_absent_log_says_how_to_get_one(tmp_path):
    with pytest.raises(RunLogError, match=r"trainer\.logger"):
        read_run(tmp_path / "none.jsonl")


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5, 1), (6, 2), (60, 12), (61, 13)])
def test_fifths_round_up_and_leave_out_step_zero(write_log, count, size):
    log = read_run(write_log([(step, {"a": 1.0}) for step in range(count + 1)]))
    first, last = log.fifths()
    assert [step.step for step in first] == list(range(1, size + 1))
    assert [step.step for step in last] == list(range(count - size + 1, count + 1))


def test_mean_skips_steps_without_the_metric_and_is_none_without_any(write_log):
    log = read_run(write_log([(1, {"a": 1.0}), (2, {}), (3, {"a": 4.0})]))
    assert mean(list(log.steps), "a") == 2.5
    assert mean(list(log.steps), "b") is None
    assert log.series("a") == ([1, 3], [1.0, 4.0])


def test_agents_come_from_the_metric_names(write_log):
    names = ["drmas/agent/verifier/reward/mean", "drmas/agent/solver/reward/mean", "drmas/workflow/x", "drmas/agent/y"]
    assert read_run(write_log([(1, dict.fromkeys(names, 0.0))])).agents() == ["solver", "verifier"]


def test_a_quantity_is_a_models_own_and_else_verls(write_log):
    def norms(*models, **data):
        named = {f"drmas/model/{m}/grad_norm": 1.0 for m in models}
        return read_run(write_log([(1, named | {"drmas/model/x/rows": 2} | data)])).by_model("grad_norm")

    stock = {"actor/grad_norm": 1.0}
    assert norms() == {}
    assert norms(**stock) == {"model": "actor/grad_norm"}
    assert norms("base", **stock) == {"base": "drmas/model/base/grad_norm"}
    assert norms("b", "a") == {"a": "drmas/model/a/grad_norm", "b": "drmas/model/b/grad_norm"}
