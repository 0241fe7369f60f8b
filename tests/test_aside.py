"""What is in the way of a start is renamed, and nothing is lost."""

import pytest

from verl_drmas.aside import keep_aside


@pytest.mark.parametrize(
    "name, kept", [("metrics.jsonl", ["metrics.1.jsonl", "metrics.2.jsonl"]), ("log", ["log.1", "log.2"])]
)
def test_a_file_keeps_its_suffix(tmp_path, name, kept):
    for _ in range(2):
        (tmp_path / name).write_text("x")
        keep_aside(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_a_folder_keeps_its_name_whole_and_nothing_is_nothing(tmp_path):
    keep_aside(tmp_path / "run.v2")
    (tmp_path / "run.v2").mkdir()
    (tmp_path / "run.v2.1").write_text("a file of that name")
    keep_aside(tmp_path / "run.v2")
    assert (tmp_path / "run.v2.2").is_dir() and not (tmp_path / "run.v2").exists()
