"""Prompt files: what is written reads back, and what is wrong is named before a run."""

import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_drmas.data.parquet import SCHEMA, check_prompts, prompt_row, read_rows, write_rows


def rows(count: int = 3) -> list[dict]:
    return [prompt_row(f"question {i}", str(i), data_source="s", split="train", index=i) for i in range(count)]


def test_rows_read_back_as_written(tmp_path):
    path = write_rows(rows(), tmp_path / "deep" / "train.parquet")
    assert read_rows(path) == rows()
    assert pq.read_schema(path).equals(SCHEMA)
    assert [file.name for file in path.parent.iterdir()] == ["train.parquet"]
    assert check_prompts(path) == 3
    assert check_prompts([str(path), path]) == 6


def test_an_index_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows 0 and 3 both have extra_info\.index 0"):
        write_rows([*rows(), rows()[0]], tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="no rows"):
        write_rows([], tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lines", [True, False])
def test_json_both_ways(tmp_path, lines):
    path = tmp_path / ("t.jsonl" if lines else "t.json")
    path.write_text("\n".join(json.dumps(row) for row in rows()) + "\n" if lines else json.dumps(rows(), indent=1))
    assert read_rows(path) == rows()
    assert check_prompts(path) == 3


def _with(row: int, **changes) -> list[dict]:
    changed = rows()
    changed[row].update(changes)
    return changed


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_with(1, reward_model={"style": "rule", "ground_truth": None}), "row 1: reward_model.ground_truth is missing"),
        (_with(2, reward_model={"style": "rule", "ground_truth": " "}), "row 2: reward_model.ground_truth is missing"),
        (_with(0, reward_model=None), "row 0: reward_model.ground_truth is missing"),
        (_with(1, prompt=[]), "row 1: prompt is empty"),
        (_with(1, prompt=None), "row 1: prompt is empty"),
        ([{**row, "prompt": "text"} for row in rows()], "a list of messages"),
        ([{"prompt": row["prompt"]} for row in rows()], "no column 'reward_model'"),
        ([{"reward_model": row["reward_model"]} for row in rows()], "no column 'prompt'"),
        ([{**row, "reward_model": {"style": "rule"}} for row in rows()], "reward_model has no ground_truth"),
    ],
)
def test_bad_rows_are_named(tmp_path, kind, bad, message):
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(bad), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in bad))
    with pytest.raises(ValueError) as error:
        check_prompts(path)
    assert message in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_several_bad_rows_are_counted(tmp_path):
    bad = rows(5)
    bad[1]["reward_model"]["ground_truth"] = bad[4]["reward_model"]["ground_truth"] = ""
    pq.write_table(pa.Table.from_pylist(bad), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"row 1: .* \(2 such rows\)"):
        check_prompts(tmp_path / "t.parquet")


def test_golds_of_question_answering_are_lists(tmp_path):
    answers = rows(2)
    for row, target in zip(answers, (["Rome", "Roma"], []), strict=True):
        row["reward_model"] = {"ground_truth": {"target": target}}
    pq.write_table(pa.Table.from_pylist(answers), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"row 1: reward_model\.ground_truth is missing or empty;"):
        check_prompts(tmp_path / "t.parquet")


@pytest.mark.parametrize("empty", [[], [""], [" ", None], None])
def test_a_list_without_a_gold_is_refused(tmp_path, empty):
    answers = rows(3)
    for row, golds in zip(answers, (["Rome", ""], ["", "Roma"], empty), strict=True):
        row["reward_model"]["ground_truth"] = golds
    pq.write_table(pa.Table.from_pylist(answers), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"row 2: reward_model\.ground_truth is missing or empty;"):
        check_prompts(tmp_path / "t.parquet")
    pq.write_table(pa.Table.from_pylist(answers[:2]), tmp_path / "t.parquet")
    assert check_prompts(tmp_path / "t.parquet") == 2
    for row in answers:
        row["reward_model"]["ground_truth"] = []
    pq.write_table(pa.Table.from_pylist(answers), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"row 0: .* \(3 such rows\)"):
        check_prompts(tmp_path / "t.parquet")


def test_what_is_left_out_is_not_read(tmp_path):
    written = [{"q": "a", "page": {"text": "long", "title": "t"}, "pages": "b"}, {"q": "c", "page": None, "pages": ""}]
    pq.write_table(pa.Table.from_pylist(written), tmp_path / "t.parquet")
    assert read_rows(tmp_path / "t.parquet", leave_out=["page.text", "none"]) == [
        {"q": "a", "page": {"title": "t"}, "pages": "b"},
        {"q": "c", "page": None, "pages": ""},
    ]
    assert read_rows(tmp_path / "t.parquet", leave_out=["page", "q"]) == [{"pages": "b"}, {"pages": ""}]
    assert read_rows(tmp_path / "t.parquet") == written


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.parquet", None, "no such file"),
        ("t.csv", b"a,b", "unknown kind of file"),
        ("t.parquet", b"not parquet", "not a readable parquet file"),
        ("t.jsonl", b'{"a": 1}\n{broken\n', "line 2 is not a JSON object"),
        ("t.json", b"[1, 2]", "row 0 is int"),
        ("t.json", b"[]", "no rows"),
        ("t.jsonl", b"", "no rows"),
        ("t.jsonl", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    for check in (read_rows, check_prompts):
        with pytest.raises(ValueError) as error:
            check(path)
        assert message in str(error.value) and str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_an_empty_parquet_file_is_refused(tmp_path):
    pq.write_table(SCHEMA.empty_table(), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="no rows"):
        check_prompts(tmp_path / "t.parquet")


def test_remote_files_and_other_prompt_keys(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"chat": r["prompt"], **r} for r in rows()]), tmp_path / "t.parquet")
    assert check_prompts([str(tmp_path / "t.parquet"), "hdfs://node/t.parquet"], prompt_key="chat") == 3


def test_the_check_is_quick_on_a_large_file(tmp_path):
    path = write_rows(rows(50_000), tmp_path / "t.parquet")
    begin = time.process_time()
    assert check_prompts(path) == 50_000
    assert time.process_time() - begin < 1.0
