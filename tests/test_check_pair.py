"""Two jobs of a pair: mode, sections, store, token and certificates are right before anything is started."""

import importlib.util
import os

import pytest

from verl_drmas.check_pair import STORE_MODE, check_links, check_pair
from verl_drmas.config import ConfigError, parse

STORE = {"url": "sqlite:///pair.db", "role": "sub"}
REMOTE = {"store": "sqlite:///pair.db", "role": "sub"}
WORKFLOW = {"name": "delegate"}
MAIN, SUB = {"main": {"model": "main"}}, {"finder": {"model": "sub"}}


def playing(**changes):
    """The section of a job that plays."""
    remote = {**REMOTE, **changes.pop("remote", {})}
    return {
        "workflow": WORKFLOW,
        "agents": MAIN | SUB,
        "models": {"main": {}, "sub": {"remote": remote}},
        **changes,
    }


def training(**changes):
    """The section of a job that trains on what the other plays."""
    return {"workflow": WORKFLOW, "agents": SUB, "models": {"sub": {}}, "store": STORE, **changes}


def refusal(check, *args):
    with pytest.raises(ConfigError) as caught:
        check(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_jobs_pass():
    check_pair(parse(playing()), "drmas_sync")
    check_pair(parse(training()), STORE_MODE)


@pytest.mark.parametrize(
    ("section", "mode", "line"),
    [
        (playing(workflow=None), "drmas_sync", "drmas.models.sub.remote: a stock agent loop speaks to this job's "),
        (training(), "drmas_sync", "drmas.store is set, and trainer.v1.trainer_mode is 'drmas_sync': a job that "),
        (training(store=None), STORE_MODE, "trainer.v1.trainer_mode is 'drmas_store', and drmas.store is not set; "),
        (training(workflow=None), STORE_MODE, "drmas.workflow.name is missing; name the workflow of the job "),
        (
            training(models={"sub": {}, "more": {}}, agents=SUB | {"reader": {"model": "more"}}),
            STORE_MODE,
            "drmas.models lists 2 models; a job of mode drmas_store trains one: ",
        ),
        (training(agents={}), STORE_MODE, "drmas.agents is empty; list the agents that are on this job's model"),
        (
            training(curriculum=[{"name": "all", "files": ["a"]}]),
            STORE_MODE,
            "drmas.curriculum: the prompts are the other job's; set it there",
        ),
    ],
)
def test_what_does_not_fit_together_is_one_line(section, mode, line):
    assert refusal(check_pair, parse(section), mode).startswith(line)


# -- what must be there ------------------------------------------------------------------------------------------------


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("DRMAS_GATEWAY_TOKEN", "long-and-random")


def test_links_that_are_there_pass_and_open_nothing(token, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.pem").touch()
    (tmp_path / "key.pem").touch()
    check_links(parse(playing(remote={"ca": "ca.pem"})))
    check_links(parse(training(gateway={"tls_cert": str(tmp_path / "ca.pem"), "tls_key": "key.pem"})))
    assert sorted(os.listdir()) == ["ca.pem", "key.pem"]


def test_a_run_of_its_own_needs_no_token(monkeypatch):
    monkeypatch.delenv("DRMAS_GATEWAY_TOKEN", raising=False)
    check_links(parse({"agents": MAIN, "models": {"main": {}}}))


@pytest.mark.parametrize("value", [None, "", "  "])
@pytest.mark.parametrize(
    ("section", "key"),
    [
        (playing(remote={"token_env": "MINE"}), "drmas.models.sub.remote.token_env"),
        (training(gateway={"token_env": "MINE"}), "drmas.gateway.token_env"),
    ],
)
def test_a_missing_token_is_named_by_its_variable(monkeypatch, token, value, section, key):
    monkeypatch.delenv("MINE", raising=False)
    if value is not None:
        monkeypatch.setenv("MINE", value)
    line = refusal(check_links, parse(section))
    assert line.startswith(f"{key} is 'MINE', and the variable is not set; set it to the same long random text")


def test_a_token_that_no_header_can_carry_is_refused_before_engines_start(monkeypatch):
    monkeypatch.setenv("DRMAS_GATEWAY_TOKEN", "two words")
    assert "holds characters that no token has" in refusal(check_links, parse(training()))


def test_a_gateway_on_all_addresses_says_which_one_to_call(token):
    line = refusal(check_links, parse(training(gateway={"host": "0.0.0.0"})))
    assert line.startswith("drmas.gateway.host is '0.0.0.0', which is no address to call: set drmas.gateway.public_url")
    check_links(parse(training(gateway={"host": "0.0.0.0", "public_url": "http://10.0.0.2:8731"})))


@pytest.mark.parametrize(
    ("section", "line"),
    [
        (playing(remote={"ca": "/no/ca.pem"}), "drmas.models.sub.remote.ca is '/no/ca.pem', which is no file"),
        (
            training(gateway={"tls_cert": "/no/c", "tls_key": "/no/k"}),
            "drmas.gateway.tls_cert is '/no/c', which is no file",
        ),
        (
            training(gateway={"tls_cert": __file__, "tls_key": "/no/k"}),
            "drmas.gateway.tls_key is '/no/k', which is no file",
        ),
    ],
)
def test_a_file_that_is_not_there_is_named(token, section, line):
    assert refusal(check_links, parse(section)) == line


@pytest.mark.parametrize("url", ["mysql://me:hidden@host/db", "sqlite:///:memory:", "postgresql://me:hidden@host", "x"])
def test_an_url_that_no_store_can_have_is_refused_without_its_password(token, url):
    for section, key in (
        (playing(remote={"store": url}), "drmas.models.sub.remote.store"),
        (training(store={**STORE, "url": url}), "drmas.store.url"),
    ):
        line = refusal(check_links, parse(section))
        assert line.startswith(f"{key}: ") and "sqlite:///" in line
        assert "hidden" not in line


def test_a_missing_library_is_named_with_the_extra_that_brings_it(token, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sqlalchemy" else find(name))
    line = refusal(check_links, parse(playing()))
    assert line == "two jobs with a store need sqlalchemy; pip install 'verl-drmas[store]'"
