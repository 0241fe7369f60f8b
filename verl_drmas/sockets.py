"""Names of weight-transfer sockets that two jobs on one machine don't share.

verl names the socket between a training worker and its vLLM server after Ray's job id, which is 01000000 in every
cluster of its own: two jobs on one machine bind one path, and each deletes the other's. A job with a name of its own,
in the environment variable `DRMAS_JOB`, has both ends put it in front. A name for the socket in verl's configuration,
or a job id that is unique across clusters, would remove this.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from verl_drmas.config import ConfigError

JOB = "DRMAS_JOB"
IPC = "ipc://"
MOST = 107  # bytes of a Unix socket's path

EXTENSION_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
EXTENSION = "verl_drmas.rollout.vllm_extension.JobWorkerExtension"
CPU_EXTENSION = "verl_drmas.cpu.vllm_extension.CpuWorkerExtension"
EXTENSIONS = (EXTENSION, CPU_EXTENSION)  # of vLLM's workers, the other end of the socket


def job_name() -> str | None:
    """This process's job; None without one."""
    return os.environ.get(JOB, "").strip() or None


def job_socket(handle: str) -> str:
    """verl's handle of a socket with the job's mark in its file name; unchanged without a job, or if it is no file.

    Raises:
        ValueError: The path is longer than a socket's may be.
    """
    job = job_name()
    if job is None or not handle.startswith(IPC):
        return handle
    path = Path(handle.removeprefix(IPC))
    own = path.with_name(f"{mark(job)}{path.name}")
    if len(os.fsencode(own)) > MOST:
        raise ValueError(f"{own}: a socket's path has at most {MOST} bytes")
    return f"{IPC}{own}"


def mark(job: str) -> str:
    """How the file names of a job's sockets begin: short, whatever its name."""
    return f"drmas-{hashlib.blake2b(job.encode(), digest_size=6).hexdigest()}-"


def remove_sockets(job: str, folder: Path = Path("/tmp")) -> list[Path]:
    """Delete what a job that was killed left of its sockets; returns it."""
    left = sorted(folder.glob(f"{mark(job)}*.sock"))
    for path in left:
        path.unlink(missing_ok=True)
    return left


def job_keys(config: Any) -> dict[str, Any]:
    """Keys that a job with a name needs: its workers know the name, and vLLM's have the extension that uses it.

    Args:
        config: The run's configuration.

    Raises:
        ConfigError: vLLM's workers have another extension.
    """
    job = job_name()
    if job is None:
        return {}
    from omegaconf import OmegaConf

    # A cluster on several machines doesn't take over this process's environment.
    keys: dict[str, Any] = {f"ray_kwargs.ray_init.runtime_env.env_vars.{JOB}": job}
    if OmegaConf.select(config, "actor_rollout_ref.rollout.name") == "vllm":
        own = OmegaConf.select(config, EXTENSION_KEY)
        _check_extension(own or EXTENSION)
        keys[EXTENSION_KEY] = own or EXTENSION
    return keys


def use_job_socket(adapter: Any) -> None:
    """Give the sending end the job's name; an adapter without a socket (SGLang's) is left alone.

    Args:
        adapter: verl's server adapter of a training worker.

    Raises:
        ConfigError: The receiving end would wait at another socket.
    """
    if job_name() is None or not hasattr(adapter, "zmq_handle"):
        return
    _check_extension((adapter.config.engine_kwargs.get("vllm") or {}).get("worker_extension_cls"))
    adapter.zmq_handle = job_socket(adapter.zmq_handle)


def _check_extension(name: str | None) -> None:
    if name not in EXTENSIONS:
        raise ConfigError(
            f"{EXTENSION_KEY} is {name!r}, and {JOB} is set, by which the sockets of weight updates are named: use "
            f"{EXTENSION}, or unset {JOB} where no other job runs on the machine"
        )
