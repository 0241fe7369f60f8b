"""The gateway as a Ray actor that comes back when it is killed, and the trainer's hold on it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol
from uuid import uuid4

import ray
from pydantic import SecretStr
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_drmas.config import ConfigError
from verl_drmas.gateway.app import Gateway, create_app
from verl_drmas.gateway.bearer import as_token
from verl_drmas.gateway.errors import EngineAway
from verl_drmas.gateway.gate import GateState
from verl_drmas.gateway.serve import Serving, check_address, endpoint, in_clear
from verl_drmas.logs import configure_logging
from verl_drmas.rollout.resuming import ResumingClient
from verl_drmas.store.settings import GatewayConfig
from verl_drmas.workflows import SessionFailed

logger = logging.getLogger(__name__)

POLL = 1.0  # seconds between looks at the actor
ANSWER = 10.0  # seconds for the actor's answer
FIRST_ANSWER = 300.0  # seconds for its first: its process imports verl
PORT_WAIT = 60.0  # seconds at the start for a port that another process, perhaps the forerunner's, lets go of
PATIENCE = 300.0  # seconds without the actor after which the run ends


@dataclass(frozen=True)
class Held:
    """What the actor says.

    Attributes:
        port: That it listens on.
        boot: Drawn anew in every process of the actor.
        pid: Of that process.
        counts: Of calls since that process began.
    """

    port: int
    boot: str
    pid: int
    counts: dict[str, int]


class GatewayAway(Exception):
    """The actor gives no answer; Ray may be starting it again."""


class GatewayActor:
    """Serves HTTP in its own event loop. A process that was just started is closed, and doesn't even listen."""

    def __init__(self, client: ResumingClient, settings: GatewayConfig, role: str, token: SecretStr):
        configure_logging()
        self._client, self._settings = client, settings
        self._gateway = Gateway(self._ask, role, token, settings)
        self._serving: Serving | None = None
        self._starting = asyncio.Lock()
        self._boot = uuid4().hex

    async def hold(self, state: GateState, port: int, wait: float) -> Held:
        """Listen, and hold the gate as the trainer said last.

        Args:
            state: The trainer's word.
            port: To listen on; 0: any free one.
            wait: Seconds to wait for a port that is taken.

        Raises:
            ConfigError: The address can't be had.
        """
        self._gateway.gate.take(state)
        async with self._starting:
            if self._serving is None or not self._serving.running:
                self._serving = await Serving.start(create_app(self._gateway), self._settings, port, wait)
        counts = Counter(self._gateway.answers.counts)
        counts["engine_retries"] = self._client.retried
        return Held(self._serving.port, self._boot, os.getpid(), dict(counts))

    async def stop(self) -> None:
        """Let go of the port; who still waits for an answer is sent away."""
        self._gateway.gate.close()
        self._gateway.answers.close()
        if self._serving is not None:
            await self._serving.stop()

    async def _ask(self, id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Any:
        try:
            return await self._client.generate(id, prompt_ids=prompt_ids, sampling_params=sampling)
        except SessionFailed as failure:
            raise EngineAway(failure.reason) from None
        except RayActorError as error:
            raise EngineAway(type(error).__name__) from None


class Actor(Protocol):
    """What the keeper needs of the actor; each call blocks."""

    def hold(self, state: GateState, port: int, wait: float, timeout: float) -> Held:
        """Raises: GatewayAway: There is no answer. ConfigError: The actor can't listen."""
        ...

    def kill(self, timeout: float) -> None:
        """End it for good."""
        ...


class RayActor:
    """A `GatewayActor` on this node, which Ray starts again for as long as the job lives."""

    def __init__(self, client: Any, *others: Any):
        # Its address is this node's. Calls are never repeated by Ray: one that was, could open the gate of the actor's
        # next process after the trainer closed it. The keeper repeats them, with its last word.
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(GatewayActor)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Kept for the actor's next processes: an argument that is too large for a message goes through the object
        # store, where Ray forgets it once the first process has it.
        self._client = ray.put(client)
        self._actor = remote.options(scheduling_strategy=here).remote(self._client, *others)

    def hold(self, state: GateState, port: int, wait: float, timeout: float) -> Held:
        """See `Actor`."""
        try:
            return ray.get(self._actor.hold.remote(state, port, wait), timeout=timeout)
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise GatewayAway(type(error.cause).__name__) from error
        except RayError as error:
            raise GatewayAway(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

    def kill(self, timeout: float) -> None:
        """End it for good; the port is free afterwards."""
        try:
            ray.get(self._actor.stop.remote(), timeout=timeout)
        except RayError as error:
            logger.warning("the gateway did not stop by itself: %s", type(error).__name__)
        ray.kill(self._actor, no_restart=True)


class GatewayKeeper:
    """The trainer's gateway: opened and closed by the trainer, and held so while the actor's processes come and go.

    A thread repeats the trainer's last word to the actor, so that a new process of it learns what the old one knew. One
    lock makes sure that nothing but the last word is ever on its way.

    Args:
        client: Asks the engines.
        settings: `drmas.gateway`.
        role: What callers call the model.
        token: That callers must have.
        start_actor: Makes the actor; given in tests.
        poll: Seconds between looks.
        patience: Seconds without the actor after which the run ends.

    Attributes:
        pid: The actor's process.

    Raises:
        ConfigError: The settings name no address that can be called, or the token is none.
    """

    def __init__(
        self,
        client: Any,
        settings: GatewayConfig,
        *,
        role: str,
        token: str | SecretStr,
        start_actor: Callable[..., Actor] = RayActor,
        poll: float = POLL,
        patience: float = PATIENCE,
    ):
        check_address(settings)
        self._arguments = (client, settings, role, as_token(token, f"the variable {settings.token_env}"))
        self.settings, self._start_actor, self._poll, self._patience = settings, start_actor, poll, patience
        self._lock = threading.Lock()
        self._word = GateState()
        self._port = settings.port
        self._boot, self.pid = "", 0
        self._past: Counter[str] = Counter()  # of processes that are gone
        self._now: dict[str, int] = {}
        self._reported: Counter[str] = Counter()
        self._missed_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drmas-gateway", daemon=True)

    def start(self) -> str:
        """Start the actor, closed.

        Returns:
            The endpoint that the other job calls.

        Raises:
            ConfigError: The address can't be had.
            RuntimeError: The actor didn't start.
        """
        if in_clear(self.settings):
            logger.warning(
                "the gateway on %s sends its token in clear; set drmas.gateway.tls_cert and tls_key, unless nobody "
                "else is on that network",
                self.settings.host,
            )
        with self._lock:
            self._actor = self._start_actor(*self._arguments)
            try:
                self._hear(self._actor.hold(self._word, self._port, PORT_WAIT, FIRST_ANSWER + PORT_WAIT))
            except (GatewayAway, ConfigError) as error:
                self._actor.kill(ANSWER)
                if isinstance(error, ConfigError):
                    raise
                raise RuntimeError(f"the gateway's actor did not start: {error}") from error
        self._thread.start()
        url = endpoint(self.settings, self._port)
        logger.info("the gateway is on %s", url)
        return url

    def open(self, version: int) -> None:
        """Take calls; the engines have the weights of `version`.

        Raises:
            RuntimeError: The actor is gone for longer than `patience`.
        """
        self._say(open=True, version=version)

    def close(self) -> None:
        """Turn calls away. When this returns, none comes in; those that are in go on.

        Raises:
            RuntimeError: The actor is gone for longer than `patience`.
        """
        self._say(open=False)

    def check(self) -> None:
        """Raise if the actor is gone for longer than `patience`."""
        missed = self._missed_since
        if missed is not None and time.monotonic() - missed > self._patience:
            raise RuntimeError(
                f"the gateway on port {self._port} has not answered for {time.monotonic() - missed:.0f} s, and Ray did "
                "not bring it back; the log says why"
            )

    def stop(self) -> None:
        """End the actor. Safe to call again, and before `start`."""
        self._stop.set()
        if self._thread.ident is None:
            return
        if self._thread is not threading.current_thread():
            self._thread.join(ANSWER + self._poll)
        with self._lock:
            actor, self._actor = self._actor, None
            if actor is not None:
                actor.kill(ANSWER)

    def report(self) -> dict[str, float]:
        """Calls since the last report by what became of them, and `restarts` of the actor."""
        with self._lock:
            total = self._past + Counter(self._now)
            new = {name: float(n - self._reported[name]) for name, n in total.items() if n != self._reported[name]}
            self._reported = total
        return new

    def _say(self, **changes: Any) -> None:
        with self._lock:
            self._word = replace(self._word, order=self._word.order + 1, **changes)
            word = self._word
        while True:
            with self._lock:
                if self._word is word and self._tell():
                    return
                if self._word is not word:
                    return
            self.check()
            if self._stop.wait(min(self._poll, 1.0)):
                raise RuntimeError("the gateway was stopped")

    def _watch(self) -> None:
        while not self._stop.wait(self._poll):
            with self._lock:
                if not self._stop.is_set():
                    self._tell()

    def _tell(self) -> bool:
        """Repeat the last word, with the lock held; False if nobody heard it."""
        try:
            self._hear(self._actor.hold(self._word, self._port, 0.0, ANSWER))
        except (GatewayAway, ConfigError) as error:
            if self._missed_since is None:
                self._missed_since = time.monotonic()
                logger.warning("the gateway is away, Ray starts it again: %s", error)
            return False
        if self._missed_since is not None:
            self._missed_since = None
            logger.warning("the gateway is back, and %s", "open" if self._word.open else "closed")
        return True

    def _hear(self, held: Held) -> None:
        if self._boot and held.boot != self._boot:
            self._past.update(self._now)
            self._past["restarts"] += 1
        self._boot, self._port, self.pid, self._now = held.boot, held.port, held.pid, held.counts
