"""Math prompts from the forms in which sets are published, up to the real files."""

import dataclasses

import datasets
import pytest
from typer.testing import CliRunner

from verl_drmas.data.commands import data_app
from verl_drmas.data.math import FILES, SOURCES, convert_rows, load_prompts
from verl_drmas.data.parquet import read_rows
from verl_drmas.rewards import math_score

REAL = {"bench/aime.json": 30, "bench/amc.json": 83, "bench/math.json": 500, "bench/minerva.json": 272}
REAL |= {"bench/olympiad_bench.json": 675, "gsm8k_train_part.jsonl": 3000, "gsm8k_test_part.jsonl": 800}


def convert(*raw: dict, **options):
    return convert_rows(raw, file="f.json", data_source="s", split="train", **options)


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        ("72", "72"),
        (142.0, "142"),
        (0.5, "0.5"),
        (7, "7"),
        (["9.6\n"], "9.6"),
        (["a", "b"], "a"),
        ("48/2 = <<48/2=24>>24\n#### 1,072", "1072"),
        (r"so $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ({"style": "rule", "ground_truth": "5"}, "5"),
    ],
)
def test_gold_in_its_published_forms(value, gold):
    (row,) = convert({"problem": "p", "answer": value}).rows
    assert row["reward_model"] == {"style": "rule", "ground_truth": gold}
    assert row["extra_info"]["answer"] == gold


@pytest.mark.parametrize(
    "tail",
    [
        "",
        " Let's think step by step and output the final answer within \\boxed{}.",
        "\n\nlet\u2019s think step by step and output the final answer within \\boxed{}. ",
        "\\nLet's think step by step and output the final answer within $\\boxed{}$.",
        "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ],
)
def test_a_closing_instruction_is_stripped(tail):
    question = r"Let's think: how many steps, step by step, lead to $\boxed{3}$ floors? Round 2.5 up."
    chat = [{"role": "system", "content": "be good"}, {"role": "user", "content": question + tail}]
    (row,) = convert({"prompt": chat, "reward_model": {"ground_truth": "1"}}).rows
    assert row["prompt"] == [{"role": "user", "content": question}]
    assert row["extra_info"]["question"] == question


def test_keys_are_found_or_named():
    both = {"q": "what", "a": "1", "question": "other", "answer": "2"}
    assert convert(both).rows[0]["extra_info"] == {"split": "train", "index": 0, "question": "other", "answer": "2"}
    asked = convert(both, question_key="q", answer_key="a").rows[0]["extra_info"]
    assert (asked["question"], asked["answer"]) == ("what", "1")
    with pytest.raises(ValueError, match=r"f.json: no column 'gold' \(--answer-key\); its columns are q, a"):
        convert(both, answer_key="gold")
    with pytest.raises(ValueError, match=r"no answer column among question, hint; name it with --answer-key"):
        convert({"question": "q", "hint": "h"})


@pytest.mark.parametrize("empty", [None, "", "  ", [], "so ####", r"\boxed{}"])
def test_a_missing_gold_is_refused_or_dropped(empty):
    raw = [{"question": "a", "answer": "1"}, {"question": "b", "answer": empty}, {"question": "c", "answer": "3"}]
    with pytest.raises(ValueError, match=r"^f.json: row 1: answer is missing or empty"):
        convert(*raw)
    rows, notes = convert(*raw, drop_missing=True)
    assert [(row["extra_info"]["question"], row["extra_info"]["index"]) for row in rows] == [("a", 0), ("c", 1)]
    assert notes == ["f.json: dropped 1 of 3 rows without question or gold"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": " ", "answer": "1"}, "row 0: question is missing"),
        ({"question": 3, "answer": "1"}, "row 0: question is int"),
        ({"question": "q", "answer": True}, "row 0: answer is bool"),
        ({"question": "q", "answer": "x" * 2000}, "row 0: answer has 2000 characters"),
        ({"prompt": [{"role": "user", "content": "a"}] * 2, "answer": "1"}, "row 0: prompt has 2 user messages"),
    ],
)
def test_bad_cells_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        convert(row)


def test_no_row_left_is_an_error():
    with pytest.raises(ValueError, match="none of 1 rows"):
        convert({"question": "q", "answer": None}, drop_missing=True)
    with pytest.raises(ValueError, match="no rows"):
        convert()


@pytest.fixture
def hub(monkeypatch):
    """The hub's data sets as the table describes them, without a network."""

    published = list(SOURCES.values())

    def load(name, split):
        source = next(source for source in published if source.hub == name)
        if split != source.split:
            raise ValueError(f'Unknown split "{split}"')
        gold = {"ground_truth": "1"} if source.answer_key == "reward_model" else 2025
        question = [{"role": "user", "content": "q"}] if source.question_key == "prompt" else "q"
        row = {source.question_key: question, source.answer_key: gold, "solution": "long", "url": name}
        return datasets.Dataset.from_list([row] * (source.size or 7))

    monkeypatch.setattr(datasets, "load_dataset", load)


def test_the_papers_files_by_name(hub):
    sizes = {}
    for file in FILES:
        rows, notes = load_prompts([file])
        assert not notes
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        sizes[file] = len(rows)
        sources = {row["data_source"] for row in rows}
        assert {row["extra_info"]["split"] for row in rows} == {"train" if file == "paper-train" else "test"}
    assert sizes == {"paper-train": 7, "paper-test": 30 + 30 + 40 + 500 + 272 + 675, "paper-test-sampled": 110}
    assert sources == {"math500", "aime24", "aime25"}


def test_a_set_of_another_size_is_noted(hub, monkeypatch):
    monkeypatch.setitem(SOURCES, "amc23", dataclasses.replace(SOURCES["amc23"], size=41))
    assert load_prompts(["amc23"]).notes == ["amc23: knoveleng/AMC-23 has 40 rows, expected were 41"]


def test_hub_errors_are_one_line(hub):
    with pytest.raises(ValueError, match=r"^HuggingFaceH4/MATH-500: can't load split 'dev' .*give the file$"):
        load_prompts(["HuggingFaceH4/MATH-500"], split="dev")
    with pytest.raises(ValueError, match=r"math5000: .* did you mean 'math500'"):
        load_prompts(["math5000"])


@pytest.mark.parametrize("name", REAL)
def test_every_gold_of_the_real_files_equals_itself(math_files, name):
    rows, _ = load_prompts([str(math_files / name)])
    assert len(rows) == REAL[name]
    golds = [row["reward_model"]["ground_truth"] for row in rows][:675]
    wrong = [gold for gold in golds if not math_score(rf"so \boxed{{{gold}}}.", gold).correct]
    # Equal strings need no algebra, so a sample goes through math-verify (the whole takes half a minute: `--check`).
    sample = golds[:: max(1, len(golds) // 12)]
    wrong += [gold for gold in sample if not math_score(rf"\boxed{{{gold}}}", gold, exact=False).correct]
    assert wrong == []


def test_the_command_writes_a_checked_file(math_files, tmp_path):
    output = tmp_path / "train.parquet"
    files = [str(math_files / "bench" / name) for name in ("aime.json", "minerva.json")]
    asked = ["math", *files, "-o", str(output), "--split", "test", "--shuffle", "1", "--limit", "8", "--check"]
    result = CliRunner().invoke(data_app, asked)
    assert result.exit_code == 0, result.output
    assert "checked: 8 of 8 golds equal themselves" in result.output
    assert "75 rows list several forms" in result.output
    rows = read_rows(output)
    assert {row["data_source"] for row in rows} <= {"aime", "minerva"}
    assert [row["extra_info"]["index"] for row in rows] == list(range(8))
    assert datasets.load_dataset("parquet", data_files=str(output), cache_dir=str(tmp_path))["train"].to_list() == rows
    again = load_prompts(files, split="test", shuffle_seed=1, limit=8).rows
    other = load_prompts(files, split="test", shuffle_seed=2, limit=8).rows
    assert again == rows and other != rows


def test_the_command_fails_with_one_line(tmp_path):
    (tmp_path / "bad.json").write_text('[{"question": "a", "answer": "1"}, {"question": "b", "answer": ""}]')
    output = tmp_path / "t.parquet"
    result = CliRunner().invoke(data_app, ["math", str(tmp_path / "bad.json"), "-o", str(output)])
    assert result.exit_code == 1
    assert "bad.json: row 1: answer is missing or empty" in result.output
    assert not output.exists()
    result = CliRunner().invoke(data_app, ["math", str(tmp_path / "bad.json"), "-o", str(output), "--drop-missing"])
    assert result.exit_code == 0 and "dropped 1 of 2 rows" in result.output
    assert len(read_rows(output)) == 1


def test_a_gold_the_reward_cannot_match_fails_the_check(tmp_path):
    (tmp_path / "t.json").write_text('[{"question": "a", "answer": "1"}, {"question": "b", "answer": "}{"}]')
    output = tmp_path / "t.parquet"
    result = CliRunner().invoke(data_app, ["math", str(tmp_path / "t.json"), "-o", str(output), "--check"])
    assert result.exit_code == 1
    assert "1 of 2 golds don't equal themselves" in result.output and "'}{'" in result.output
    assert not output.exists()
