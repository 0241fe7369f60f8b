"""Workflows by registry name or by import path (`package.module:Class` or `package.module.Class`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches

from verl_drmas.workflows.base import Workflow

# Bundled workflows are imported when they are asked for, so that one with extra dependencies costs nobody else.
_BUNDLED = {
    "arithmetic": "verl_drmas.workflows.arithmetic:Arithmetic",
    "arithmetic_rival": "verl_drmas.workflows.arithmetic:ArithmeticRival",
    "delegate": "verl_drmas.workflows.delegate:Delegate",
    "four_agents": "verl_drmas.workflows.four_agents:FourAgents",
    "search_hierarchy": "verl_drmas.workflows.search_hierarchy:SearchHierarchy",
    "solver_verifier": "verl_drmas.workflows.solver_verifier:SolverVerifier",
}
_REGISTERED: dict[str, type[Workflow]] = {}


def register_workflow(name: str) -> Callable[[type[Workflow]], type[Workflow]]:
    """Class decorator: make a workflow known under `name`.

    Raises:
        ValueError: Another class already has this name.
        TypeError: The class isn't a Workflow or declares no agents.
    """

    def decorate(cls: type[Workflow]) -> type[Workflow]:
        if not (isinstance(cls, type) and issubclass(cls, Workflow)):
            raise TypeError(f"register_workflow({name!r}) expects a subclass of Workflow, got {cls!r}")
        if not cls.agents:
            raise TypeError(f"workflow {name!r} ({cls.__qualname__}) declares no agents; set `agents = (...)`")
        known, path = _REGISTERED.get(name), f"{cls.__module__}:{cls.__qualname__}"
        taken = f"{known.__module__}:{known.__qualname__}" if known else _BUNDLED.get(name, path)
        if taken != path:
            raise ValueError(f"workflow {name!r} is already {taken}; choose another name")
        _REGISTERED[name] = cls
        return cls

    return decorate


def workflow_names() -> list[str]:
    """Names that `load_workflow` knows without an import path."""
    return sorted({*_BUNDLED, *_REGISTERED})


def load_workflow(name: str) -> type[Workflow]:
    """The workflow class behind a registry name or an import path.

    Raises:
        ValueError: No such name, module or class; the message holds the nearest known name.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    path = _BUNDLED.get(name, name)
    module_name, _, class_name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name:
        near = get_close_matches(name, workflow_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(workflow_names())}"
        raise ValueError(f"unknown workflow {name!r}; {hint} (or give an import path, package.module:Class)")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever a user's module raises
        raise ValueError(f"workflow {name!r} can't be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Workflow)):
        raise ValueError(f"workflow {name!r} is {cls!r}, not a subclass of verl_drmas.workflows.Workflow")
    if not cls.agents:
        raise ValueError(f"workflow {name!r} declares no agents; set `agents = (...)` in its class")
    return cls
