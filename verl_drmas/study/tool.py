"""Tools of the toolbox for a single agent on verl's own tool agent loop (`multi_turn.tool_config_path`)."""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_drmas.workflows.toolbox import open_tools
from verl_drmas.workflows.tools import ToolError, ToolOutage


class Outage(BaseException):
    """No answer to a proper call.

    Not an `Exception`: verl's loop turns each of those that a tool raises into text that the agent reads and is scored
    on (experimental/agent_loop/tool_agent_loop.py). This one ends the session, which verl then leaves out. An exception
    that verl's loop lets pass would replace it.
    """


class ToolboxTool(BaseTool):
    """A tool of `verl_drmas.workflows.toolbox` in verl's registry: the same schema, limits and retries as in a team.

    Args:
        config: `type: native`, `name`, and the settings of the tool, as `drmas.workflow.tools.<name>` has them.
        tool_schema: Not looked at; the tool has its own.

    Raises:
        ConfigError: A wrong or unknown key.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        own = {key: value for key, value in config.items() if key not in ("type", "name")}
        (self.tool,) = open_tools({config["name"]: own}, "config").values()
        super().__init__(config, OpenAIFunctionToolSchema.model_validate(self.tool.schema))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """What the tool answers; a wrong call reads what is wrong with it.

        Raises:
            Outage: The tool has no answer, after every attempt.
        """
        try:
            text = await self.tool.call(parameters)
        except ToolError as error:
            text = str(error)
        except ToolOutage as outage:
            raise Outage(str(outage)) from outage
        return ToolResponse(text=text), 0.0, {}
