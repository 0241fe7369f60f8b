"""verl's agent loop (`agent_name: drmas_team`) that plays one session of a workflow."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
    register,
)
from verl.utils.config import omega_conf_to_dataclass

from verl_drmas.check import LOOP_NAME, build_workflow, read_section
from verl_drmas.rollout.client import TeamClient
from verl_drmas.rollout.team import Engine, TrainingTeam
from verl_drmas.rollout.verl_tools import as_tools
from verl_drmas.support import get
from verl_drmas.workflows import SessionFailed, Task

logger = logging.getLogger(__name__)

MODEL_SAMPLING = ("temperature", "top_p", "top_k")  # what verl reads from the run's rollout section
# verl tells its worker whether a rollout is validation, but not the loop.
VALIDATE: ContextVar[bool] = ContextVar("drmas_validate", default=False)


def read_task(fields: dict[str, Any], validate: bool) -> Task:
    """A task from a data row's fields (verl's RLHF format plus `uid`, `session_id`, `global_steps`)."""
    messages = tuple(dict(m) for m in fields["raw_prompt"])
    users = [m["content"] for m in messages if m.get("role") == "user"]
    reward_model = fields.get("reward_model") or {}
    info = fields.get("extra_info") or {}
    return Task(
        question=users[-1] if users else "",
        answer=reward_model.get("ground_truth"),
        messages=messages,
        data_source=str(fields.get("data_source", "unknown")),
        index=int(fields.get("index", 0)),
        session=int(fields["session_id"]),
        step=int(fields["global_steps"]),
        validate=validate,
        extra=dict(info),
    )


class ModelLoop(AgentLoopBase):
    """verl's token helpers for one model of several: its tokenizer, chat template and lengths."""

    @classmethod
    def of(cls, client: Any, team: AgentLoopBase) -> ModelLoop:
        """Build from the model's client, which carries its configuration."""
        model = omega_conf_to_dataclass(client.config.actor_rollout_ref.model)
        kind = getattr(model.hf_config, "model_type", None)
        return cls(
            trainer_config=DictConfigWrap(client.config),
            server_manager=client,
            tokenizer=model.tokenizer,
            processor=model.processor,
            dataset_cls=team.dataset_cls,
            data_config=DictConfigWrap(team.data_config),
            hf_model_type=kind if isinstance(kind, str) else None,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Never asked: the team's loop plays the sessions."""
        raise NotImplementedError(f"a model's loop plays no sessions; set agent_loop={LOOP_NAME}")


class TeamLoop(AgentLoopBase):
    """Plays one session; each activation becomes one output. Holds no state of a session, so one serves them all."""

    def __init__(self, *args: Any, tools: ToolListWrap | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.section = read_section(self.config)
        folders = {False: "trainer.rollout_data_dir", True: "trainer.validation_data_dir"}
        self.dumped = {validate: bool(get(self.config, key)) for validate, key in folders.items()}
        self.workflow = build_workflow(self.section)
        self.workflow.bring(as_tools(tools.tools if tools else [], self.rollout_config.multi_turn))
        engines = self._build_engines()
        # verl stores a session's rows under the first one's fields: all carry a temperature, or none does.
        mixed = any(engine.row_temperature for engine in engines.values())
        self.engines = {model_id: replace(engine, row_temperature=mixed) for model_id, engine in engines.items()}

    def _build_engines(self) -> dict[str, Engine]:
        if not isinstance(self.server_manager, TeamClient):
            (model_id,) = self.section.models
            return {model_id: Engine(model_id, self.server_manager, self, row_temperature=self._mixes(model_id, self))}
        engines = {}
        for model_id, client in self.server_manager.clients.items():
            loop, own = ModelLoop.of(client, self), client.config.actor_rollout_ref.rollout
            differs = {k: own[k] for k in MODEL_SAMPLING if own[k] != self.rollout_config[k]}
            remote = model_id in self.section.remote
            engines[model_id] = Engine(model_id, client, loop, differs, self._mixes(model_id, loop), remote)
        return engines

    def _mixes(self, model_id: str, loop: AgentLoopBase) -> bool:
        """The model's trained agents sample at other temperatures than the model trains at."""
        return self.section.only(model_id).mixes_temperature(loop.rollout_config.temperature)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Play the workflow over one data row.

        Raises:
            SessionFailed: The session has no outcome.
        """
        task = read_task(kwargs, VALIDATE.get())
        dumped = self.dumped[task.validate]
        team = TrainingTeam(self.section, self.engines, task, sampling_params, self.workflow.agents, dumped=dumped)
        try:
            outcome = await self.workflow.run(task, team)
        except SessionFailed as failure:
            masked = team.masked_rows(failure) if self._keeps_failed(task) else []
            if not masked:
                raise
            logger.warning(  # verl says so itself of a session that raises
                "session %d of data row %d failed, and its %d rows are masked: %s",
                task.session,
                task.index,
                len(masked),
                failure,
            )
            return masked
        return team.rows(self.workflow, outcome)

    def _keeps_failed(self, task: Task) -> bool:
        """In validation a row counts as an ended session, whatever it is marked with."""
        return self.section.faults.failed_sessions == "mask" and not task.validate


_LOOPS: dict[int, tuple[Any, TeamLoop]] = {}


def tools_report() -> dict[str, float]:
    """What the workflows of this process count beside their sessions, since the last call."""
    report: dict[str, float] = {}
    for _, loop in _LOOPS.values():
        for name, value in loop.workflow.report().items():
            report[name] = report.get(name, 0) + value
    return report


@register(LOOP_NAME)
def team_loop(trainer_config: Any, **kwargs: Any) -> TeamLoop:
    """The loop of this worker. verl builds one per session; this one is built once, its token builder with it."""
    config = trainer_config.config
    known, loop = _LOOPS.get(id(config), (None, None))
    if known is not config or loop.server_manager is not kwargs["server_manager"]:
        loop = TeamLoop(trainer_config=trainer_config, **kwargs)
        _LOOPS[id(config)] = (config, loop)
    return loop
