"""The sections of the configuration that name a store, a gateway or a model of another job."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")
TOKEN = "DRMAS_GATEWAY_TOKEN"


def _check_role(role: str) -> None:
    if not role or len(role) > 64 or not all(c.isalnum() or c in "-." for c in role):
        raise ValueError(f"role is {role!r}; use 1 to 64 letters, digits, '-' and '.'")


@dataclass(config=STRICT)
class StoreConfig:
    """Where a job that trains on another job's sessions finds them (`drmas.store`).

    Attributes:
        url: SQLAlchemy URL of the store: `sqlite:///path` or `postgresql+psycopg://...`.
        role: What the other job calls this job's model.
        lease: Seconds without a sign of life after which another job may take the role over.
        max_attempts: How often a step is begun before it counts as one that can't be trained.
        keep_steps: Saved steps whose rows are kept; None: all.
        patience: Seconds that a database may be away before the job stops.
    """

    url: str
    role: str
    lease: PositiveFloat = 60.0
    max_attempts: PositiveInt = 5
    keep_steps: NonNegativeInt | None = None
    patience: PositiveFloat = 600.0

    def __post_init__(self):
        _check_role(self.role)


@dataclass(config=STRICT)
class GatewayConfig:
    """The HTTP server in front of a job's engines (`drmas.gateway`).

    Attributes:
        host: Address that it listens on; anything but loopback should have TLS or a private network.
        port: 0: any free one.
        public_url: What the other job shall call; None: made from host and port.
        token_env: Environment variable that holds the bearer token.
        tls_cert: PEM file; with `tls_key`, serves HTTPS.
        tls_key: PEM file.
        max_body: Longest request in bytes.
    """

    host: str = "127.0.0.1"
    port: NonNegativeInt = 8731
    public_url: str | None = None
    token_env: str = TOKEN
    tls_cert: str | None = None
    tls_key: str | None = None
    max_body: PositiveInt = 16 * 2**20

    def __post_init__(self):
        if self.port > 65535:
            raise ValueError(f"port is {self.port}; the highest is 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")


@dataclass(config=STRICT)
class RemoteConfig:
    """A model that another job serves and trains (`drmas.models.<id>.remote`).

    Attributes:
        store: URL of the store that both jobs meet in.
        role: The model's name there; the other job's `drmas.store.role`.
        token_env: Environment variable that holds the gateway's bearer token.
        max_lag: Steps that the other job's training may be behind: 0 trains both in step.
        stale: Steps beyond `max_lag`: `wait` for them, or `drop` those that nobody trains yet.
        patience: Seconds that the other job, or the store, may be away before sessions fail and the run stops.
        ca: PEM file to check the gateway's certificate with; None: the system's.
    """

    store: str
    role: str
    token_env: str = TOKEN
    max_lag: NonNegativeInt = 0
    stale: Literal["wait", "drop"] = "wait"
    patience: PositiveFloat = 1800.0
    ca: str | None = None

    def __post_init__(self):
        _check_role(self.role)
