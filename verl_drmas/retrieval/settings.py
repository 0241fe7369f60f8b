"""How a workflow searches: `drmas.workflow.retrieval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass
class RetrievalSettings:
    """Where passages come from; exactly one of `local` and `urls`.

    Attributes:
        local: Folder of an index that is loaded into the rollout process (words only: no encoder runs there); on
            several nodes an absolute path that all of them have.
        urls: Servers with `/retrieve`, such as `http://127.0.0.1:8000`; calls are spread over them.
        dialect: What the servers speak: `queries` (Search-R1's; ours speaks both) or `query` (one query a call, as in
            Dr. MAS' reference code).
        timeout: Seconds one call may take.
        attempts: Calls until a search counts as an outage; each goes to another server where there is one.
        deadline: Seconds until it counts as one whatever the attempts, waits between them included.
        connections: Most connections of one rollout process.
    """

    local: str | None = None
    urls: list[str] = field(default_factory=list)
    dialect: Literal["queries", "query"] = "queries"
    timeout: float = 30.0
    attempts: int = 6
    deadline: float = 180.0
    connections: int = 256

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        if self.local == "":
            raise ValueError("local is ''; give the folder of an index, or null")
        if (self.local is None) == (not self.urls):
            given = "both are set" if self.local is not None else "neither is set"
            raise ValueError(f"{given}; set `local` (folder of an index) or `urls` (servers), and leave out the other")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} is no address; write http://host:port")
        for name in ("timeout", "attempts", "deadline", "connections"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
