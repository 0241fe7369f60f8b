"""Weight updates of vLLM on a CPU; named by `rollout.engine_kwargs.vllm.worker_extension_cls`."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """vLLM's CPU linear layers pack their weight and drop the parameter, so loading into the live model can't work.

    The buckets are collected and handed to vLLM's own reload, which restores the parameters first.
    """

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        weights: list[tuple[str, torch.Tensor]] = []

        def collect(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            weights.extend((name, tensor.clone()) for name, tensor in bucket)  # the bucket's memory is used again

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=collect)
        self.model_runner.reload_weights(weights_iterator=iter(weights))
