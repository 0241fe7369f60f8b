"""avg@k and pass@k per data source over sessions (Dr. MAS, section 5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from verl_drmas.evaluation.score import score_source, usual_ks


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
        # The rule of an evaluation, so that both say the same of the same sessions.
        scores = score_source([prompts], n, [1, *usual_ks(n)])
        metrics |= {f"val/{source}/{name}": score.value for name, score in scores.items()}
    for source, n in sorted(asked.items()):
        ended = sum(len(s) for s in by_source.get(source, {}).values())
        metrics[f"val/{source}/failed_sessions"] = float(n - ended)
    return metrics
