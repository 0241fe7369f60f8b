"""What a launcher learns of a configuration, from the shipped ones and from refusals."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl_drmas.config import ConfigError
from verl_drmas.pair.facts import Facts, look, read


def config(**drmas):
    return OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "drmas_sync"}, "device": "cuda", "n_gpus_per_node": 4, "nnodes": 2},
            "drmas": drmas,
        }
    )


def test_gpus_are_those_of_the_pools_that_this_job_uses():
    assert (read(config()).gpus, read(config()).nodes) == (4, 2)
    pools = {"right": {"n_gpus_per_node": 2, "nnodes": 3}}
    two = config(models={"a": None, "b": {"pool": "right"}}, pools=pools)
    assert (read(two).gpus, read(two).nodes) == (6, 3)
    remote = config(models={"a": {"remote": {"role": "r"}}, "b": {"pool": "right"}}, pools=pools)
    assert (read(remote).gpus, read(remote).nodes) == (2, 3)
    assert read(remote).remotes == {"a": {"role": "r"}}


def test_defaults_are_the_settings_own():
    facts = read(config(store={"role": "sub", "url": None}))
    assert (facts.host, facts.port, facts.token_variables) == ("127.0.0.1", 8731, ["DRMAS_GATEWAY_TOKEN"])
    own = read(config(store={"role": "sub"}, gateway={"host": "10.0.0.1", "port": 0, "token_env": "T"}))
    assert (own.host, own.port, own.token_variables) == ("10.0.0.1", 0, ["T"])
    main = read(config(models={"a": {"remote": {"token_env": "A"}}, "b": {"remote": {"token_env": "A"}}}))
    assert main.token_variables == ["A"]
    assert read(config()).token_variables == []


@pytest.mark.process
def test_the_shipped_pairs_are_read_in_processes_of_their_own():
    code = "import sys; import verl_drmas.pair.command; print({'verl', 'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "set()"  # a launcher lives as long as the jobs
    jobs = {name: [f"--config-name=cpu_delegate_{name}", "trainer.total_training_steps=3"] for name in ("main", "sub")}
    found = look(jobs, {**os.environ, "VERL_PLATFORM": "cpu"})
    assert {name: (facts.mode, facts.device) for name, facts in found.items()} == {
        "main": ("drmas_sync", "cpu"),
        "sub": ("drmas_store", "cpu"),
    }
    assert found["main"].remotes["sub"]["role"] == found["sub"].store["role"] == "sub"
    assert isinstance(found["sub"], Facts)


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config-name=no_such"], "sub: Cannot find primary config 'no_such'"),
        (["--config-name=cpu_delegate_sub", "drmas.no_such=1"], "sub: Could not override 'drmas.no_such'"),
    ],
)
def test_why_a_configuration_cant_be_composed_is_one_line(arguments, told):
    with pytest.raises(ConfigError, match=told) as refusal:
        look({"sub": arguments}, {**os.environ, "VERL_PLATFORM": "cpu"})
    assert "\n" not in str(refusal.value)
