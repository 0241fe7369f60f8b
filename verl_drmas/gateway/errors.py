"""What can go wrong on the way to another job's engines, told apart by what the caller should do about it."""

from __future__ import annotations


class EngineAway(Exception):
    """No engine can answer now; another attempt may find one. The message is the reason's short name."""


class CallFailed(Exception):
    """A call to a gateway without an answer; the message holds neither token nor prompt."""


class Unreachable(CallFailed):
    """No HTTP answer came back.

    Attributes:
        silent: The connection stood, and nothing came within the time: the gateway may be well.
    """

    def __init__(self, message: str, silent: bool = False):
        super().__init__(message)
        self.silent = silent


class Busy(CallFailed):
    """The gateway lives and says to come again: it is closed, or its weights are too old.

    Attributes:
        retry_after: Seconds.
    """

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class Failed(CallFailed):
    """The gateway lives and could not answer: its engine raised, or the answer is none."""


class Rejected(CallFailed):
    """Asking again is no use; the message names the fix."""
