"""One answer a call id: who asks again for what is on its way joins it, and who asks again later gets what was said."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter, OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from verl_drmas.body import Refused
from verl_drmas.gateway.errors import EngineAway
from verl_drmas.gateway.gate import RETRY_AFTER, Gate
from verl_drmas.gateway.wire import GenerateBody, write_answer

logger = logging.getLogger(__name__)

LINGER = 30.0  # seconds an answer goes on without anybody who waits for it; callers come back within half of that
KEPT_BYTES = 2**26  # of answers that were given; a caller whose connection broke asks again within seconds


class Output(Protocol):
    """What an engine says: verl's `TokenOutput`."""

    token_ids: Any
    log_probs: Any
    stop_reason: str | None
    num_preempted: int | None
    extra_fields: dict[str, Any]


class Ask(Protocol):
    """Asks the engines. Raises `EngineAway` where another attempt may find one."""

    def __call__(self, id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Awaitable[Output]: ...


class HungUp(Exception):
    """The caller is gone."""


@dataclass(eq=False)
class _Flight:
    """One answer on its way, or given. Its task never raises: nothing but we may log what an engine says."""

    id: str
    digest: bytes
    task: asyncio.Task[bytes | Refused] | None = None
    waiting: int = 0
    lingers: asyncio.TimerHandle | None = None


class Answers:
    """Answers on their way, and those given lately. Belongs to one event loop.

    Args:
        ask: Asks the engines.
        gate: Decides who comes in.
        linger: See `LINGER`.
        kept_bytes: See `KEPT_BYTES`.
    """

    def __init__(self, ask: Ask, gate: Gate, *, linger: float = LINGER, kept_bytes: int = KEPT_BYTES):
        self._ask, self._gate, self._linger, self._room = ask, gate, linger, kept_bytes
        self._flights: dict[str, _Flight] = {}
        self._given: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self.counts: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Calls that the engines work on."""
        return len(self._flights)

    async def answer(self, asked: GenerateBody, hung_up: asyncio.Future) -> bytes:
        """The answer to a call.

        Args:
            asked: The call.
            hung_up: Done when the caller is gone. The answer goes on for a while, in case the caller comes back.

        Raises:
            Refused: The gate is closed (503), the id belongs to another call (409), or the engines gave no answer.
            HungUp: The caller did.
        """
        digest = asked.digest()
        given = self._given.get(asked.id)
        if given is not None:
            self._same(given[0], digest)
            self._given.move_to_end(asked.id)
            self.counts["repeated"] += 1
            return given[1]
        flight = self._flights.get(asked.id)
        if flight is not None:
            self._same(flight.digest, digest)
            self.counts["joined"] += 1
        else:
            # No await between this and the entry of the flight: of two equal calls one begins.
            self._gate.admit(asked.min_version)
            flight = self._begin(asked, digest)
        return await self._wait(flight, hung_up)

    def _same(self, known: bytes, digest: bytes) -> None:
        if known != digest:
            raise Refused(409, "id", "this id belongs to a call with another body; give each call an id of its own")

    def _begin(self, asked: GenerateBody, digest: bytes) -> _Flight:
        flight = self._flights[asked.id] = _Flight(asked.id, digest)
        flight.task = asyncio.create_task(self._fly(flight, asked))
        return flight

    async def _wait(self, flight: _Flight, hung_up: asyncio.Future) -> bytes:
        flight.waiting += 1
        if flight.lingers is not None:
            flight.lingers.cancel()
            flight.lingers = None
        try:
            await asyncio.wait({flight.task, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.lingers = asyncio.get_running_loop().call_later(self._linger, self._abandon, flight)
        if not flight.task.done():
            raise HungUp
        if flight.task.cancelled():
            raise Refused(503, "stopping", "the gateway stops; come again", RETRY_AFTER)
        result = flight.task.result()
        if isinstance(result, Refused):
            raise Refused(result.status, result.reason, result.text, result.retry_after)  # one object for each caller
        return result

    async def _fly(self, flight: _Flight, asked: GenerateBody) -> bytes | Refused:
        try:
            output = await self._ask(asked.id, asked.prompt_ids, asked.parameters())
            result = self._written(output, asked)
        except EngineAway as error:
            self.counts["away"] += 1
            result = Refused(503, "engine", f"no engine can answer ({error}); come again", RETRY_AFTER)
        except Exception as error:  # noqa: BLE001  an engine may raise anything, and its words may repeat the prompt
            self.counts["failed"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            logger.warning(
                "an engine failed in a call: %s (%s, line %d)", type(error).__name__, where.filename, where.lineno
            )
            result = Refused(500, "engine", type(error).__name__)
        finally:
            if self._flights.get(flight.id) is flight:  # after an abandoned one, the same id may fly anew
                del self._flights[flight.id]
        if isinstance(result, bytes):
            self.counts["answered"] += 1
            self._keep(flight, result)
        return result

    def _written(self, output: Output, asked: GenerateBody) -> bytes | Refused:
        """The answer's bytes, labelled by the engine: the gate's version says nothing of an update in between."""
        fields = output.extra_fields
        first, last = fields.get("min_global_steps"), fields.get("max_global_steps")
        if first is None or last is None:
            self.counts["failed"] += 1
            logger.warning("an engine answers without a version; the gateway was opened before its first weight update")
            return Refused(500, "engine", "NoVersion")
        if first < asked.min_version:
            self.counts["stale"] += 1
            logger.warning(
                "an engine answers with weights of version %d, and the gate is at %d", first, self._gate.state.version
            )
            text = f"an engine has weights of version {first}, and the call needs {asked.min_version}; come again"
            return Refused(503, "version", text, RETRY_AFTER)
        return write_answer(
            {
                "token_ids": output.token_ids,
                "log_probs": output.log_probs,
                "stop_reason": output.stop_reason,
                "min_version": int(first),
                "max_version": int(last),
                "num_preempted": output.num_preempted,
                "num_cached_tokens": fields.get("num_cached_tokens"),
            }
        )

    def _keep(self, flight: _Flight, body: bytes) -> None:
        self._given[flight.id] = (flight.digest, body)
        self._room -= len(body)
        while self._room < 0 and self._given:
            _, (_, oldest) = self._given.popitem(last=False)
            self._room += len(oldest)

    def _abandon(self, flight: _Flight) -> None:
        """Nobody came back."""
        if flight.waiting or flight.task.done():
            return
        self.counts["abandoned"] += 1
        if self._flights.get(flight.id) is flight:
            del self._flights[flight.id]
        flight.task.cancel()

    def close(self) -> None:
        """Stop what is on its way; whoever waits for it is told to come again."""
        for flight in self._flights.values():
            flight.task.cancel()
