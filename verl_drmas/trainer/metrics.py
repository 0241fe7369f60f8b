"""Numbers per agent and per workflow (`drmas/...`), from one step's real rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

from verl_drmas.advantage import agent_diagnostics, shadow
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.step import StepRows
from verl_drmas.workflows import Workflow

_PLACE = re.compile(r"^(actor|training|perf)/")  # where verl files a policy's numbers; here the model is the place
_OURS = re.compile(r"(rows|padding_rows|padding_share|updates)$|seconds/")  # what `Policy` and `TeamTrainer` add
# They compare an agent with its team, and one job of a pair has its own agents' rows only.
WHOLE_TEAM = re.compile(r"drmas/agent/[^/]+/(inflation_factor/|advantage_mass_share|token_share)")


def without_team(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics but those that need the rows of the whole team."""
    return {name: value for name, value in metrics.items() if not WHOLE_TEAM.match(name)}


def agent_metrics(step: StepRows, sessions: int | None = None) -> dict[str, float]:
    """`drmas/agent/<agent_id>/...` for every agent that acted.

    Args:
        step: The step's rows, with scores and advantages.
        sessions: That the rows are of; None: as many as have a row.
    """
    rows, penalty = step.known, step.penalty()
    agents = np.array([row.agent_id for row in rows], dtype=object)
    sessions = sessions or len({(row.uid, row.session) for row in rows})
    inside = step.section.advantage.penalty == "inside"
    seen = step.scores - penalty if inside else step.scores  # what the groups' statistics saw
    diagnostics = agent_diagnostics(seen, step.advantage, tokens=step.tokens, **step.ids())
    metrics: dict[str, float] = {}
    for agent_id, numbers in diagnostics.items():
        mine = agents == agent_id
        valid = np.array([row.valid for row, m in zip(rows, mine, strict=True) if m])
        counts = [row.counts for row, m in zip(rows, mine, strict=True) if m]
        numbers = dict(numbers)
        numbers["rows"] = float(mine.sum())
        numbers["reward/mean"] = float(step.scores[mine].mean())
        numbers["penalty/mean"] = float(penalty[mine].mean())
        numbers["valid_share"] = float(valid.mean())
        numbers["activations_per_session"] = float(mine.sum() / sessions)
        numbers["response_length/mean"] = float(step.tokens[mine].mean())
        numbers["token_share"] = float(step.tokens[mine].sum() / max(1, step.tokens.sum()))
        for name in sorted({key for count in counts for key in count}):
            numbers[f"{name}/mean"] = float(np.mean([count.get(name, 0.0) for count in counts]))
        numbers |= _part_means([row.parts for row, m in zip(rows, mine, strict=True) if m])
        metrics |= {f"drmas/agent/{agent_id}/{name}": value for name, value in numbers.items()}
    return metrics


def _part_means(parts: list[dict[str, float]]) -> dict[str, float]:
    """`reward_part/<name>/mean`, each over the rows that have the term: one without a judgement has no such term."""
    names = sorted({name for part in parts for name in part})
    return {f"reward_part/{name}/mean": float(np.mean([p[name] for p in parts if name in p])) for name in names}


def model_metrics(model_id: str, own: dict[str, float], *, alone: bool) -> dict[str, float]:
    """`drmas/model/<model_id>/...`: what a policy's stage measured.

    Args:
        model_id: The model.
        own: verl's metrics of one stage on this model's rows, and ours.
        alone: True keeps verl's own names beside ours, for dashboards that know them.
    """
    metrics = {f"drmas/model/{model_id}/{_PLACE.sub('', name)}": value for name, value in own.items()}
    return metrics | ({name: value for name, value in own.items() if not _OURS.match(name)} if alone else {})


def log_prob_gaps(batch: KVBatchMeta, keys: dict[str, list[str]]) -> dict[str, float]:
    """`drmas/model/<model_id>/log_prob_gap/...` and `.../rollout_corr/...`: engine against trainer.

    The gap is in nats a sampled token; the rest is verl's own, which it takes over the rows of all models.

    Args:
        batch: The rows, whose log-probs are computed.
        keys: Rows by model id.
    """
    metrics = {}
    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    for model_id, mine in keys.items():
        if mine:
            data = tq.kv_batch_get(mine, batch.partition_id, select_fields=fields)
            trained, sampled, mask = (data[name].to_padded_tensor(0.0) for name in fields)
            if not mask.any():
                continue
            gap = (trained - sampled).abs()[mask.bool()]
            verls = compute_offpolicy_metrics(trained, sampled, mask)
            metrics |= {f"drmas/model/{model_id}/rollout_corr/{name}": value for name, value in verls.items()}
            metrics |= {
                f"drmas/model/{model_id}/log_prob_gap/max": gap.max().item(),
                f"drmas/model/{model_id}/log_prob_gap/mean": gap.mean().item(),
            }
    return metrics


def shadow_metrics(step: StepRows, options: dict[str, Any]) -> dict[str, float]:
    """`drmas/shadow/<estimator>/...`: what the other estimators would have given on the same rows."""
    result = shadow(
        step.scores,
        step.advantage,
        tokens=step.tokens,
        penalty=step.penalty(),
        place=step.section.advantage.penalty,
        **step.ids(),
        **options,
    )
    return {
        f"drmas/shadow/{estimator}/{name}": value
        for estimator, numbers in result.items()
        for name, value in numbers.items()
    }


def workflow_metrics(rows: list[Row], workflow: type[Workflow] | None) -> dict[str, float]:
    """`drmas/workflow/...`: the workflow's own summary of its sessions' numbers."""
    sessions = [row.metrics for row in rows if row.metrics is not None]
    summarise = (workflow or Workflow).summarise
    return {f"drmas/workflow/{name}": value for name, value in summarise(sessions).items()}


def session_metrics(rows: list[Row], expected: int, report: dict[str, float]) -> dict[str, float]:
    """`drmas/sessions/...`: how many were asked for, ended, and failed, by reason; `drmas/tools/...`: what the
    workflow's tools counted.
    """
    ended = len({(row.uid, row.session) for row in rows})
    metrics = {
        "drmas/sessions/expected": float(expected),
        "drmas/sessions/failed": float(expected - ended),
        "drmas/sessions/rows_per_session": len(rows) / max(1, ended),
    }
    return metrics | reported(report)


def reported(report: dict[str, float]) -> dict[str, float]:
    """What the rollout workers counted: `drmas/sessions/...` and `drmas/tools/...`."""
    return {
        f"drmas/{name}" if name.startswith("tools/") else f"drmas/sessions/{name}": float(n)
        for name, n in report.items()
    }


class CollapseWatch:
    """Names an agent that stops acting, stops acting validly, or whose groups lose their spread.

    Args:
        fraction: A share that falls below this part of its start is warned about.
        start: Steps that make up the start.
        flat: Steps in a row without any spread that are warned about.
    """

    def __init__(self, fraction: float = 0.2, start: int = 3, flat: int = 5):
        self.fraction, self.start, self.flat = fraction, start, flat
        self._first: dict[str, list[float]] = defaultdict(list)
        self._flat_steps: Counter[str] = Counter()
        self._warned: set[str] = set()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to warn as an uninterrupted one would; JSON values."""
        return {"first": self._first, "flat_steps": self._flat_steps, "warned": sorted(self._warned)}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self._first.update(state.get("first", {}))
        self._flat_steps.update(state.get("flat_steps", {}))
        self._warned.update(state.get("warned", ()))

    def look(self, metrics: dict[str, float], agents: list[str]) -> list[str]:
        """Warnings that this step's metrics give for the first time."""
        warnings = []
        for agent_id in agents:
            prefix = f"drmas/agent/{agent_id}"
            for name, what in (("activations_per_session", "activations per session"), ("valid_share", "valid share")):
                key = f"{prefix}/{name}"
                if name == "valid_share" and key not in metrics:
                    continue
                value = metrics.get(key, 0.0)  # an agent without rows has no metrics: it acted 0 times
                first = self._first[key]
                if len(first) < self.start:
                    first.append(value)
                elif value < self.fraction * np.mean(first) and key not in self._warned:
                    self._warned.add(key)
                    warnings.append(
                        f"agent {agent_id!r}: {what} fell to {value:.3g}, from {np.mean(first):.3g} at the start"
                    )
            no_spread = metrics.get(f"{prefix}/zero_std_share", 0.0) >= 1.0
            self._flat_steps[agent_id] = self._flat_steps[agent_id] + 1 if no_spread else 0
            if self._flat_steps[agent_id] == self.flat:
                warnings.append(
                    f"agent {agent_id!r}: no group had any spread in rewards for {self.flat} steps; it learns nothing"
                )
        return warnings
