"""The three loggers of verl: each writes the same numbers, and each is read back."""

import io
import math
import sys
from contextlib import redirect_stdout

import numpy as np
import pytest

from verl_drmas.report.readers import Kind, kind_of, read_files
from verl_drmas.report.runlog import RunLogError

STEPS = {
    0: {"val/gsm8k - hard/avg@4": 0.25},
    1: {
        "training/global_step": 1,
        "actor/grad_norm": np.float32(0.1),
        "drmas/agent/a/rows": 64.0,
        "perf/total_num_tokens": np.int64(123_456_78),
        "tiny": 1.25e-07,
        "huge": -3e21,
        "text": "no number",
    },
    2: {"training/global_step": 2, "actor/grad_norm": math.nan, "actor/loss": math.inf, "drmas/agent/a/rows": 60.0},
}


@pytest.fixture(scope="module")
def tracking():
    return pytest.importorskip("verl.utils.tracking")


@pytest.fixture
def written(tmp_path, monkeypatch, tracking):
    """The same steps by verl's own loggers: a path by kind."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tensorboard"))
    console = io.StringIO()
    with redirect_stdout(console):
        loggers = tracking.Tracking("p", "e", ["file", "tensorboard", "console"])
        for step, data in STEPS.items():
            numbers = {key: value for key, value in data.items() if not isinstance(value, str)}
            loggers.log(data, step, backend=["file", "console"])
            loggers.log(numbers, step, backend=["tensorboard"])  # verl's adapter breaks at texts
        loggers.finish()
    text = tmp_path / "verl.log"
    prefix = "\x1b[36m(TaskRunnerV1 pid=17)\x1b[0m "
    progress = "Training Progress:  50%|█████     | 1/2 [00:09<00:09,  9.11s/it]\r"
    lines = [prefix + line for line in console.getvalue().splitlines()]
    text.write_text("booting, step: none\n" + progress + "\n".join(lines) + "\nbye\n")
    (events,) = (tmp_path / "tensorboard").iterdir()
    return {Kind.FILE: tmp_path / "metrics.jsonl", Kind.TENSORBOARD: events, Kind.CONSOLE: text}


@pytest.mark.parametrize("kind", list(Kind))
def test_each_logger_gives_the_same_run(written, kind):
    path = written[kind]
    assert kind_of(path) is kind
    log = read_files([path], kind, name="r")
    exact = kind is not Kind.TENSORBOARD
    assert [step.step for step in log.steps] == [0, 1, 2]
    for step in log.steps:
        data = {k: v for k, v in STEPS[step.step].items() if not isinstance(v, str)}
        finite = {k: float(v) for k, v in data.items() if math.isfinite(v)}
        # float32's 0.1 comes back as the double nearest to it from JSON, and as 0.1 from the others.
        assert step.metrics == pytest.approx(finite, rel=1e-7 if exact else 1e-6)
        assert step.lost == set(data) - set(finite)
    assert log.series("perf/total_num_tokens")[1] == [12345678.0]


def test_a_console_log_cut_within_a_step_reads_up_to_it(tmp_path):
    path = tmp_path / "verl.log"
    path.write_text("step:1 - training/global_step:1 - a:0.123\nstep:2 - training/global_step:2 - a:0.4")
    log = read_files([path], Kind.CONSOLE, name="r")
    assert log.series("a") == ([1], [0.123])
    assert log.cut


def test_names_with_the_consoles_own_separators_are_read(tmp_path):
    path = tmp_path / "verl.log"
    path.write_text("step:3 - val/a - b: c/avg@4:0.5 - ok:True - x:-1e-05 - y:np.float64(nan)\nstep: 4 - no\n")
    log = read_files([path], Kind.CONSOLE, name="r")
    assert log.steps[0].metrics == {"val/a - b: c/avg@4": 0.5, "x": -1e-05}
    assert log.steps[0].lost == {"y"}


def test_events_cut_short_are_read_up_to_there(written):
    path = written[Kind.TENSORBOARD]
    path.write_bytes(path.read_bytes()[:-20])
    log = read_files([path], Kind.TENSORBOARD, name="r")
    assert [step.step for step in log.steps] == [0, 1, 2]
    assert "drmas/agent/a/rows" not in log.steps[-1].metrics  # was the last


def test_a_missing_package_is_named_with_the_fix(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(ImportError, match=r"verl-drmas\[report\]"):
        read_files([written[Kind.TENSORBOARD]], Kind.TENSORBOARD, name="r")


def test_parts_are_joined_in_the_order_of_their_steps_whatever_their_names(tmp_path):
    def part(name, steps, value):
        path = tmp_path / name
        path.write_text("".join(f"step:{s} - training/global_step:{s} - a:{value}\n" for s in steps))
        return path

    late, early = part("a.log", range(4, 9), 2.0), part("b.log", range(1, 6), 1.0)
    log = read_files([late, early], Kind.CONSOLE, name="r")
    assert log.series("a") == (list(range(1, 9)), [1.0] * 3 + [2.0] * 5)
    assert log.again == (4, 5)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", b'{"step": 1, "data": {}}\n', Kind.FILE),
        ("a.jsonl", b'{"step": 1, "da', Kind.FILE),
        ("dump.jsonl", b'{"input": "x", "output": "y", "step": 1}\n', None),
        ("a.jsonl", b"", Kind.FILE),
        ("a.json", b'{"learned": true}\n', None),
        ("a.log", b"hello\nstep:1 - a:1\n", Kind.CONSOLE),
        ("a.log", b"hello\n", None),
        ("a.log", b"\0\1\2step:1", None),
    ],
)
def test_a_files_kind_is_told_from_its_beginning(tmp_path, name, content, kind):
    path = tmp_path / name
    path.write_bytes(content)
    assert kind_of(path) is kind


def test_an_empty_run_is_refused_by_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"")
    with pytest.raises(RunLogError, match=r"a\.jsonl: holds no step"):
        read_files([path], Kind.FILE, name="r")
