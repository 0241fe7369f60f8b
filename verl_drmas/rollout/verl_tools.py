"""verl's own tools and tool parsers, as workflows see tools and calls."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_drmas.config import ConfigError
from verl_drmas.workflows.tools import Spoken, Tool, ToolCall, ToolError, ToolOutage

logger = logging.getLogger(__name__)

# Attributes of verl's parsers that hold the mark a call begins and ends with; a parser may call it by any of these.
_BEGINS = ("tool_call_begin_token", "tool_call_start_token", "tool_calls_start_token")
_ENDS = ("tool_call_end_token", "tool_calls_end_token")
_GPT_OSS = (" to=functions.", "<|call|>")  # its parser has patterns in place of marks


class VerlTool(Tool):
    """A tool of verl's registry: a `BaseTool`, created and released around each call, or a `FunctionTool`.

    What a tool returns beside its text goes to `report`: its reward and its metrics. Neither enters a row's reward.

    Args:
        tool: verl's tool.
        characters: Longest text of an answer (`multi_turn.max_tool_response_length`); None for no limit.
        side: Where longer ones are cut (`multi_turn.tool_response_truncate_side`): `left`, `middle` or `right`.
    """

    def __init__(self, tool: BaseTool | FunctionTool, *, characters: int | None = None, side: str = "middle"):
        schema = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
        self.tool, self.name = tool, tool.name
        self.description = schema.get("description", "")
        self.parameters = schema.get("parameters") or {"type": "object", "properties": {}}
        self._characters, self._side = characters, side
        self._counts: Counter[str] = Counter()

    async def call(self, arguments: dict[str, Any]) -> str:
        """The text that verl's tool answers.

        Raises:
            ToolError: The arguments aren't the tool's, it raises something else than an outage, or it gives no text.
            ToolOutage: It raises an `OSError` or a time-out.
        """
        self._counts["calls"] += 1
        try:
            self._look_at(arguments)
            response, reward, metrics = await self._executed(arguments)
            if not response.text:
                what = "nothing" if response.is_empty() else "pictures and no text"
                raise ToolError(f"{self.name} gave {what}")
        except ToolError:
            self._counts["errors"] += 1
            raise
        except (OSError, asyncio.TimeoutError) as error:
            self._counts["outages"] += 1
            raise ToolOutage(self.name, f"{type(error).__name__}: {error}") from error
        except Exception as error:  # whatever a user's tool raises; verl tells the agent of it too
            self._counts["errors"] += 1
            logger.warning("tool %s: %s: %s", self.name, type(error).__name__, error)
            raise ToolError(f"{self.name} failed: {error}") from error
        self._counts["reward"] += float(reward or 0.0)
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                self._counts[f"metric/{name}"] += value
        return self._cut(response.text)

    def check(self) -> str:
        return f"{self.name}: {type(self.tool).__name__} of verl's registry"

    def report(self) -> dict[str, float]:
        """Sums since the last report: calls, errors, outages, cut_characters, reward, and the tool's own
        `metric/<name>`.
        """
        counts, self._counts = self._counts, Counter()
        return {name: float(value) for name, value in counts.items()}

    async def _executed(self, arguments: dict[str, Any]) -> tuple[ToolResponse, float, dict]:
        if isinstance(self.tool, FunctionTool):
            return normalize_function_tool_return(await self.tool.call(arguments))
        instance, _ = await self.tool.create(create_kwargs={})
        try:
            # There is no `AgentData`: a workflow's agents aren't verl's tool agent.
            return await self.tool.execute(instance, arguments, agent_data=None)
        finally:
            await self.tool.release(instance)

    def _look_at(self, arguments: dict[str, Any]) -> None:
        """Refuse arguments that a function would take for a fault of its own."""
        known = self.parameters.get("properties", {})
        missing = [name for name in self.parameters.get("required", ()) if name not in arguments]
        if missing:
            raise ToolError(f"argument {missing[0]!r} is missing; write it")
        unknown = [name for name in arguments if name not in known]
        if unknown and isinstance(self.tool, FunctionTool):
            raise ToolError(f"unknown argument {unknown[0]!r}; known: {', '.join(known) or 'none'}")

    def _cut(self, text: str) -> str:
        """As verl cuts."""
        limit = self._characters
        if limit is None or len(text) <= limit:
            return text
        self._counts["cut_characters"] += len(text) - limit
        if self._side == "left":
            return f"(truncated)...{text[len(text) - limit :]}"
        if self._side == "right":
            return f"{text[:limit]}...(truncated)"
        half = limit // 2
        return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"


def as_tools(tools: Iterable[BaseTool | FunctionTool], multi_turn: Any) -> dict[str, Tool]:
    """Tools that verl has loaded (its workers' `self.tools`), by name.

    Args:
        tools: What `multi_turn.tool_config_path` and `function_tool_path` name.
        multi_turn: That section, as verl's worker has it: it says how long an answer may be and where it is cut.
    """
    characters, side = multi_turn.max_tool_response_length, multi_turn.tool_response_truncate_side
    return {tool.name: VerlTool(tool, characters=characters, side=side) for tool in tools}


def verl_schemas(schemas: Iterable[Mapping[str, Any]]) -> list[OpenAIFunctionToolSchema]:
    """Schemas of tools (`Tool.schema`) as verl's parsers take them.

    Raises:
        ConfigError: One doesn't fit into verl's form, which wants a type for each argument.
    """
    read = []
    for schema in schemas:
        try:
            read.append(OpenAIFunctionToolSchema.model_validate(schema))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            name = schema.get("function", {}).get("name")
            raise ConfigError(f"tool {name}: its schema isn't one that verl reads: {where}: {first['msg']}") from error
    return read


async def verl_calls(parser: ToolParser, tokens: list[int], schemas: list[OpenAIFunctionToolSchema]) -> Spoken:
    """A turn taken apart by verl's parser of the model's format (`multi_turn.format`).

    verl's parsers leave out what they can't read. A call that began and isn't among those they found makes the turn
    broken.

    Args:
        parser: `ToolParser.get_tool_parser(format, tokenizer)`.
        tokens: As sampled.
        schemas: Of the agent's tools, by `verl_schemas`.
    """
    tokens = _after_thinking(parser.tokenizer, tokens)
    content, found = await parser.extract_tool_calls(tokens, schemas)
    tokenizer = parser.tokenizer
    loop = asyncio.get_running_loop()
    text = await loop.run_in_executor(None, lambda: tokenizer.decode(tokens, skip_special_tokens=False))
    broken = _is_broken(parser, text, len(found))
    for special in (tokenizer.eos_token, tokenizer.pad_token):
        if special:
            content = content.replace(special, "")
    return Spoken(content.strip(), [_call(one) for one in found], broken)


def _after_thinking(tokenizer: Any, tokens: list[int]) -> list[int]:
    """What follows the last `</think>`, where the model has a token for it: what is thought isn't called."""
    end = tokenizer.get_added_vocab().get("</think>")
    if end is None or end not in tokens:
        return tokens
    return tokens[len(tokens) - tokens[::-1].index(end) :]


def _is_broken(parser: ToolParser, text: str, found: int) -> bool:
    """Whether a call was begun and not ended, or fewer calls were found than begun."""
    begin = next((mark for name in _BEGINS if (mark := getattr(parser, name, None))), _GPT_OSS[0])
    end = next((mark for name in _ENDS if (mark := getattr(parser, name, None))), _GPT_OSS[1])
    for name in ("cot_pattern", "partial_cot_pattern"):  # gpt-oss: what is thought isn't called
        if (pattern := getattr(parser, name, None)) is not None:
            text = pattern.sub("", text)
    begun = text.count(begin)
    several = text.count('invoke name="') if hasattr(parser, "invoke_regex") else 0  # calls between one pair of marks
    return begun != text.count(end) or found < max(begun, several)


def _call(found: FunctionCall) -> ToolCall:
    try:
        arguments = json.loads(found.arguments)
    except (ValueError, TypeError, RecursionError):
        arguments = None
    return ToolCall(found.name, arguments if isinstance(arguments, dict) else None, found.tool_call_id)
