"""What an evaluation found, as plain data: scores, tokens, latency, cost, and the sessions that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verl_drmas.evaluation.results import Results
from verl_drmas.evaluation.score import macro_average, score_source
from verl_drmas.evaluation.team import Evaluated
from verl_drmas.evaluation.usage import Latency, Price, cost_of, total, use_by_agent


def summarise(
    team: Evaluated,
    sources: Sequence[str],
    results: Results,
    ks: Sequence[int],
    prices: Mapping[str, Price] | None = None,
    currency: str = "",
) -> dict[str, Any]:
    """The summary that is shown and written as JSON; shares are in 0..1, seconds and tokens as they are.

    Tokens, latency and cost of agents are of sessions that ended; what failed ones took stands apart.

    Args:
        team: Who was evaluated.
        sources: The data source of each row.
        results: The sessions.
        ks: Of pass@k.
        prices: By model id.
        currency: Of the prices.
    """
    asked, lines = results.asked, list(results.ended.values())
    scored = {name: score_source(runs, asked.samples, ks) for name, runs in _successes(sources, results).items()}
    measured = [scores for scores in scored.values() if scores]
    macro = macro_average(measured) if len(scored) > 1 and len(measured) == len(scored) else {}
    uses = use_by_agent(lines, team.agents, prices)
    costs = [use.cost for use in uses.values()]
    lost = [call for line in results.attempts for call in line["calls"]]
    rows = Counter(sources[: asked.rows])
    return {
        "workflow": team.name,
        "results": str(results.path),
        "complete": not results.left(),
        "runs": asked.runs,
        "samples": asked.samples,
        "sessions": {
            "asked": len(asked),
            "ended": len(results.ended),
            "failed": dict(Counter(line["failed"] for line in results.failed.values())),
        },
        "first_failure": next((_failure(line) for line in results.failed.values()), None),
        "sources": {
            name: {"rows": rows[name], "failed": failed, "scores": {key: asdict(s) for key, s in scored[name].items()}}
            for name, failed in _failures(sources, results, rows).items()
        },
        "macro_average": {key: asdict(score) for key, score in macro.items()},
        "concurrency": sorted({line["concurrency"] for line in lines}),
        "session_seconds": _plain(Latency.of([line["seconds"] for line in lines])),
        "agents": {agent: asdict(use) for agent, use in uses.items()},
        "models": {model_id: model.model for model_id, model in team.models.items()},
        "cost": None if None in costs else sum(costs),
        "currency": currency,
        "failed_attempts": {
            "sessions": len(results.attempts),
            "prompt_tokens": total(call["prompt"] for call in lost),
            "response_tokens": total(call["response"] for call in lost),
            "cost": cost_of(lost, prices),
        },
        "workflow_metrics": type(team.workflow).summarise([line["metrics"] for line in lines]) if lines else {},
    }


def _failure(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("run", "row", "session", "failed", "detail")}


def _successes(sources: Sequence[str], results: Results) -> dict[str, list[dict[int, list[float]]]]:
    """Successes by data source, then run, then row."""
    found: dict[str, list[dict[int, list[float]]]] = {
        name: [{} for _ in range(results.asked.runs)] for name in dict.fromkeys(sources[: results.asked.rows])
    }
    for place in results.asked:
        line = results.ended.get(place)
        if line is not None:
            found[sources[place.row]][place.run].setdefault(place.row, []).append(line["success"])
    return found


def _failures(sources: Sequence[str], results: Results, rows: Mapping[str, int]) -> dict[str, int]:
    counts = Counter(sources[place.row] for place in results.failed)
    return {name: counts[name] for name in rows}


def _plain(latency: Latency | None) -> dict[str, float] | None:
    return None if latency is None else asdict(latency)
