"""What the jobs of a pair are started with: flags, overrides as Hydra reads them, environment, and refusals."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from verl_drmas.config import ConfigError
from verl_drmas.pair.facts import Facts
from verl_drmas.pair.jobs import (
    FROM_STORE,
    Job,
    by_hand,
    check_fit,
    choose_store,
    config_flags,
    free_port,
    hide,
    shared_token,
    split_gpus,
)

REMOTE = {"role": "sub", "store": None}


def main_facts(**changes):
    return Facts(**{"mode": "drmas_sync", "remotes": {"sub": REMOTE}, **changes})


def sub_facts(**changes):
    return Facts(**{"mode": "drmas_store", "store": {"role": "sub", "url": None}, **changes})


# -- commands


def test_a_files_folder_joins_the_search_path_and_a_name_is_a_shipped_configuration(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    monkeypatch.chdir(tmp_path)
    flags = (f"--config-dir={tmp_path}", "--config-name=mine")
    assert config_flags("mine.yaml") == config_flags("mine") == config_flags(str(tmp_path / "mine.yaml")) == flags
    assert config_flags("mgrpo_main") == config_flags("mgrpo_main.yaml") == ("--config-name=mgrpo_main",)


@pytest.mark.parametrize("name", ["nothing", "nothing.yaml", "elsewhere/mgrpo_main.yaml", "drmas", ".", "/"])
def test_what_is_neither_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such YAML file"):
        config_flags(name)


def test_the_users_overrides_come_last_and_each_start_has_its_own_place(tmp_path):
    job = Job("main", tmp_path / "main", ("--config-name=x",), ("trainer.nnodes=1",), ("own=1",), {"TOKEN": "t"})
    places = Path("/tmp/drmas-main-a"), Path("/tmp/drmas-main-b")
    first, second = (job.command(place) for place in places)
    assert first[:4] == [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name=x"]
    assert first[-2:] == ["own=1", "trainer.nnodes=1"]
    assert "++ray_kwargs.ray_init.address=local" in first
    assert set(first) - set(second) == {"++ray_kwargs.ray_init._temp_dir=/tmp/drmas-main-a"}
    environments = [job.environment(place) for place in places]
    assert [env["DRMAS_JOB"] for env in environments] == ["drmas-main-a", "drmas-main-b"]
    assert environments[0]["TOKEN"] == "t" and "'t'" not in repr(job)
    assert environments[0]["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "main" / "metrics.jsonl")
    assert f"trainer.default_local_dir={tmp_path}/main/checkpoints" in first  # else both jobs' might be one folder


# -- what fits


def test_a_pair_fits():
    check_fit(main_facts(), sub_facts(), one_machine=True)
    check_fit(main_facts(nodes=4), sub_facts(), one_machine=False)


MISFITS = {
    "the first plays no sessions": (sub_facts(), sub_facts(), "main: has no model with drmas.models.<id>.remote"),
    "the first has no remote": (main_facts(remotes={}), sub_facts(), "main: has no model with"),
    "the second plays sessions": (main_facts(), main_facts(), "sub: trainer.v1.trainer_mode is 'drmas_sync'"),
    "another role": (
        main_facts(),
        sub_facts(store={"role": "searcher"}),
        "sub: drmas.store.role is 'searcher', and the other job's remote roles are: sub",
    ),
    "two roles": (
        main_facts(remotes={"a": {"role": "sub"}, "b": {"role": "other"}}),
        sub_facts(),
        r"start the jobs of the others \(other\) by hand",
    ),
    "several machines": (main_facts(), sub_facts(nodes=2), "sub: trainer.nnodes is 2.*--sub trainer.nnodes=1"),
}


@pytest.mark.parametrize(("main", "sub", "told"), MISFITS.values(), ids=MISFITS)
def test_what_is_no_pair_is_refused(main, sub, told):
    with pytest.raises(ConfigError, match=told):
        check_fit(main, sub, one_machine=True)


# -- the store


def test_a_store_that_nobody_names_is_the_runs():
    url, main, sub = choose_store(main_facts(), sub_facts(), None, "sqlite:////run/store.db")
    assert url == "sqlite:////run/store.db"
    assert main == [f"drmas.models.sub.remote.store={FROM_STORE}"] and sub == [f"drmas.store.url={FROM_STORE}"]


@pytest.mark.parametrize("who", ["main", "sub", "both"])
def test_a_store_that_a_configuration_names_is_handed_to_the_other(who):
    main = main_facts(remotes={"sub": {"role": "sub", "store": "sqlite:////a"}}) if who != "sub" else main_facts()
    sub = sub_facts(store={"role": "sub", "url": "sqlite:////a"}) if who != "main" else sub_facts()
    url, of_main, of_sub = choose_store(main, sub, None, "sqlite:////run")
    assert url == "sqlite:////a"
    assert (bool(of_main), bool(of_sub)) == {"main": (False, True), "sub": (True, False), "both": (False, False)}[who]


def test_two_stores_are_refused_unless_one_is_given():
    main = main_facts(remotes={"sub": {"role": "sub", "store": "sqlite:////a"}})
    sub = sub_facts(store={"role": "sub", "url": "sqlite:////b"})
    with pytest.raises(ConfigError, match="name two stores"):
        choose_store(main, sub, None, "sqlite:////run")
    assert choose_store(main, sub, "sqlite:////c", "sqlite:////run") == (
        "sqlite:////c",
        [f"drmas.models.sub.remote.store={FROM_STORE}"],
        [f"drmas.store.url={FROM_STORE}"],
    )


# -- the token


def test_a_token_is_made_once_for_both():
    token = shared_token(main_facts(), sub_facts(), {})
    assert list(token) == ["DRMAS_GATEWAY_TOKEN"] and len(token["DRMAS_GATEWAY_TOKEN"]) >= 32
    assert shared_token(main_facts(), sub_facts(), {}) != token


def test_the_environments_token_stays_and_reaches_every_variable():
    main = main_facts(remotes={"sub": {**REMOTE, "token_env": "MINE"}})
    assert shared_token(main, sub_facts(), {"MINE": "abc"}) == {"MINE": "abc", "DRMAS_GATEWAY_TOKEN": "abc"}
    assert shared_token(main, sub_facts(), {"MINE": " ", "DRMAS_GATEWAY_TOKEN": "x"})["MINE"] == "x"
    with pytest.raises(ConfigError, match="MINE and DRMAS_GATEWAY_TOKEN hold different tokens") as refusal:
        shared_token(main, sub_facts(), {"MINE": "abcsecret", "DRMAS_GATEWAY_TOKEN": "xyzsecret"})
    assert "secret" not in str(refusal.value)


# -- the port


def test_a_port_that_is_taken_gives_way_to_a_free_one():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken = listening.getsockname()[1]
        assert free_port("127.0.0.1", taken) not in (taken, 0)
    assert free_port("127.0.0.1", taken) == taken
    assert free_port("localhost", 0) > 0


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_a_host_that_isnt_this_machine_is_refused(host):
    with pytest.raises(ConfigError, match=f"drmas.gateway.host is '{host}'"):
        free_port(host, 8731)


# -- GPUs


@pytest.mark.parametrize(
    ("visible", "named", "main", "sub"),
    [(8, None, "0,1", "2,3,4,5"), (8, "7,6,5,4,3,2", "7,6", "5,4,3,2"), (6, "", "0,1", "2,3,4,5")],
)
def test_each_job_sees_gpus_of_its_own(visible, named, main, sub):
    env = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    found = split_gpus(main_facts(gpus=2, visible=visible), sub_facts(gpus=4, visible=visible), env)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in found] == [main, sub]


def test_too_few_gpus_are_refused_and_a_cpu_needs_none():
    with pytest.raises(ConfigError, match=r"need 8 \+ 8 GPUs, and this machine has 8"):
        split_gpus(main_facts(gpus=8, visible=8), sub_facts(gpus=8, visible=8), {})
    assert split_gpus(main_facts(device="cpu"), sub_facts(device="cpu"), {}) == ({}, {})


# -- by hand


def test_by_hand_needs_token_and_store_by_name_only():
    job = Job("sub", Path("/r"), ("--config-name=mgrpo_sub",), ("a.b=[c, d]",), (f"drmas.store.url={FROM_STORE}",))
    facts = sub_facts(gateway={"host": "127.0.0.1"})
    text = by_hand(job, facts, "sqlite:////run/store.db")
    assert "ray start" not in text and "ray start" in by_hand(job, sub_facts(nodes=2), None)
    assert "# drmas.gateway.host is 127.0.0.1" in text and "${DRMAS_GATEWAY_TOKEN:?" in text
    words = shlex.split(text.splitlines()[-1])
    assert words[:4] == ["python", "-m", "verl.trainer.main_ppo", "--config-name=mgrpo_sub"]
    assert words[4:] == [f"drmas.store.url={FROM_STORE}", "a.b=[c, d]"]
    run = ["bash", "-c", text.replace("python -m", "echo")]
    refused = subprocess.run(run, env={"PATH": "/bin:/usr/bin"}, capture_output=True, text=True, check=False)
    assert refused.returncode and "DRMAS_GATEWAY_TOKEN" in refused.stderr and not refused.stdout
    env = {"PATH": "/bin:/usr/bin", "DRMAS_GATEWAY_TOKEN": "s3cret", "DRMAS_STORE": "postgresql://x/y"}
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
    assert "s3cret" not in done.stdout and FROM_STORE in done.stdout  # which Hydra reads, not the shell


def test_a_store_of_several_machines_stays_the_configurations():
    facts = sub_facts(gateway={"host": "10.0.0.7"})
    text = by_hand(Job("sub", Path("/r"), ("--config-name=x",)), facts, "postgresql+psycopg://db/drmas")
    assert "DRMAS_STORE" not in text and "gateway.host" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql+psycopg://me:pa:ss@db/x", "postgresql+psycopg://me:***@db/x"),
        ("a=postgresql://:pw@db", "a=postgresql://:***@db"),
        ("sqlite:////a/b@c", "sqlite:////a/b@c"),
        ("http://127.0.0.1:8000 x@y", "http://127.0.0.1:8000 x@y"),
    ],
)
def test_passwords_are_hidden(text, shown):
    assert hide(text) == shown
