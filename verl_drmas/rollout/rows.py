"""What the trainer knows of a row. Imports neither Ray nor verl: estimators read rows while verl is still importing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_AGENT = "default"
FIRST_COPY = 1_000_000  # activation numbers of copies (`drmas.alignment.copies: physical`) begin here; no session's do


@dataclass(frozen=True)
class Row:
    """What the trainer knows of a real row; padding rows have none.

    Attributes:
        uid: The prompt.
        session: Which attempt at the prompt.
        activation: Order of the row within its session.
        index: Dataset index of the prompt.
        agent_id: The agent that acted.
        model_id: The model behind it.
        valid: False for an invalid action.
        path: The activation's place in the workflow.
        metrics: The session's numbers, on its first row; else None.
        counts: Numbers of this activation (cut characters, turns, ...).
        failed: Why the row's session failed; empty: it ended well.
        fault: What outside the team kept the activation from having its effect; empty: nothing.
        parts: The activation's own reward terms by name.
        acc: Whether the session's answer was right; None where nobody can say.
    """

    uid: str
    session: int
    activation: int
    index: int
    agent_id: str
    model_id: str
    valid: bool = True
    path: str = ""
    metrics: dict[str, float] | None = None
    counts: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    fault: str = ""
    acc: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, key: str, extra_fields: Mapping[str, Any], index: Any, model_id: str) -> Row:
        """Build from a TransferQueue key (`{uid}_{session}_{activation}`) and the row's `extra_fields`."""
        uid, session, activation = key.rsplit("_", 2)
        return cls(
            uid=uid,
            session=int(session),
            activation=int(activation),
            index=int(index),
            agent_id=extra_fields.get("agent_id", DEFAULT_AGENT),
            model_id=extra_fields.get("model_id") or model_id,
            valid=bool(extra_fields.get("valid", True)),
            path=extra_fields.get("path", ""),
            metrics=extra_fields.get("session_metrics"),
            counts=extra_fields.get("counts") or {},
            failed=extra_fields.get("failed") or "",
            fault=extra_fields.get("fault") or "",
            parts=extra_fields.get("reward_parts") or {},
            acc=(extra_fields.get("reward_extra_info") or {}).get("acc"),
        )

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key that depends on nothing but the data: prompts repeat within no step, uid is random."""
        return (self.index, self.session, self.activation)
