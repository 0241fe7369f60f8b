"""`verl-drmas judge` against a server: what is asked and kept, and the means it shows, counted another way here."""

import json
import re
from statistics import fmean, stdev

import pytest
from aiohttp import web
from typer.testing import CliRunner

from verl_drmas.data.parquet import write_rows
from verl_drmas.data.search import SEARCH_SCHEMA, question_row
from verl_drmas.evaluation.judge_command import judge_app
from verl_drmas.evaluation.rows import read_files

RUNS = 3
# By row: benchmark, level, and per run the answer and whether a judge finds it right.
PLAYED = [
    ("gaia", "1", [("seven", True), ("seven", True), ("8", False)]),
    ("gaia", "2", [("seven", True), ("9", False), (None, False)]),
    ("gaia", "2", [("0", False), ("5", False), ("it's seven", True)]),
    ("webwalkerqa", "easy", [("7", True), ("7", True), ("7", True)]),
]


@pytest.fixture
def data(tmp_path):
    rows = [
        question_row(f"Question {i}?", ["7"], data_source=source, split="test", index=i, level=level)
        for i, (source, level, _) in enumerate(PLAYED)
    ]
    return write_rows(rows, tmp_path / "rows.parquet", schema=SEARCH_SCHEMA)


def lines(data):
    """What `verl-drmas eval` writes; the first attempt of one session failed."""
    yield {"measured": {"workflow": "delegate", "data": read_files([data]).files}}
    yield {"weights": {"main": []}}
    place = {"run": 0, "row": 0, "session": 0, "data_source": "gaia"}
    yield {**place, "success": None, "failed": "tool", "detail": "away"}
    for row, (source, _, runs) in enumerate(PLAYED):
        for run, played in enumerate(runs):
            place = {"run": run, "row": row, "session": 0, "data_source": source}
            yield {**place, "success": float(played[0] == "7"), "answer": played[0]}


@pytest.fixture
def sessions(data, tmp_path):
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(data)) + '{"run": 0, "ro')  # as it is written
    return path


class Judging:
    """Finds right what says seven; answers in `broken` get `status`, or without one a reply without verdict."""

    def __init__(self):
        self.asked, self.broken, self.status = [], set(), 400

    def __call__(self, body):
        said = re.search(r"--- answer \w+\n(.*)\n--- end", body["messages"][1]["content"])[1]
        self.asked.append(said)
        if said in self.broken:
            return web.Response(status=self.status, text="broken") if self.status else "I can't say."
        return f"So.\n<verdict>{'right' if said in ('7', 'seven') or 'seven' in said else 'wrong'}</verdict>"


@pytest.fixture
def judging():
    return Judging()


@pytest.fixture
def judge(serve, judging, sessions, data, tmp_path):
    server = serve(judging)

    def run(*more, sessions=sessions, data=data):
        numbers = tmp_path / "numbers.json"
        numbers.unlink(missing_ok=True)
        options = ["--url", server.url, "--model", "tiny", "--json", numbers, *more]
        arguments = [str(part) for part in (sessions, data, *options)]
        result = CliRunner().invoke(judge_app, arguments, env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output, json.loads(numbers.read_text()) if numbers.exists() else None

    return run


def expected(chosen):
    """Each run's share of right answers, and per prompt the mean over the runs."""
    by_run = [[runs[r][1] for s, lv, runs in PLAYED if chosen(s, lv)] for r in range(RUNS)]
    prompts = [fmean(p[1] for p in runs) for s, lv, runs in PLAYED if chosen(s, lv)]
    return [fmean(run) for run in by_run], fmean(prompts)


def test_means_over_runs_per_benchmark_and_level(judge):
    code, told, found = judge()
    assert code == 0, told
    names = ["gaia", "gaia, level 1", "gaia, level 2", "webwalkerqa"]
    assert list(found["sources"]) == names and (found["runs"], found["judge"]) == (RUNS, "tiny")
    for name in names:
        source, _, level = name.partition(", level ")
        runs, mean = expected(lambda s, lv, source=source, level=level: s == source and level in ("", lv))
        score = found["sources"][name]["scores"]["judged"]
        assert score["runs"] == pytest.approx(runs) and score["value"] == pytest.approx(mean)
        assert score["runs_error"] == pytest.approx(stdev(runs) / RUNS**0.5)
    gaia = found["sources"]["gaia"]
    assert (gaia["prompts"], gaia["ended"], gaia["without_answer"], gaia["not_judged"]) == (3, 9, 1, 0)
    assert (gaia["asked"], gaia["failed"]) == (9, 0)  # the session that failed once was played again
    assert gaia["scores"]["exact match"]["value"] == 0.0  # what match alone would have said
    assert found["sources"]["webwalkerqa"]["scores"]["exact match"]["value"] == 1.0
    macro = [found["sources"][name]["scores"]["judged"]["value"] for name in ("gaia", "webwalkerqa")]
    assert found["macro_average"]["judged"]["value"] == pytest.approx(fmean(macro))
    assert "gaia, level 2" in told and "100.0" in told


def test_an_answer_is_judged_once_and_no_answer_never(judge, judging, sessions):
    assert judge()[0] == 0
    to_two_questions = ["seven", "seven"]
    assert sorted(judging.asked) == ["0", "5", "7", "8", "9", "it's seven", *to_two_questions]
    verdicts = sessions.with_name("sessions.verdicts.jsonl").read_text().splitlines()
    assert len(verdicts) == 1 + 11
    before = len(judging.asked)
    assert judge()[0] == 0 and len(judging.asked) == before


def test_what_could_not_be_judged_is_no_wrong_answer_and_is_asked_about_again(judge, judging):
    judging.broken = {"8"}
    code, told, found = judge()
    assert code == 1 and "1 answers couldn't be judged" in told
    block = found["sources"]["gaia, level 1"]
    assert block["not_judged"] == 1 and block["scores"]["judged"]["runs"] == [1.0, 1.0, None]
    judging.broken, before = set(), len(judging.asked)
    code, _, found = judge()
    assert code == 0 and judging.asked[before:] == ["8"]
    assert found["sources"]["gaia, level 1"]["scores"]["judged"]["runs"] == [1.0, 1.0, 0.0]


def test_a_judge_that_is_away_ends_it(judge, judging, monkeypatch):
    monkeypatch.setattr("verl_drmas.evaluation.judged.GIVE_UP", 2)
    judging.broken, judging.status = {"seven"}, 401
    code, told, found = judge("--concurrency", 1)
    assert code == 1 and judging.asked == ["seven", "seven"]
    assert "error: 2 judgements in a row failed" in told and "the same command goes on" in told
    assert "check --api-key-env" in told and "judge.api_key_env" not in told
    assert found["sources"]["gaia"]["not_judged"] == 8  # what there is is shown and written
    code, told, _ = judge("--url", "http://127.0.0.1:9/v1", "--model", "other")
    assert code == 1 and "error: --url: no server can judge" in told and "judge." not in told


@pytest.mark.parametrize("status", [400, None])
def test_answers_that_have_no_verdict_do_not_pass_for_a_judge_that_is_away(judge, judging, status, monkeypatch):
    monkeypatch.setattr("verl_drmas.evaluation.judged.GIVE_UP", 2)
    judging.broken, judging.status = {"0", "5", "8", "9", "it's seven", "seven"}, status
    for _ in range(2):  # the second time nothing else is left
        code, told, found = judge("--concurrency", 1)
        assert code == 1 and "8 answers couldn't be judged" in told
        assert found["sources"]["webwalkerqa"]["not_judged"] == 0 and found["sources"]["gaia"]["not_judged"] == 8
    assert {"7", "9"} <= set(judging.asked)


def test_an_evaluation_that_is_not_finished_does_not_look_finished(judge, sessions, data):
    header, *rest = (line for line in lines(data) if "weights" not in line)
    found = {(line["run"], line["row"]): line for line in rest if line["run"] < 2}  # of the last run nothing
    found[1, 2] = {**found[1, 2], "success": None, "failed": "timeout", "detail": ""}
    asked = {"rows": 4, "samples": 1, "runs": RUNS}  # but it was asked for
    found = [header, *({**line, "asked": asked} for line in found.values())]
    sessions.write_text("".join(json.dumps(line) + "\n" for line in found))
    code, told, numbers = judge()
    assert code == 1 and "7 of 12 sessions ended (1 failed, 4 not played)" in told
    gaia = numbers["sources"]["gaia"]
    assert (numbers["runs"], gaia["asked"], gaia["ended"], gaia["failed"]) == (RUNS, 9, 5, 1)
    # Runs 2/3 and 1/2, the mean of these: 58.3. Over prompts it would be (1 + 1/2 + 0) / 3.
    assert re.search(r"gaia +│ judged +│ +66.7 │ +50.0 │ +- │ +58.3 ± 8.3 \(2 of 3 runs\)", told), told


def test_other_data_another_judge_and_other_files_are_refused(judge, sessions, data, tmp_path):
    assert judge()[0] == 0
    code, told, _ = judge("--model", "other")
    assert code == 1 and "holds sessions of another judge" in told
    rows = [question_row("Else?", ["7"], data_source="gaia", split="test", index=0)]
    other = write_rows(rows, tmp_path / "other.parquet", schema=SEARCH_SCHEMA)
    code, told, _ = judge(data=other)
    assert code == 1 and re.search(r"was played on rows.parquet \(\w+\), and the data given is other.parquet", told)
    for text, message in {
        '{"run": 0}\n': "is no file of sessions",
        "no json\n": "line 1 is no JSON",
        sessions.read_text().splitlines()[0] + "\n": "no session came to an end",
    }.items():
        (tmp_path / "odd.jsonl").write_text(text)
        code, told, _ = judge(sessions=tmp_path / "odd.jsonl")
        assert code == 1 and message in told
    code, told, _ = judge(sessions=tmp_path / "none.jsonl")
    assert code == 1 and "none.jsonl: can't be read" in told


def test_files_in_another_order_and_rows_of_another_benchmark_are_refused(judge, judging, tmp_path):
    files = []
    for name, gold in (("one", "7"), ("two", "8")):
        rows = [question_row(f"{name}?", [gold], data_source=name, split="test", index=0)]
        files.append(write_rows(rows, tmp_path / f"{name}.parquet", schema=SEARCH_SCHEMA))
    played = read_files(files).files
    path = tmp_path / "two.jsonl"

    def write(sources, **order):
        place = {"run": 0, "session": 0, "success": 0.0, "answer": "seven"}
        ended = [{**place, "row": row, "data_source": source} for row, source in enumerate(sources)]
        lines = [{"measured": {"data": played, **order}}, *ended]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    for order in ({"order of data": [*played]}, {}):  # an old file has the order of its names alone
        write(["one", "two"], **order)
        code, told, _ = judge(files[0], sessions=path, data=files[1])
        assert code == 1 and re.search(r"on one\.parquet \(\w+\), two.* given is two.*, one\.", told), told
    write(["two", "one"])
    code, told, _ = judge(files[1], sessions=path, data=files[0])
    assert code == 1 and "line 2 is of row 0 of 'two', which in the data given is of 'one'" in told
    write(["one", "two", "two"])
    code, told, _ = judge(files[1], sessions=path, data=files[0])
    assert code == 1 and "line 4 is of row 2 of 'two', which in the data given is of None" in told
    assert judging.asked == []
    write(["one", "two"])
    assert judge(files[1], sessions=path, data=files[0])[0] == 0


def test_a_rebuilt_data_file_does_not_take_over_verdicts(judge, judging, sessions, data):
    assert judge()[0] == 0
    asked = len(judging.asked)
    write_rows(
        [
            question_row(f"Question {i}?", ["8"], data_source=source, split="test", index=i, level=level)
            for i, (source, level, _) in enumerate(PLAYED)
        ],
        data,
        schema=SEARCH_SCHEMA,
    )
    sessions.write_text("".join(json.dumps(line) + "\n" for line in lines(data)))  # played again, with these answers
    code, told, _ = judge()
    assert code == 1 and "verdicts.jsonl: holds sessions of another data.rows.parquet" in told
    assert len(judging.asked) == asked


def test_plain_rows_are_read_as_the_evaluation_read_them(judge, judging, tmp_path):
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"asked": "How many?", "known": "7", "answer": "8"}) + "\n")
    keys = {"question_key": "asked", "answer_key": "known"}
    path = tmp_path / "played.jsonl"
    played = [
        {"measured": read_files([plain], kind="search", **keys).measured()},
        {"run": 0, "row": 0, "session": 0, "data_source": "plain", "success": 0.0, "answer": "seven"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in played))
    options = ["--kind", "search", "--question-key", "asked", "--answer-key", "known"]
    code, told, found = judge(*options, sessions=path, data=plain)
    assert code == 0 and found["sources"]["plain"]["scores"]["judged"]["value"] == 1.0, told
    code, told, _ = judge("--kind", "maths", sessions=path, data=plain)
    assert code == 1 and "--kind is 'maths'; choose auto, math or search" in told
