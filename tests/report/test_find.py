"""Finding runs: a file, a run's folder with its parts, a folder of runs; names, configurations, one run given twice."""

import json
import os
import shutil

import pytest
from simulated_runs import config_text, make_records, write_records, write_run

from verl_drmas.report.find import find_runs
from verl_drmas.report.readers import Kind
from verl_drmas.report.runlog import RunLogError


def console_text(records):
    return "".join(
        f"step:{step} - " + " - ".join(f"{k}:{v}" for k, v in data.items() if v is not None) + "\n"
        for step, data in records
    )


def test_a_run_folder_is_one_run_named_after_it(tmp_path):
    truth = write_run(tmp_path / "drmas-seed3", seed=3, steps=5)
    (tmp_path / "drmas-seed3" / "verl.log").write_text(console_text(truth.records))
    for path in (tmp_path / "drmas-seed3", tmp_path / "drmas-seed3" / "metrics.jsonl", tmp_path):
        (run,), notes = find_runs([path])
        assert (run.name, run.kind, notes) == ("drmas-seed3", Kind.FILE, [])
        assert run.settings.get("drmas.request_seed") == 3
        assert len(run.log.steps) == 5


def test_parts_of_a_resumed_run_in_its_folder_are_one_run(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, seed=1, steps=6)
    write_records(folder / "metrics-2.jsonl", make_records(seed=2, steps=6, first=5).records)
    (run,), _ = find_runs([tmp_path])
    assert [step.step for step in run.log.steps] == list(range(1, 11))
    assert run.log.again == (5, 6)


def test_a_folder_of_logs_without_configurations_is_a_run_a_file(tmp_path):
    for name in ("a_seed1", "a_seed2"):
        write_records(tmp_path / "project" / f"{name}.jsonl", make_records(seed=int(name[-1]), steps=3).records)
    runs, _ = find_runs([tmp_path])
    assert [run.name for run in runs] == ["a_seed1", "a_seed2"]
    assert all(run.settings is None for run in runs)


def test_dumps_and_checkpoints_are_no_runs(tmp_path):
    write_run(tmp_path / "run", steps=3)
    dump = tmp_path / "run" / "rollouts" / "1.jsonl"
    dump.parent.mkdir()
    dump.write_text('{"input": "x", "output": "y", "step": 1}\n')
    (tmp_path / "run" / "dump.jsonl").write_text(dump.read_text())
    (run,), _ = find_runs([tmp_path])
    assert [file.name for file in run.files] == ["metrics.jsonl"]


def test_links_are_followed_and_lead_to_no_run_twice_or_for_ever(tmp_path):
    write_run(tmp_path / "elsewhere" / "one", seed=1, steps=3)
    write_run(tmp_path / "runs" / "two", seed=2, steps=3)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere" / "one")
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs" / "two")
    (tmp_path / "runs" / "up").symlink_to(tmp_path / "runs")
    runs, _ = find_runs([tmp_path / "runs"])
    assert sorted(run.files[0].resolve().parent.name for run in runs) == ["one", "two"]


def test_names_that_meet_get_the_folders_above(tmp_path):
    for project in ("math", "search"):
        write_run(tmp_path / project / "seed1", seed=len(project), steps=3)
    runs, _ = find_runs([tmp_path])
    assert sorted(run.name for run in runs) == ["math/seed1", "search/seed1"]


def test_one_run_by_two_loggers_counts_once(tmp_path):
    truth = make_records(steps=4)
    one = write_records(tmp_path / "a" / "run.jsonl", truth.records)
    two = tmp_path / "b" / "other.log"
    two.parent.mkdir()
    two.write_text(console_text(truth.records))
    runs, notes = find_runs([two, one])
    assert [run.kind for run in runs] == [Kind.FILE]
    assert "the same run" in notes[0] and "other.log" in notes[0]
    assert len(find_runs([one, one])[0]) == 1


def test_the_longer_log_of_one_run_is_kept(tmp_path):
    truth = make_records(steps=6)
    late = write_records(tmp_path / "a" / "run.jsonl", truth.records[3:])
    whole = tmp_path / "b.log"
    whole.write_text(console_text(truth.records))
    (run,), _ = find_runs([late, whole])
    assert len(run.log.steps) == 6


def test_runs_that_only_look_alike_are_two(tmp_path):
    for seed in (1, 2):
        write_records(tmp_path / f"s{seed}.jsonl", make_records(seed=seed, steps=4).records)
    assert len(find_runs([tmp_path])[0]) == 2


def test_hydras_own_outputs_are_matched_by_the_runs_names(tmp_path):
    """verl's defaults: the log in <project>/<experiment>.jsonl, the configuration in outputs/<day>/<time>/.hydra."""
    write_records(tmp_path / "math" / "four.jsonl", make_records(steps=3).records)
    for time, (project, experiment, lr) in enumerate(
        [("math", "four", 1e-6), ("math", "five", 2e-6), ("qa", "four", 3e-6)]
    ):
        hydra = tmp_path / "outputs" / "2026-12-01" / f"10-0{time}-00" / ".hydra"
        hydra.mkdir(parents=True)
        (hydra / "config.yaml").write_text(config_text(project=project, experiment=experiment, lr=lr))
    (run,), _ = find_runs([tmp_path / "math"])
    assert run.settings.get("actor_rollout_ref.actor.optim.lr") == 1e-6


def test_a_configuration_that_cant_be_read_is_said(tmp_path):
    write_run(tmp_path / "run", steps=3)
    (tmp_path / "run" / "hydra" / ".hydra" / "config.yaml").write_text("a: [1\nb")
    (run,), _ = find_runs([tmp_path])
    assert run.settings is None
    assert "config.yaml can't be read" in run.notes[0]


def test_whole_evaluations_in_a_runs_folder_are_its_own(tmp_path):
    write_run(tmp_path / "run", steps=3)
    summary = {"workflow": "w", "samples": 16, "sources": {}, "sessions": {}, "complete": True}
    (tmp_path / "run" / "eval.json").write_text(json.dumps(summary))
    (tmp_path / "run" / "result.json").write_text('{"learned": true}')
    (run,), _ = find_runs([tmp_path])
    assert [path.name for path in run.evaluations] == ["eval.json"]


def test_one_broken_run_among_others_is_left_out_and_said(tmp_path):
    write_run(tmp_path / "good", steps=3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    runs, notes = find_runs([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert "empty/metrics.jsonl: holds no step" in notes[0]
    with pytest.raises(RunLogError, match="holds no step"):
        find_runs([tmp_path / "empty"])


def test_absent_and_empty_paths_are_refused_by_name(tmp_path):
    with pytest.raises(RunLogError, match="none: no such file or folder"):
        find_runs([tmp_path / "none"])
    with pytest.raises(RunLogError, match="holds no log of verl's"):
        find_runs([tmp_path])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(RunLogError, match="not a log of verl's loggers"):
        find_runs([tmp_path / "a.txt"])


def test_a_copied_run_keeps_its_order_without_times(tmp_path):
    """File times are lost by copies; the parts' steps tell their order."""
    folder = tmp_path / "run"
    write_run(folder, seed=1, steps=6)
    write_records(folder / "later.jsonl", make_records(seed=2, steps=4, first=4).records)
    copy = tmp_path / "copy" / "run"
    shutil.copytree(folder, copy)
    os.utime(copy / "metrics.jsonl", (2e9, 2e9))
    os.utime(copy / "later.jsonl", (1e9, 1e9))
    (one,), _ = find_runs([folder])
    (two,), _ = find_runs([copy])
    assert one.log.steps == two.log.steps
