"""A weight update outlives a dead server without leaving the other ranks alone, and rows keep their temperature."""

import ast
import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, RayTaskError
from tensordict import TensorDict
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import replica as replica_module
from verl.workers.rollout.utils import ensure_async_iterator
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

from verl_drmas.sockets import EXTENSION, job_socket
from verl_drmas.trainer.worker import GuardedRollout, TeamActorRolloutRefWorker, use_row_temperature

OPTIONS = (zmq.RCVTIMEO, zmq.SNDTIMEO)


class EngineDeadError(Exception):
    """Named as vLLM's."""


class Adapter:
    """verl's server adapter: takes `take` tensors of the stream, then raises `error`, as a sender that fails does."""

    replica_rank = 1

    def __init__(self, error=None, take=99, wake_error=None):
        self.error, self.take, self.wake_error = error, take, wake_error
        self.sent, self.woken, self.options, self.arguments = [], [], [], None

    async def resume(self, tags):
        self.woken.append(tags)
        if self.wake_error is not None:
            raise self.wake_error

    async def update_weights(self, weights, **kwargs):
        self.arguments = kwargs
        context = zmq.Context.instance()
        self.options.append([context.sockopts.get(option) for option in OPTIONS])
        async for name, _ in ensure_async_iterator(weights):
            if len(self.sent) == self.take:
                break
            self.sent.append(name)
        if self.error is not None:
            raise self.error


class Weights:
    """The gather over all ranks: each step must be taken by every rank."""

    def __init__(self, count=5):
        self.count, self.gathered, self.closed = count, 0, False

    def __iter__(self):
        try:
            for i in range(self.count):
                self.gathered += 1
                yield f"w{i}", torch.zeros(1)
        except GeneratorExit:
            self.closed = True
            raise


def update(guard, weights, **kwargs):
    asyncio.run(guard.update_weights(iter(weights), **kwargs))


def test_a_healthy_server_gets_everything():
    adapter, weights = Adapter(), Weights()
    update(GuardedRollout(adapter, 30.0), weights, global_steps=3, peft_config=None)
    assert adapter.sent == ["w0", "w1", "w2", "w3", "w4"]
    assert adapter.arguments == {"global_steps": 3, "peft_config": None}


DEATHS = {
    "no answer in time": zmq.Again(),
    "the actor died": ActorDiedError(),
    "the engine died": RayTaskError("collective_rpc", "trace", EngineDeadError()),
}


@pytest.mark.parametrize("take", [0, 2, 99])
@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_a_server_that_dies_meanwhile_still_drains_the_gather(death, take):
    adapter, weights = Adapter(death, take), Weights()
    guard = GuardedRollout(adapter, 30.0)
    update(guard, weights)
    assert weights.gathered == 5
    assert not weights.closed
    assert guard.dead
    assert len(adapter.sent) == min(take, 5)


def test_a_dead_server_gets_nothing_and_the_gather_goes_on():
    adapter, weights = Adapter(), Weights()
    guard = GuardedRollout(adapter, 30.0)
    guard.dead = True
    update(guard, weights)
    asyncio.run(guard.resume(tags=["weights"]))
    assert (adapter.sent, adapter.woken, weights.gathered) == ([], [], 5)


@pytest.mark.parametrize("error", [ValueError("too large"), RayTaskError("x", "trace", ValueError("too large"))])
def test_other_errors_are_not_hidden(error):
    guard = GuardedRollout(Adapter(error), 30.0)
    with pytest.raises(type(error)):
        update(guard, Weights())
    assert not guard.dead


def test_a_server_found_dead_at_wake_up_does_not_stop_the_gather_that_follows():
    adapter, weights = Adapter(wake_error=ActorDiedError()), Weights()
    guard = GuardedRollout(adapter, 30.0)
    asyncio.run(guard.resume(tags=["weights"]))
    update(guard, weights)
    assert guard.dead
    assert (adapter.sent, weights.gathered) == ([], 5)


def test_another_error_at_wake_up_is_not_hidden():
    guard = GuardedRollout(Adapter(wake_error=ValueError("no such tag")), 30.0)
    with pytest.raises(ValueError, match="no such tag"):
        asyncio.run(guard.resume(tags=["x"]))


@pytest.mark.parametrize("error", [None, zmq.Again(), ValueError()])
@pytest.mark.parametrize("before", [None, 1234])
def test_sockets_have_a_time_out_meanwhile_and_not_afterwards(error, before):
    context = zmq.Context.instance()
    if before is not None:
        context.setsockopt(zmq.RCVTIMEO, before)
    try:
        adapter = Adapter(error)
        try:
            update(GuardedRollout(adapter, 1.5), Weights())
        except ValueError:
            assert isinstance(error, ValueError)
        assert adapter.options == [[1500, 1500]]
        assert context.sockopts.get(zmq.RCVTIMEO) == before
        assert zmq.SNDTIMEO not in context.sockopts
    finally:
        context.sockopts.pop(zmq.RCVTIMEO, None)


def test_verls_own_sender_gives_up_on_a_server_that_never_answers(tmp_path, monkeypatch):
    """The real one: it opens its socket from the shared context and sets no time-out."""
    device = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    monkeypatch.setattr(bucketed_weight_transfer, "get_torch_device", lambda: device)
    monkeypatch.setattr(bucketed_weight_transfer, "is_support_ipc", lambda: False)

    class Real(Adapter):
        async def update_weights(self, weights, **kwargs):
            handle = f"ipc://{tmp_path}/w.sock"
            sender = bucketed_weight_transfer.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
            await sender.async_send_weights(weights)

    weights, guard = Weights(), GuardedRollout(Real(), 0.05)
    thread = threading.Thread(target=update, args=(guard, weights), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert guard.dead
    assert weights.gathered == 5


def test_what_verl_sets_and_reads_is_the_adapters():
    adapter = Adapter()
    guard = GuardedRollout(adapter, 30.0)
    guard.sleep_level = 1
    assert adapter.sleep_level == 1
    assert guard.replica_rank == 1
    guard.dead = True
    assert not hasattr(adapter, "dead")


@pytest.mark.parametrize(("replica", "dead"), [(1, True), (0, False)])
def test_the_named_server_is_dropped(replica, dead):
    worker = SimpleNamespace(rollout=GuardedRollout(Adapter(), 30.0))
    TeamActorRolloutRefWorker.drop_server(worker, replica)
    assert worker.rollout.dead is dead
    TeamActorRolloutRefWorker.drop_server(SimpleNamespace(rollout=None), replica)


# -- a temperature per row ---------------------------------------------------------------------------------------------


def data(**fields):
    td = TensorDict({"input_ids": torch.zeros(3, 2), **fields}, batch_size=3)
    tu.assign_non_tensor_data(td, "temperature", 1.0)  # as verl's trainer puts the run's
    return td


def test_rows_with_a_temperature_are_trained_with_it():
    td = use_row_temperature(data(row_temperature=torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)), True)
    assert td["temperature"].tolist() == [0.5, 1.0, 1.5]
    assert td["temperature"].dtype == torch.float32
    assert td[1:]["temperature"].tolist() == [1.0, 1.5]  # a mini-batch takes its own rows'


def test_a_column_of_temperatures_is_flattened():
    td = use_row_temperature(data(row_temperature=torch.tensor([[0.5], [1.0], [1.5]])), True)
    assert td["temperature"].shape == (3,)


def test_rows_without_keep_the_runs():
    td = use_row_temperature(data(), True)
    assert tu.get_non_tensor_data(td, "temperature", None) == 1.0


def test_a_model_whose_rows_agree_keeps_one_temperature():
    # Another model's may differ, so that all rows carry theirs; verl's fused kernels take one number only.
    td = use_row_temperature(data(row_temperature=torch.tensor([1.0, 1.0, 1.0])), False)
    assert tu.get_non_tensor_data(td, "temperature", None) == 1.0


@pytest.mark.parametrize("method", ["compute_log_prob", "compute_ref_log_prob", "update_actor"])
def test_the_stages_hand_the_temperature_on_and_are_dispatched_as_verls(method, monkeypatch):
    seen = []
    monkeypatch.setattr(ActorRolloutRefWorker, method, lambda self, td: seen.append(td["temperature"].tolist()) or td)
    worker = object.__new__(TeamActorRolloutRefWorker)
    worker.config = SimpleNamespace(row_temperature=True)
    td = data(row_temperature=torch.tensor([0.5, 1.0, 1.5]))
    assert getattr(worker, method)(td) is td
    assert seen == [[0.5, 1.0, 1.5]]


@pytest.mark.parametrize("method", ["init_model", "compute_log_prob", "compute_ref_log_prob", "update_actor"])
def test_overridden_methods_are_dispatched_as_verls(method):
    ours, theirs = (getattr(getattr(c, method), MAGIC_ATTR) for c in (TeamActorRolloutRefWorker, ActorRolloutRefWorker))
    assert ours["blocking"] == theirs["blocking"]
    assert ours["execute_mode"] == theirs["execute_mode"]

    def shape(mode):
        return {k: (f.func, f.args) for k, f in mode.items()} if isinstance(mode, dict) else mode

    assert shape(ours["dispatch_mode"]) == shape(theirs["dispatch_mode"])


# -- servers whose ranks don't begin at 0 ------------------------------------------------------------------------------


class BuiltAdapter:
    """verl's server adapter as its worker builds it: without a rank, which it then takes from the process."""

    def __init__(self, config, model_config, device_mesh, replica_rank=-1):
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh
        self.replica_rank = 3 if replica_rank == -1 else replica_rank


class OtherAdapter(BuiltAdapter):
    """Another engine's."""


def initialised(monkeypatch, config, adapter=BuiltAdapter):
    """A worker after `init_model`, and the adapter that verl's left."""
    made = adapter and adapter("rollout", "model", "mesh")
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: setattr(self, "rollout", made))
    worker = object.__new__(TeamActorRolloutRefWorker)
    worker.config = OmegaConf.create(config)
    worker.init_model()
    return worker, made


@pytest.mark.parametrize("adapter", [BuiltAdapter, OtherAdapter])
@pytest.mark.parametrize("base", [1, 8])
def test_the_adapter_feeds_the_server_of_its_own_model(monkeypatch, adapter, base):
    worker, made = initialised(monkeypatch, {"replica_base": base, "sync_timeout": 7.0}, adapter)
    assert isinstance(worker.rollout, GuardedRollout)
    rebuilt = worker.rollout.adapter
    assert type(rebuilt) is adapter and rebuilt is not made
    assert rebuilt.replica_rank == worker.rollout.replica_rank == 3 + base
    assert (rebuilt.config, rebuilt.model_config, rebuilt.device_mesh) == ("rollout", "model", "mesh")
    assert worker.rollout.sync_timeout == 7.0


def test_the_first_models_adapter_is_verls(monkeypatch):
    worker, made = initialised(monkeypatch, {"replica_base": 0, "sync_timeout": 7.0})
    assert worker.rollout.adapter is made
    assert worker.rollout.replica_rank == 3
    assert worker.rollout.sync_timeout == 7.0


@pytest.mark.parametrize("base", [0, 1])
def test_a_named_jobs_adapter_sends_to_a_socket_of_its_own(monkeypatch, base):
    class SocketAdapter(BuiltAdapter):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.config = SimpleNamespace(engine_kwargs={"vllm": {"worker_extension_cls": EXTENSION}})
            self.zmq_handle = f"ipc:///tmp/replica-{self.replica_rank}.sock"

    for job, named in (("main", True), ("", False)):
        monkeypatch.setenv("DRMAS_JOB", job)
        worker, _ = initialised(monkeypatch, {"replica_base": base, "sync_timeout": 7.0}, SocketAdapter)
        stock = f"ipc:///tmp/replica-{3 + base}.sock"
        assert worker.rollout.zmq_handle == job_socket(stock)
        assert (worker.rollout.zmq_handle != stock) is named


def test_a_worker_without_servers_has_none_to_guard(monkeypatch):
    worker, _ = initialised(monkeypatch, {"replica_base": 8, "sync_timeout": 7.0}, adapter=None)
    assert worker.rollout is None


def test_every_engine_of_verls_takes_the_rank_that_its_worker_does_not_pass():
    """By name, in the adapters' own signatures; without it the servers of several models couldn't be told apart."""
    for folder in ("vllm_rollout/vllm_rollout.py", "sglang_rollout/sglang_rollout.py"):
        source = Path(replica_module.__file__).parent / folder
        (adapter,) = [
            node
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.ClassDef) and node.name == "ServerAdapter"
        ]
        (init,) = [node for node in adapter.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        names = [argument.arg for argument in init.args.args]
        assert set(names) >= {"config", "model_config", "device_mesh", "replica_rank"}, folder


# -- weights alone -----------------------------------------------------------------------------------------------------

CONTENTS = ["model", "optimizer", "extra"]


class Checkpointed:
    """verl's actor: loads what its engine's checkpoint manager is set to."""

    def __init__(self, name, error=None):
        self.manager = SimpleNamespace(checkpoint_load_contents=CONTENTS)
        self.engine = SimpleNamespace(**{name: self.manager})
        self.error, self.loaded = error, []

    def load_checkpoint(self, local_path):
        self.loaded.append((local_path, list(self.manager.checkpoint_load_contents)))
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("name", ["checkpoint_manager", "checkpoint_mananager"])  # FSDP's and Megatron's
@pytest.mark.parametrize("error", [None, FileNotFoundError("no such shard")])
def test_a_model_that_starts_from_a_checkpoint_takes_its_weights_alone(name, error):
    actor = Checkpointed(name, error)
    worker = SimpleNamespace(actor=actor)
    if error is None:
        TeamActorRolloutRefWorker.load_weights(worker, "/runs/a")
    else:
        with pytest.raises(FileNotFoundError, match="no such shard"):
            TeamActorRolloutRefWorker.load_weights(worker, "/runs/a")
    assert actor.loaded == [("/runs/a", ["model"])]
    assert actor.manager.checkpoint_load_contents is CONTENTS  # a resume loads everything
    assert CONTENTS == ["model", "optimizer", "extra"]


def test_the_engines_managers_have_these_names():
    """Both are verl's, one misspelt: a rename must be noticed here and not in a run that starts from a checkpoint."""
    engines = Path(replica_module.__file__).parents[1] / "engine"
    assert "self.checkpoint_manager = " in (engines / "fsdp" / "transformer_impl.py").read_text()
    assert "self.checkpoint_mananager = " in (engines / "megatron" / "transformer_impl.py").read_text()
