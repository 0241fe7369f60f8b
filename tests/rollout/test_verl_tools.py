import asyncio
import json
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.tool_registry import load_all_tools
from verl.workers.config.rollout import MultiTurnConfig

from verl_drmas.config import ConfigError
from verl_drmas.rollout.verl_tools import VerlTool, as_tools, verl_calls, verl_schemas
from verl_drmas.workflows.toolbox import open_tools
from verl_drmas.workflows.tools import ToolCall, ToolError, ToolOutage, hermes_calls

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "One."},
                "b": {"type": "integer", "description": "Other."},
            },
            "required": ["a"],
        },
    },
}


class Add(BaseTool):
    """Notes its life; a tool's answer or error can be set."""

    def __init__(self, answer=None):
        super().__init__({"type": "native"}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self.life, self.answer = [], answer

    async def create(self, instance_id=None, **kwargs):
        self.life.append(("create", kwargs))
        return "instance", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.life.append(("execute", instance_id, parameters, kwargs))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or (ToolResponse(text=str(sum(parameters.values()))), 0.5, {"sums": 1, "note": "x"})

    async def release(self, instance_id, **kwargs):
        self.life.append(("release", instance_id))


def function(fn):
    return FunctionTool("add", fn, OpenAIFunctionToolSchema.model_validate(SCHEMA), asyncio.iscoroutinefunction(fn))


def call(tool, **arguments):
    return asyncio.run(tool.call(arguments))


def test_a_base_tool_is_created_and_released_around_each_call():
    tool = VerlTool(add := Add())
    assert call(tool, a=1, b=2) == "3" and call(tool, a=4) == "4"
    assert add.life[:3] == [
        ("create", {"create_kwargs": {}}),
        ("execute", "instance", {"a": 1, "b": 2}, {"agent_data": None}),
        ("release", "instance"),
    ]
    assert tool.schema == SCHEMA and "add" in tool.check()
    assert tool.report() == {"calls": 2, "reward": 1.0, "metric/sums": 2} and tool.report() == {}


@pytest.mark.parametrize(
    "returns, text",
    [("4", "4"), ({"sum": 4}, '{"sum": 4}'), ((4, 0.5), "4"), (ToolResponse(text="4"), "4"), (4, "4")],
)
def test_a_function_answers_in_any_form_that_verl_knows(returns, text):
    async def later(a, b=0):
        return returns

    for fn in (lambda a, b=0: returns, later):
        tool = VerlTool(function(fn))
        assert call(tool, a=1) == text
        assert tool.report()["reward"] == (0.5 if isinstance(returns, tuple) else 0)


def test_whose_fault_an_error_is():
    for error, kind in (
        (ConnectionError("gone"), ToolOutage),
        (TimeoutError(), ToolOutage),
        (KeyError("x"), ToolError),
    ):
        tool = VerlTool(add := Add(error))
        with pytest.raises(kind, match="add"):
            call(tool, a=1)
        assert add.life[-1] == ("release", "instance")
        assert tool.report() == {"calls": 1, "outages" if kind is ToolOutage else "errors": 1}


@pytest.mark.parametrize("arguments, told", [({}, "'a' is missing"), ({"a": 1, "c": 2}, "unknown argument 'c'")])
def test_a_wrong_call_is_the_agents_fault(arguments, told):
    asked = []
    with pytest.raises(ToolError, match=told):
        call(VerlTool(function(lambda a, b=0: asked.append(a))), **arguments)
    assert asked == []


@pytest.mark.parametrize(
    "response, told", [(ToolResponse(), "nothing"), (ToolResponse(image=["x"]), "pictures and no text")]
)
def test_an_answer_without_text_is_told(response, told):
    with pytest.raises(ToolError, match=told):
        call(VerlTool(Add((response, 0.0, {}))), a=1)


@pytest.mark.parametrize(
    "side, text", [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")]
)
def test_a_long_answer_is_cut_as_verl_cuts_it(side, text):
    tool = VerlTool(Add((ToolResponse(text="0123456789"), 0.0, {})), characters=4, side=side)
    assert call(tool, a=1) == text and tool.report()["cut_characters"] == 6


def test_tools_come_from_verls_own_keys(tmp_path):
    (tmp_path / "functions.py").write_text(
        textwrap.dedent('''
        from verl.tools.function_tool import function_tool


        @function_tool("double_for_test")
        def double(number: int) -> str:
            """Doubles.

            Args:
                number: What to double.
            """
            return str(2 * number)
        ''')
    )
    native = {"class_name": "verl.tools.base_tool.BaseTool", "config": {"type": "native"}, "tool_schema": SCHEMA}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [native]}))
    multi_turn = MultiTurnConfig(
        tool_config_path=str(tmp_path / "tools.yaml"),
        function_tool_path=str(tmp_path / "functions.py"),
        max_tool_response_length=8,
        tool_response_truncate_side="right",
    )
    loaded = load_all_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
    tools = as_tools(loaded, multi_turn)
    assert list(tools) == ["add", "double_for_test"]
    assert call(tools["add"], a=1) == "Updated ...(truncated)"
    assert call(tools["double_for_test"], number=21) == "42"
    assert tools["double_for_test"].parameters["properties"]["number"]["type"] == "integer"
    assert as_tools(load_all_tools(None, None), MultiTurnConfig()) == {}
    assert list(as_tools([Add()], multi_turn)) == ["add"]


# -- calls
class Letters:
    """A tokenizer of one token a letter."""

    eos_token, pad_token = "<|im_end|>", "<|pad|>"

    def encode(self, text):
        return [ord(letter) for letter in text]

    def get_added_vocab(self):
        return {}

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(map(chr, tokens))

    def convert_tokens_to_ids(self, token):
        return 0


LETTERS = Letters()
SCHEMAS = [OpenAIFunctionToolSchema.model_validate(SCHEMA)]


def parsed(name, text):
    parser = ToolParser.get_tool_parser(name, LETTERS)
    return asyncio.run(verl_calls(parser, LETTERS.encode(text), SCHEMAS))


DSML = "｜DSML｜"
# By format: what stands before the calls and after them, a call, and one that can't be read.
FORMATS = {
    "hermes": ("", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "<tool_call>add 1</tool_call>", ""),
    "qwen3_coder": (
        "",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>add 1</tool_call>",
        "",
    ),
    "glm": ("", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "<tool_call>add", ""),
    "seed": (
        "",
        "<seed:tool_call><function=add><parameter=a>1</parameter></function></seed:tool_call>",
        "<seed:tool_call>add 1</seed:tool_call>",
        "",
    ),
    "minimax": (
        "<minimax:tool_call>",
        '<invoke name="add"><parameter name="a">1</parameter></invoke>',
        '<invoke name="add"><parameter name="a">1',
        "</minimax:tool_call>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        '<|tool_call_begin|>add<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
        "<|tool_call_begin|>add<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v4": (
        f"<{DSML}tool_calls>",
        f'<{DSML}invoke name="add"><{DSML}parameter name="a" string="false">1</{DSML}parameter></{DSML}invoke>',
        f'<{DSML}invoke name="add"><{DSML}parameter name="a" string="false">1',
        f"</{DSML}tool_calls>",
    ),
    "gemma4": ("", "<|tool_call>call:add{a:1}<tool_call|>", "<|tool_call>add 1<tool_call|>", ""),
    "gpt-oss": (
        "",
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        '<|start|>assistant<|channel|>commentary to=functions.add {"a": 1}<|call|>',
        "",
    ),
}


def test_every_format_of_verl_is_here():
    assert set(FORMATS) == set(ToolParser._registry)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_every_format(name):
    before, good, bad, after = FORMATS[name]
    for times in (1, 2):
        spoken = parsed(name, f"I add. {before}{good * times}{after}<|im_end|>")
        assert [(call.name, call.arguments) for call in spoken.calls] == [("add", {"a": 1})] * times
        assert not spoken.broken and spoken.content == "I add."
    mixed = parsed(name, f"{before}{good}{bad}{after}")
    assert mixed.broken and [call.name for call in mixed.calls][:1] == ["add"]
    assert parsed(name, f"{before}{bad}{after}").broken
    assert parsed(name, f"{before}{good[:-5]}").broken
    said = parsed(name, "It is 2.<|im_end|>")
    assert said.content == "It is 2." and not said.calls and not said.broken


def test_what_gpt_oss_thinks_isnt_called():
    thought = "<|channel|>analysis<|message|>I write to=functions.add <|call|> now<|end|>"
    spoken = parsed("gpt-oss", thought + FORMATS["gpt-oss"][1])
    assert len(spoken.calls) == 1 and not spoken.broken


def test_arguments_that_are_no_object_are_none():
    spoken = parsed("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>')
    assert spoken.calls == [ToolCall("add", None)] and not spoken.broken
    deep = FORMATS["gpt-oss"][1].replace('{"a": 1}', "[" * 10**5)
    assert parsed("gpt-oss", deep).calls == [ToolCall("add", None)]
    assert parsed("kimi", "".join(FORMATS["kimi"][i] for i in (0, 1, 3))).calls[0].id == "add"


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1}}', '{"name": "add"}', " so ", "{", "[]", "1"]
)


@settings(deadline=None, max_examples=60)
@given(st.lists(pieces, max_size=8).map("".join))
def test_our_own_parser_and_verls_agree(text):
    ours, theirs = hermes_calls(text), parsed("hermes", text)
    assert ours.calls == theirs.calls and ours.broken == theirs.broken
    assert ours.content == theirs.content


def test_every_bundled_tools_schema_is_one_that_verl_reads():
    tools = open_tools(
        {
            "calculator": {},
            "reason": {"urls": ["http://host/v1"], "model": "m"},
            "search": {"retrieval": {"local": "/nowhere"}},
            "visit": {},
        }
    )
    assert [schema.function.name for schema in verl_schemas(tool.schema for tool in tools.values())] == list(tools)
    tools["visit"].parameters = {"type": "object", "properties": {"url": {"description": "No type."}}}
    with pytest.raises(ConfigError, match=r"tool visit: .*function\.parameters\.properties\.url\.type"):
        verl_schemas([tools["visit"].schema])
