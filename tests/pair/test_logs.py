"""The joint log: whole lines, secrets left out, and nobody who watches can stop it."""

import io
import os
import threading

from verl_drmas.pair.logs import LONGEST, JointLog


def test_lines_of_both_jobs_stay_whole(tmp_path):
    screen = io.StringIO()
    log = JointLog(tmp_path, ["main", "sub"], [], screen)
    threads, ends = [], []
    for name in ("main", "sub"):
        read, write = os.pipe()
        threads.append(log.follow(name, os.fdopen(read, "rb")))
        ends.append(threading.Thread(target=_write, args=(write, [f"{name} {i} ".encode() * 50 for i in range(200)])))
        ends[-1].start()
    for thread in (*ends, *threads):
        thread.join(60)
        assert not thread.is_alive()
    log.say("the end")
    log.close()
    joint = (tmp_path / "pair.log").read_text()
    assert joint == screen.getvalue() and len(joint.splitlines()) == 401
    for name in ("main", "sub"):
        lines = (tmp_path / f"{name}.log").read_text().splitlines()
        assert lines == [f"{name} {i} " * 50 for i in range(200)]
        prefix = f"{name:<4}| "
        assert [line.removeprefix(prefix) for line in joint.splitlines() if line.startswith(prefix)] == lines


def _write(end, lines):
    with os.fdopen(end, "wb", buffering=0) as file:
        for line in lines:
            file.write(line + b"\n")


def follow(log, data):
    log.follow("main", io.BytesIO(data)).join(30)
    log.close()


def test_secrets_are_left_out_everywhere(tmp_path):
    screen = io.StringIO()
    log = JointLog(tmp_path, ["main"], ["t0ken", "", "pa55"], screen)
    log.say("with t0ken")
    follow(log, b"Bearer t0ken, postgresql://me:pa55@db\n")
    texts = [screen.getvalue(), *(path.read_text() for path in tmp_path.glob("*.log"))]
    assert len(texts) == 3 and not any("t0ken" in text or "pa55" in text for text in texts)
    assert "Bearer ***, postgresql://me:***@db" in texts[0]


def test_what_is_no_text_or_no_line_is_written_too(tmp_path):
    screen = io.StringIO()
    log = JointLog(tmp_path, ["main"], [], screen)
    long = b"x" * (LONGEST + 10)
    follow(log, b"\xff\xfe bytes\r\n" + long + b"\nunfinished")
    assert (tmp_path / "main.log").read_bytes() == b"\xff\xfe bytes\r\n" + long + b"\nunfinished"
    assert [len(line) for line in screen.getvalue().splitlines()] == [14, 6 + LONGEST, 6 + 10, 16]


def test_files_are_appended_to(tmp_path):
    for number in range(2):
        follow(JointLog(tmp_path, ["main"], [], None), f"{number}\n".encode())
    assert (tmp_path / "main.log").read_text() == "0\n1\n"
    assert (tmp_path / "pair.log").read_text() == "main| 0\nmain| 1\n"
