"""One name of verl that this package relies on, and the look whether the installed verl has it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Name:
    """One name of verl, and what hangs on it.

    Attributes:
        module: The module we import it from.
        name: The attribute, or a dotted path of attributes.
        why: What it is for; goes into the doctor's line.
        parameters: Names of the arguments we pass, separated by blanks.
        members: Attributes that we call or override, each with the arguments we pass, separated by blanks.
        attributes: Attributes of its instances that we use, separated by blanks; looked for in the class's source.
        needs: A module without which `module` can't be imported; where it isn't installed, the name isn't checked.
    """

    module: str
    name: str
    why: str
    parameters: str = ""
    members: Mapping[str, str] = field(default_factory=dict)
    attributes: str = ""
    needs: str | None = None


def check_name(name: Name) -> Iterator[str]:
    if name.needs and importlib.util.find_spec(name.needs) is None:
        return
    try:
        found: Any = importlib.import_module(name.module)
    except ImportError as error:
        yield f"{name.module} can't be imported ({error}); for: {name.why}"
        return
    for part in name.name.split("."):
        found = getattr(found, part, None)
    if found is None:
        yield f"{name.module}.{name.name} is missing; for: {name.why}"
        return
    yield from _check_parameters(found, name.parameters, f"{name.module}.{name.name}", name.why)
    for member, parameters in name.members.items():
        path = f"{name.module}.{name.name}.{member}"
        if not hasattr(found, member):
            yield f"{path} is missing; for: {name.why}"
        else:
            yield from _check_parameters(getattr(found, member), parameters, path, name.why)
    for attribute in name.attributes.split():
        if not any(re.search(rf"\bself\.{attribute}\b", source) for source in _sources(found)):
            yield f"{name.module}.{name.name} sets no self.{attribute}; for: {name.why}"


def _sources(cls: type) -> list[str]:
    """Source of a class and of its bases within verl."""
    return [inspect.getsource(base) for base in cls.__mro__ if base.__module__.split(".")[0] == "verl"]


def _check_parameters(function: Any, parameters: str, path: str, why: str) -> Iterator[str]:
    if not parameters:
        return
    known = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return
    for parameter in parameters.split():
        if parameter not in known:
            yield f"{path} takes no {parameter!r}; for: {why}"
