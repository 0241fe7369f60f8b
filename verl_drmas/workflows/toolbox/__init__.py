"""The bundled tools: search, visit, reason and a calculator; and how the configuration opens them."""

from verl_drmas.workflows.toolbox.registry import open_tools

__all__ = ["open_tools"]
