"""Data files of an evaluation: verl's own, and plain questions and answers."""

import json

import pytest

from verl_drmas.data.parquet import prompt_row, write_rows
from verl_drmas.data.search import SEARCH_SCHEMA, question_row
from verl_drmas.evaluation.rows import read_files
from verl_drmas.evaluation.workflow import task_of


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_verls_files_stay_as_they_are(tmp_path):
    a = write_rows(
        [prompt_row("1+1", "2", data_source="s", split="t", index=i) for i in (3, 7)], tmp_path / "a.parquet"
    )
    golds = question_row("who", ["Ada", "A"], data_source="q", split="t", index=4)
    b = write_rows([golds], tmp_path / "b.parquet", schema=SEARCH_SCHEMA)
    rows = read_files([a, b])
    assert rows.sources == ["s", "s", "q"] and list(rows.files) == ["a.parquet", "b.parquet"]
    task = task_of(rows.rows[2], 1, validate=True)
    assert (task.question, task.answer, task.index, task.session, task.validate) == ("who", ["Ada", "A"], 4, 1, True)
    c = lines(tmp_path / "c.jsonl", *rows.rows[:2])
    assert read_files([c]).rows == rows.rows[:2]


def test_plain_rows_have_one_gold(tmp_path):
    path = lines(
        tmp_path / "gsm8k.jsonl",
        {"question": "How many?", "answer": "6*7=<<6*7=42>>42\n#### 1,042"},
        {"question": "Which?", "answer": 3.0},
    )
    rows = read_files([path])
    assert [task_of(row, 0).answer for row in rows.rows] == ["1042", "3"]
    assert rows.sources == ["gsm8k", "gsm8k"] and [row["extra_info"]["index"] for row in rows.rows] == [0, 1]


def test_plain_rows_have_several_golds(tmp_path):
    path = lines(tmp_path / "qa.jsonl", {"question": "Who?", "golden_answers": ["Ada", "A. L."]})
    assert [task_of(row, 0).answer for row in read_files([path]).rows] == [["Ada", "A. L."]]
    path = lines(tmp_path / "m.jsonl", {"q": "Energy?", "a": ["9.6", "9.60"]})
    asked = {"question_key": "q", "answer_key": "a"}
    assert task_of(read_files([path], kind="math", **asked).rows[0], 0).answer == "9.6"
    assert task_of(read_files([path], **asked).rows[0], 0).answer == ["9.6", "9.60"]


def test_the_content_decides_a_files_short_name(tmp_path):
    one = lines(tmp_path / "a.jsonl", {"question": "1+1", "answer": "2"})
    before = read_files([one]).files
    assert read_files([one]).files == before
    lines(tmp_path / "a.jsonl", {"question": "1+1", "answer": "3"})
    assert read_files([one]).files != before


@pytest.mark.parametrize(
    "row, says",
    [
        ({"question": "q"}, "no answer column among question"),
        ({"question": "q", "answer": ""}, "row 0: answer is missing or empty"),
        ({"prompt": [{"role": "user", "content": "q"}]}, "reward_model"),
        ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}}, "extra_info.index"),
    ],
)
def test_wrong_rows_are_one_line(tmp_path, row, says):
    with pytest.raises(ValueError, match=says) as error:
        read_files([lines(tmp_path / "a.jsonl", row)])
    assert "\n" not in str(error.value)


def test_one_name_is_one_file(tmp_path):
    (tmp_path / "b").mkdir()
    files = [lines(folder / "a.jsonl", {"question": "q", "answer": "1"}) for folder in (tmp_path, tmp_path / "b")]
    with pytest.raises(ValueError, match="a file of that name is given before"):
        read_files(files)
