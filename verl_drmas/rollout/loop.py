"""verl's agent loop (`agent_name: drmas_team`) that plays one session of a workflow."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from verl_drmas.check import LOOP_NAME, read_section
from verl_drmas.config import DrmasConfig
from verl_drmas.rollout.team import Engine, TrainingTeam
from verl_drmas.workflows import Task, Workflow, load_workflow

# verl tells its worker whether a rollout is validation, but not the loop.
VALIDATE: ContextVar[bool] = ContextVar("drmas_validate", default=False)


def build_workflow(section: DrmasConfig) -> Workflow:
    """The workflow that the section names, with its settings."""
    settings = {k: v for k, v in (section.workflow or {}).items() if k != "name"}
    cls = load_workflow((section.workflow or {})["name"])
    return cls(cls.Settings(**settings))


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


class TeamLoop(AgentLoopBase):
    """Plays one session; each activation becomes one output. Holds no state of a session, so one serves them all."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.section = read_section(self.config)
        self.workflow = build_workflow(self.section)
        (model_id,) = self.section.models
        self.engines = {model_id: Engine(model_id, self.server_manager, self)}
        self.mixed_temperature = self.section.mixes_temperature(self.rollout_config.temperature)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Play the workflow over one data row.

        Raises:
            SessionFailed: The session has no outcome.
        """
        task = read_task(kwargs, VALIDATE.get())
        team = TrainingTeam(
            self.section, self.engines, task, sampling_params, self.workflow.agents, self.mixed_temperature
        )
        outcome = await self.workflow.run(task, team)
        return team.rows(self.workflow, outcome)


_LOOPS: dict[int, tuple[Any, TeamLoop]] = {}


@register(LOOP_NAME)
def team_loop(trainer_config: Any, **kwargs: Any) -> TeamLoop:
    """The loop of this worker. verl builds one per session; this one is built once, its token builder with it."""
    config = trainer_config.config
    known, loop = _LOOPS.get(id(config), (None, None))
    if known is not config or loop.server_manager is not kwargs["server_manager"]:
        loop = TeamLoop(trainer_config=trainer_config, **kwargs)
        _LOOPS[id(config)] = (config, loop)
    return loop
