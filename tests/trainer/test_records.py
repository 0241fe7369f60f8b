"""What a step's dump holds is what was trained, in one job with both models and in each job of a pair."""

import json
from collections import Counter

import numpy as np
import pytest
import recorded_jobs
import torch
from recorded_jobs import CALLS, CASES, MASKED, SUBS, K, player, train, trainee

from verl_drmas.dumps import COLUMN, STEP_SETTINGS, DumpError, read_step
from verl_drmas.rollout.told import told
from verl_drmas.trainer.records import one_number, plain
from verl_drmas.workflows import Action
from verl_drmas.workflows.tools import ToolCall

pytestmark = pytest.mark.long

STEPS = tuple(CALLS)


@pytest.fixture(scope="module")
def dumped(queue, tmp_path_factory):
    """By case: the file of each step, and the rows that each model was given, by key."""
    known = {}

    def run(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("dump")
            made = player("one", "", CASES[name], seed=1, dump=str(folder))
            known[name] = []
            for step in STEPS:
                train(made, step)
                seen = {m: {one[0]: one[1] for one in p.seen if one != "padding"} for m, p in made.trained.items()}
                known[name].append((folder / f"{step}.jsonl", seen))
        return known[name]

    return run


@pytest.mark.parametrize("name", ["sample", "drmas, balanced", "grpo_team"])
def test_a_dumped_row_is_the_trained_row(name, dumped):
    for file, seen in dumped(name):
        trained = {row.line["uid"]: row for row in read_step(file).rows if row.trained}
        given = {key: fields for rows in seen.values() for key, fields in rows.items()}
        assert trained.keys() == given.keys() and len(given) > 20
        for key, fields in given.items():
            row, own = trained[key], trained[key].trained
            assert row.mask == fields["response_mask"]
            tokens = [a for a, m in zip(fields["advantages"], fields["response_mask"], strict=True) if m]
            assert [own["advantage"]] * own["tokens"] == tokens
            assert own["weight"] == (fields["rollout_is_weights"][0] if "rollout_is_weights" in fields else None)
            assert own["reward"] == pytest.approx(row.line["score"], abs=1e-6) == sum(fields["rm_scores"])
            assert (own["penalty"] > 0) == (row.agent in SUBS and not row.own["valid"])
            assert own["updated"] is True


def test_a_row_says_where_it_stands_and_how_it_went(dumped):
    ((file, _), _) = dumped("sample")
    step = read_step(file)
    assert step.step == 1 and {row.line["step"] for row in step.rows} == {1}
    positions = sorted(row.trained["position"] for row in step.rows if row.trained)
    assert positions == list(range(len(positions)))
    assert [row.place for row in step.rows] == sorted(row.place for row in step.rows)
    for row in step.rows:
        assert row.place[2] == row.own["activation"] and row.own["versions"] == [0, 0]
        assert sum(size for _, _, size in row.own["spans"]) == len(row.line["output"])
        assert "".join(text for _, text in row.pieces) == row.line["output"]
        assert row.own["prompt_tokens"] == len(row.line["input"]) and row.own["turns"] == 2.0
        assert set(row.own["parts"]) == {"own"} and "cut_characters" in row.own["counts"]
        assert (row.own["outcome"] is None) == (row.line.get("failed") == MASKED)
    first = [row for row in step.rows if row.own["session"] is not None]
    assert {row.own["activation"] for row in first} == {0} and first[0].own["session"]["rounds"] == 2.0
    assert any(row.own["path"].endswith("/finder") for row in step.rows)
    assert Counter(row.trained["copies"] for row in step.rows if row.trained)[0.0] > 0


def test_copies_repeat_no_numbers_of_their_session_and_drops_lose_none(dumped):
    for file, _ in dumped("physical"):
        rows = read_step(file).rows
        sessions = {row.place[:2] for row in rows if not row.line.get("failed")}
        having = [row for row in rows if row.own["session"] is not None]
        assert any(row.copied for row in rows) and not any(row.copied for row in having)
        assert {row.place[:2] for row in having} == sessions and len(having) == len(sessions)


def test_a_failed_sessions_rows_were_not_trained(dumped):
    ((file, _), _) = dumped("drmas")
    masked = [row for row in read_step(file).rows if row.line.get("failed")]
    assert len(masked) == 4 and all(row.trained is None for row in masked)  # two finders, a reader and the main agent


def test_padding_has_no_record_and_one_row_the_settings(dumped):
    ((file, _), _) = dumped("sample")
    lines = [json.loads(line) for line in file.open(encoding="utf-8")]
    real = read_step(file).rows
    assert len(lines) - len(real) == sum(line["agent_id"] is None for line in lines) > 0
    having = [line[COLUMN]["settings"] for line in lines if line[COLUMN] and "settings" in line[COLUMN]]
    assert len(having) == 1 and tuple(having[0]) == STEP_SETTINGS
    (settings,) = having
    assert (settings["estimator"], settings["sessions"], settings["copies"]) == ("mgrpo", K, "weights")
    assert settings["alignment"]["target"] == dict.fromkeys(SUBS, 3) and settings["alignment"]["step"] == 1
    assert settings["section"]["agents"]["finder"] == {"model": "sub", "trainable": True, "invalid_penalty": 0.25}
    assert settings["whole_team"] is True


def test_both_jobs_of_a_pair_dump_their_rows(queue, tmp_path, dumped):
    """Each has its own agents', and the advantages are those of the one job."""
    url = f"sqlite:///{tmp_path}/pair.db"
    main = player("main", url, CASES["sample"], seed=2, dump=str(tmp_path / "main"))
    sub = trainee(url, CASES["sample"], dump=str(tmp_path / "sub"))
    ((file, _), _) = dumped("sample")

    def advantages(rows):
        named = {(row.line["index"], row.place[1], row.own["path"]): row for row in rows if row.agent in SUBS}
        return {name: row.trained["advantage"] for name, row in named.items() if row.trained}

    train(main, 1), train(sub, 1)
    sub.consumer.detach()
    theirs = read_step(tmp_path / "sub" / "1.jsonl")
    assert advantages(theirs.rows) == advantages(read_step(file).rows)
    assert theirs.settings["whole_team"] is False and set(theirs.settings["section"]["agents"]) == set(SUBS)
    assert all(row.own["outcome"] in (0.0, 1.0) for row in theirs.rows if row.trained)
    own = read_step(tmp_path / "main" / "1.jsonl")
    updated = {row.agent: row.trained["updated"] for row in own.rows if row.trained}
    assert updated == {"main": True, "finder": False, "reader": False}


def test_a_run_without_dumps_keeps_nothing(queue):
    made = player("one", "", CASES["drmas"], seed=1)
    train(made, 1)
    assert made._trained_rows is None


def test_an_estimators_values_that_differ_by_token_are_listed():
    values, mask = torch.tensor([0.5, 9.0, 0.25]), torch.tensor([1, 0, 1])
    assert one_number(values, mask) == [0.5, 0.25]
    assert one_number(values, torch.tensor([1, 0, 0])) == 0.5
    assert one_number(values, torch.zeros(3)) is None


def test_a_workflows_odd_values_dont_break_a_dump():
    odd = np.array([[np.int64(2), {"x": np.ones(1)}]], dtype=object)
    made = plain({"a": np.float32(0.5), 3: (np.arange(2), torch.ones(1)), "c": {"d": object}, "e": None, "f": odd})
    assert made == {"a": 0.5, "3": [[0, 1], [1.0]], "c": {"d": str(object)}, "e": None, "f": [[2, {"x": [1.0]}]]}
    json.dumps(made)


def test_what_a_model_said_cannot_end_the_training(queue, tmp_path, monkeypatch):
    """JSON of a call may hold half a character as an escape; verl's writer would fail at the next dump."""
    played = recorded_jobs.session_rows
    call = ToolCall(name="search\ud800", arguments=json.loads('{"\\udc00": "a\\ud800b"}'))
    said = told(Action(agent_id="finder", parsed="\udfffx"), [(0, call)])

    def with_halves(*args):
        rows = played(*args)
        for row in rows:
            row.extra_fields |= {"told": said, "fault": "half \ud800"}
            row.extra_fields["counts"] |= {"\ud801": 1.0}
        return rows

    monkeypatch.setattr(recorded_jobs, "session_rows", with_halves)
    made = player("one", "", CASES["drmas"], seed=1, dump=str(tmp_path))
    made.transcripts.tokenizers["sub"].decode = lambda ids, skip_special_tokens: "\ud805" * len(ids)
    train(made, 1)
    rows = read_step(tmp_path / "1.jsonl").rows
    (call,) = rows[0].own["told"]["calls"]
    assert call == {"turn": 0, "name": r"search\ud800", "arguments": r'{"\udc00": "a\ud800b"}'}
    assert rows[0].own["told"]["parsed"] == r"\udfffx" and rows[0].own["counts"][r"\ud801"] == 1.0
    assert {row.line["fault"] for row in rows} == {r"half \ud800"}
    finder = next(row for row in rows if row.agent == "finder")
    assert "".join(text for _, text in finder.pieces) == finder.line["output"] == r"\ud805" * len(finder.mask)


def test_a_cut_file_is_refused_with_its_line(dumped, tmp_path):
    ((file, _), _) = dumped("drmas")
    cut = tmp_path / "1.jsonl"
    whole = file.read_text(encoding="utf-8")
    lines = whole.count("\n")
    cut.write_text(whole[: whole.rindex("\n", 0, -1) + 1], encoding="utf-8")  # between two rows
    with pytest.raises(DumpError, match=rf"has {lines - 1} of its {lines} rows"):
        read_step(cut)
    cut.write_text(whole[:-100], encoding="utf-8")
    with pytest.raises(DumpError, match=rf"1\.jsonl: line {lines} is not JSON"):
        read_step(cut)
