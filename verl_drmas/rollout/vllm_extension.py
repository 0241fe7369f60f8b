"""vLLM's workers of a job with sockets of its own; see `rollout.engine_kwargs.vllm.worker_extension_cls`."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_drmas.sockets import job_socket


class JobWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, which waits for weights at a socket that is the job's own (see `verl_drmas/sockets.py`)."""

    def _get_zmq_handle(self) -> str:
        return job_socket(super()._get_zmq_handle())
