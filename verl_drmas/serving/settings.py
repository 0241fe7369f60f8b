"""Where a served model is, and how patiently it is asked. Needs no HTTP library."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Endpoint:
    """A model behind one or more OpenAI-compatible servers.

    Attributes:
        urls: Base addresses, as `http://host:8000/v1`; calls are spread over them.
        model: Its name there.
        api_key_env: Environment variable that holds the key; None: none is sent.
        concurrency: Most calls in flight; others wait for their turn.
        timeout: Seconds of one attempt.
        attempts: Attempts of a call; each goes to another server where there is one.
        deadline: Seconds of a call with all its attempts, from the first on.
        requests_per_minute: Most attempts of a minute, evenly spaced; None: no limit.
    """

    urls: tuple[str, ...]
    model: str
    api_key_env: str | None = None
    concurrency: int = 64
    timeout: float = 600.0
    attempts: int = 5
    deadline: float = 1800.0
    requests_per_minute: float | None = None

    def __post_init__(self):
        if not self.urls:
            raise ValueError("urls is empty; give the address of a server, such as http://localhost:8000/v1")
        check_addresses(self.urls)
        if not self.model:
            raise ValueError("model is empty; write the model's name on the servers")
        check_key_name(self.api_key_env)
        for name in ("concurrency", "attempts", "timeout", "deadline", "requests_per_minute"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")

    @classmethod
    def of(cls, settings: Any) -> Endpoint:
        """The endpoint that settings speak of: their attributes that bear the names of an endpoint's.

        Raises:
            ValueError: As by hand.
        """
        given = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**{**given, "urls": tuple(settings.urls)})


def check_addresses(urls: Iterable[str]) -> None:
    """Refuse what is no address of a server, or holds a password.

    Raises:
        ValueError: One line that begins with `urls`.
    """
    for url in urls:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError("urls: one holds a user or password; leave it out and name the key's api_key_env")
        if parts.scheme not in ("http", "https") or not parts.netloc or re.search(r"\s", url):
            raise ValueError(f"urls: {url!r} is no address; write http://host:port/v1")


def check_key_name(name: str | None) -> None:
    """Refuse what is no name of an environment variable. The value isn't repeated: who errs here may have written the
    key itself.

    Raises:
        ValueError: One line that begins with `api_key_env`.
    """
    if name is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name, re.ASCII):
        raise ValueError("api_key_env: no name of an environment variable (capitals); write the name, not the key")
