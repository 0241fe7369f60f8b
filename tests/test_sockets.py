"""Both ends of a weight update meet at one socket, and two jobs on one machine at two; verl's own classes are asked."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

from verl_drmas import sockets
from verl_drmas.config import ConfigError
from verl_drmas.sockets import CPU_EXTENSION, EXTENSION, EXTENSION_KEY, JOB, job_keys, job_socket, use_job_socket

pytest.importorskip("vllm")

from verl.workers.rollout.vllm_rollout import utils, vllm_rollout

from verl_drmas.cpu.vllm_extension import CpuWorkerExtension
from verl_drmas.rollout.vllm_extension import JobWorkerExtension

CLUSTER = "01000000"  # the job id of every cluster's first driver


@pytest.fixture
def job(monkeypatch):
    """Sets the job's name."""

    def set_name(name):
        monkeypatch.delenv(JOB, raising=False)
        if name is not None:
            monkeypatch.setenv(JOB, name)

    set_name(None)
    return set_name


def sender(monkeypatch, extension=EXTENSION):
    """verl's own adapter as our worker leaves it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(vllm_rollout, "is_support_ipc", lambda: False)
    context = SimpleNamespace(get_job_id=lambda: CLUSTER)
    monkeypatch.setattr(vllm_rollout.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(vllm_rollout.BaseRollout, "__init__", lambda self, config, *_: setattr(self, "config", config))
    config = SimpleNamespace(
        tensor_model_parallel_size=1,
        data_parallel_size=1,
        pipeline_model_parallel_size=1,
        disaggregation=None,
        layered_summon=False,
        engine_kwargs={"vllm": {"worker_extension_cls": extension}} if extension else {},
    )
    adapter = vllm_rollout.ServerAdapter(config, None, None, 0)
    use_job_socket(adapter)
    return adapter.zmq_handle


def receiver(monkeypatch, cls=JobWorkerExtension):
    """The handle of a vLLM worker, with the environment that verl's server leaves it."""
    monkeypatch.setenv("VERL_RAY_JOB_ID", CLUSTER)
    monkeypatch.setenv("VERL_REPLICA_RANK", "0")
    monkeypatch.delenv("VERL_ZMQ_BASE_TRAINER_RANK", raising=False)
    worker = object.__new__(cls)
    worker.model_runner, worker.local_rank = SimpleNamespace(vllm_config=None), 0
    return worker._get_zmq_handle()


@pytest.mark.parametrize(("cls", "name"), [(JobWorkerExtension, EXTENSION), (CpuWorkerExtension, CPU_EXTENSION)])
@pytest.mark.parametrize("named", [None, "main", "a name / with anything, and " * 20])
def test_both_ends_meet(monkeypatch, job, cls, name, named):
    job(named)
    assert f"{cls.__module__}.{cls.__qualname__}" == name
    assert sender(monkeypatch, name) == receiver(monkeypatch, cls)


def test_two_jobs_have_two_sockets_and_a_job_without_a_name_has_verls(monkeypatch, job):
    seen = set()
    for name in (None, "main", "sub", "", "  "):
        job(name)
        seen.add(receiver(monkeypatch))
    stock = receiver(monkeypatch, utils.vLLMColocateWorkerExtension)
    assert stock in seen and len(seen) == 3
    job("main")
    assert receiver(monkeypatch, utils.vLLMColocateWorkerExtension) == stock != sender(monkeypatch)


def test_the_path_fits_a_socket_and_keeps_verls_name(job):
    job("x" * 500)
    theirs = "ipc:///tmp/rl-colocate-zmq-01000000-replica-128-rank-15.sock"
    ours = job_socket(theirs)
    assert ours.endswith("-rl-colocate-zmq-01000000-replica-128-rank-15.sock") and ours.startswith("ipc:///tmp/")
    assert len(ours.removeprefix("ipc://")) < sockets.MOST
    assert job_socket("tcp://127.0.0.1:99") == "tcp://127.0.0.1:99"
    with pytest.raises(ValueError, match="at most 107 bytes"):
        job_socket("ipc:///tmp/" + "y" * 100)


@pytest.mark.parametrize("extension", [None, "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"])
def test_a_receiver_that_would_wait_elsewhere_is_refused_before_anything_hangs(monkeypatch, job, extension):
    assert sender(monkeypatch, extension) == receiver(monkeypatch)
    job("main")
    with pytest.raises(ConfigError, match=f"{EXTENSION_KEY} is .*use {EXTENSION}"):
        sender(monkeypatch, extension)


def test_an_adapter_without_a_socket_is_left_alone(job):
    job("main")
    adapter = SimpleNamespace(config=None)
    use_job_socket(adapter)
    assert vars(adapter) == {"config": None}


def config(**rollout):
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "ray_kwargs": {"ray_init": {}}})


def test_a_named_job_fills_what_both_ends_need(job):
    assert job_keys(config(name="vllm")) == {}
    job("main")
    env = {f"ray_kwargs.ray_init.runtime_env.env_vars.{JOB}": "main"}
    assert job_keys(config(name="vllm")) == {**env, EXTENSION_KEY: EXTENSION}
    cpu = {"vllm": {"worker_extension_cls": CPU_EXTENSION}}
    assert job_keys(config(name="vllm", engine_kwargs=cpu)) == {**env, EXTENSION_KEY: CPU_EXTENSION}
    assert job_keys(config(name="sglang")) == env
    with pytest.raises(ConfigError, match="is 'mine'"):
        job_keys(config(name="vllm", engine_kwargs={"vllm": {"worker_extension_cls": "mine"}}))


def test_what_a_killed_job_left_is_removed_and_nothing_else(tmp_path, job):
    mine, other = (tmp_path / f"{sockets.mark(name)}rl-colocate-zmq-01.sock" for name in ("main", "sub"))
    stock = tmp_path / "rl-colocate-zmq-01.sock"
    for path in (mine, other, stock):
        path.touch()
    assert sockets.remove_sockets("main", tmp_path) == [mine]
    assert not mine.exists() and other.exists() and stock.exists()


def test_updates_of_two_jobs_at_once_stay_apart(monkeypatch, job, tmp_path):
    """verl's own sender and receiver; both senders have bound their socket before either is read."""
    device = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    monkeypatch.setattr(bucketed_weight_transfer, "get_torch_device", lambda: device)
    monkeypatch.setattr(bucketed_weight_transfer, "is_support_ipc", lambda: False)
    handles, got, bound = {}, {}, threading.Barrier(2)
    for name in ("main", "sub"):
        job(name)
        handles[name] = job_socket(f"ipc://{tmp_path}/w.sock")

    class Sender(bucketed_weight_transfer.BucketedWeightSender):
        def _init_socket(self):
            super()._init_socket()
            bound.wait(30)

    def send(name, value):
        weights = iter([("w", torch.full((4,), value))])
        asyncio.run(Sender(handles[name], bucket_size_mb=1, use_shm=True).async_send_weights(weights))

    def receive(name):
        def keep(bucket, is_last):
            got[name] = bucket[0][1].tolist()

        transfer = bucketed_weight_transfer.BucketedWeightReceiver(handles[name], torch.device("cpu"), use_shm=True)
        transfer.receive_weights(keep)

    threads = [threading.Thread(target=send, args=(n, v), daemon=True) for n, v in (("main", 1.0), ("sub", 2.0))]
    threads += [threading.Thread(target=receive, args=(name,), daemon=True) for name in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert got == {"main": [1.0] * 4, "sub": [2.0] * 4}
