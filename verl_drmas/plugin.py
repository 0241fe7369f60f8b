"""The module that verl loads at the end of every `import verl` (entry point group `verl.plugins`).

It runs in every driver, Ray worker and vLLM process, so it only plants hooks: estimators, trainer and agent loop
register themselves when verl's own module that needs them has been imported. A failure is one visible WARNING with its
reason, because verl logs a failing plugin at DEBUG only.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from types import ModuleType

logger = logging.getLogger(__name__)

# When verl has imported the module on the left, ours on the right register themselves in it.
HOOKS = {
    "verl.trainer.ppo.core_algos": ("verl_drmas.trainer.estimators",),
    "verl.trainer.ppo.v1": ("verl_drmas.trainer.team",),
    "verl.experimental.agent_loop": ("verl_drmas.rollout.loop",),
}
STORE_HOOKS = {"verl.trainer.ppo.v1": ("verl_drmas.trainer.team", "verl_drmas.trainer.sub")}
CPU_HOOKS = {"verl.workers.engine.fsdp": ("verl_drmas.cpu.engine",)}

_planted: set[str] = set()


def warn(what: str, error: BaseException) -> None:
    """Say that a part of the plugin is missing and why; training without it then fails by name, not in silence."""
    logger.warning("verl-drmas: %s is not available: %s: %s", what, type(error).__name__, error)


def _follow(ours: tuple[str, ...]):
    def imported(_: ModuleType) -> None:
        for name in ours:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  a raise here would break verl's own import
                warn(name, error)

    return imported


def activate() -> None:
    """Plant the hooks; safe to call again."""
    import wrapt

    hooks = dict(HOOKS)
    if importlib.util.find_spec("sqlalchemy"):  # of the extra `store`; `check` says so where it is missing
        hooks |= STORE_HOOKS
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        importlib.import_module("verl_drmas.cpu.platform")  # first: whatever comes next may ask verl for its platform
        hooks |= CPU_HOOKS
    for theirs, ours in hooks.items():
        if theirs not in _planted:
            _planted.add(theirs)
            wrapt.register_post_import_hook(_follow(ours), theirs)


try:
    activate()
except Exception as error:  # noqa: BLE001  verl would swallow it
    warn("the plugin", error)
