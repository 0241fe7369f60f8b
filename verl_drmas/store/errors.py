"""What can go wrong with a store, told apart by what one should do about it."""

from __future__ import annotations


class StoreError(RuntimeError):
    """A store that refused, or that was asked for something it can't give; one line that names what, and the fix."""


class StoreAway(StoreError):
    """The database could not be reached, or stayed locked, for as long as the caller had patience."""


class LeaseLost(StoreError):
    """Another consumer has the role now: nothing that this one still trains counts."""


class RoleTaken(StoreError):
    """Another consumer has the role.

    Attributes:
        remaining: Seconds until its lease ends, unless it is renewed.
    """

    def __init__(self, message: str, remaining: float = 0.0):
        super().__init__(message)
        self.remaining = remaining


class Corrupt(StoreError):
    """A row whose bytes are not those that were written."""
