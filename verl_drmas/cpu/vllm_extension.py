"""Weight updates of vLLM on a CPU; named by `rollout.engine_kwargs.vllm.worker_extension_cls`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from verl.utils.vllm import resolve_weight_name
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

from verl_drmas.rollout.vllm_extension import JobWorkerExtension


class CpuWorkerExtension(JobWorkerExtension):
    """vLLM's CPU linear layers pack their weight and drop the parameter, so loading into the live model can't work.

    The buckets are collected and handed to vLLM's own reload, which restores the parameters first. A LoRA adapter's
    matrices aren't packed: they go verl's own way.
    """

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        if peft_config and base_sync_done:
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        weights: list[tuple[str, torch.Tensor]] = []

        def collect(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            weights.extend((name, tensor.clone()) for name, tensor in bucket)  # the bucket's memory is used again

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=collect)
        self.model_runner.reload_weights(weights_iterator=self._named(weights) if peft_config else iter(weights))

    def _named(self, weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name a base model's weights as vLLM does once it has wrapped layers for an adapter.

        A generator, so that it looks at the parameters after the reload has restored them.
        """
        model = self.model_runner.get_model()
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, tensor in weights:
            yield resolve_weight_name(model, name, names), tensor
