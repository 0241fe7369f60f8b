"""A served model: its servers on its pool, no workers, asleep only where others need its GPUs."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_drmas.placement import Pool
from verl_drmas.rollout.client import RetryingClient
from verl_drmas.trainer import frozen as frozen_module
from verl_drmas.trainer import servers as servers_module
from verl_drmas.trainer.fan import Fan
from verl_drmas.trainer.frozen import FrozenModel
from verl_drmas.trainer.lanes import Lanes


class Replica:
    def __init__(self, log, rank):
        self.log, self.rank, self.servers = log, rank, [f"server {rank}"]

    async def sleep(self):
        self.log.append(("sleep", self.rank))

    async def wake_up(self):
        self.log.append(("wake_up", self.rank))


class Servers:
    """verl's manager, with two servers."""

    def __init__(self, log, config, placed, base):
        self.config, self.made = config, (placed, base)
        self.replicas = [Replica(log, base), Replica(log, base + 1)]

    def get_replicas(self):
        return self.replicas

    def get_client(self, client_cls):
        return client_cls(self.config, None)


@pytest.fixture
def make(monkeypatch):
    """A frozen model on a pool, and what happened to its servers."""

    def make(pool, free_cache_engine=True):
        log = []
        monkeypatch.setattr(frozen_module.FrozenServers, "create", lambda *args: Servers(log, *args))
        rollout = {"n_gpus_per_node": 99, "nnodes": 0, "free_cache_engine": free_cache_engine}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        OmegaConf.set_struct(config, True)
        return FrozenModel("judge", config, pool, "placed", 4), log

    return make


OWN, SHARED = Pool("right", 2, 3, ("judge",)), Pool("run", 2, 1, ("base", "judge"))


def test_its_servers_fill_its_pool(make):
    """verl counts servers without workers from these two keys, whose defaults say 0 nodes."""
    model, _ = make(OWN)
    rollout = model.llm_server_manager.config.actor_rollout_ref.rollout
    assert (rollout.n_gpus_per_node, rollout.nnodes) == (2, 3)
    assert model.llm_server_manager.made == ("placed", 4)


def test_on_a_shared_pool_it_sleeps_from_the_start_and_between_rollouts(make):
    model, log = make(SHARED)
    assert log == [("sleep", 4), ("sleep", 5)]
    fan = Fan({"judge": model.checkpoint_manager}, Lanes({"run": SHARED}))  # as the trainer calls it
    fan.update_weights(1)
    fan.sleep_replicas()
    assert log[2:] == [("wake_up", 4), ("wake_up", 5), ("sleep", 4), ("sleep", 5)]


@pytest.mark.parametrize(("pool", "free"), [(OWN, True), (SHARED, False), (OWN, False)])
def test_alone_or_without_a_sleep_mode_it_stays_awake(make, pool, free):
    model, log = make(pool, free)
    model.checkpoint_manager.update_weights(1)
    model.checkpoint_manager.sleep_replicas()
    assert log == []


def test_its_calls_are_asked_again_like_any_other(make):
    model, _ = make(OWN)
    client = model.get_llm_client()
    assert isinstance(client, RetryingClient) and client.config is model.config


def test_servers_that_hang_are_killed(make, monkeypatch):
    killed = []
    monkeypatch.setattr(servers_module.ray, "kill", killed.append)
    model, _ = make(OWN)
    model.drop_server(SimpleNamespace(replica_rank=4))  # there is no worker to tell
    assert killed == []
    model.kill_workers()
    assert killed == ["server 4", "server 5"]
