"""What a configuration needs of the machine that it is checked on: engine, model folders, checkpoints, data files."""

from __future__ import annotations

import glob
import importlib.util
import os

from omegaconf import DictConfig

from verl_drmas.config import ConfigError
from verl_drmas.support import get
from verl_drmas.workflows import Workflow


def check_machine(config: DictConfig) -> None:
    """Device and engine are there.

    Raises:
        ConfigError: No GPU for a GPU configuration, a CPU configuration without the CPU platform, or no engine.
    """
    device = get(config, "trainer.device", "cuda")
    platform = os.environ.get("VERL_PLATFORM", "").strip().lower()
    cluster = os.environ.get("RAY_ADDRESS") or get(config, "ray_kwargs.ray_init.address")
    if device == "cpu" and platform != "cpu":
        raise ConfigError(
            "trainer.device is 'cpu', but the environment lacks VERL_PLATFORM=cpu; set it before verl starts"
        )
    if device == "cuda" and platform == "cpu":
        raise ConfigError(
            "trainer.device is 'cuda' under VERL_PLATFORM=cpu; add +drmas_runtime=cpu, or unset VERL_PLATFORM"
        )
    if device == "cuda" and not cluster and not _has_accelerator():
        raise ConfigError(
            "trainer.device is 'cuda', but this machine has no GPU; for a CPU run set VERL_PLATFORM=cpu and add "
            "+drmas_runtime=cpu"
        )
    engine = get(config, "actor_rollout_ref.rollout.name")
    if engine in ("vllm", "sglang") and importlib.util.find_spec(engine) is None:
        extra = "cpu" if device == "cpu" else ("sglang" if engine == "sglang" else "gpu")
        raise ConfigError(
            f"actor_rollout_ref.rollout.name is {engine!r}, which is not installed; pip install 'verl-drmas[{extra}]'"
        )


def check_model(config: DictConfig) -> None:
    """A model path that names a folder is one.

    Raises:
        ConfigError: It isn't there, or holds no config.json.
    """
    path = str(get(config, "actor_rollout_ref.model.path", ""))
    if not path:
        raise ConfigError("actor_rollout_ref.model.path is not set; give a folder or a Hugging Face model id")
    folder = os.path.expanduser(path)
    local = path.startswith((".", "/", "~")) or os.path.isdir(folder)
    if local and not os.path.isdir(folder):
        raise ConfigError(f"actor_rollout_ref.model.path is {path!r}, which is no folder; give one, or a model id")
    if local and not os.path.isfile(os.path.join(folder, "config.json")):
        raise ConfigError(f"actor_rollout_ref.model.path is {path!r}, a folder without config.json; give a saved model")


def check_start(path: str | None, policy: DictConfig) -> None:
    """A checkpoint to start from is one of the model's worker group's size.

    Raises:
        ConfigError: No checkpoint folder, or one that another number of ranks wrote.
    """
    if path is None:
        return
    folder = os.path.expanduser(path)
    key = f"init_from is {path!r}"
    if not os.path.isdir(folder):
        raise ConfigError(f"{key}, which is no folder; give .../global_step_N/actor/<model id> of a run with save_freq")
    ranks = int(policy.trainer.n_gpus_per_node) * int(policy.trainer.nnodes)
    shards = glob.glob(os.path.join(folder, "model_world_size_*_rank_*.pt"))
    wanted = glob.glob(os.path.join(folder, f"model_world_size_{ranks}_rank_*.pt"))
    if not shards and not os.path.isdir(os.path.join(folder, "model")):  # Megatron's, whose layout takes any size
        inner = sorted(d for d in os.listdir(folder) if os.path.isdir(os.path.join(folder, d)))
        raise ConfigError(
            f"{key}, which holds no model's shards; give a model's own folder ({', '.join(inner) or 'none'})"
        )
    if shards and len(wanted) != ranks:
        raise ConfigError(
            f"{key}, whose {len(shards)} shards don't fit the model's {ranks} ranks; write it out with "
            f"`verl-drmas export` and give the result as actor_rollout_ref.model.path"
        )


def _has_accelerator() -> bool:
    import torch  # verl has imported it by now

    return torch.cuda.is_available() or importlib.util.find_spec("torch_npu") is not None


def check_data(config: DictConfig, workflow: type[Workflow] | None, *, seeded: bool) -> None:
    """The data files exist, every row has a gold and, for seeds, an index of its own, and the rows fill a batch.

    Raises:
        ConfigError: Names file, row and fix.
    """
    from verl_drmas.data.parquet import check_indices, check_prompts

    if get(config, "data.custom_cls.path"):
        return  # a data set class of the user's own reads what it likes
    prompt_key = get(config, "data.prompt_key", "prompt")
    needs_answer = workflow is not None and workflow.needs_answer  # a stock loop scores as it likes
    for key in ("data.train_files", "data.val_files"):
        if key == "data.train_files" and get(config, "drmas.curriculum"):
            continue  # `check_curriculum` has looked at them stage by stage
        value = get(config, key)
        if value is None:
            raise ConfigError(f"{key} is not set")
        files = [value] if isinstance(value, str) else list(value)
        rows = 0
        for pattern in files:
            path = os.path.expanduser(str(pattern))
            if "://" in path:
                continue  # verl fetches remote files itself
            if glob.has_magic(path):
                raise ConfigError(f"{key}: {pattern!r} is a pattern; verl takes file names")
            try:
                rows += check_prompts([path], prompt_key=prompt_key, needs_answer=needs_answer)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{key}: {error}") from None
        if seeded:
            try:
                check_indices([os.path.expanduser(str(file)) for file in files])
            except (OSError, ValueError) as error:
                raise ConfigError(f"{key}: {error}") from None
        batch = int(get(config, "data.gen_batch_size") or get(config, "data.train_batch_size", 1))
        if key == "data.train_files" and rows < batch and not any("://" in str(file) for file in files):
            raise ConfigError(
                f"data.train_batch_size is {batch}, but data.train_files has {rows} rows, less than one batch: lower it"
            )
