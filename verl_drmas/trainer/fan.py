"""One stand-in where verl expects a single worker group or checkpoint manager: the call reaches every policy's."""

from __future__ import annotations

import os
from typing import Any


class Fan:
    """Calls every member in turn; checkpoint paths get the model id appended (`global_step_N/actor/<model_id>`).

    Args:
        members: By model id.
    """

    def __init__(self, members: dict[str, Any]):
        self.members = members

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for their hooks
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> None:
            for member in self.members.values():
                getattr(member, name)(*args, **kwargs)

        return call

    def save_checkpoint(
        self, local_path: str, remote_path: str | None, global_step: int, max_ckpt_to_keep: int | None = None
    ) -> None:
        for model_id, member in self.members.items():
            remote = remote_path and os.path.join(remote_path, model_id)
            member.save_checkpoint(
                os.path.join(local_path, model_id), remote, global_step, max_ckpt_to_keep=max_ckpt_to_keep
            )

    def load_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        for model_id, member in self.members.items():
            member.load_checkpoint(local_path=os.path.join(local_path, model_id), **kwargs)
