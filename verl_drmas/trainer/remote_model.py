"""The trainer's handle on a model that another job serves and trains: a client, and nothing on this job's GPUs."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from verl_drmas.rollout.remote import RemoteClient
from verl_drmas.store.settings import RemoteConfig


class NoServers:
    """Stands for a server manager without a server."""

    def get_replicas(self) -> list[Any]:
        """None: they are another job's, which watches them."""
        return []


class RemoteModel:
    """A model of another job (`drmas.models.<id>.remote`).

    Args:
        model_id: The model.
        config: The run's configuration as the model sees it; its path gives tokenizer and template.
        remote: Where the other job is found.
    """

    def __init__(self, model_id: str, config: DictConfig, remote: RemoteConfig):
        self.model_id, self.config, self.remote = model_id, config, remote
        self.llm_server_manager = NoServers()

    def get_llm_client(self) -> RemoteClient:
        """A client of its gateway."""
        return RemoteClient(self.config, self.remote)
