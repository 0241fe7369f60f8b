"""A seed for every LLM call that depends on what the call is, not on when it runs."""

from __future__ import annotations

import hashlib


def call_seed(base: int, *, index: int, session: int, step: int, path: str, validate: bool = False) -> int:
    """Seed of one LLM call, the same in every run and under every batching.

    Never made from `uid`, which verl draws anew each time, nor from a counter of calls, whose order parallel calls
    change.

    Args:
        base: `drmas.request_seed`.
        index: Dataset index of the row.
        session: Attempt at the row.
        step: Global training step.
        path: The call's place in the session, for example `solver.1/turn.0`.
        validate: Validation draws differ from training draws.

    Returns:
        An integer in [0, 2**31).
    """
    key = repr((base, int(index), int(session), int(step), path, bool(validate))).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % 2**31
