"""Weights on their way into vLLM's CPU worker: collected over buckets, named as vLLM has them; adapters are verl's."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from verl_drmas.cpu import vllm_extension
from verl_drmas.cpu.vllm_extension import CpuWorkerExtension

WEIGHTS = {f"model.layers.{i}.mlp.down_proj.weight": torch.full((2,), float(i + 1)) for i in range(3)}


class Receiver:
    """verl's receiver: a tensor a bucket, all of them in the same memory."""

    def __init__(self, zmq_handle, device, use_shm):
        self.made.append((zmq_handle, device, use_shm))

    def receive_weights(self, on_bucket_received):
        memory = torch.empty(2)
        for i, (name, tensor) in enumerate(WEIGHTS.items()):
            memory.copy_(tensor)
            on_bucket_received([(name, memory)], i == len(WEIGHTS) - 1)
        memory.fill_(-1.0)


class Runner:
    """vLLM's model runner: a reload restores the parameters, then takes the weights."""

    def __init__(self, names):
        self.names, self.restored, self.loaded = names, False, None

    def get_model(self):
        def named_parameters(remove_duplicate):
            assert self.restored, "looked at the packed layers' parameters"
            return [(name, None) for name in self.names]

        return SimpleNamespace(named_parameters=named_parameters)

    def reload_weights(self, weights_iterator):
        self.restored = True
        self.loaded = {name: tensor.tolist() for name, tensor in weights_iterator}


@pytest.fixture
def make(monkeypatch):
    """A worker whose model has the parameters `names`, and the calls that went on to verl's own method."""

    def make(names=WEIGHTS):
        stock = []
        monkeypatch.setattr(Receiver, "made", [], raising=False)
        monkeypatch.setattr(vllm_extension, "BucketedWeightReceiver", Receiver)
        monkeypatch.setattr(
            vllm_extension.JobWorkerExtension,
            "update_weights_from_ipc",
            lambda self, *args: stock.append(args),
        )
        worker = object.__new__(CpuWorkerExtension)
        worker.model_runner, worker.device = Runner(names), torch.device("cpu")
        worker._get_zmq_handle = lambda: "ipc://handle"
        return worker, stock

    return make


def expected(rename=lambda name: name):
    return {rename(name): tensor.tolist() for name, tensor in WEIGHTS.items()}


def test_all_buckets_are_handed_to_one_reload(make):
    worker, stock = make()
    worker.update_weights_from_ipc(use_shm=True)
    assert worker.model_runner.loaded == expected()  # the buckets' memory was used again meanwhile
    assert Receiver.made == [("ipc://handle", torch.device("cpu"), True)]
    assert stock == []


def test_a_base_models_weights_are_named_as_in_layers_wrapped_for_an_adapter(make):
    def wrapped(name):
        return name.replace(".weight", ".base_layer.weight")

    worker, stock = make([wrapped(name) for name in WEIGHTS])
    worker.update_weights_from_ipc(peft_config={"r": 4}, base_sync_done=False)
    assert worker.model_runner.loaded == expected(wrapped)
    assert stock == []


def test_an_adapters_weights_go_verls_own_way(make):
    worker, stock = make()
    worker.update_weights_from_ipc(peft_config={"r": 4}, base_sync_done=True, use_shm=True)
    assert stock == [({"r": 4}, True, True)]
    assert worker.model_runner.loaded is None and Receiver.made == []


def test_a_model_without_an_adapter_never_goes_that_way(make):
    """verl says `base_sync_done` for it too, from the second update on."""
    worker, stock = make()
    worker.update_weights_from_ipc(peft_config=None, base_sync_done=True)
    assert worker.model_runner.loaded == expected()
    assert stock == []
