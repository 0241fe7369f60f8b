"""The `drmas` section of the configuration: typed, checked once, unknown keys refused with the nearest right name.

Nothing here imports Ray or verl. `check.py` holds the section against the rest of verl's configuration.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from verl_drmas.store.settings import GatewayConfig, RemoteConfig, StoreConfig

STRICT = ConfigDict(extra="forbid")
SECTION = "drmas"
OWN_POOL = "run"  # the pool of models that name none
TOGETHER = 0.95  # of a GPU's memory, for all servers that are awake at once; the rest is CUDA's and the trainers'
Share = Annotated[float, Field(ge=0, le=1)]
T = TypeVar("T")


NO_ADAPTERS = (
    "agents can't be adapters on one base model: a verl 0.9 worker group trains one adapter, and its engine serves one "
    "(verl#7909, open; verl#4421 before it); give each agent a model of its own with actor_rollout_ref.model.lora_rank"
)


class ConfigError(ValueError):
    """A wrong configuration; the message is one line that names the key, the value and the fix."""


@dataclass(config=STRICT)
class SamplingConfig:
    """How one agent samples in training; None keeps the value of `actor_rollout_ref.rollout`.

    Validation keeps `rollout.val_kwargs` for temperature, top_p and top_k; penalties and stop strings hold in both.
    """

    temperature: float | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: PositiveFloat | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] | None = None

    def __post_init__(self):
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}; training divides the logits by it, so it must be above 0"
            )


@dataclass(config=STRICT)
class AgentConfig:
    """One agent of the team.

    Attributes:
        model: The model (a key of `drmas.models`) that serves and learns from this agent.
        trainable: False leaves the agent's rows out of every update.
        invalid_penalty: Taken off the score of an invalid action (0.1 in the paper's math task).
        prompt_length: Longest prompt in tokens; None: `data.max_prompt_length`.
        response_length: Longest row of responses and observations in tokens; None: `data.max_response_length`.
        turn_length: Most tokens of one LLM call; None: what `response_length` leaves.
    """

    model: str
    trainable: bool = True
    invalid_penalty: NonNegativeFloat = 0.0
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompt_length: PositiveInt | None = None
    response_length: PositiveInt | None = None
    turn_length: PositiveInt | None = None


@dataclass(config=STRICT)
class ModelConfig:
    """One model. `{}` is `actor_rollout_ref` as it stands, in the run's own pool.

    Attributes:
        trainable: False serves the model as it is on disk, without training workers.
        actor_rollout_ref: What differs from the run's `actor_rollout_ref`; composed while interpolations are open, so
            that keys that follow from others follow (compose.py).
        pool: The pool (a key of `drmas.pools`) whose GPUs the model trains and serves on; None: the run's own, of
            `trainer.n_gpus_per_node` x `trainer.nnodes`.
        updates_per_step: As `drmas.updates_per_step`, for this model alone.
        init_from: A checkpoint folder `.../global_step_N/actor/<model id>` whose weights (not its optimiser) the model
            starts from; a resume goes before. A reference model stays at `model.path`.
        remote: The model is another job's, which serves it and trains it on this job's sessions.
    """

    trainable: bool = True
    actor_rollout_ref: dict[str, Any] = field(default_factory=dict)
    pool: str | None = None
    updates_per_step: PositiveInt | None = None
    init_from: str | None = None
    remote: RemoteConfig | None = None

    @property
    def trained_here(self) -> bool:
        """True if this job has training workers for it."""
        return self.trainable and self.remote is None


@dataclass(config=STRICT)
class PoolConfig:
    """GPUs that models share (several name the pool) or have to themselves."""

    n_gpus_per_node: PositiveInt
    nnodes: PositiveInt = 1


@dataclass(config=STRICT)
class AdvantageConfig:
    """Options of the estimators; the defaults give `drmas` the reference code's numbers on groups with a spread.

    Attributes:
        penalty: `inside`: an invalid action's penalty enters the group's statistics (reference code); `outside`: it is
            taken off the normalised advantage.
        balance: Row weights in the loss: `agent` gives every (prompt, agent) group the same mass, `session` every
            session.
        ddof: 1: unbiased standard deviation (reference code); 0: population (paper).
        eps: Added to the standard deviation.
        std_floor: Smallest standard deviation used.
        singleton: A group with one value: `zero`, or `raw` as in the reference code (advantage = score).
        constant: A group whose values are equal: `zero`, or `raw` for what the formula gives.
        shadow: Log what the other estimators would have given on the same rows.
    """

    penalty: Literal["inside", "outside"] = "inside"
    balance: Literal["none", "agent", "session"] = "none"
    ddof: Literal[0, 1] = 1
    eps: NonNegativeFloat = 1e-6
    std_floor: NonNegativeFloat = 0.0
    singleton: Literal["zero", "raw"] = "zero"
    constant: Literal["zero", "raw"] = "zero"
    shadow: bool = True


@dataclass(config=STRICT)
class AlignmentConfig:
    """How `mgrpo` makes every session that called a sub-agent count the same (M-GRPO, section 4.1).

    Attributes:
        target: D, the trajectories each session counts as; `auto`: the 99th percentile of the first `auto_steps` steps,
            by sub-agent, which is then kept.
        mode: `sample` (the paper), `expected`, `mask` or `none`; see `advantage/alignment.py`.
        copies: `weights` trains a trajectory once, by its number of copies; `physical` adds copies as rows, for losses
            where that isn't the same. verl then divides by the rows there are, so that sessions without a call leave
            the denominator, and agents of one model weigh by their rows.
        auto_steps: See `target`.
    """

    target: PositiveInt | Literal["auto"] = 8
    mode: Literal["sample", "expected", "mask", "none"] = "sample"
    copies: Literal["weights", "physical"] = "weights"
    auto_steps: PositiveInt = 10

    def __post_init__(self):
        if self.copies == "physical" and self.mode == "expected":
            raise ValueError(
                "copies is 'physical', but mode 'expected' has fractions of copies; choose sample, or weights"
            )


@dataclass(config=STRICT)
class StageConfig:
    """One stage of a curriculum: what is trained on, and until when.

    Attributes:
        name: For logs.
        files: Data files, as `data.train_files`.
        until_step: Ends after this step; None: not by steps.
        until_metric: Ends when this metric has been at least `above` for `for_steps` steps in a row.
        above: See `until_metric`.
        for_steps: See `until_metric`.
    """

    name: str
    files: list[str]
    until_step: PositiveInt | None = None
    until_metric: str | None = None
    above: float | None = None
    for_steps: PositiveInt = 5

    def __post_init__(self):
        if not self.files:
            raise ValueError("files is empty; name the stage's data files")
        if (self.until_metric is None) != (self.above is None):
            raise ValueError("until_metric and above belong together; set both or neither")

    @property
    def ends(self) -> bool:
        """Whether the stage ever ends."""
        return self.until_step is not None or self.until_metric is not None


@dataclass(config=STRICT)
class FaultConfig:
    """What a run survives and when it stops.

    Attributes:
        session_timeout: Seconds until a session counts as failed; a call it waits for runs on to its token limit.
        max_failed_share: Share of a step's sessions that may fail before the run stops.
        stall_timeout: Seconds without any session ending before the run stops.
        poll_health: Seconds between looks at the servers' `/health`; 0 turns the watchdog off.
        hang_timeout: Seconds of unanswered `/health` before a server counts as dead.
        sync_timeout: Seconds a training worker waits for its server in a weight update.
        failed_sessions: What becomes of what a session's agents said before it failed: `drop` forgets it; `mask` keeps
            it in the rollout dumps (`trainer.rollout_data_dir`), but for sessions over their time, which are dropped.
            Neither enters statistics, updates or metrics, and both are counted.
    """

    session_timeout: PositiveFloat = 1800.0
    max_failed_share: Share = 0.1
    stall_timeout: PositiveFloat = 3600.0
    poll_health: NonNegativeFloat = 5.0
    hang_timeout: PositiveFloat = 120.0
    sync_timeout: PositiveFloat = 120.0
    failed_sessions: Literal["drop", "mask"] = "drop"


@dataclass(config=STRICT)
class DrmasConfig:
    """The whole `drmas` section.

    Attributes:
        workflow: `{name: <registry name or import path>, ...its settings}`; None: the rows come from a stock agent
            loop.
        agents: The team, by agent id.
        models: The models, by model id; empty: one, `base`.
        pools: Groups of GPUs beside the run's own, by name.
        updates_per_step: Optimizer updates per step; None: `data.train_batch_size / actor.ppo_mini_batch_size`, what
            verl does for a workflow with one row a session.
        group_by: `agent` runs one of verl's own group estimators per (prompt, agent).
        request_seed: Seed hashed into every request, for exact resume and parity; None leaves sampling unseeded (faster
            on a GPU).
        poll_interval: Seconds between looks for finished sessions (verl: 2).
        alignment: Options of `mgrpo`.
        curriculum: Stages that follow each other; empty: `data.train_files` from the first step to the last.
        show_first_session: Print the first session with prompts, masks and special tokens before the first update.
        store: Where a job of mode `drmas_store` finds the sessions that it trains on.
        gateway: The server in front of that job's engines.
    """

    workflow: dict[str, Any] | None = None
    agents: dict[str, AgentConfig] = field(default_factory=dict)
    models: dict[str, ModelConfig] = field(default_factory=dict)
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    updates_per_step: PositiveInt | None = None
    group_by: Literal["prompt", "agent"] = "prompt"
    request_seed: int | None = None
    poll_interval: PositiveFloat = 0.2
    show_first_session: bool = True
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    curriculum: list[StageConfig] = field(default_factory=list)
    faults: FaultConfig = field(default_factory=FaultConfig)
    store: StoreConfig | None = None
    gateway: GatewayConfig = field(default_factory=GatewayConfig)

    def __post_init__(self):
        if not self.models:
            self.models = {"base": ModelConfig()}
        for agent_id, agent in self.agents.items():
            if agent.model not in self.models:
                raise ValueError(
                    f"agents.{agent_id}.model is {agent.model!r}, which drmas.models doesn't list; "
                    f"{nearest(agent.model, self.models)}"
                )
        for model_id, model in self.models.items():
            self._check_model(model_id, model)
        for number, stage in enumerate(self.curriculum):
            last = number + 1 == len(self.curriculum)
            if stage.ends == last:
                fix = "drop until_step and until_metric" if last else "set until_step or until_metric"
                raise ValueError(
                    f"curriculum: stage {stage.name!r} {'is the last and ends' if last else 'never ends'}; {fix}"
                )
        for pool in self.pools:
            if pool == OWN_POOL:
                raise ValueError(f"pools.{pool}: {pool!r} is the name of the run's own pool; choose another")
            if pool not in {m.pool for m in self.models.values()}:
                raise ValueError(f"pools.{pool}: no model is in it; set drmas.models.<id>.pool={pool}, or drop it")
        if not any(model.trained_here for model in self.models.values()):
            raise ValueError("models has no model that this job trains; a run trains at least one")
        roles = [(m.remote.store, m.remote.role) for m in self.models.values() if m.remote]
        if len(set(roles)) < len(roles):
            raise ValueError(
                "models: two models have the same remote.store and remote.role; give each a role of its own"
            )

    def _check_model(self, model_id: str, model: ModelConfig) -> None:
        key = f"models.{model_id}"
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", model_id):
            raise ValueError(f"{key}: {model_id!r} names a folder and metrics; use letters, digits, '_', '-' and '.'")
        if not self.agents and len(self.models) > 1:
            raise ValueError(f"{key}: no agent is listed; drmas.agents.<id>.model says who is on which model")
        if self.agents and not self.agents_of(model_id):
            used = sorted({agent.model for agent in self.agents.values()})
            raise ValueError(f"{key}: no agent is on it (agents are on {', '.join(used)}); give it one, or drop it")
        mine = self.agents_of(model_id)
        if model.trainable and mine and not any(self.agents[agent_id].trainable for agent_id in mine):
            raise ValueError(
                f"{key}: none of its agents is trained ({', '.join(mine)}); set drmas.{key}.trainable=false to "
                "serve it without training workers"
            )
        if model.pool is not None and model.pool not in self.pools:
            raise ValueError(
                f"{key}.pool is {model.pool!r}, which drmas.pools doesn't list; {nearest(model.pool, self.pools)}"
            )
        if model.remote and not model.trainable:
            raise ValueError(f"{key}.remote is set, but the model is frozen; serve a frozen model in this job")
        if not model.trained_here:
            why = "is another job's (remote)" if model.remote else "is frozen (trainable: false)"
            for part in ("actor", "ref"):
                if part in model.actor_rollout_ref:
                    raise ValueError(
                        f"{key}.actor_rollout_ref.{part} is set, but the model {why} and has no optimiser or training "
                        "worker here; drop the override, or train the model here"
                    )
            for name in ("updates_per_step", "init_from", *(["pool"] if model.remote else [])):
                if getattr(model, name) is not None:
                    raise ValueError(f"{key}.{name} is set, but the model {why}; drop it")

    def agents_of(self, model_id: str) -> list[str]:
        """The agents on a model."""
        return [agent_id for agent_id, agent in self.agents.items() if agent.model == model_id]

    def trained(self, agent_id: str) -> bool:
        """True if the agent's rows enter this job's updates: the agent is trainable, and its model trained here."""
        agent = self.agent(agent_id)
        return agent.trainable and self.models[agent.model].trained_here

    @property
    def remote(self) -> dict[str, RemoteConfig]:
        """The models that another job serves and trains."""
        return {model_id: model.remote for model_id, model in self.models.items() if model.remote}

    def only(self, model_id: str) -> DrmasConfig:
        """The section with this model's agents alone."""
        narrowed = copy.copy(self)
        narrowed.agents = {agent_id: self.agents[agent_id] for agent_id in self.agents_of(model_id)}
        return narrowed

    def mixes_temperature(self, default: float) -> bool:
        """True if a trained agent samples at another temperature than `default`."""
        own = {agent.sampling.temperature for agent_id, agent in self.agents.items() if self.trained(agent_id)}
        return bool(own - {None, default})

    def updates(self, model_id: str) -> int | None:
        """Optimizer updates per step of a model; None: as verl has it."""
        return self.models[model_id].updates_per_step or self.updates_per_step

    def agent(self, agent_id: str) -> AgentConfig:
        """An agent's settings; one the section doesn't list (rows of a stock agent loop) is on the first model."""
        return self.agents.get(agent_id) or AgentConfig(model=next(iter(self.models)))


def nearest(name: str, known: Any) -> str:
    """`did you mean 'x'?` or the known names."""
    near = get_close_matches(str(name), [str(k) for k in known], n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    names = [str(k) for k in known]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"known: {', '.join(names[:12]) or 'none'}{more}"


def parse(
    section: Mapping[str, Any] | None, cls: type[T] = DrmasConfig, path: str = SECTION, *, strict: bool = False
) -> T:
    """Turn a plain mapping into a typed section.

    Args:
        section: The mapping (no OmegaConf containers, nothing unresolved).
        cls: The dataclass to fill.
        path: Where the mapping stands, for messages.
        strict: Refuse what only fits after a conversion, such as '2' for an integer.

    Raises:
        ConfigError: One line on the first wrong key or value.
    """
    if not isinstance(section, Mapping | None):
        raise ConfigError(f"{path}: {section!r} is not valid: a section of keys is needed")
    section, adapter = dict(section or {}), TypeAdapter(cls)
    try:
        # Strict Python input would have to be an instance of `cls` already; strict JSON takes an object for it.
        return adapter.validate_json(json.dumps(section), strict=True) if strict else adapter.validate_python(section)
    except ValidationError as error:
        raise ConfigError(_one_line(error, cls, path)) from None


def _one_line(error: ValidationError, cls: type, path: str) -> str:
    # A misspelt required key gives two errors; the misspelling is the one to show.
    first = min(error.errors(), key=lambda e: e["type"] not in ("unexpected_keyword_argument", "extra_forbidden"))
    location = [str(part) for part in first["loc"]]
    key = ".".join([path, *location])
    value = first.get("input")
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        if location[0] == "agents" and re.search("lora|adapter", location[-1]):
            return f"{key}: {NO_ADAPTERS}"
        owner = _class_at(cls, location[:-1])
        known = [f.name for f in fields(owner)] if owner else []
        return f"{key}: unknown key; {nearest(location[-1], known)}"
    if first["type"] in ("missing", "missing_argument"):
        what = " (an agent without a model)" if location[-1] == "model" else ""
        return f"{key}: missing{what}; set it"
    if first["type"] == "value_error":
        return f"{key}.{first['ctx']['error']}"  # the checks above begin with the field's name
    if first["type"] in ("dict_type", "dataclass_type"):
        return f"{key}: {value!r} is not valid: a section is needed, such as `{location[-1]}: {{...}}`"
    return f"{key}: {value!r} is not valid: {first['msg'][0].lower()}{first['msg'][1:]}"


def _class_at(cls: type, location: list[str]) -> type | None:
    """The dataclass that a location inside `cls` points at; mapping keys stand for the mapping's value type."""
    current: Any = cls
    for part in location:
        if is_dataclass(current):
            current = get_type_hints(current).get(part)
        else:
            current = next((a for a in get_args(current) if is_dataclass(a)), None)
        if current is None:
            return None
    if not is_dataclass(current):
        current = next((a for a in get_args(current) if is_dataclass(a)), None)
    return current
