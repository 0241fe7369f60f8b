"""GAIA, XBench-DeepSearch and WebWalkerQA from files in their published forms, made by hand."""

import base64
import csv
import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from verl_drmas.data.commands import data_app
from verl_drmas.data.parquet import check_indices, check_prompts, read_rows
from verl_drmas.data.research import decrypt, load_gaia, load_webwalker, load_xbench
from verl_drmas.data.search import SEARCH_SCHEMA


def run(*arguments):
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments])


def save(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def gaia_row(number, **other):
    return {
        "task_id": f"id-{number}",
        "Question": f" What is {number}? ",
        "Level": number % 3 + 1,
        "Final answer": f"{number}",
        "file_name": "",
        "Annotator Metadata": {"Steps": "1. Think", "Number of steps": "1"},
        **other,
    }


GAIA = [gaia_row(0), gaia_row(1), gaia_row(2, file_name="id-2.xlsx"), gaia_row(3, **{"Final answer": "[a, b]"})]


def test_gaia_without_what_needs_a_file(tmp_path):
    rows, notes = load_gaia(save(tmp_path / "metadata.jsonl", GAIA))
    assert [row["extra_info"]["level"] for row in rows] == ["1", "2", "1"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [["0"], ["1"], ["[a, b]"]]  # a text, and no list
    assert rows[0]["prompt"] == [{"role": "user", "content": "What is 0?"}]
    assert (rows[0]["data_source"], rows[0]["extra_info"]["split"]) == ("gaia", "validation")
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
    size, files = notes
    assert size.endswith("has 4 rows, the published set 165")
    assert "1 questions come with a file (1 of level 3); left out" in files


def test_gaia_by_level_and_with_files(tmp_path):
    file = save(tmp_path / "metadata.jsonl", GAIA)
    rows, notes = load_gaia(file, levels=["3"], keep_attachments=True)
    assert [row["extra_info"]["question"] for row in rows] == ["What is 2?"]
    assert "kept, and count though no agent here reads files" in notes[1]
    rows, notes = load_gaia(file, levels=["1", "2"])
    assert len(rows) == 3 and len(notes) == 1  # the file of level 3 was not asked for
    table = pa.Table.from_pylist([{**row, "Level": str(row["Level"])} for row in GAIA])  # as its parquet has it
    pq.write_table(table, tmp_path / "metadata.parquet")
    assert load_gaia(str(tmp_path / "metadata.parquet")).rows == load_gaia(file).rows


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"Final answer": "?"}, {}, r"metadata.jsonl: row 1: Final answer is '\?': the answers of the test split"),
        ({"Level": 4}, {}, "metadata.jsonl: row 1: Level is 4; GAIA's are 1, 2, 3"),
        ({"Level": None}, {}, "row 1: Level is None"),
        ({"Final answer": " "}, {}, "row 1: Final answer is missing or empty"),
        ({"Final answer": True}, {}, "row 1: Final answer: a gold answer is bool"),
        ({"Question": ""}, {}, "row 1: Question is missing or empty"),
        ({}, {"levels": ["4"]}, "--level is '4'; GAIA's levels are 1, 2, 3"),
        ({}, {"levels": ["3"]}, "metadata.jsonl: no rows are left: none is what was asked for"),
        ({}, {"limit": 0}, "--limit is 0"),
    ],
)
def test_what_is_wrong_with_gaia_is_named(tmp_path, row, options, message):
    file = save(tmp_path / "metadata.jsonl", [gaia_row(0), gaia_row(1, **row)])
    with pytest.raises(ValueError, match=message):
        load_gaia(file, **options)


def test_another_file_is_told_from_gaia(tmp_path):
    with pytest.raises(ValueError, match=r"row 0: no field 'Final answer', which GAIA's metadata has \(fields: Questi"):
        load_gaia(save(tmp_path / "t.jsonl", [{"Question": "q", "answer": "a"}]))


def test_rows_without_an_answer_are_dropped_when_asked(tmp_path):
    file = save(tmp_path / "m.jsonl", [gaia_row(0, **{"Final answer": None}), gaia_row(1)])
    rows, notes = load_gaia(file, drop_missing=True)
    assert [row["extra_info"]["question"] for row in rows] == ["What is 1?"]
    assert notes[-1].endswith("dropped 1 rows without question or answer")
    with pytest.raises(ValueError, match="none has both Question and Final answer"):
        load_gaia(save(tmp_path / "m.jsonl", [gaia_row(0, **{"Final answer": None})]), drop_missing=True)


CANARY = "canary-geheim-é"
XBENCH = [("2024年的首都是哪里？", "北京"), ("What links A and B, in one word?", "42")]


def encrypted(text, key=CANARY):
    """As XBench publishes it, written the other way round than the reader does it."""
    key = key.encode()
    data = text.encode()
    return base64.b64encode(bytes(data[i] ^ key[i % len(key)] for i in range(len(data)))).decode()


def save_csv(path, rows, fields=("id", "prompt", "answer", "reference_steps", "canary")):
    with path.open("w", encoding="utf-8-sig", newline="") as lines:
        writer = csv.DictWriter(lines, fields)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def xbench_rows(write=encrypted):
    for number, (prompt, answer) in enumerate(XBENCH):
        yield {"id": number, "prompt": write(prompt), "answer": write(answer), "reference_steps": "", "canary": CANARY}


def test_xbench_is_decrypted_with_the_keys_in_it(tmp_path):
    rows, notes = load_xbench(save_csv(tmp_path / "DeepSearch-2505.csv", xbench_rows()))
    assert [(r["extra_info"]["question"], *r["reward_model"]["ground_truth"]) for r in rows] == XBENCH
    assert {row["data_source"] for row in rows} == {"xbench_deepsearch"}
    assert "decrypted 2 rows" in notes[-1]
    # A worked example: "Ja" is 4a 61, and under the key "k" (6b) 21 0a.
    assert decrypt(base64.b64encode(bytes([0x21, 0x0A])).decode(), "k") == "Ja"


def test_xbench_in_clear_stays_as_it_is(tmp_path):
    clear = list(xbench_rows(str))
    from_csv = load_xbench(save_csv(tmp_path / "clear.csv", clear))
    assert [(r["extra_info"]["question"], *r["reward_model"]["ground_truth"]) for r in from_csv.rows] == XBENCH
    assert len(from_csv.notes) == 1  # its size alone
    plain = [{"prompt": row["prompt"], "answer": row["answer"]} for row in clear]
    loaded = load_xbench(save(tmp_path / "clear.jsonl", plain))
    assert loaded.rows == from_csv.rows
    assert loaded.notes[-1].endswith(
        "has neither canary nor reference_steps, which the published file has; is it XBench's?"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"canary": ""}, "x.csv: row 1: prompt is encrypted, and canary is missing"),
        ({"canary": "other"}, "x.csv: row 1: prompt gives no text with the row's canary"),
        ({"answer": "not base64!"}, "x.csv: row 1: answer is no base64"),
        ({"prompt": "A plain question?"}, "x.csv: row 1: prompt is no base64, and 1 others are encrypted"),
        ({"answer": ""}, "x.csv: row 1: answer is missing or empty"),
    ],
)
def test_what_is_wrong_with_xbench_is_named(tmp_path, change, message):
    first, second = xbench_rows(lambda text: encrypted(f"{text} größer"))
    with pytest.raises(ValueError, match=message):
        load_xbench(save_csv(tmp_path / "x.csv", [first, {**second, **change}]))


def test_unreadable_tables_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.csv: no such file"):
        load_xbench(str(tmp_path / "none.csv"))
    for text, message in {
        "id,prompt,answer\n1,q\n": "row 0 has not as many cells",
        "id,prompt,answer\n": "no rows",
        "id,prompt\n1,q\n": "no field 'answer', which XBench-DeepSearch has",
        'id,prompt,answer\n1,"q': "not readable as CSV",
    }.items():
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_xbench(str(tmp_path / "t.csv"))
    (tmp_path / "t.csv").write_bytes(b"id,prompt,answer\n1,\xff,a\n")
    with pytest.raises(ValueError, match="not readable as CSV in UTF-8"):
        load_xbench(str(tmp_path / "t.csv"))


def webwalker_row(number, lang="en", **info):
    return {
        "question": f"When is talk {number}?",
        "answer": f"On day {number}.",
        "root_url": f"https://conf{number}.org/",
        "info": {
            **{"domain": "conference", "type": "multi_source", "difficulty_level": "Hard", "lang": lang},
            **{"source_website": ["https://a"], "golden_path": ["root->a"], **info},
        },
    }


WEBWALKER = [webwalker_row(0), webwalker_row(1, "zh", type="single_source"), webwalker_row(2, "")]


def test_another_file_is_told_from_webwalkerqa(tmp_path):
    with pytest.raises(ValueError, match="row 0: neither 'info' nor 'root_url', one of which WebWalkerQA has"):
        load_webwalker(save(tmp_path / "t.jsonl", [{"question": "q", "answer": "a"}]))


def test_webwalkerqa_with_type_and_difficulty(tmp_path):
    file = save(tmp_path / "main.jsonl", WEBWALKER)
    rows, notes = load_webwalker(file)
    assert [row["extra_info"]["type"] for row in rows] == ["multi_source", "single_source", "multi_source"]
    assert {row["extra_info"]["level"] for row in rows} == {"hard"}
    assert rows[1]["reward_model"]["ground_truth"] == ["On day 1."]
    assert len(notes) == 1
    pq.write_table(pa.Table.from_pylist(WEBWALKER), tmp_path / "main.parquet")
    assert load_webwalker(str(tmp_path / "main.parquet")).rows == rows
    card = [{key.title(): value for key, value in row.items()} for row in WEBWALKER]  # `Root_Url`, as its card has it
    card = [{**row, "Info": {key.title(): v for key, v in row["Info"].items()}} for row in card]
    assert load_webwalker(save(tmp_path / "card.jsonl", card)).rows == rows
    as_text = [{**row, "info": json.dumps(row["info"])} for row in WEBWALKER]
    assert load_webwalker(save(tmp_path / "text.jsonl", as_text)).rows == rows


def test_webwalkerqa_by_language_and_with_the_website(tmp_path):
    file = save(tmp_path / "main.jsonl", WEBWALKER)
    rows, notes = load_webwalker(file, languages=["zh"], root_url=True)
    assert [row["prompt"][0]["content"] for row in rows] == [
        "When is talk 1?\n\nWebsite to begin with: https://conf1.org/"
    ]
    assert notes[-1].endswith("kept 1 of 3 rows, those with info.lang in zh")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"info": "easy"}, {}, "main.jsonl: row 1: info is text and no JSON"),
        ({"info": ["easy"]}, {}, "main.jsonl: row 1: info is list, not an object"),
        (
            {"root_url": ""},
            {"root_url": True},
            "main.jsonl: row 1: root_url is empty; fill it, or leave out --root-url",
        ),
        ({"answer": None}, {}, "main.jsonl: row 1: answer is missing or empty"),
        ({}, {"languages": ["fr"]}, "main.jsonl: no rows are left: none is what was asked for"),
    ],
)
def test_what_is_wrong_with_webwalkerqa_is_named(tmp_path, change, options, message):
    file = save(tmp_path / "main.jsonl", [webwalker_row(0), {**webwalker_row(1), **change}])
    with pytest.raises(ValueError, match=message):
        load_webwalker(file, **options)


def test_the_commands_write_what_verl_reads(tmp_path):
    files = {
        "gaia": save(tmp_path / "metadata.jsonl", GAIA),
        "xbench": save_csv(tmp_path / "x.csv", xbench_rows()),
        "webwalker": save(tmp_path / "main.jsonl", WEBWALKER),
    }
    more = {"gaia": ["--level", "1"], "xbench": ["--shuffle", 1], "webwalker": ["--root-url", "--limit", 2]}
    for name, file in files.items():
        output = tmp_path / f"{name}.parquet"
        result = run(name, file, "-o", output, *more[name])
        assert result.exit_code == 0 and "wrote 2 prompts" in result.output, result.output
        assert "note: " in result.output and "the published set" in result.output
        assert check_prompts(output) == 2 == len(read_rows(output))
        check_indices([output])
        assert pq.read_schema(output).equals(SEARCH_SCHEMA)


def test_the_commands_end_with_one_line(tmp_path):
    file = save(tmp_path / "metadata.jsonl", [gaia_row(0, **{"Final answer": "?"})])
    for name, given, output in itertools.product(("gaia", "xbench", "webwalker"), (file,), ("t.parquet", "t.txt")):
        result = run(name, given, "-o", tmp_path / output)
        assert result.exit_code == 1 and result.output.startswith("error: ") and result.output.count("\n") == 1
        assert not (tmp_path / output).exists()
