"""The package's log lines, kept apart from what other libraries do to the root logger."""

from __future__ import annotations

import logging
import os
import sys


def configure_logging() -> None:
    """Give the package's logger a handler of its own; safe to call again.

    verl does the same for its logger in the trainer's process (`utils/logging_utils.py`), because engines and queues
    change the root logger there and messages vanish.
    """
    ours = logging.getLogger("verl_drmas")
    if not ours.handlers:
        handler = logging.StreamHandler(stream=sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:verl-drmas: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False
    ours.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
