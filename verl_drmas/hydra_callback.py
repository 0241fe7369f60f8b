"""The Hydra callback of our config files (`hydra.callbacks.drmas`): checks and fills before Ray starts."""

from __future__ import annotations

import logging
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from verl_drmas.check import prepare
from verl_drmas.config import ConfigError

logger = logging.getLogger(__name__)


class DrmasCallback(Callback):
    """Runs between Hydra's composition and verl's main function."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        try:
            prepared = prepare(config)
        except ConfigError as error:
            # Hydra turns any Exception of a callback into a warning and goes on.
            raise SystemExit(f"verl-drmas: {error}") from None
        if prepared.filled:
            logger.warning("verl-drmas: filled in %s", ", ".join(f"{k}={v}" for k, v in prepared.filled.items()))
