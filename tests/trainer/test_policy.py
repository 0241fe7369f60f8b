"""How a step's rows become a fixed number of updates, each with real rows, and what a policy's configuration says."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl_drmas.compose import default_updates
from verl_drmas.config import parse
from verl_drmas.trainer import policy as policy_module
from verl_drmas.trainer.lanes import Driver
from verl_drmas.trainer.policy import Policy, feasible_updates, in_rows, spread
from verl_drmas.trainer.worker import TeamActorRolloutRefWorker


@st.composite
def steps(draw):
    """(rows, ranks, updates, which rows of the padded batch are padding), the padding anywhere, as verl may put it."""
    ranks = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 60))
    updates = feasible_updates(draw(st.integers(1, 6)), rows=rows, ranks=ranks)
    total = math.ceil(rows / (ranks * updates)) * ranks * updates
    padding = draw(st.permutations([False] * rows + [True] * (total - rows)))
    return rows, ranks, updates, list(padding)


def slices(order, ranks, updates):
    """Row numbers of each (rank, update): a rank trains its block from front to back, one slice an update."""
    block = len(order) // ranks
    size = block // updates
    return {
        (rank, update): order[rank * block + update * size :][:size]
        for rank in range(ranks)
        for update in range(updates)
    }


@settings(max_examples=300, deadline=None)
@given(steps())
def test_spread(step):
    rows, ranks, updates, padding = step
    order = spread(padding, ranks=ranks, updates=updates)
    assert sorted(order) == list(range(len(padding)))
    parts = slices(order, ranks, updates)
    block = len(padding) // ranks
    for (rank, _), part in parts.items():
        assert all(rank * block <= row < (rank + 1) * block for row in part)  # rows stay with their rank
    for rank in range(ranks):
        real = [row for row in order[rank * block : (rank + 1) * block] if not padding[row]]
        assert real == sorted(real)  # and real rows keep their order
    total = sum(padding)
    for update in range(updates):
        mine = [row for rank in range(ranks) for row in parts[rank, update]]
        padded = sum(padding[row] for row in mine)
        assert padded <= math.ceil(total / updates)
        if rows >= updates * ranks:
            assert len(mine) - padded >= ranks


@given(st.integers(1, 8), st.integers(1, 200), st.integers(1, 8))
def test_feasible_updates(wanted, rows, ranks):
    updates = feasible_updates(wanted, rows=rows, ranks=ranks)
    assert 1 <= updates <= wanted
    assert updates == 1 or updates * ranks <= rows
    if updates < wanted:
        assert (updates + 1) * ranks > rows  # no more than needed are dropped


@pytest.mark.parametrize(
    ("wanted", "rows", "ranks", "expected"), [(4, 64, 2, 4), (4, 7, 2, 3), (4, 1, 2, 1), (2, 2, 1, 2), (3, 5, 8, 1)]
)
def test_feasible_updates_by_hand(wanted, rows, ranks, expected):
    assert feasible_updates(wanted, rows=rows, ranks=ranks) == expected


def test_spread_by_hand():
    padding = [False, False, False, True, True, False, False, False]  # two ranks, the padding at the seam
    assert spread(padding, ranks=2, updates=2) == [0, 3, 1, 2, 5, 6, 7, 4]


def config(**values):
    return OmegaConf.create(
        {
            "data": {"train_batch_size": 8},
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": 4, "ppo_epochs": 2, "optim": {"total_training_steps": -1}},
                "rollout": {"n": 5, "temperature": 1.0, "nnodes": 0},
            },
            "trainer": {"v1": {"trainer_mode": "drmas_sync"}, "resume_mode": "auto", "checkpoint_callback_class": "x"},
            "reward": {"num_workers": 3},
            **values,
        }
    )


def test_a_policys_configuration_counts_rows(monkeypatch):
    seen = {}

    def validate(config, **kwargs):
        seen.update(mini=config.actor_rollout_ref.actor.ppo_mini_batch_size, n=config.actor_rollout_ref.rollout.n)

    monkeypatch.setattr(policy_module, "validate_config", validate)
    monkeypatch.setattr(policy_module, "need_reference_policy", lambda config: False)
    run = config()
    run.actor_rollout_ref.actor.optim.total_training_steps = 70  # set by the data loader
    built = in_rows(config(), run, parse({"faults": {"sync_timeout": 12.0}}))
    assert seen == {"mini": 4, "n": 5}  # verl's own checks saw the user's numbers
    model = built.actor_rollout_ref
    assert model.actor.ppo_mini_batch_size * model.rollout.n == 4 * 5
    assert model.rollout.n == 1
    assert model.sync_timeout == 12.0
    assert model.actor.optim.total_training_steps == 70
    assert built.trainer.resume_mode == "disable"
    assert built.trainer.v1.trainer_mode == "sync"
    assert built.reward.num_workers == 0


@pytest.mark.parametrize(("prompts", "mini", "updates"), [(8, 4, 2), (8, 8, 1), (8, 16, 1), (9, 4, 2)])
def test_default_updates_are_verls(prompts, mini, updates):
    run = config(data={"train_batch_size": prompts})
    run.actor_rollout_ref.actor.ppo_mini_batch_size = mini
    assert default_updates(run) == updates


def policy(updates, ranks, monkeypatch, stage):
    """A `Policy` without Ray whose inherited `stage` is recorded."""
    built = object.__new__(Policy)
    built.model_id, built.updates_per_step, built._updates, built._rows = "base", updates, updates, 0
    built.config = config()
    built.actor_rollout_wg = type("Group", (), {"_dispatch_info": {"actor": list(range(ranks))}})()
    name, function = stage
    monkeypatch.setattr(Policy.__mro__[1], name, function)
    return built


def batch(rows, padding):
    tags = [{"is_padding": p} if p else {} for p in padding]
    return KVBatchMeta(keys=[f"k{i}" for i in range(rows)], tags=tags, partition_id="train")


def test_balancing_pads_to_the_updates_and_spreads_the_padding(monkeypatch):
    seen = []

    def balance(self, batch, metrics, **kwargs):
        multiple = self._get_required_batch_multiple(2)
        seen.append(multiple)
        total = math.ceil(len(batch) / multiple) * multiple
        padding = [False] * len(batch) + [True] * (total - len(batch))
        return batch_of(total, padding)

    batch_of = batch
    built = policy(3, 2, monkeypatch, ("_balance_batch", balance))
    balanced = built._balance_batch(batch(19, [False] * 19), {})
    assert seen == [6]
    assert len(balanced) == 24
    parts = slices([tag.get("is_padding", False) for tag in balanced.tags], 2, 3)
    per_update = [sum(sum(parts[rank, update]) for rank in range(2)) for update in range(3)]
    assert sorted(per_update) == [1, 2, 2]
    assert [tag.get("is_padding", False) for tag in balanced.tags] == [
        int(key[1:]) >= 19 for key in balanced.keys
    ]  # tags move with their keys


def test_few_rows_make_fewer_updates(monkeypatch):
    built = policy(4, 2, monkeypatch, ("_balance_batch", lambda self, batch, metrics: batch))
    built._rows = 5
    assert built._get_required_batch_multiple(2) == 4  # two updates of two ranks
    assert built._updates == 2


def test_an_update_is_an_equal_share_of_the_rows_and_is_logged(monkeypatch):
    def update(self, batch, metrics):
        metrics["mini"] = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        metrics["actor/grad_norm"] = 0.5
        return batch

    built = policy(3, 2, monkeypatch, ("_update_actor", update))
    metrics = {}
    built._update_actor(batch(24, [i >= 19 for i in range(24)]), metrics)
    assert metrics["mini"] == 8
    assert (metrics["rows"], metrics["padding_rows"]) == (19, 5)
    assert metrics["padding_share"] == pytest.approx(5 / 24)
    assert metrics["updates"] == 6  # three a step, two epochs
    assert metrics["actor/grad_norm"] == 0.5


# -- its place ---------------------------------------------------------------------------------------------------------


def placed(base, monkeypatch):
    """A `Policy` on a pool that is there already, with verl's own method replaced by what it would leave."""

    def init(self):
        self.role_worker_mapping = {"actor_rollout_ref": "verl's worker"}
        self.resource_pool_manager = "a pool of its own"
        self.hybrid_when_asked = getattr(self, "_enable_hybrid_replicas", True)

    monkeypatch.setattr(Policy.__mro__[1], "_init_resource_pool_mgr", init)
    monkeypatch.setattr(policy_module.ray, "remote", lambda cls: ("remote", cls))
    built = object.__new__(Policy)
    built._placed = SimpleNamespace(name_prefix="left", store=[2, 2])
    built._replica_base = base
    built._init_resource_pool_mgr()
    return built


@pytest.mark.parametrize("base", [0, 4])
def test_a_policy_trains_on_the_pool_that_was_handed_over(base, monkeypatch):
    built = placed(base, monkeypatch)
    manager = built.resource_pool_manager
    manager.create_resource_pool()  # verl does this next
    assert manager.resource_pool_dict == {"left": built._placed}
    assert manager.get_resource_pool("actor_rollout_ref") is built._placed
    assert built.role_worker_mapping == {"actor_rollout_ref": ("remote", TeamActorRolloutRefWorker)}


@pytest.mark.parametrize(("base", "hybrid"), [(0, True), (1, False), (8, False)])
def test_verl_starts_the_servers_of_the_model_with_the_first_ranks_only(base, hybrid, monkeypatch):
    built = placed(base, monkeypatch)
    assert built._enable_hybrid_replicas is hybrid
    assert built.hybrid_when_asked is True  # else verl would give the workers no rollout


class Servers:
    """A server manager's parts that `_setup` uses."""

    def __init__(self, log, names):
        self.log, self.names, self.global_load_balancer = log, names, f"balancer of {names}"

    def get_replicas(self):
        return list(self.names)


def set_up(base, monkeypatch, ref=True):
    """A `Policy` after `_setup`, and what it did to servers, in order."""
    log = []

    def setup(self):
        self.actor_rollout_wg = SimpleNamespace(name="group", compute_log_prob=lambda: "log-probs")
        self.llm_server_manager = Servers(log, [] if self._replica_base else ["server 0"])
        self.checkpoint_manager = SimpleNamespace(
            add_replicas=lambda replicas: log.append(("add", replicas)),
            sleep_replicas=lambda: log.append(("sleep",)),
        )
        if ref:
            self.ref_policy_wg = self.actor_rollout_wg

    def create(config, group, start):
        log.append(("create", config, group.name, start))
        return Servers(log, [f"server {start}"])

    monkeypatch.setattr(Policy.__mro__[1], "_setup", setup)
    monkeypatch.setattr(policy_module.HybridServers, "create", create)
    monkeypatch.setattr(policy_module.ray, "kill", lambda actor: log.append(("kill", actor)))
    built = object.__new__(Policy)
    built.config, built._replica_base, built._driver = "own", base, Driver()
    built._setup()
    return built, log


def test_servers_of_a_later_model_get_their_own_ranks_and_sleep_until_they_are_needed(monkeypatch):
    built, log = set_up(4, monkeypatch)
    assert log == [
        ("kill", "balancer of []"),
        ("create", "own", "group", 4),
        ("add", ["server 4"]),
        ("sleep",),
    ]
    assert built.llm_server_manager.get_replicas() == ["server 4"]


def test_servers_of_the_first_model_are_verls(monkeypatch):
    built, log = set_up(0, monkeypatch)
    assert log == []
    assert built.llm_server_manager.get_replicas() == ["server 0"]


@pytest.mark.parametrize("ref", [True, False])
def test_long_calls_let_go_of_the_driver(ref, monkeypatch):
    built, _ = set_up(0, monkeypatch, ref)
    with built._driver.held():
        assert built.actor_rollout_wg.compute_log_prob() == "log-probs"
    assert getattr(built, "ref_policy_wg", None) is (built.actor_rollout_wg if ref else None)


@pytest.mark.parametrize(
    ("folder", "path"),
    [("runs/global_step_3/actor/a", "{cwd}/runs/global_step_3/actor/a"), ("/x/./a", "/x/a"), ("~/a", "{home}/a")],
)
def test_a_checkpoint_to_start_from_is_named_by_its_absolute_path(folder, path, tmp_path, monkeypatch):
    """Workers run in folders of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    loaded = []
    built = object.__new__(Policy)
    built.actor_rollout_wg = SimpleNamespace(load_weights=loaded.append)
    built.start_from(folder)
    assert loaded == [path.format(cwd=tmp_path, home="/home/someone")]


def test_a_dead_servers_worker_is_told_by_rank_and_workers_and_servers_are_killed(monkeypatch):
    dropped, killed = [], []
    monkeypatch.setattr(policy_module.ray, "kill", killed.append)
    built = object.__new__(Policy)
    built.actor_rollout_wg = SimpleNamespace(drop_server=dropped.append, workers=["w0", "w1"])
    replicas = [SimpleNamespace(servers=["s0"]), SimpleNamespace(servers=["s1", "s2"])]
    built.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)
    built.drop_server(SimpleNamespace(replica_rank=5))
    built.kill_workers()
    assert (dropped, killed) == ([5], ["w0", "w1", "s0", "s1", "s2"])  # a call may wait for either
