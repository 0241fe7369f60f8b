"""Trajectory alignment of M-GRPO: how often each of a session's sub-agent trajectories counts, so that every session
that called the sub-agent counts the same however often it did (arXiv 2511.13288, 4.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from numbers import Integral

import numpy as np

from verl_drmas.advantage.keys import one_of

ALIGN_MODES = ("sample", "expected", "mask", "none")


def seed_of(*parts: int | str) -> int:
    """Hash of the parts, the same in every process; whole numbers count by value, whatever their type.

    Returns:
        An integer in [0, 2**64).

    Raises:
        ValueError: A part is neither a whole number nor a string.
    """
    plain = []
    for part in parts:
        if not isinstance(part, Integral | str):
            raise ValueError(f"seed part {part!r} is a {type(part).__name__}: give whole numbers and strings")
        plain.append(str(part) if isinstance(part, str) else int(part))
    return int.from_bytes(hashlib.blake2b(repr(tuple(plain)).encode(), digest_size=8).digest(), "big")


def align(
    counts: Sequence[int] | np.ndarray,
    target: int | None,
    *,
    seed: int | tuple[int | str, ...],
    mode: str,
    sessions: Sequence[int | str] | None = None,
) -> list[np.ndarray]:
    """Copies of each trajectory of one (prompt, sub-agent), session by session.

    A session draws from a generator of its own, seeded with `seed` and its id: the draw depends neither on the order of
    the sessions nor on which others there are.

    Args:
        counts: Trajectories d of each session, at least 0 (sessions,).
        target: Trajectories D that each session shall count as, at least 1. Not read under `none`.
        seed: What the draws are made from, for example (run seed, step, dataset index, agent); never verl's `uid`,
            which is random.
        mode: `sample`: as in the paper. d < D: each once, and D - d more drawn from them with replacement; d > D: D of
            them, drawn without replacement. `expected`: D / d each, what `sample` gives on average, without a draw.
            `mask`: each once, and of more than D the same D that `sample` keeps; missing ones are not made up for: they
            add nothing to loss and statistics and stay in the loss's denominator. `none`: each once.
        sessions: Id of each session (sessions,); None: 0, 1, ... in the order given.

    Returns:
        One float64 array (d,) a session; empty for a session without a trajectory, whose D slots are all masked.

    Raises:
        ValueError: A count or the target is out of its range, ids are repeated or of the wrong number, or the mode is
            unknown.
    """
    one_of("mode", mode, ALIGN_MODES)
    if mode != "none":
        check_count("target", target)
    sessions = range(len(counts)) if sessions is None else sessions
    if len(sessions) != len(counts):
        raise ValueError(f"sessions has {len(sessions)} ids for {len(counts)} counts: give one id per session")
    parts = seed if isinstance(seed, tuple) else (seed,)
    seen: set[int] = set()
    aligned = []
    for count, session in zip(counts, sessions, strict=True):
        check_count(f"count of session {session!r}", count, least=0)
        session_seed = seed_of(*parts, session)
        if session_seed in seen:
            raise ValueError(f"sessions holds {session!r} twice: give each session of a prompt its own id")
        seen.add(session_seed)
        aligned.append(_copies(int(count), target, session_seed, mode))
    return aligned


def target_of(counts: Iterable[int], quantile: float = 0.99) -> int:
    """Smallest D that at least the share `quantile` of the sessions stays within, at least 1.

    Args:
        counts: Trajectories d of each observed session, those without one too.
        quantile: In (0, 1]; the paper's is 0.99.

    Raises:
        ValueError: There is no count, a count is negative or not whole, or the quantile is out of its range.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile={quantile!r} must be above 0 and at most 1")
    counts = list(counts)
    if not counts:
        raise ValueError("counts is empty: a target needs at least one observed session")
    for count in counts:
        check_count("count", count, least=0)
    # k / n is the double nearest to the share, as a literal quantile is: n * quantile may round to the wrong side of k.
    shares = np.arange(1, len(counts) + 1) / len(counts)
    return max(int(sorted(counts)[np.searchsorted(shares, quantile)]), 1)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise a ValueError unless `value` is a whole number of at least `least`."""
    if not (isinstance(value, Integral) and value >= least):
        raise ValueError(f"{name} is {value!r}: it must be a whole number of at least {least}")


def _copies(count: int, target: int | None, seed: int, mode: str) -> np.ndarray:
    if mode == "expected" and count:
        return np.full(count, target / count)
    copies = np.ones(count)
    if mode in ("expected", "none") or count in (0, target) or (mode == "mask" and count < target):
        return copies
    draw = np.random.default_rng(seed)
    if count > target:
        copies[draw.permutation(count)[target:]] = 0.0
        return copies
    return copies + np.bincount(draw.integers(count, size=target - count), minlength=count)
