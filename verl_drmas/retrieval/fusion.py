"""Rankings, and how two become one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Ranking = list[tuple[int, float]]
"""Rows and their scores, best first; of equal scores the lower row is first."""


def ranked(rows: np.ndarray, scores: np.ndarray, k: int) -> Ranking:
    """The best `k`, in an order that does not depend on how they came.

    Args:
        rows: Row numbers, (n,).
        scores: Their scores, (n,); higher is better.
        k: How many to keep.
    """
    if len(rows) > k:
        # all that are as good as the k-th, so that of equal ones the lower rows stay
        limit = np.partition(scores, len(scores) - k)[len(scores) - k]
        kept = scores >= limit
        rows, scores = rows[kept], scores[kept]
    order = np.lexsort((rows, -scores))[:k]
    return list(zip(rows[order].tolist(), scores[order].tolist(), strict=True))


def fuse(rankings: Iterable[Ranking], k: int, constant: float = 60.0) -> Ranking:
    """Reciprocal rank fusion (Cormack et al., 2009): a row scores the sum of 1 / (constant + rank), ranks from 1.

    Args:
        rankings: Each best first; scores are not looked at, so they need not be comparable.
        k: How many rows to keep.
        constant: How little the first ranks count more than later ones; 60 in the paper.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (constant + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:k]
