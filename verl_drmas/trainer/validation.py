"""avg@k and pass@k per data source over sessions (Dr. MAS, section 5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb, isclose

import numpy as np


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of k sessions drawn without replacement from n is right; unbiased for n > k.

    Args:
        n: Sessions of the prompt.
        correct: How many of them were right.
        k: Sessions drawn, at most n.

    Raises:
        ValueError: k is larger than n, or correct isn't in 0..n.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def ks(n: int) -> list[int]:
    """The k that are reported for n sessions: powers of two up to n, and n."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})


def validation_metrics(
    data_sources: Sequence[str], uids: Sequence[str], scores: Sequence[float], expected: dict[tuple[str, str], int]
) -> dict[str, float]:
    """`val/<data source>/avg@k` and `pass@k`, and how many sessions failed.

    A session that failed is counted, and neither right nor wrong; a prompt with fewer than k sessions left out of
    pass@k.

    Args:
        data_sources: Per session.
        uids: Per session.
        scores: Per session, 1 right and 0 wrong; a fractional score enters avg@k as it is and pass@k if it is 1.
        expected: Sessions asked for, by (data source, uid).
    """
    by_source: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for source, uid, score in zip(data_sources, uids, scores, strict=True):
        by_source[str(source)][str(uid)].append(float(score))
    asked: dict[str, int] = defaultdict(int)
    most: dict[str, int] = defaultdict(int)
    for (source, _), n in expected.items():
        asked[source] += n
        most[source] = max(most[source], n)
    metrics: dict[str, float] = {}
    for source, prompts in sorted(by_source.items()):
        n = most.get(source) or max(len(s) for s in prompts.values())
        metrics[f"val/{source}/avg@{n}"] = float(np.mean([np.mean(s) for s in prompts.values()]))
        for k in ks(n):
            full = [s for s in prompts.values() if len(s) >= k]
            if full:
                right = [sum(isclose(score, 1.0) for score in s) for s in full]
                values = [pass_at_k(len(s), r, k) for s, r in zip(full, right, strict=True)]
                metrics[f"val/{source}/pass@{k}"] = float(np.mean(values))
    for source, n in sorted(asked.items()):
        ended = sum(len(s) for s in by_source.get(source, {}).values())
        metrics[f"val/{source}/failed_sessions"] = float(n - ended)
    return metrics
