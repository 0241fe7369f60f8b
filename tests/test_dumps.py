"""Dumps as they are read: spans of sampled text, folders, and files of another kind or time."""

import json
import os
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_drmas.dumps import COLUMN, DumpError, find_dumps, newest_whole, read_step, spans_of


def letters(ids):
    return "".join(chr(97 + i) for i in ids)


@given(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 1)), min_size=1))
def test_spans_cover_tokens_and_characters(tokens):
    ids, mask = map(list, zip(*tokens, strict=True))
    spans = spans_of(mask, ids, letters(ids), letters)
    assert [kind for kind, n, _ in spans for _ in range(n)] == mask
    assert all(a[0] != b[0] for a, b in pairwise(spans))
    assert [n for _, n, _ in spans] == [size for _, _, size in spans]


def by_bytes(ids):
    """A tokenizer of bytes: a character may be of several tokens."""
    return bytes(ids).decode("utf-8", errors="replace")


def with_space(ids):
    """A tokenizer that swallows the space before its first word."""
    return letters(ids).replace("s", " ").lstrip(" ")


@pytest.mark.parametrize(
    ("ids", "mask", "decode", "sizes"),
    [
        (list("aé".encode()), [1, 1, 0], by_bytes, None),  # the mask parts a character
        ([0, 1, 18, 2, 3], [1, 1, 0, 0, 1], with_space, [2, 2, 1]),  # "ab cd"
    ],
)
def test_pieces_that_dont_add_up_still_cover_the_text(ids, mask, decode, sizes):
    text = decode(ids)
    found = [size for _, _, size in spans_of(mask, ids, text, decode)]
    assert sum(found) == len(text) and min(found) >= 0
    assert sizes is None or found == sizes


@given(st.text(), st.data())
def test_spans_are_those_of_whole_beginnings_and_take_linear_time(text, data):
    ids = list(text.encode()) or [97]
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    decoded = []

    def decode(some):
        decoded.append(len(some))
        return by_bytes(some)

    spans, text = spans_of(mask, ids, by_bytes(ids), decode), by_bytes(ids)
    ends = list(accumulate(n for _, n, _ in spans))
    wanted = [len(by_bytes(ids[:end])) for end in ends]
    assert list(accumulate(size for _, _, size in spans)) == [*wanted[:-1], len(text)]
    assert sum(decoded) <= 2 * len(ids) + 33 * len(spans)


def line(**own):
    record = {"format": 1, "path": "a.0", "activation": 0, "valid": True, "spans": [[1, 1, 2]], "reward": 1.0}
    record |= own
    return {"input": "?", "output": "hi", "uid": "u_0_0", "agent_id": "a", "index": 0, "acc": None, COLUMN: record}


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines), encoding="utf-8")
    return path


def test_line_separators_within_a_text_are_no_line_breaks(tmp_path):
    odd = line(spans=[[1, 1, 6]]) | {"output": "a\u2028b\x85c\u2029"}
    (row,) = read_step(write(tmp_path / "3.jsonl", odd)).rows
    assert row.pieces == [(True, "a\u2028b\x85c\u2029")]


def without(name):
    made = line()
    made.pop(name, None) or made[COLUMN].pop(name)
    return made


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], r"3\.jsonl: holds no row"),
        ([line() | {COLUMN: None}], r"3\.jsonl: holds no row"),
        (
            [line(), without(COLUMN)],
            r"3\.jsonl: line 2 has no 'drmas': dumped by an older .*Run the step again",
        ),
        ([without("uid")], r"line 1 has no 'uid'"),
        ([line(format=2)], r"line 1 has format 2, and this verl-drmas reads 1"),
        ([without("spans")], r"line 1 has no 'drmas.spans'"),
        ([without("output")], r"line 1 has no 'output'"),
        ([[1]], r"line 1 has no 'uid'"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_its_name(tmp_path, lines, says):
    with pytest.raises(DumpError, match=says):
        read_step(write(tmp_path / "3.jsonl", *lines))


def test_the_dumps_of_a_run_are_found(tmp_path):
    trained = line(trained={"advantage": 1.0})
    for step in (10, 9):
        write(tmp_path / "run" / "out" / "rows" / f"{step}.jsonl", trained)
    write(tmp_path / "run" / "global_step_9" / "1.jsonl", trained)
    write(tmp_path / "run" / "metrics.jsonl", {"step": 1, "data": {}})
    rows = tmp_path / "run" / "out" / "rows"
    for named in (tmp_path / "run", rows):
        assert find_dumps(named) == {9: rows / "9.jsonl", 10: rows / "10.jsonl"}
        assert list(find_dumps(named)) == [9, 10]
    assert find_dumps(rows / "9.jsonl") == {9: rows / "9.jsonl"}
    write(tmp_path / "run" / "validation" / "0.jsonl", line())
    assert set(find_dumps(tmp_path / "run")) == {9, 10}  # rows that were trained on go before
    write(tmp_path / "run" / "sub" / "1.jsonl", trained)
    with pytest.raises(DumpError, match=r"several runs or jobs; name one of .*rows, .*sub$"):
        find_dumps(tmp_path / "run")


def test_a_file_that_is_cut_within_a_character_is_refused_with_its_line(tmp_path):
    file = write(tmp_path / "3.jsonl", line(), line() | {"output": "h\u00ef"})
    file.write_bytes(file.read_bytes().partition(b"\xaf")[0])
    with pytest.raises(DumpError, match=r"3\.jsonl: line 2 is not JSON \('utf-8' codec.*the file is cut"):
        read_step(file)


def test_a_file_that_ends_too_early_is_refused(tmp_path):
    padding = line() | {COLUMN: None}
    assert len(read_step(write(tmp_path / "3.jsonl", padding, line(rows=4), line(), padding)).rows) == 2
    with pytest.raises(DumpError, match=r"3\.jsonl: has 3 of its 4 rows; it is being written"):
        read_step(write(tmp_path / "3.jsonl", padding, line(rows=4), line()))


def test_the_newest_whole_dump_is_the_one_that_was_written_last(tmp_path):
    """After a resume, higher steps may be those of an attempt that died."""
    files = {step: write(tmp_path / f"{step}.jsonl", line() | {"step": step}) for step in (7, 8, 9)}
    for age, step in enumerate((8, 7, 9)):
        os.utime(files[step], ns=(10**9 * (50 - age),) * 2)
    step, note = newest_whole(files)
    assert (step.step, note) == (8, "; written last")
    write(files[8], line(rows=2))
    os.utime(files[8], ns=(10**9 * 60,) * 2)
    step, note = newest_whole(files)
    assert step.step == 7 and "of those that can be read" in note and "8.jsonl: has 1 of its 2 rows" in note
    for file in files.values():
        file.write_text("")
    with pytest.raises(DumpError, match="holds no row"):
        newest_whole(files)


def test_a_folder_of_dumps_is_judged_by_what_of_it_can_be_read(tmp_path):
    rows = tmp_path / "rows"
    for step in (1, 2, 3):
        write(rows / f"{step}.jsonl", line(trained={"advantage": 1.0}))
    (rows / "1.jsonl").write_text("{")
    (rows / "3.jsonl").write_bytes(b"\xaf")
    write(tmp_path / "validation" / "0.jsonl", line())
    for name in ("wandb", "checkpoints", "global_step_2"):
        write(tmp_path / name / "1.jsonl", line(trained={"advantage": 1.0}))
    assert set(find_dumps(tmp_path)) == {1, 2, 3}
    (rows / "2.jsonl").write_text("[")
    with pytest.raises(
        DumpError, match=r"several runs or jobs; name one of .*validation \(.*\d.jsonl: line 1 is not JSON"
    ):
        find_dumps(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "no rollout dumps .*rollout_data_dir"),
        ("gone", "no such file"),
        ("a.txt", "not named <step>.jsonl"),
    ],
)
def test_what_is_no_dump_is_refused(tmp_path, name, says):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DumpError, match=says):
        find_dumps(tmp_path / name)


def test_a_row_without_its_prompt_is_refused(tmp_path):
    """No row passes for one of data row 0."""
    line = {"input": "?", "output": "hi", "uid": "u_0_0", "agent_id": "a", COLUMN: {"format": 1}}
    (tmp_path / "1.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DumpError, match="line 1 has no 'index'"):
        read_step(tmp_path / "1.jsonl")
