"""Looks after the LLM servers while the trainer waits: a dead one is dropped, and with none left the run ends.

verl's calls to servers and workers have no time-out: a trainer that waits for a weight update to a dead server waits
for ever. Killing that policy's workers makes the waiting calls raise.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

# Servers are in the cluster: a proxy from the environment would answer for them, with an error.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

REFUSALS = 2  # refused connections in a row that make a server dead; one may be a restart of the listening socket


@dataclass
class Server:
    """One replica of one model.

    Attributes:
        model_id: The model it serves.
        address: `host:port` of its HTTP server, its name in verl's balancer.
        replica: verl's `RolloutReplica`.
        alive: False once it was found dead.
    """

    model_id: str
    address: str
    replica: Any
    alive: bool = True
    refused: int = 0
    answered: float = field(default_factory=time.monotonic)


def ask_health(address: str, timeout: float) -> bool | None:
    """True: healthy. False: the server is gone, or says that its engine is. None: no answer in time."""
    try:
        with _DIRECT.open(f"http://{address}/health", timeout=timeout) as reply:
            return reply.status == 200
    except urllib.error.HTTPError as error:
        return error.code < 500  # who answers "not found" or "not allowed" is alive
    except (TimeoutError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        return False if isinstance(reason, ConnectionError) else None
    except ConnectionError:
        return False
    except http.client.HTTPException:
        return None


class Watchdog(threading.Thread):
    """Polls the servers of all policies.

    Args:
        servers: The servers to look after.
        poll: Seconds between rounds.
        hang_timeout: Seconds without an answer until a server counts as dead.
        on_dead: Called once for each dead server, from this thread.
        on_end: Called once, from this thread, when a model has no server left.
        ask: For tests.
    """

    def __init__(
        self,
        servers: list[Server],
        *,
        poll: float,
        hang_timeout: float,
        on_dead: Callable[[Server], None],
        on_end: Callable[[str], None],
        ask: Callable[[str, float], bool | None] = ask_health,
    ):
        super().__init__(name="drmas-watchdog", daemon=True)
        self.servers, self.poll, self.hang_timeout = servers, poll, hang_timeout
        self.on_dead, self.on_end, self.ask = on_dead, on_end, ask
        self.phase = "start"
        self.fatal: str | None = None
        self.deaths = 0
        self._lock = threading.Lock()
        self._stop_event = threading.Event()

    def run(self) -> None:
        while not self._stop_event.wait(self.poll):
            try:
                self.look()
            except Exception:  # a watchdog that stops watching lets the trainer hang
                logger.exception("a look at the LLM servers failed")

    def stop(self) -> None:
        """End the thread; servers are going down on purpose."""
        self._stop_event.set()

    def look(self) -> None:
        """One round; also called by the trainer when a call to a server failed."""
        with self._lock:
            for server in self.servers:
                if server.alive and not self._stop_event.is_set():
                    why = self._why_dead(server)
                    if why:
                        self._bury(server, why)

    def _why_dead(self, server: Server) -> str | None:
        answer = self.ask(server.address, max(1.0, self.poll))
        if answer:
            server.refused, server.answered = 0, time.monotonic()
            return None
        if answer is False:
            server.refused += 1
            return "its engine or process is gone" if server.refused >= REFUSALS else None
        silent = time.monotonic() - server.answered
        return f"no answer for {silent:.0f} s" if silent > self.hang_timeout else None

    def _bury(self, server: Server, why: str) -> None:
        server.alive = False
        self.deaths += 1
        logger.warning(
            "LLM server %s of model %r is dead during %s: %s", server.address, server.model_id, self.phase, why
        )
        try:
            self.on_dead(server)
        finally:  # whatever went wrong in dropping it, the run must not wait for a model without servers
            if self.fatal is None and not any(s.alive for s in self.servers if s.model_id == server.model_id):
                self.fatal = (
                    f"LLM server {server.address} of model {server.model_id!r} died during {self.phase} ({why}), "
                    "and the model has no server left; resume from the last checkpoint"
                )
                self.on_end(server.model_id)

    def check(self) -> None:
        """Raise if the run can't go on."""
        if self.fatal is not None:
            raise RuntimeError(self.fatal)
