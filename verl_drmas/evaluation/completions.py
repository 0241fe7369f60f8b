"""The served models that a team's agents speak to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from verl_drmas.serving.client import ChatClient, Unanswered
from verl_drmas.serving.look import Look, look_at
from verl_drmas.serving.settings import Endpoint

MARGIN = 10.0  # seconds


@dataclass(frozen=True)
class ServedModel(Endpoint):
    """A model behind one or more servers, as agents ask it.

    Attributes:
        calls: Who reads an agent's tool calls: `server`, in its own parser; `text`, ourselves, as Hermes and Qwen write
            them (for a vLLM without `--enable-auto-tool-choice`; it still shows the tools to the model).
        extra_body: Further fields of every request, such as vLLM's `chat_template_kwargs`.
    """

    calls: Literal["server", "text"] = "server"
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        super().__post_init__()
        if self.calls not in ("server", "text"):
            raise ValueError(f"calls is {self.calls!r}; choose server or text")
        ours = [
            name for name in ("model", "messages", "tools", "tool_choice", "stream", "n") if name in self.extra_body
        ]
        if ours:
            raise ValueError(f"extra_body: {ours[0]!r} is set by the workflow and the back end; leave it out")


def patience_of(sessions: int, seconds: float) -> dict[str, Any]:
    """How a model is asked by sessions: fields of a `ServedModel`.

    As many calls are in flight as sessions, and a call may take what its session may. The session's limit comes first,
    so that one that is over its time is told as that, and not as a server's failure.

    Args:
        sessions: At once.
        seconds: That one may take.
    """
    return {"concurrency": sessions, "timeout": seconds + MARGIN, "deadline": seconds + MARGIN}


class Completions(ChatClient):
    """Chat completions of one served model, shared by all sessions."""

    def __init__(self, served: ServedModel):
        super().__init__(served)
        self.served = served

    def look(self) -> list[Look]:
        """Ask every server for its models; a server without such a list is taken at its word.

        Raises:
            Unanswered: The key's variable isn't set, or a server doesn't answer, refuses the key, or lists models and
                not this one.
        """
        looks = look_at(self)
        if any(look.state != "fit" for look in looks):
            raise Unanswered("; ".join(look.said for look in looks), "look")
        return looks

    def check(self) -> str:
        """`look`, in a line."""
        return "; ".join(look.said for look in self.look())
