"""One stand-in where verl expects a single worker group or checkpoint manager: the call reaches every policy's."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

from verl_drmas.trainer.lanes import Lanes


class Fan:
    """Calls every member: in turn within a pool, pools at the same time.

    Checkpoint paths get the model id appended (`global_step_N/actor/<model_id>`).

    Args:
        members: By model id.
        lanes: Says which members may work at the same time.
    """

    def __init__(self, members: dict[str, Any], lanes: Lanes):
        self.members, self.lanes = members, lanes
        self.calls: Counter[tuple[str, str]] = Counter()  # (model id, method): how often it ended

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for their hooks
            raise AttributeError(name)

        def each(*args: Any, **kwargs: Any) -> None:
            self._each(name, {model_id: (args, kwargs) for model_id in self.members})

        return each

    def save_checkpoint(
        self, local_path: str, remote_path: str | None, global_step: int, max_ckpt_to_keep: int | None = None
    ) -> None:
        def own(model_id: str) -> tuple[tuple, dict]:
            remote = remote_path and os.path.join(remote_path, model_id)
            local = os.path.join(local_path, model_id)
            return (local, remote, global_step), {"max_ckpt_to_keep": max_ckpt_to_keep}

        self._each("save_checkpoint", {model_id: own(model_id) for model_id in self.members})

    def load_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        self._each(
            "load_checkpoint",
            {m: ((), {"local_path": os.path.join(local_path, m), **kwargs}) for m in self.members},
        )

    def _each(self, name: str, arguments: dict[str, tuple[tuple, dict]]) -> None:
        def call(model_id: str) -> None:
            args, kwargs = arguments[model_id]
            # None of these touches TransferQueue, so other pools go on meanwhile.
            with self.lanes.driver.released():
                getattr(self.members[model_id], name)(*args, **kwargs)
            self.calls[model_id, name] += 1

        self.lanes.run({model_id: partial(call, model_id) for model_id in self.members})
