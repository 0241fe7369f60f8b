"""Life and death of the scoring processes."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_drmas.rewards.timebox import TimeBox

pytestmark = pytest.mark.process


@pytest.fixture
def box():
    # Functions of a test module can't be imported in the child, so the tests use the standard library's.
    box = TimeBox(os.getpid, workers=1)
    yield box
    box.close()


def _gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_one_child_serves_many_calls(box):
    pids = {box.submit(os.getpid, timeout=5).result().value for _ in range(20)}
    assert len(pids) == 1 and os.getpid() not in pids
    assert box.submit(math.sqrt, 9.0, timeout=5).result() == (3.0, None)


def test_the_deadline_kills_and_replaces_the_child(box):
    before = box.submit(os.getpid, timeout=5).result().value
    begin = time.monotonic()
    assert box.submit(time.sleep, 60, timeout=0.5).result().fault == "timeout"
    assert time.monotonic() - begin < 1.5
    assert _gone(before)
    assert box.submit(os.getpid, timeout=5).result().value != before


def test_a_child_killed_while_idle_costs_nothing(box):
    pid = box.submit(os.getpid, timeout=5).result().value
    os.kill(pid, signal.SIGKILL)
    assert box.submit(math.sqrt, 4.0, timeout=5).result() == (2.0, None)


def test_a_call_that_raises_or_ends_its_process_is_a_crash(box):
    assert box.submit(math.sqrt, -1.0, timeout=5).result().fault == "crash"
    assert box.submit(os._exit, 3, timeout=5).result().fault == "crash"
    assert box.submit(bytes, 1 << 32, timeout=5).result().fault == "crash"  # above the memory limit
    assert box.submit(math.sqrt, 4.0, timeout=5).result() == (2.0, None)


def test_close_leaves_no_process_and_the_box_starts_again(box):
    pid = box.submit(os.getpid, timeout=5).result().value
    box.close()
    assert not Path(f"/proc/{pid}").exists()  # neither running nor a zombie
    assert box.submit(math.sqrt, 4.0, timeout=5).result().value == 2.0


def test_a_child_that_cannot_start_is_an_error_each_time():
    box = TimeBox(sys.exit, workers=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended while starting"):
            box.submit(os.getpid, timeout=5).result()
    box.close()


def test_a_deadline_must_be_positive(box):
    with pytest.raises(ValueError, match="timeout is 0"):
        box.submit(os.getpid, timeout=0)


_SCRIPT = """
import os, sys, threading
from verl_drmas.rewards.timebox import TimeBox
box = TimeBox(os.getpid, workers=1)
print(box.submit(os.getpid, timeout=5).result().value, flush=True)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "",  # the interpreter's own end
        "os.kill(os.getpid(), 9)",
        "os._exit(0)",
        "box.submit(pow, 7, 10**9, timeout=1); import time; time.sleep(.3); os.kill(os.getpid(), 9)",  # stuck in C
    ],
)
def test_no_orphan_whatever_ends_the_parent(ending):
    # The script has no __main__ guard: a child must not run it again.
    done = subprocess.run([sys.executable, "-c", _SCRIPT + ending], capture_output=True, text=True, timeout=60)
    pids = done.stdout.split()
    assert len(pids) == 1, done.stderr
    assert _gone(int(pids[0]), seconds=10)


def test_a_forked_process_gets_children_of_its_own(box):
    ours = box.submit(os.getpid, timeout=5).result().value
    reader, writer = os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            os.write(writer, str(box.submit(os.getpid, timeout=5).result(timeout=20).value).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        theirs = int(answer.read())
    os.waitpid(fork, 0)
    assert theirs != ours and _gone(theirs)
    assert box.submit(os.getpid, timeout=5).result().value == ours
