"""The launcher over fake jobs: what starts again, what ends the pair, and that nothing is left running."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

LAUNCH = Path(__file__).with_name("launch.py")
MARK = "DRMAS_TEST_MARK"
PATIENCE = 240.0

pytestmark = pytest.mark.process


def until(true, what):
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Pair:
    """A launcher that runs, its processes found by a mark in their environment."""

    def __init__(self, folder, jobs, **options):
        self.folder, self.mark = folder, f"{os.getpid()}-{folder}"
        self.goes = folder / "go"
        spec = {"folder": str(folder), "jobs": jobs, **options}
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCH), json.dumps(spec)],
            env={**os.environ, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def alive(self):
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def log(self, name="pair"):
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text, name="pair", times=1):
        until(lambda: self.log(name).count(text) >= times, f"{text!r} is not in {name}.log:\n{self.log()}")

    def pid(self, name):
        path = self.folder / f"{name}.pid"
        until(lambda: path.exists() and path.read_text().strip(), f"no {path}")
        return int(path.read_text())

    def end(self):
        """Exit status and what was shown; nothing of the pair runs any more."""
        shown, _ = self.process.communicate(timeout=PATIENCE)
        assert self.alive() == [], shown
        return self.process.returncode, shown


@pytest.fixture
def start(tmp_path):
    pairs = []

    def start(main, sub, **options):
        jobs = {name: [p.format(go=tmp_path / "go").split(" ") for p in plans] for name, plans in
                (("main", main), ("sub", sub))}  # fmt: skip
        pairs.append(Pair(tmp_path, jobs, **options))
        return pairs[-1]

    yield start
    for pair in pairs:
        for process in pair.alive():
            process.kill()
        pair.process.wait(30)
        pair.process.stdout.close()
        for place in places(pair):
            shutil.rmtree(place, ignore_errors=True)


def places(pair):
    """Ray's folders, from the log."""
    return [Path(line.rsplit(" ", 1)[1].rstrip(")")) for line in pair.log().splitlines() if "Ray's files" in line]


def test_both_end_well_with_logs_of_their_own_and_a_joint_one(start, tmp_path):
    pair = start(["say:hello-main ray until:{go} exit:0"], ["say:hello-sub ray until:{go} exit:0"])
    pair.wait_for("hello-main")
    pair.wait_for("hello-sub")
    pair.goes.touch()
    status, shown = pair.end()
    assert status == 0
    assert pair.log("main") == "hello-main\n" and pair.log("sub") == "hello-sub\n"
    assert "main| hello-main\n" in pair.log() and "sub | hello-sub\n" in pair.log()
    assert shown == pair.log()
    folders = places(pair)
    assert len(folders) == 2 and not any(folder.exists() for folder in folders)
    assert not list(tmp_path.glob("*.pid"))


def test_daemons_of_a_job_that_ended_well_are_ended_too(start):
    pair = start(["ray daemons exit:0"], ["ray exit:0"])
    assert pair.end()[0] == 0


@pytest.mark.parametrize("death", ["exit:3", "kill:9"])
def test_a_job_that_dies_is_started_again_and_the_other_goes_on(start, death):
    pair = start(
        [f"ray daemons say:first {death}", "ray say:second until:{go} exit:0"],
        ["ray say:only until:{go} exit:0"],
        restarts=1,
    )
    pair.wait_for("second", "main")
    pair.wait_for("only", "sub")
    assert len(pair.alive()) == 5  # of the first start there is nothing left: launcher, two keepers, two jobs
    pair.goes.touch()
    assert pair.end()[0] == 0
    assert pair.log("main") == "first\nsecond\n" and pair.log("sub") == "only\n"
    assert "main died with status " + {"exit:3": "3", "kill:9": "137"}[death] in pair.log()
    first, _, second = places(pair)
    assert first != second and first.exists() and not second.exists()  # of a death, Ray's logs are kept


def test_restarts_are_counted_for_both_and_the_last_death_ends_the_pair(start):
    pair = start(["ray exit:1", "ray sleep"], ["ray until:{go} exit:1", "ray until:{go} exit:1"], restarts=2)
    pair.wait_for("restarts left")  # main's death has used one
    pair.goes.touch()
    status, _ = pair.end()
    assert status == 1
    assert (pair.log().count("started main"), pair.log().count("started sub")) == (2, 2)
    assert "no restart is left" in pair.log()


def test_a_job_that_dies_without_restarts_takes_the_other_along(start):
    pair = start(["ray until:{go} exit:1"], ["ray daemons stubborn say:ready sleep"], grace=0.5)
    pair.wait_for("ready")
    pair.goes.touch()
    assert pair.end()[0] == 1


def test_a_job_that_refuses_its_configuration_is_not_started_again(start):
    pair = start(["say:refused exit:1"], ["ray sleep"], restarts=5)
    status, shown = pair.end()
    assert status == 1
    assert pair.log().count("started main") == 1 and "before it had started anything" in shown
    assert not places(pair)[0].exists()


def test_a_job_killed_before_it_began_is_started_again(start):
    pair = start(["kill:9", "exit:0"], ["exit:0"], restarts=1)
    assert pair.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_stop_ends_everything(start, number):
    pair = start(["ray daemons say:ready sleep"], ["ray daemons stubborn say:ready sleep"], grace=1.0, restarts=3)
    pair.wait_for("ready", "main")
    pair.wait_for("ready", "sub")
    pair.process.send_signal(number)
    status, shown = pair.end()
    assert status == 128 + number
    assert "started again" not in shown
    assert not any(folder.exists() for folder in places(pair))


def test_a_second_stop_doesnt_wait(start):
    pair = start(["ray stubborn say:ready sleep"], ["ray stubborn say:ready sleep"], grace=PATIENCE * 2)
    pair.wait_for("ready", "main")
    pair.wait_for("ready", "sub")
    pair.process.send_signal(signal.SIGINT)
    pair.wait_for("ending both jobs")
    pair.process.send_signal(signal.SIGINT)
    assert pair.end()[0] == 130  # within PATIENCE, half of the grace


def test_a_job_killed_from_outside_by_its_pid_is_started_again(start):
    pair = start(["ray daemons say:one sleep", "ray say:two exit:0"], ["ray until:{go} exit:0"], restarts=1)
    pair.wait_for("one", "main")
    os.kill(pair.pid("main"), signal.SIGKILL)
    pair.wait_for("two", "main")
    pair.goes.touch()
    assert pair.end()[0] == 0


def test_a_killed_keeper_leaves_nothing_of_its_job(start):
    pair = start(["ray daemons say:one sleep", "ray say:two exit:0"], ["ray exit:0"], restarts=1)
    pair.wait_for("one", "main")
    psutil.Process(pair.pid("main")).parent().kill()
    pair.wait_for("two", "main")
    pair.wait_for("main died with status 137")
    pair.process.wait(PATIENCE)
    # What has a session of its own is out of sight then: two of the fake's daemons, and nothing else.
    left = pair.alive()
    assert all(os.getsid(process.pid) == process.pid for process in left) and len(left) == 2


def test_a_killed_launcher_takes_both_jobs_along(start):
    pair = start(["ray daemons say:ready sleep"], ["ray daemons say:ready sleep"])
    pair.wait_for("ready", "main")
    pair.wait_for("ready", "sub")
    pair.process.kill()
    until(lambda: not pair.alive(), "something of the pair still runs")


def test_the_token_is_in_no_log(start):
    pair = start(["token exit:0"], ["exit:0"])
    status, shown = pair.end()
    assert status == 0
    texts = [shown, *(pair.log(name) for name in ("main", "sub", "pair"))]
    assert all("s3cr3t" not in text for text in texts)
    assert "my token is *** and that is all" in pair.log("main")


def test_nobody_watching_is_no_reason_to_end(start):
    pair = start(["until:{go} say:last exit:0"], ["exit:0"])
    pair.process.stdout.close()
    pair.wait_for("sub ended well")
    pair.goes.touch()
    assert pair.process.wait(PATIENCE) == 0
    assert "main| last" in pair.log()


def test_a_second_run_in_the_folder_keeps_what_the_first_wrote(start, tmp_path):
    (tmp_path / "main").mkdir()
    metrics = tmp_path / "main" / "metrics.jsonl"
    for number in range(3):
        metrics.write_text(f"{number}\n")
        assert start(["say:hello exit:0"], ["exit:0"]).end()[0] == 0
        assert not metrics.exists()
    assert [(tmp_path / "main" / f"metrics.{n}.jsonl").read_text() for n in (1, 2, 3)] == ["0\n", "1\n", "2\n"]
    assert (tmp_path / "main.log").read_text() == "hello\n" * 3
