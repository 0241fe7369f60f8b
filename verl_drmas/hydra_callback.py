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
        # Hydra turns any Exception of a callback into a warning and goes on, with a configuration nobody has checked.
        except ConfigError as error:
            raise SystemExit(f"verl-drmas: {error}") from None
        except Exception as error:
            logger.exception("verl-drmas: the check ended early")
            raise SystemExit(f"verl-drmas: {type(error).__name__}: {' '.join(str(error).split())}") from error
        if prepared.found:
            logger.warning("verl-drmas: %s", prepared.found)
        if prepared.filled:
            logger.warning("verl-drmas: filled in %s", ", ".join(f"{k}={v}" for k, v in prepared.filled.items()))
