"""A file of sessions: on the disk at once, whole after a kill, one writer, and nothing mixed in."""

import json
import os

import pytest

from verl_drmas.evaluation.journal import Journal, Mixed, first_difference

HEADER = {"workflow": "a", "sampling": {"temperature": 0.6, "top_p": 0.95}}


def written(path, *lines, header=HEADER):
    with Journal(path, header) as journal:
        for line in lines:
            journal.add(line)
    return path


def test_lines_come_back(tmp_path):
    path = written(tmp_path / "new" / "j.jsonl", {"n": 1}, {"n": 2, "text": "é\n\ud800"})
    with Journal(path, HEADER) as journal:
        assert [line["n"] for line in journal.lines] == [1, 2]
        journal.add({"n": 3})
        assert [line["n"] for line in journal.lines] == [1, 2, 3]
    assert [json.loads(line).get("n") for line in path.read_bytes().splitlines()] == [None, 1, 2, 3]


def test_each_line_is_on_the_disk_before_the_next(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(path.read_bytes().count(b"\n")))
    path = tmp_path / "j.jsonl"
    written(path, {"n": 1}, {"n": 2})
    assert synced == [1, 2, 3]


@pytest.mark.parametrize("kept", [1, 9, 30])
def test_the_line_that_a_kill_cut_off_is_dropped(tmp_path, kept):
    path = written(tmp_path / "j.jsonl", {"n": 1}, {"n": 2, "text": "x" * 40})
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b'{"n": 2') + kept])
    with Journal(path, HEADER) as journal:
        assert journal.lines == [{"n": 1}]
        journal.add({"n": 3})
    with Journal(path, HEADER) as journal:
        assert journal.lines == [{"n": 1}, {"n": 3}]


def test_a_broken_line_inside_is_said(tmp_path):
    path = written(tmp_path / "j.jsonl", {"n": 1}, {"n": 2})
    path.write_bytes(path.read_bytes().replace(b'{"n": 1}', b'{"n": '))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 2 is no line of sessions"):
        Journal(path, HEADER)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ['{"question": "a"}', "notes\n", '{"question": "a"}\n{"question": "b"}\n'])
def test_another_kind_of_file_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="is no file of sessions; give another --output"):
        Journal(path, HEADER)
    assert path.read_text() == content


@pytest.mark.parametrize("cut", [0, 3, 20])
def test_a_file_without_sessions_binds_nobody(tmp_path, cut):
    path = written(tmp_path / "j.jsonl")
    if cut:
        path.write_bytes(path.read_bytes()[:cut])
    written(path, {"n": 1}, header={"workflow": "b"})
    with pytest.raises(Mixed):
        Journal(path, HEADER)


def test_the_key_that_differs_is_named(tmp_path):
    path = written(tmp_path / "j.jsonl", {"n": 1})
    other = {"workflow": "a", "sampling": {"temperature": 1.0, "top_p": 0.95}}
    with pytest.raises(Mixed, match=r"another sampling.temperature \(0.6, now 1.0\); delete it, or give") as error:
        Journal(path, other)
    assert (error.value.key, error.value.was, error.value.now) == ("sampling.temperature", 0.6, 1.0)
    with pytest.raises(Mixed, match=r"another seed \(null, now 3\)"):
        Journal(path, {**HEADER, "seed": 3})
    with pytest.raises(Mixed, match=r'another workflow \("a", now null\)'):
        Journal(path, {"sampling": HEADER["sampling"]})


def test_two_writers_are_one_too_many(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path, HEADER) as journal:
        journal.add({"n": 1})
        with pytest.raises(ValueError, match="another process writes it"):
            Journal(path, HEADER)
    Journal(path, HEADER).close()


def test_tuples_and_lists_are_the_same_header(tmp_path):
    path = written(tmp_path / "j.jsonl", {"n": 1}, header={"a": (1, 2)})
    Journal(path, {"a": (1, 2)}).close()
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 1}}) is None
    assert first_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}) == ("a.c", 2, None)
