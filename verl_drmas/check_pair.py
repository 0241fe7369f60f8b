"""What the configuration says of another job: a model that it serves, or a store that it fills."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from verl_drmas.config import ConfigError, DrmasConfig

STORE_MODE = "drmas_store"
LIBRARIES = ("sqlalchemy", "fastapi", "uvicorn", "httpx", "orjson", "tenacity")  # of the extra `store`


def check_pair(section: DrmasConfig, mode: str) -> None:
    """Mode and sections fit together.

    Args:
        section: The `drmas` section.
        mode: `trainer.v1.trainer_mode`.

    Raises:
        ConfigError: A store without the mode or the other way round, or keys that have no meaning there.
    """
    if section.remote and section.workflow is None:
        raise ConfigError(
            f"drmas.models.{next(iter(section.remote))}.remote: a stock agent loop speaks to this job's engines only; "
            "set drmas.workflow.name"
        )
    if mode != STORE_MODE:
        if section.store is not None:
            raise ConfigError(
                f"drmas.store is set, and trainer.v1.trainer_mode is {mode!r}: a job that trains on another's sessions "
                f"has trainer.v1.trainer_mode={STORE_MODE}; a job that plays them names the store in "
                "drmas.models.<id>.remote"
            )
        return
    if section.store is None:
        raise ConfigError(
            f"trainer.v1.trainer_mode is {mode!r}, and drmas.store is not set; set drmas.store.url and drmas.store.role"
        )
    if section.workflow is None:
        raise ConfigError("drmas.workflow.name is missing; name the workflow of the job that plays the sessions")
    if len(section.models) > 1:
        raise ConfigError(
            f"drmas.models lists {len(section.models)} models; a job of mode {STORE_MODE} trains one: give each its own"
        )
    if section.remote:
        raise ConfigError(
            f"drmas.models.{next(iter(section.remote))}.remote: a job of mode {STORE_MODE} trains its model itself"
        )
    if not section.agents:
        raise ConfigError("drmas.agents is empty; list the agents that are on this job's model")
    if section.curriculum:
        raise ConfigError("drmas.curriculum: the prompts are the other job's; set it there")


def check_links(section: DrmasConfig) -> None:
    """Token, certificates, addresses and store's URL are right, before anything is started.

    Raises:
        ConfigError: Names the key or the variable.
    """
    if not section.remote and section.store is None:
        return
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"two jobs with a store need {', '.join(missing)}; pip install 'verl-drmas[store]'")
    from verl_drmas.gateway.bearer import read_token
    from verl_drmas.gateway.serve import check_address

    for model_id, remote in section.remote.items():
        key = f"drmas.models.{model_id}.remote"
        _check_url(remote.store, f"{key}.store")
        read_token(remote.token_env, f"{key}.token_env")
        _check_file(remote.ca, f"{key}.ca")
    if section.store is not None:
        _check_url(section.store.url, "drmas.store.url")
        read_token(section.gateway.token_env, "drmas.gateway.token_env")
        check_address(section.gateway)
        _check_file(section.gateway.tls_cert, "drmas.gateway.tls_cert")
        _check_file(section.gateway.tls_key, "drmas.gateway.tls_key")


def _check_url(url: str, key: str) -> None:
    from verl_drmas.store.database import parse
    from verl_drmas.store.errors import StoreError

    try:
        parse(url)
    except StoreError as error:
        raise ConfigError(f"{key}: {error}") from None


def _check_file(path: str | None, key: str) -> None:
    if path is not None and not Path(path).expanduser().is_file():
        raise ConfigError(f"{key} is {path!r}, which is no file")
