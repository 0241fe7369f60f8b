"""verl's V1 agent-loop worker and manager for teams: rows keep their own reward, failed sessions are counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_drmas.check import read_section
from verl_drmas.logs import configure_logging
from verl_drmas.rollout.activation import Activation
from verl_drmas.rollout.delivery import NO_STORE, Delivery
from verl_drmas.rollout.loop import VALIDATE, tools_report
from verl_drmas.rollout.rows import DEFAULT_AGENT
from verl_drmas.workflows import SessionFailed

logger = logging.getLogger(__name__)


class TeamWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # the plain class behind verl's @ray.remote
    """Runs sessions under a time limit and stores their rows.

    Outputs of a stock agent loop pass through as well: one that carries `extra_fields["agent_id"]` trains with `drmas`
    unchanged, one that doesn't is agent `default`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        configure_logging()
        self.section = read_section(self.config)
        self.failures: Counter[str] = Counter()
        self.delivery = Delivery(self.section)
        self._said_default = False

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> None:
        VALIDATE.set(bool(trajectory["validate"]))
        limit, began = self.section.faults.session_timeout, time.monotonic()
        try:
            await asyncio.wait_for(super()._run_agent_loop(sampling_params, trajectory, **kwargs), limit)
        except (TimeoutError, asyncio.TimeoutError):
            await self._failed("timeout", trajectory, kwargs)
            if time.monotonic() - began < limit:
                raise  # a time-out of something inside the session, a tool for example
            raise SessionFailed("timeout", f"no outcome after {limit:g} s (drmas.faults.session_timeout)") from None
        except SessionFailed as failure:
            await self._failed(failure.reason, trajectory, kwargs)
            raise
        except Exception as error:
            await self._failed(type(error).__name__, trajectory, kwargs)
            raise

    async def _failed(self, reason: str, trajectory: dict[str, Any], kwargs: dict[str, Any]) -> None:
        self.failures[reason] += 1
        # Of a session that no store took, none needs to hear: the outage would be waited for once more.
        if self.delivery.producers and not trajectory["validate"] and reason != NO_STORE:
            await self.delivery.fail(**_place(kwargs), reason=reason)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        rows = [Activation.of(o) for o in outputs if o.response_ids]
        if not rows:
            raise SessionFailed("empty", "the agent loop returned no row with a response token")
        if reason := rows[0].extra_fields.get("failed"):
            self.failures[reason] += 1
        last, scored = rows[-1], outputs[-1]
        if last.reward_score is None and scored.reward_score is not None:  # the output that bore the score had no token
            last.reward_score = scored.reward_score
            last.extra_fields["reward_extra_info"] = scored.extra_fields.get("reward_extra_info", {})
        if last.reward_score is not None:
            last.extra_fields.setdefault("reward_extra_info", {})  # verl copies it to the session's other rows
        for row in rows:
            if "agent_id" not in row.extra_fields:
                self._say_default()
                row.extra_fields["agent_id"] = DEFAULT_AGENT
        if self.delivery.producers and not validate:
            await self.delivery.put(rows, **_place(kwargs), reason=rows[0].extra_fields.get("failed") or "")
        await super()._agent_loop_postprocess(rows, validate, **kwargs)

    def _say_default(self) -> None:
        if not self._said_default:
            self._said_default = True
            logger.warning(
                "rows come without extra_fields['agent_id']; each counts as agent %r, so that drmas is GRPO over rows",
                DEFAULT_AGENT,
            )

    def report(self) -> dict[str, float]:
        """Failed sessions by reason, retried calls and the workflow's own counts (`tools/...`) since the last
        report.
        """
        report: dict[str, float] = {f"failed/{reason}": n for reason, n in self.failures.items()}
        report |= {f"tools/{name}": value for name, value in tools_report().items()}
        retried = getattr(self.llm_client, "retried", 0)
        if retried:
            report["retried_calls"] = retried
            self.llm_client.retried = 0
        self.failures.clear()
        return report


def _place(fields: dict[str, Any]) -> dict[str, int]:
    """Where a session stands in the run, from its data row's fields."""
    names = {"step": "global_steps", "prompt": "index", "session": "session_id"}
    return {ours: int(fields[theirs]) for ours, theirs in names.items()}


@ray.remote
class TeamWorkerActor:
    """Builds a `TeamWorker` inside the actor's process.

    `ray.remote(TeamWorker)` would ship verl's base class by value, because its module-level name is the actor class,
    and zero-argument `super()` then fails in the actor. verl could export the plain class.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self.worker = TeamWorker(*args, **kwargs)

    async def generate_sequences(self, batch: Any) -> None:
        await self.worker.generate_sequences(batch)

    async def report(self) -> dict[str, float]:
        return self.worker.report()


class TeamManager(AgentLoopManagerTQ):
    """verl's manager (`rollout.agent.agent_loop_manager_class`) over `TeamWorkerActor`s."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = TeamWorkerActor

    def report(self) -> dict[str, float]:
        """Sum of the workers' reports since the last call."""
        total: Counter[str] = Counter()
        for report in ray.get([worker.report.remote() for worker in self.agent_loop_workers]):
            total.update(report)
        return dict(total)


class IdleManager:
    """The manager of a job that plays no sessions of its own (`drmas_store`)."""

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> IdleManager:
        """As verl makes a manager; there is nothing to start."""
        return cls()

    def generate_sequences(self, prompts: Any) -> None:
        """Never asked: the rows come from a store."""
        raise NotImplementedError("a job of mode drmas_store plays no sessions; the job that fills its store does")

    def report(self) -> dict[str, float]:
        """Nothing to report."""
        return {}
