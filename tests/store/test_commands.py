"""`verl-drmas store ...` on a store of a run."""

import json

import pytest
from played import play, tamper, train
from typer.testing import CliRunner

from verl_drmas.store.commands import store_app


@pytest.fixture
def worked(producer, attach):
    for step in (1, 2, 3):
        play(producer, step)
    consumer = attach()
    train(consumer), train(consumer)
    consumer.saved(2)
    consumer.publish(2, "http://127.0.0.1:8731")


def run(*arguments, **environment):
    return CliRunner().invoke(store_app, [str(argument) for argument in arguments], env=environment or None)


def test_status_says_who_trains_and_what_waits(worked, url, producer):
    done = run("status", url)
    assert done.exit_code == 0
    text = " ".join(done.output.split())
    for part in ("role sub", "│ ready │ 1 │ 2 │", "│ saved │ 2 │ 4 │", "1: 12", "alive", "http://127.0.0.1:8731"):
        assert part in text, done.output
    found = json.loads(run("status", url, "--json").output)
    assert found["sub"]["groups/saved"] == 4
    assert list(json.loads(run("status", url, "--json", "--role", "x").output)) == ["x"]


def test_the_url_may_stand_in_the_environment_or_be_a_path(worked, url, store):
    assert run("status", DRMAS_STORE=url).exit_code == 0
    if not store.postgresql:
        assert run("status", url.removeprefix("sqlite:///")).exit_code == 0


def test_a_new_store_has_nothing_to_say(store, url):
    done = run("status", url)
    assert (done.exit_code, "no job has used it yet" in done.output) == (0, True)


def test_verify_proves_or_names_what_is_wrong(worked, url, store):
    done = run("verify", url)
    assert (done.exit_code, "nothing was trained twice" in done.output) == (0, True)
    tamper(store, "UPDATE drmas_step SET state = 'ready' WHERE step = 2")
    done = run("verify", url)
    assert done.exit_code == 1
    assert "step 2 of role 'sub' is ready; its events say saved" in done.output
    assert "error: 1 problems" in done.stderr


def test_gc_and_export(worked, url, tmp_path):
    assert run("export", url, "--out", tmp_path / "rows.jsonl").output.startswith("wrote 12 rows")
    assert "freed 4 rows" in run("gc", url, "--keep-steps", 1).output
    assert "wrote 8 rows" in run("export", url, "--out", tmp_path / "rows.jsonl").output
    assert "freed 0 rows" in run("gc", url, "--older-than", 1).output
    assert "freed 4 rows" in run("gc", url, "--max-bytes", 0).output
    assert run("verify", url).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "nowhere.db"], "no such file"),
        (["verify", "mysql://u:secret@h/d"], "no known kind"),
        (["gc", "nowhere.db", "--keep-steps", "1"], "no such file"),
        (["verify", "postgresql://u:secret@127.0.0.1:9/d", "--patience", "0.1"], "tried for 0.1 s"),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "secret" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_gc_needs_a_rule_and_export_a_known_kind(worked, url, tmp_path):
    assert "gc needs a rule" in run("gc", url).stderr
    assert "ends in .jsonl or .parquet" in run("export", url, "--out", tmp_path / "x.csv").stderr
