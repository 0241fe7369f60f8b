"""The additions of the CPU job."""

import pytest
from typer.testing import CliRunner

from verl_drmas.data.arithmetic import arithmetic_rows
from verl_drmas.data.commands import data_app
from verl_drmas.data.parquet import check_prompts, read_rows


def test_every_problem_once_on_one_side():
    train, test = arithmetic_rows()
    assert (len(train), len(test)) == (84, 16)
    questions = [row["prompt"][0]["content"] for row in train + test]
    assert sorted(questions) == sorted(f"{a}+{b}" for a in range(10) for b in range(10))
    for row in train + test:
        left, right = row["prompt"][0]["content"].split("+")
        assert int(row["reward_model"]["ground_truth"]) == int(left) + int(right)
        assert row["data_source"] == "arithmetic"
    assert {row["extra_info"]["split"] for row in test} == {"test"}
    assert len({row["extra_info"]["index"] for row in train + test}) == 100


def test_the_seed_decides_the_split():
    assert arithmetic_rows(seed=1) == arithmetic_rows(seed=1)
    held = [{row["prompt"][0]["content"] for row in arithmetic_rows(seed=seed)[1]} for seed in (1, 2)]
    assert held[0] != held[1]


@pytest.mark.parametrize("options", [{"held_out": 0}, {"held_out": 100}, {"max_operand": 0}, {"max_operand": -3}])
def test_an_empty_side_is_refused(options):
    with pytest.raises(ValueError, match="max_operand must be at least 1"):
        arithmetic_rows(**options)


def test_the_command(tmp_path):
    asked = ["arithmetic", "-o", str(tmp_path), "--max-operand", "4", "--held-out", "5", "--seed", "3"]
    result = CliRunner().invoke(data_app, asked)
    assert result.exit_code == 0, result.output
    assert check_prompts([tmp_path / "train.parquet", tmp_path / "test.parquet"]) == 25
    assert read_rows(tmp_path / "test.parquet") == arithmetic_rows(max_operand=4, held_out=5, seed=3)[1]
