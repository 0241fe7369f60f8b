"""Which step folders are whole, which is the newest, and what retention removes."""

import json
import logging
import shutil

import pytest

from verl_drmas.trainer import step_folder
from verl_drmas.trainer.step_folder import MARKER, IncompleteError, complete, inspect, newest, prune, survey


def save(root, step, models=("a", "b"), whole=True):
    """A step's folder with one shard of 10 bytes a model; its marker, too, if it is whole."""
    folder = root / f"global_step_{step}"
    for model in models:
        (folder / "actor" / model).mkdir(parents=True)
        (folder / "actor" / model / "shard.pt").write_bytes(b"0123456789")
    if whole:
        complete(folder, models)
    return folder


def steps(root):
    return [step_folder.step_of(folder) for folder in step_folder.step_folders(root)]


def test_a_whole_folder_says_what_is_in_it(tmp_path):
    marker = inspect(save(tmp_path, 3))
    assert (marker.step, marker.save, marker.models) == (3, 0, ["a", "b"])
    assert marker.files == {"actor/a/shard.pt": 10, "actor/b/shard.pt": 10}
    assert inspect(save(tmp_path, 4)).save == 1


def cut(folder):
    (folder / "actor" / "b" / "shard.pt").write_bytes(b"012345678")


def grow(folder):
    (folder / "actor" / "b" / "shard.pt").write_bytes(b"0123456789+")


def change(**values):
    def apply(folder):
        marker = json.loads((folder / MARKER).read_text())
        (folder / MARKER).write_text(json.dumps(marker | values))

    return apply


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MARKER).unlink(), r"no complete\.json"),
        (lambda folder: shutil.rmtree(folder / "actor" / "b"), r"actor/b/shard\.pt is missing"),
        (cut, r"actor/b/shard\.pt has 9 bytes instead of 10"),
        (grow, r"actor/b/shard\.pt has 11 bytes instead of 10"),
        (lambda folder: (folder / MARKER).write_text('{"format": 1, "st'), r"can't be read"),
        (lambda folder: (folder / MARKER).write_text("[]"), r"can't be read"),
        (lambda folder: (folder / MARKER).write_bytes(b"\xff\xfe{"), r"can't be read"),
        (change(files=None), r"can't be read"),
        (change(format=2), r"has format 2; .* reads 1"),
    ],
)
def test_a_damaged_folder_is_never_picked_and_the_log_says_why(tmp_path, caplog, damage, reason):
    first = save(tmp_path, 1)
    second = save(tmp_path, 2)
    damage(second)
    with pytest.raises(IncompleteError, match=reason):
        inspect(second)
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path).folder == first
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(second) in record.message
    inspect(first)


def test_nothing_whole_is_nothing_to_resume_from(tmp_path, caplog):
    assert newest(tmp_path / "absent") is None
    save(tmp_path, 1, whole=False)
    assert newest(tmp_path) is None
    assert "global_step_1" in caplog.text


def test_steps_are_numbers_and_other_names_are_ignored(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    (tmp_path / "global_step_200_old").mkdir()
    (tmp_path / "global_step_300").write_text("a file")
    assert steps(tmp_path) == [9, 10, 100]
    assert newest(tmp_path).marker.step == 100


def test_unfinished_earlier_folders_are_not_worth_a_word(tmp_path, caplog):
    save(tmp_path, 1, whole=False)
    save(tmp_path, 2)
    assert newest(tmp_path).marker.step == 2
    assert not caplog.records


def test_a_run_that_went_back_resumes_its_own_branch(tmp_path, caplog):
    for step in (10, 20, 30):
        save(tmp_path, step)
    shutil.rmtree(tmp_path / "global_step_20")
    save(tmp_path, 20)  # resumed from 10 by hand
    assert newest(tmp_path).marker.step == 20
    assert "global_step_30: step 20 was saved after it" in caplog.text


def test_a_damaged_folder_keeps_its_place_in_the_order(tmp_path):
    save(tmp_path, 1)
    cut(save(tmp_path, 2))
    assert inspect(save(tmp_path, 3)).save == 2


def test_a_model_that_left_no_file_is_said(tmp_path, caplog):
    complete(save(tmp_path, 1, models=("a",), whole=False), ("a", "elsewhere"))
    assert "no file of model 'elsewhere'" in caplog.text
    assert "'a'" not in caplog.text


@pytest.mark.parametrize(
    ("keep", "left"), [(None, [1, 2, 3, 4]), (0, [1, 2, 3, 4]), (2, [3, 4]), (1, [4]), (9, [1, 2, 3, 4])]
)
def test_retention_keeps_the_last_saves(tmp_path, keep, left):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    prune(tmp_path, keep)
    assert steps(tmp_path) == left


def test_retention_clears_remains_of_older_saves_only(tmp_path):
    save(tmp_path, 1, whole=False)
    save(tmp_path, 2)
    save(tmp_path, 3)
    save(tmp_path, 4, whole=False)
    save(tmp_path, 5)
    save(tmp_path, 6, whole=False)
    prune(tmp_path, 2)
    assert steps(tmp_path) == [3, 4, 5, 6]


def test_damaged_folders_do_not_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    cut(tmp_path / "global_step_2")
    prune(tmp_path, 2)
    assert [w.marker.step for w in survey(tmp_path)[0]] == [1, 3]


def test_what_can_not_be_removed_is_said_and_cannot_be_resumed(tmp_path, caplog, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)

    def busy(path):
        raise OSError("device or resource busy")

    monkeypatch.setattr(step_folder.shutil, "rmtree", busy)
    prune(tmp_path, 1)
    assert "global_step_1 could not be removed: device or resource busy" in caplog.text
    assert [w.marker.step for w in survey(tmp_path)[0]] == [2]


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    step_folder.write_atomically(path, "old")

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(step_folder.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        step_folder.write_atomically(path, "new")
    assert path.read_text() == "old"
