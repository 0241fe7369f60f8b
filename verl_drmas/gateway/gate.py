"""Whether a gateway takes calls, and how new its weights are: what its trainer said last, and nothing else."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from verl_drmas.body import Refused

RETRY_AFTER = 1  # seconds; the caller waits longer by itself where the gate stays closed


@dataclass(frozen=True)
class GateState:
    """One word of the trainer.

    Attributes:
        open: Calls are taken.
        version: Of the weights that answer them; while closed, of those that did last.
        order: Number of the word; a later one is higher.
    """

    open: bool = False
    version: int = 0
    order: int = 0


class Gate:
    """Closed until it is told otherwise; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = GateState()

    @property
    def state(self) -> GateState:
        """The last word."""
        return self._state

    def take(self, state: GateState) -> None:
        """Take a word, unless a later one is known: words that were late on their way change nothing."""
        with self._lock:
            if state.order >= self._state.order:
                self._state = state

    def open(self, version: int) -> None:
        """Let calls in; their answers come from these weights or newer ones."""
        with self._lock:
            self._state = GateState(True, version, self._state.order + 1)

    def close(self) -> None:
        """Turn calls away. Those that are in go on."""
        with self._lock:
            self._state = GateState(False, self._state.version, self._state.order + 1)

    def admit(self, min_version: int) -> None:
        """Let one call in.

        Raises:
            Refused: 503: the gate is closed, or the weights are older than the call can use.
        """
        state = self._state
        if not state.open:
            raise Refused(503, "closed", "the engines are training or getting new weights; come again", RETRY_AFTER)
        if state.version < min_version:
            text = f"the weights are of version {state.version}, and the call needs {min_version}; come again"
            raise Refused(503, "version", text, RETRY_AFTER)
