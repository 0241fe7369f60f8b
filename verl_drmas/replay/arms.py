"""Which estimator a dumped step is replayed with, and with which switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import yaml

from verl_drmas.advantage import ESTIMATORS
from verl_drmas.config import ConfigError, DrmasConfig, nearest, parse
from verl_drmas.dumps import STEP_SETTINGS, DumpedStep, DumpError
from verl_drmas.support import GROUP_ESTIMATORS, MGRPO, PER_AGENT, REFUSED_ESTIMATORS, spans_agents
from verl_drmas.trainer.alignment import StepAlignment

NAMES = (*ESTIMATORS, MGRPO, *GROUP_ESTIMATORS)
NORM = "algorithm.norm_adv_by_std_in_grpo"
GROUP_BY = "drmas.group_by"
ADVANTAGE = tuple(
    f"drmas.advantage.{name}" for name in ("ddof", "eps", "std_floor", "singleton", "constant", "penalty")
)
ALIGNMENT = ("drmas.alignment.target", "drmas.alignment.mode", "alignment.aligned", "alignment.seed")


@dataclass(frozen=True)
class Arm:
    """One estimator as it shall be applied.

    Attributes:
        name: What it is called in tables.
        estimator, base_estimator: As the trainer has them.
        section: The `drmas` section, as far as estimators read it.
        algorithm: The section `algorithm`.
        alignment: Of `mgrpo`; None for others.
        own: True: the estimator and all its switches are those that the step was trained with.
    """

    name: str
    estimator: str
    base_estimator: str | None
    section: DrmasConfig
    algorithm: Mapping[str, Any]
    alignment: StepAlignment | None
    own: bool


def arm_of(step: DumpedStep, name: str | None, changes: Mapping[str, str]) -> Arm:
    """An estimator on a step.

    Args:
        step: The dump.
        name: The estimator; None: the step's own.
        changes: Settings that differ from the run's, by key, as YAML texts.

    Raises:
        DumpError: The dump can't tell what the estimator would have given; with the reason.
    """
    settings = step.settings
    if settings is None:
        raise DumpError(f"{step.file}: nothing was trained on its rows (validation?); give the dumps of training steps")
    missing = [key for key in STEP_SETTINGS if key not in settings]
    if missing:
        raise DumpError(f"{step.file}: its settings have no {missing[0]!r}: the dump was changed; take it as it was")
    own_name = settings["base_estimator"] or settings["estimator"]
    chosen = name or own_name
    _check_name(step, chosen, own_name)
    changed = _changed(step, chosen, changes)
    group_by = changed["section"]["group_by"] == "agent" and chosen in GROUP_ESTIMATORS
    estimator, base = (PER_AGENT, chosen) if group_by else (chosen, None)
    alignment = _alignment(step, changed["alignment"], chosen) if estimator == MGRPO else None
    try:
        section = parse(
            {
                "agents": {
                    agent: {"model": "base", "invalid_penalty": own["invalid_penalty"]}
                    for agent, own in changed["section"]["agents"].items()
                },
                "advantage": changed["section"]["advantage"],
                "group_by": changed["section"]["group_by"],
            }
        )
    except ConfigError as error:
        raise DumpError(f"--set {error}") from None
    same = (estimator, base) == (settings["estimator"], settings["base_estimator"]) and all(
        changed[key] == settings[key] for key in ("section", "algorithm", "alignment")
    )
    if not same:
        _check_rows(step, estimator)
    label = f"{chosen} by agent" if base else chosen
    return Arm(label, estimator, base, section, changed["algorithm"], alignment, same)


def _check_name(step: DumpedStep, chosen: str, own: str) -> None:
    if chosen in REFUSED_ESTIMATORS:
        raise DumpError(f"--estimator {chosen} can't be replayed from rows: {REFUSED_ESTIMATORS[chosen]}")
    if chosen in NAMES:
        return
    if chosen == own:
        raise DumpError(
            f"{step.file}: its run's estimator {own!r} is neither verl's nor ours, and may read what no dump holds; "
            f"replay another with --estimator: {', '.join(NAMES)}"
        )
    raise DumpError(f"--estimator {chosen} is unknown; {nearest(chosen, NAMES)}")


def _check_rows(step: DumpedStep, estimator: str) -> None:
    """Refuse what the dump's rows can't tell of an estimator that wasn't the run's."""
    if step.settings["copies"] == "physical":
        raise DumpError(
            f"{step.file}: the run made copies of rows and dropped others (drmas.alignment.copies=physical); what was "
            "dropped isn't in the dump, so that only the step's own estimator can be replayed"
        )
    if not step.settings["whole_team"] and not _within_agents(estimator):
        raise DumpError(
            f"{step.file}: holds one job's agents of a pair, and {estimator} compares an agent with its team; replay "
            f"one whose groups are (prompt, agent): {', '.join([*filter(_within_agents, NAMES)])}"
        )


def check_read(arms: Sequence[Arm], changes: Mapping[str, str]) -> None:
    """Refuse a change that would change nothing.

    Raises:
        DumpError: None of the estimators reads one of the keys.
    """
    for key in changes:
        if not any(_reads(arm, key) for arm in arms):
            names = ", ".join(arm.name for arm in arms)
            raise DumpError(f"--set {key}: {names} doesn't read it; leave it out, or name an estimator that does")


def _reads(arm: Arm, key: str) -> bool:
    ours = arm.estimator in (*ESTIMATORS, MGRPO)
    if key in ALIGNMENT:
        return arm.estimator == MGRPO
    if key == GROUP_BY:
        return not ours  # verl's own, per prompt or per prompt and agent
    if key == NORM:
        return ours or "grpo" in (arm.base_estimator or arm.estimator)
    if key in ADVANTAGE and not key.endswith(".penalty"):
        return ours
    return ours or arm.estimator == PER_AGENT  # penalties, which verl's own don't know


def _within_agents(estimator: str) -> bool:
    return estimator in (*ESTIMATORS, MGRPO, PER_AGENT) and not spans_agents(estimator)


def _changed(step: DumpedStep, estimator: str, changes: Mapping[str, str]) -> dict[str, Any]:
    """The step's settings with the changes in them."""
    made = {key: deepcopy(step.settings[key]) for key in ("section", "algorithm", "alignment")}
    agents = {row.agent for row in step.rows} | set(made["section"]["agents"])
    known = [NORM, GROUP_BY, *ADVANTAGE, *ALIGNMENT, *(f"drmas.agents.{a}.invalid_penalty" for a in sorted(agents))]
    for key, text in changes.items():
        if key not in known:
            raise DumpError(f"--set {key}: an estimator doesn't read it; {nearest(key, known)}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise DumpError(f"--set {key}={text}: not a value in YAML, such as 0.5 or [a, b]") from None
        last = key.rsplit(".", 1)[-1]
        if key in ALIGNMENT:
            if estimator == MGRPO:
                made["alignment"] = {**(made["alignment"] or {}), last: value}
        elif key == NORM:
            if not isinstance(value, bool):
                raise DumpError(f"--set {key}={text}: true or false")
            made["algorithm"][last] = value
        elif key == GROUP_BY:
            made["section"][last] = value
        elif key in ADVANTAGE:
            made["section"]["advantage"][last] = value
        else:
            agent = key.removeprefix("drmas.agents.").removesuffix(".invalid_penalty")
            made["section"]["agents"].setdefault(agent, {})["invalid_penalty"] = value
    return made


def _alignment(step: DumpedStep, given: Mapping[str, Any] | None, estimator: str) -> StepAlignment:
    given = {"mode": "sample", "seed": 0, "step": step.step, **(given or {})}
    agents = sorted({*step.settings["section"]["agents"], *(row.agent for row in step.rows)})
    examples = {"aligned": "alignment.aligned=[AGENT, ...]", "target": "drmas.alignment.target=8"}
    missing = [f"--set {example}" for key, example in examples.items() if given.get(key) is None]
    if missing:
        raise DumpError(
            f"{step.file}: its run didn't align trajectories, and {estimator} needs to know how: {' '.join(missing)} "
            f"(its agents: {', '.join(agents)})"
        )
    aligned = [given["aligned"]] if isinstance(given["aligned"], str) else list(given["aligned"])
    target = given["target"]
    known = {*agents, *(target if isinstance(target, Mapping) else ())}  # one job of a pair aligns with the other's
    if not isinstance(target, Mapping):
        target = dict.fromkeys(aligned, target)
    for agent in aligned:
        if agent not in known:
            raise DumpError(f"--set alignment.aligned={agent}: the team has no such agent; {nearest(agent, agents)}")
    return StepAlignment(tuple(aligned), dict(target), given["mode"], int(given["seed"]), int(given["step"]))


def read_changes(texts: Sequence[str]) -> dict[str, str]:
    """`key=value` texts by key.

    Raises:
        DumpError: One isn't of that form.
    """
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise DumpError(f"--set {text}: give key=value, such as {ADVANTAGE[0]}=0")
        changes[key] = value
    return changes
