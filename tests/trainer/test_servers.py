"""Servers of several models in one job: ranks never collide, each is on its own workers and sleeps when others work."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError

from verl_drmas.trainer import servers as servers_module
from verl_drmas.trainer.servers import FrozenServers, FrozenSync, HybridServers, next_base


def config(tp=1, dp=1, pp=1, gpus=4, nodes=1):
    """A model's configuration, as far as verl's manager reads it."""
    rollout = {
        "name": "vllm",
        "tensor_model_parallel_size": tp,
        "data_parallel_size": dp,
        "pipeline_model_parallel_size": pp,
        "n_gpus_per_node": gpus,
        "nnodes": nodes,
        "disaggregation": {"enabled": False},
        "disable_log_stats": True,
        "prometheus": {"enable": False},
    }
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {"path": "x"}}})


class Replica:
    """verl's replica (`workers/rollout/replica.py`), which slices the workers by its rank and launches nothing."""

    def __init__(self, replica_rank, config, model_config, gpus_per_node):
        self.replica_rank = replica_rank
        self.world_size = (
            config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        )
        self._server_handle, self._server_address = f"handle {replica_rank}", f"address {replica_rank}"
        self.workers, self.pool, self.calls, self.error = None, None, [], None

    async def init_hybrid(self, worker_group):
        self.workers = worker_group.workers[
            self.world_size * self.replica_rank : self.world_size * (self.replica_rank + 1)
        ]

    async def init_colocated(self, resource_pool):
        self.pool = resource_pool

    async def init_standalone(self):
        raise AssertionError("took GPUs of its own")

    async def sleep(self):
        self.calls.append("sleep")

    async def wake_up(self):
        self.calls.append("wake_up")
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def stock(monkeypatch):
    monkeypatch.setattr(servers_module, "_replica_class", lambda config: Replica)
    monkeypatch.setattr(servers_module.LLMServerManager, "_init_global_load_balancer", lambda self: asyncio.sleep(0))


# -- ranks -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 16))
def test_a_base_is_the_first_free_rank_where_sglangs_gpu_numbers_come_out_as_from_0(taken, gpus):
    base = next_base(taken, gpus)
    assert base >= taken
    assert base % gpus == 0
    assert base - taken < gpus  # no more ranks are left out than needed
    for size in range(1, gpus + 1):  # SGLang's first GPU of a replica
        assert [(base + i) * size % gpus for i in range(gpus)] == [i * size % gpus for i in range(gpus)]


@pytest.mark.parametrize(("taken", "gpus", "base"), [(0, 8, 0), (1, 1, 1), (1, 4, 4), (4, 4, 4), (5, 4, 8), (3, 2, 4)])
def test_bases_by_hand(taken, gpus, base):
    assert next_base(taken, gpus) == base


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=6))
def test_no_two_models_servers_have_the_same_rank(models):
    """Models of pools with `gpus` GPUs a node and servers of `size`; ranks name actors and sockets in the whole job."""
    taken, ranks = 0, []
    for nodes, size in models:
        gpus = 8
        base = next_base(taken, gpus)
        count = nodes * gpus // size
        ranks += range(base, base + count)
        taken = base + count
    assert len(ranks) == len(set(ranks))


# -- a trained model's servers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 4, 8])
@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
def test_each_server_stands_on_its_own_models_workers(start, tp, dp, pp):
    workers = [f"worker {i}" for i in range(8)]
    group = SimpleNamespace(workers=workers, world_size=8)
    manager = HybridServers.create(config(tp, dp, pp), group, start)
    size = tp * dp * pp
    replicas = manager.get_replicas()
    assert [replica.replica_rank for replica in replicas] == list(range(start, start + 8 // size))
    assert [replica.workers for replica in replicas] == [workers[i : i + size] for i in range(0, 8, size)]
    assert group.workers is workers and len(workers) == 8
    assert manager.server_addresses == [f"address {start + i}" for i in range(8 // size)]


def test_managers_of_two_models_keep_their_own_offsets():
    """Each has a replica class of its own; an offset of the last model's would move the first one's workers."""
    groups = [SimpleNamespace(workers=[f"{m}{i}" for i in range(2)], world_size=2) for m in "ab"]
    first, second = HybridServers(config(), groups[0], 2), HybridServers(config(), groups[1], 4)
    for manager in (first, second):
        asyncio.run(manager._initialize_llm_servers())
    assert [replica.workers for replica in first.get_replicas()] == [["a0"], ["a1"]]
    assert [replica.workers for replica in second.get_replicas()] == [["b0"], ["b1"]]


# -- a frozen model's servers ------------------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch):
    """verl's split of a pool, which would ask Ray for placement groups."""
    asked = []

    def split(pool, size):
        asked.append((pool, size))
        return [f"{pool} part {i}" for i in range(4 // size)]

    monkeypatch.setattr(servers_module, "split_resource_pool", split)
    return asked


@pytest.mark.parametrize("start", [0, 4, 12])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_frozen_models_servers_share_out_their_pool(parts, start, tp):
    manager = FrozenServers.create(config(tp), "pool", start)
    assert parts == [("pool", tp)]
    replicas = manager.get_replicas()
    assert [replica.replica_rank for replica in replicas] == list(range(start, start + 4 // tp))
    assert [replica.pool for replica in replicas] == [f"pool part {i}" for i in range(4 // tp)]
    assert [replica.workers for replica in replicas] == [None] * (4 // tp)


# -- asleep while others work ------------------------------------------------------------------------------------------


def sync(sleeps, count=2):
    replicas = [Replica(i, config().actor_rollout_ref.rollout, None, 1) for i in range(count)]
    return FrozenSync(SimpleNamespace(get_replicas=lambda: replicas), sleeps), replicas


def calls(replicas):
    return [replica.calls for replica in replicas]


def test_servers_sleep_once_and_wake_once():
    frozen, replicas = sync(sleeps=True)
    frozen.update_weights(0)
    assert calls(replicas) == [[], []]  # awake from the start
    frozen.sleep_replicas()
    frozen.sleep_replicas()
    assert calls(replicas) == [["sleep"]] * 2
    frozen.update_weights(1)
    frozen.update_weights(global_steps=2)
    frozen.update_weights()
    assert calls(replicas) == [["sleep", "wake_up"]] * 2
    frozen.sleep_replicas()
    assert calls(replicas) == [["sleep", "wake_up", "sleep"]] * 2


def test_servers_with_gpus_of_their_own_never_sleep():
    frozen, replicas = sync(sleeps=False)
    for step in range(2):
        frozen.sleep_replicas()
        frozen.update_weights(step)
    assert calls(replicas) == [[], []]


def test_dead_servers_are_forgotten():
    frozen, (dead, alive) = sync(sleeps=True)
    frozen.sleep_replicas()
    frozen.remove_replicas([dead])
    frozen.update_weights(1)
    assert (dead.calls, alive.calls) == (["sleep"], ["sleep", "wake_up"])
    frozen.sleep_replicas()
    assert (dead.calls, alive.calls) == (["sleep"], ["sleep", "wake_up", "sleep"])


def test_a_failed_sleep_is_not_taken_for_one():
    frozen, replicas = sync(sleeps=True, count=1)

    async def broken():
        raise RuntimeError("gone")

    replicas[0].sleep = broken
    with pytest.raises(RuntimeError, match="gone"):
        frozen.sleep_replicas()
    frozen.update_weights(1)
    assert replicas[0].calls == []  # it isn't asleep


def test_a_server_that_died_asleep_is_left_out():
    frozen, (dead, alive) = sync(sleeps=True)
    frozen.sleep_replicas()
    dead.error = ActorDiedError()
    frozen.update_weights(1)
    frozen.sleep_replicas()
    assert (dead.calls, alive.calls) == (["sleep", "wake_up"], ["sleep", "wake_up", "sleep"])


@pytest.mark.parametrize(
    ("errors", "raised"), [((ActorDiedError(),) * 2, ActorDiedError), ((ValueError(), None), ValueError)]
)
def test_the_last_servers_death_and_other_errors_are_not_hidden(errors, raised):
    frozen, replicas = sync(sleeps=True)
    frozen.sleep_replicas()
    for replica, error in zip(replicas, errors, strict=True):
        replica.error = error
    with pytest.raises(raised):
        frozen.update_weights(1)
    assert frozen.replicas == replicas
