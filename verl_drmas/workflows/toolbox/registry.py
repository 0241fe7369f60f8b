"""Tools by kind or by import path, opened from a plain mapping of the configuration."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from verl_drmas.config import ConfigError, nearest, parse
from verl_drmas.workflows.tools import Tool

# Imported when asked for, so that a tool with extra dependencies costs nobody else.
_BUNDLED = {
    "calculator": "verl_drmas.workflows.toolbox.calculator:Calculator",
    "reason": "verl_drmas.workflows.toolbox.reason:Reason",
    "search": "verl_drmas.workflows.toolbox.search:Search",
    "visit": "verl_drmas.workflows.toolbox.visit:Visit",
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")  # what OpenAI's endpoints take


def tool_kinds() -> list[str]:
    """Kinds that `open_tools` knows without an import path."""
    return sorted(_BUNDLED)


def open_tools(settings: Mapping[str, Any], path: str = "tools") -> dict[str, Tool]:
    """The tools that a section of the configuration names; nothing is loaded or asked yet.

    Args:
        settings: By the name that agents call: the tool's own settings and its `kind`, which is the name where it
            isn't set. A kind is one of `tool_kinds()` or an import path, `package.module:Class` of a `Tool`, whose
            class takes the other settings as keyword arguments.
        path: Where the section stands, for messages.

    Returns:
        The tools by name.

    Raises:
        ConfigError: A name, a kind or a setting is wrong; one line that names the key, the value and the fix.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: {settings!r} is no section of tools; write `search: {{...}}`")
    return {str(name): _open(str(name), own, f"{path}.{name}") for name, own in settings.items()}


def _open(name: str, settings: Any, path: str) -> Tool:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: {name!r} is no name for a tool; use up to 64 letters, digits, _ and -")
    if not isinstance(settings, Mapping | None):
        raise ConfigError(f"{path}: {settings!r} is not valid: a section is needed, such as `{name}: {{...}}`")
    own = dict(settings or {})
    kind = own.pop("kind", None) or name
    if kind in _BUNDLED:
        cls = _load(kind, _BUNDLED[kind], path)
        return cls(parse(own, cls.Settings, path), name=name)
    if ":" not in str(kind):
        hint = nearest(kind, tool_kinds())
        raise ConfigError(f"{path}.kind: {kind!r} is unknown; {hint} (or give an import path, package.module:Class)")
    cls = _load(kind, kind, path)
    try:
        tool = cls(**own)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {kind} doesn't take these settings: {error}") from error
    tool.name = name
    return tool


def _load(kind: str, import_path: str, path: str) -> type[Tool]:
    module_name, _, class_name = import_path.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        if kind not in _BUNDLED:
            raise ConfigError(f"{path}.kind: {kind!r} can't be imported: {error}") from error
        raise ConfigError(
            f"{path}: {kind} needs {error.name}, which isn't installed; pip install 'verl-drmas[search]'"
        ) from error
    except Exception as error:  # whatever a user's module raises
        raise ConfigError(f"{path}.kind: {kind!r} can't be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Tool)):
        raise ConfigError(f"{path}.kind: {kind!r} is {cls!r}, not a subclass of verl_drmas.workflows.tools.Tool")
    return cls
