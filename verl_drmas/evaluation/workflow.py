"""The workflow that is played, from names and settings of a command line, and the tasks it gets."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_drmas.config import nearest, parse
from verl_drmas.workflows import Task, Workflow, load_workflow


def build_workflow(name: str, settings: Sequence[str], base: Mapping[str, Any] | None = None) -> Workflow:
    """The workflow with settings as on verl's command line (`max_rounds=2`, `subs.search.tools=[search]`).

    Args:
        name: Registry name or import path.
        settings: What differs from `base`.
        base: Settings of a configuration.

    Raises:
        ValueError: No such workflow or setting, a value that it refuses, or a library that isn't there.
    """
    cls = load_workflow(name)
    for module in cls.requires:
        if importlib.util.find_spec(module) is None:
            fix = f"'verl-drmas[{cls.extra}]'" if cls.extra else f"what brings {module}"
            raise ValueError(f"--workflow {name}: needs the module {module}; pip install {fix}")
    try:
        merged = OmegaConf.merge(OmegaConf.create(dict(base or {})), OmegaConf.from_dotlist(list(settings)))
        given = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"--setting: {' '.join(str(error).split())}") from None
    for key in given:
        if key not in cls.setting_names():
            raise ValueError(f"--setting {key}: {name} has no such setting; {nearest(key, cls.setting_names())}")
    parse(given, cls.Settings, "--setting", strict=True)
    workflow = cls(cls.Settings(**given))
    workflow.bring({})
    return workflow


def preflight(workflow: Workflow) -> str:
    """What the workflow found of its tools.

    Raises:
        ValueError: As the workflow's `preflight` says it.
    """
    try:
        return workflow.preflight()
    except Exception as error:  # whatever a user's workflow raises
        raise ValueError(f"--workflow: {' '.join(str(error).split()) or type(error).__name__}") from error


def task_of(row: dict[str, Any], session: int, *, validate: bool = False) -> Task:
    """A session's task, as training has it of the same row.

    Args:
        row: In verl's RLHF format.
        session: Which of the row's attempts.
        validate: Whether it is asked as in validation.
    """
    messages = tuple(dict(m) for m in row["prompt"])
    users = [m["content"] for m in messages if m.get("role") == "user"]
    info = row["extra_info"]
    return Task(
        question=users[-1] if users else "",
        answer=gold_of(row.get("reward_model")),
        messages=messages,
        data_source=str(row.get("data_source", "unknown")),
        index=int(info["index"]),
        session=session,
        validate=validate,
        extra=dict(info),
    )


def gold_of(reward_model: dict[str, Any] | None) -> Any:
    """The gold of a row."""
    return (reward_model or {}).get("ground_truth")
