"""Whole reports: that the numbers printed are the logs', and that nothing that wasn't run looks as if it was."""

import json
import re
import time
from collections import Counter

import pytest
from simulated_runs import SEPARATE, write_records, write_run

from verl_drmas.report.build import write_report
from verl_drmas.report.command import main
from verl_drmas.report.sections.scores import Tables

PIXEL = bytes.fromhex("89504e470d0a1a0a")


@pytest.fixture(autouse=True)
def fast(request, monkeypatch):
    """No pictures are drawn, but where they are asked for; test_figures.py has them."""
    if "drawn" in request.fixturenames:
        return

    def curves(title, panels, groups, path, **_):
        path.write_bytes(PIXEL)
        return path, 1

    def bars(seconds, path):
        path.write_bytes(PIXEL)
        return path

    monkeypatch.setattr("verl_drmas.report.sections.curves.draw_curves", curves)
    monkeypatch.setattr("verl_drmas.report.sections.work.draw_phases", bars)


@pytest.fixture
def drawn():
    """Asks for real pictures."""


MATH = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiad")


def table(text, title):
    """The rows of a table in the Markdown, each by its head."""
    lines = text.split(f"**{title}", 1)[1].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def section(text, title):
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def count_lines(path):
    """Sessions, rows and tokens of a log, from its text and in whole numbers, step by step in a dictionary."""
    steps = {}
    for line in path.read_text().splitlines():
        step = int(re.match(r'\{"step": (\d+)', line)[1])
        found = Counter()
        for name, value in re.findall(r'"([^"]+)": (-?[\d.e+-]+)', line):
            if name == "drmas/sessions/expected":
                found["sessions"] += int(float(value))
            elif name == "drmas/sessions/failed":
                found["sessions"] -= int(float(value))
            elif re.fullmatch(r"drmas/agent/\w+/rows", name):
                found["rows"] += int(float(value))
            elif name == "perf/total_num_tokens":
                found["tokens"] += int(value)
        steps[step] = found
    return sum(steps.values(), Counter())


def test_sessions_rows_and_tokens_are_those_of_the_logs(tmp_path):
    truths = {}
    for seed in (1, 2, 3):
        folder = tmp_path / "runs" / f"a_seed{seed}"
        truths[folder.name] = write_run(folder, seed=seed, steps=25, failing=(2, 7), agents=SEPARATE)
    text = write_report([tmp_path / "runs"], tmp_path / "out").markdown.read_text()
    rows = {row["run"].split(" ", 1)[1]: row for row in table(text, "In total")}
    assert rows.keys() == truths.keys()
    for name, truth in truths.items():
        counted = count_lines(tmp_path / "runs" / name / "metrics.jsonl")
        row = {key: value.replace(",", "") for key, value in rows[name].items()}
        assert row["sessions"] == f"{counted['sessions']} of 400" == f"{truth.sessions} of 400"
        assert row["rows"] == str(counted["rows"]) == str(truth.rows)
        assert row["tokens"] == str(counted["tokens"]) == str(truth.tokens)
        assert row["sampled tokens"] == str(truth.sampled)
        assert row["seconds"] == f"{truth.seconds:.1f}"
    failures = section(text, "Failures")
    assert failures.count("| 2 (0.5%) | 2 | 0 | 4 | 0 |") == 3


def test_a_resumed_runs_steps_count_once(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, seed=1, steps=10)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines, *lines[6:]]))
    text = write_report([folder], tmp_path / "out").markdown.read_text()
    (row,) = table(text, "In total")
    assert row["steps"] == "10"
    assert row["sessions"] == "160 of 160"
    assert "steps 7–10 were logged before a resume" in text


def scores(base, k=16):
    found = {name: {f"avg@{k}": base + i / 100, f"pass@{k}": base + 0.3} for i, name in enumerate(MATH)}
    return {"last": found}


@pytest.fixture
def three_cells(tmp_path):
    for estimator, base in (("drmas", 0.4), ("grpo_team", 0.3)):
        for seed in (1, 2):
            options = dict(seed=seed, steps=6, scores=scores(base + 0.02 * seed), config={"estimator": estimator})
            write_run(tmp_path / "runs" / f"{estimator}_seed{seed}", **options)
    write_run(tmp_path / "runs" / "sep", seed=5, steps=6, agents=SEPARATE, scores=scores(0.5, k=1))
    return tmp_path / "runs"


def test_the_papers_table_has_our_numbers_beside_its_own_and_not_run_elsewhere(three_cells, tmp_path):
    text = write_report([three_cells], tmp_path / "out").markdown.read_text()
    rows = table(text, "Table 1, Qwen3-4B: avg@16")
    assert [row[""] for row in rows] == ["AIME24", "AIME25", "AMC23", "MATH500", "Minerva", "Olympiad", "Average"]
    first, last = rows[0], rows[-1]
    assert first["Shared, Dr. MAS: paper"] == "39.3"
    assert first["Shared, Dr. MAS: ours"] == "43.0 ± 1.0 (n = 2)"
    assert first["Shared, GRPO: ours"] == "33.0 ± 1.0 (n = 2)"
    assert last["Shared, Dr. MAS: ours"] == "45.5 ± 1.0 (n = 2)"
    for column in ("Single agent, GRPO: ours", "Separate, GRPO: ours", "Separate, Dr. MAS: ours"):
        assert {row[column] for row in rows} == {"not run"}
    assert (
        "Table 1, Qwen3-8B" not in text
        and "Table 2" not in section(text, "The paper's tables").split("tables 1 to 3")[1]
    )
    # Validated with another k: said, shown where k is said, and in no cell of the paper's.
    assert "has avg@1, pass@1, which is not the tables' avg@16" in text
    assert "50.0 (n = 1)" in section(text, "Final validation")
    assert not re.search(r"\|\s*0(\.0+)?\s*\|", section(text, "The paper's tables"))


def test_which_tables_are_shown_can_be_chosen(three_cells, tmp_path):
    every = write_report([three_cells], tmp_path / "a", tables=Tables.ALL).markdown.read_text()
    assert all(f"**Table {n}" in every for n in (1, 2, 3)) and "Qwen2.5-7B: pass@16" in every
    assert "The paper" not in write_report([three_cells], tmp_path / "b", tables=Tables.NONE).markdown.read_text()


def test_an_average_needs_all_data_sets(tmp_path):
    part = scores(0.4)
    del part["last"]["aime25"]
    write_run(tmp_path / "run", steps=4, scores=part)
    text = write_report([tmp_path / "run"], tmp_path / "out").markdown.read_text()
    rows = {row[""]: row["Shared, Dr. MAS: ours"] for row in table(text, "Table 1, Qwen3-4B: avg@16")}
    assert (rows["AIME24"], rows["AIME25"], rows["Average"]) == ("40.0 (n = 1)", "not run", "not run")
    assert "not run with 16 sessions a prompt on AIME25" in section(text, "What is missing")


def test_an_evaluation_in_a_runs_folder_goes_before_its_last_validation(tmp_path):
    write_run(tmp_path / "run", steps=4, scores=scores(0.4))
    score = {"value": 0.61, "error": 0.1, "prompts": 30, "runs": [0.61], "runs_error": None}
    summary = {"workflow": "solver_verifier", "samples": 16, "sessions": {}, "complete": True}
    summary["sources"] = {"aime24": {"rows": 30, "failed": 0, "scores": {"avg@16": score}}}
    (tmp_path / "run" / "eval.json").write_text(json.dumps(summary))
    (tmp_path / "run" / "half.json").write_text(json.dumps({**summary, "complete": False}))
    text = write_report([tmp_path / "run"], tmp_path / "out").markdown.read_text()
    (row, *_) = table(text, "Table 1, Qwen3-4B: avg@16")
    assert row["Shared, Dr. MAS: ours"] == "61.0 (n = 1)"
    assert "eval.json, step 4" in section(text, "Final validation")
    assert "the evaluation half.json isn't complete" in text


def test_several_evaluations_of_a_run_are_said(tmp_path):
    write_run(tmp_path / "run", steps=4, scores=scores(0.4))
    for name, value in (("eval_a", 0.61), ("eval_b", 0.58)):
        score = {"value": value, "error": 0.1, "prompts": 30, "runs": [value], "runs_error": None}
        summary = {"workflow": "solver_verifier", "samples": 16, "sessions": {}, "complete": True}
        summary["sources"] = {"aime24": {"rows": 30, "failed": 0, "scores": {"avg@16": score}}}
        (tmp_path / "run" / f"{name}.json").write_text(json.dumps(summary))
    text = write_report([tmp_path / "run"], tmp_path / "out").markdown.read_text()
    (row, *_) = table(text, "Table 1, Qwen3-4B: avg@16")
    assert row["Shared, Dr. MAS: ours"] == "58.0 (n = 1)"
    told = "several evaluations; aime24 avg@16: 58.0 is of eval_b.json; 61.0 in eval_a.json, not shown"
    assert told in section(text, "What is missing").replace("\\_", "_")


def test_stock_verls_own_validation_keeps_its_name(tmp_path):
    metrics = {"training/global_step": 1, "val-core/aime24/acc/mean@16": 0.5, "val-core/aime24/acc/best@16/mean": 0.7}
    write_records(tmp_path / "stock.jsonl", [(1, metrics)])
    text = section(write_report([tmp_path / "stock.jsonl"], tmp_path / "out").markdown.read_text(), "Final validation")
    assert "| avg@16 | verl's best@16 |" in text
    assert "| 50.0 (n = 1) | 70.0 (n = 1) |" in text


def test_what_is_missing_is_said(tmp_path):
    truth = write_run(tmp_path / "runs" / "a_seed1", steps=10, lost=(3,), config={"steps": 12})
    write_run(tmp_path / "runs" / "a_seed2", steps=8, first=3, seed=1, config={"steps": 12})
    path = tmp_path / "runs" / "a_seed1" / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    assert len(truth.records) == 10
    missing = section(write_report([tmp_path / "runs"], tmp_path / "out").markdown.read_text(), "What is missing")
    for line in (
        "several have the same seed (1)",
        "its runs end at different steps (9, 10)",
        "A1 a_seed1: ends at step 9 of 12",
        "A2 a_seed2: ends at step 10 of 12",
        "A1 a_seed1: the last line was cut short",
        "NaN or infinite, and in no mean: actor/grad_norm in 1, drmas/model/base/grad_norm in 1 steps",
        "A2 a_seed2: steps 1–2 are not in the log; verl's file logger begins its file anew",
        "no validation",
    ):
        assert line in missing


def test_means_over_runs_of_different_length_are_said_beside_the_tables(tmp_path):
    for seed, steps in ((1, 6), (2, 4)):
        options = dict(seed=seed, steps=steps, epoch=3, scores=scores(0.4), config={"steps": None, "epochs": 2})
        write_run(tmp_path / "runs" / f"a_seed{seed}", **options)
    text = write_report([tmp_path / "runs"], tmp_path / "out").markdown.read_text()
    places = section(text, "The paper's tables")
    assert "a_seed2 isn't whole: it ends at step 4 of 6 (2 epochs of 3), and the means of A have it in" in places
    assert "The means of A are over runs of different length: they end at steps 4, 6." in places
    assert "a_seed1 isn't whole" not in places


def test_an_agent_that_wasnt_called_in_some_steps_is_said_once(tmp_path):
    truth = write_run(tmp_path / "run", steps=5, lost=(4,))
    for _, data in truth.records[:2]:
        for name in [name for name in data if name.startswith("drmas/agent/verifier/")]:
            del data[name]
    write_records(tmp_path / "run" / "metrics.jsonl", truth.records)
    missing = section(write_report([tmp_path / "run"], tmp_path / "out").markdown.read_text(), "What is missing")
    assert missing.count("agent verifier: rows, reward/mean") == 1
    assert "in 3 of 5 steps" in missing
    assert "grad_norm in 4 of 5" not in missing  # its NaN is said already


def test_runs_without_a_configuration_are_grouped_by_name_and_it_is_said(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "runs" / f"mine_seed{seed}", seed=seed, steps=4, config=False)
    written = write_report([tmp_path / "runs"], tmp_path / "out")
    (group,) = written.groups
    assert (group.title, len(group.runs)) == ("mine", 2)
    text = written.markdown.read_text()
    assert "grouped by name, because no .hydra/config.yaml" in text
    assert "no configuration tells its model, mapping, estimator and task" in text


def test_a_run_of_validation_alone_is_reported(tmp_path):
    write_records(tmp_path / "eval.jsonl", [(100, {"val/aime24/avg@16": 0.4})])
    text = write_report([tmp_path / "eval.jsonl"], tmp_path / "out").markdown.read_text()
    assert "no training step, validation alone" in text
    assert "None of the metrics that are drawn was logged" in text
    assert "not logged" in text and "40.0 (n = 1)" in text


@pytest.mark.long
def test_the_same_runs_give_the_same_report(tmp_path, drawn):
    for seed in (1, 2):
        write_run(
            tmp_path / "runs" / f"a_seed{seed}", seed=seed, steps=4, agents={"solver": "base"}, scores=scores(0.4)
        )
    one, two = (write_report([tmp_path / "runs"], tmp_path / name) for name in ("a", "b"))
    assert one.html.read_bytes() == two.html.read_bytes()
    assert len(one.pictures) >= 8 and all(path.read_bytes().startswith(b"\x89PNG") for path in one.pictures)


@pytest.mark.long
def test_sixteen_times_the_steps_are_at_most_sixteen_times_the_work(tmp_path):
    """In seconds of this process's own, which a busy machine stretches alike; drawing is `test_figures.py`'s."""
    seconds = {}
    for steps in (500, 8000):
        write_run(tmp_path / f"{steps}" / "run", steps=steps, prompts=1, n=2)
        start = time.process_time()
        text = write_report([tmp_path / f"{steps}"], tmp_path / f"report-{steps}").markdown.read_text()
        seconds[steps] = time.process_time() - start
        assert [row["steps"] for row in table(text, "In total")] == [f"{steps:,}"]
    assert seconds[8000] < 16 * seconds[500], seconds  # some of it is the same for any run: about 9 times


def test_the_command_writes_and_says_where(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a_seed1", steps=3)
    assert main([tmp_path / "runs"], tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "A: drmas, shared, solver_verifier, Qwen/Qwen3-4B: A1 a_seed1" in shown
    assert str(tmp_path / "out" / "report.html") in shown


@pytest.mark.parametrize(
    ("path", "tables", "message"),
    [
        ("none", "auto", "no such file or folder"),
        (".", "some", "--tables is 'some'; choose auto, all or none"),
        (".", "auto", "holds no log of verl's"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, capsys, path, tables, message):
    (tmp_path / "x").mkdir()
    assert main([tmp_path / "x" / path], tmp_path / "out", tables=tables) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("refused: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
