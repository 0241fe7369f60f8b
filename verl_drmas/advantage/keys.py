"""Dense integer codes for prompts, sessions and agents, so that every statistic is one `np.bincount`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# A table of all possible pairs is the fastest way to number the pairs that occur, as long as it stays this small.
_TABLE_PER_ROW = 64


@dataclass(frozen=True)
class Codes:
    """One integer per row, dense from 0 to `size - 1`."""

    of_row: np.ndarray
    size: int

    def sum(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum of `weights` (or count of rows) per code, float64 of shape (size,)."""
        return np.bincount(self.of_row, weights=weights, minlength=self.size).astype(np.float64, copy=False)

    def pick(self, values: np.ndarray) -> np.ndarray:
        """The value of one row of each code, shape (size,)."""
        picked = np.zeros(self.size, dtype=values.dtype)
        picked[self.of_row] = values
        return picked

    def any(self, flags: np.ndarray) -> np.ndarray:
        """Whether any row of a code is flagged, bool of shape (size,)."""
        found = np.zeros(self.size, dtype=bool)
        found[self.of_row[flags]] = True
        return found


def factorize(name: str, values: Iterable[object], rows: int) -> tuple[Codes, list]:
    """Number the distinct ids in order of appearance.

    Args:
        name: What the ids are, for the error.
        values: One hashable id per row.
        rows: How many ids there must be.

    Returns:
        The codes and the list of distinct ids, the id of code `c` at place `c`.

    Raises:
        ValueError: The ids are missing, not as many as the rows, or one of them is None or NaN.
    """
    if values is None:
        raise ValueError(f"{name} is missing: one id per row is needed")
    values = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} ids for {rows} rows: give one id per row")
    code = {value: place for place, value in enumerate(dict.fromkeys(values))}
    for value in code:
        if value is None or value != value:  # NaN is the one value that differs from itself
            raise ValueError(f"{name} of row {values.index(value)} is {value!r}: every row needs an id")
    return Codes(np.fromiter(map(code.__getitem__, values), np.int64, rows), len(code)), list(code)


def combine(first: Codes, second: Codes) -> Codes:
    """Number the pairs of codes that occur, in order of appearance.

    That order makes sums over the pairs of one prompt the same to the bit whatever other prompts are in the batch.
    """
    rows = np.arange(len(first.of_row))
    pair = first.of_row * second.size + second.of_row
    possible = first.size * second.size
    if possible <= _TABLE_PER_ROW * len(rows):
        appeared = np.zeros(possible, dtype=np.int64)
        appeared[pair[::-1]] = rows[::-1]  # of several rows of a pair the last one written stays: the earliest
        appeared = appeared[pair]
    else:
        _, earliest, of_row = np.unique(pair, return_index=True, return_inverse=True)
        appeared = earliest[of_row]
    new = appeared == rows
    return Codes((np.cumsum(new) - 1)[appeared], int(np.count_nonzero(new)))


def order_within(codes: Codes, order: np.ndarray | None) -> np.ndarray:
    """Rank of each row (0, 1, ...) among the rows of its code, by `order` or else by row."""
    sequence = np.argsort(codes.of_row, kind="stable") if order is None else np.lexsort((order, codes.of_row))
    starts = np.cumsum(codes.sum()) - codes.sum()
    rank = np.empty(len(sequence), dtype=np.int64)
    rank[sequence] = np.arange(len(sequence)) - starts[codes.of_row[sequence]].astype(np.int64)
    return rank


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise a ValueError that names the value and the nearest allowed one, unless `value` is allowed."""
    if value in allowed:
        return
    nearest = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(f"{name}={value!r} is unknown: {hint}Choose one of {', '.join(allowed)}")


def row_values(name: str, values: object, rows: int) -> np.ndarray:
    """One finite float64 per row, or a ValueError that names the first bad row."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (rows,):
        raise ValueError(f"{name} has shape {array.shape} for {rows} rows: give one number per row")
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise ValueError(f"{name} of row {bad[0]} is {array[bad[0]]}: it must be finite ({len(bad)} such rows)")
    return array
