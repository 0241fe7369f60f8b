"""The single agent's search tool in verl's registry and in verl's own tool loop."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.tool_registry import initialize_tools_from_config
from verl.trainer.ppo.v1.agent_loop_tq import _settle_session_tasks

from verl_drmas.config import ConfigError
from verl_drmas.retrieval import Hit, Passage, RetrievalOutage
from verl_drmas.study.tool import Outage, ToolboxTool
from verl_drmas.workflows.toolbox import open_tools

SHIPPED = Path(__file__).parents[2] / "recipes" / "drmas_search" / "search_tool.yaml"


class Library:
    """A retriever that finds one passage, or is away."""

    def __init__(self, error=None):
        self.error, self.asked = error, []

    async def search(self, query, k):
        self.asked.append((query, k))
        if self.error:
            raise self.error
        return [Hit(Passage("1", "Paris", "Paris is the capital of France. " * 500), 1.0)]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setenv("DRMAS_RETRIEVER_URLS", "[http://127.0.0.1:8000,http://127.0.0.2:8001]")
    (tool,) = initialize_tools_from_config(SHIPPED)
    return tool


def call(tool, text):
    """verl's loop carries out a call that an agent wrote."""
    loop = SimpleNamespace(
        tools={tool.name: tool}, max_tool_response_length=12000, tool_response_truncate_side="middle"
    )
    arguments = text if isinstance(text, str) else json.dumps(text)
    agent = SimpleNamespace()
    return asyncio.run(ToolAgentLoop._call_tool(loop, FunctionCall(name="search", arguments=arguments), {}, agent))


def test_the_shipped_file_opens_the_toolboxs_search_with_the_papers_values(tool):
    assert isinstance(tool, ToolboxTool) and tool.name == "search"
    settings = tool.tool.settings
    assert (settings.topk, settings.max_queries) == (3, 1)
    assert settings.retrieval.urls == ["http://127.0.0.1:8000", "http://127.0.0.2:8001"]
    team = {"topk": 3, "max_queries": 1, "retrieval": {"urls": ["http://127.0.0.1:8000"]}}
    (same,) = open_tools({"search": team}).values()
    assert tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) == same.schema


def test_a_call_reads_passages_within_the_loops_limit(tool):
    tool.tool.retriever = Library()
    response, reward, _ = call(tool, {"query": "capital of France"})
    assert response.text.startswith("[1] Paris: Paris is the capital of France.")
    assert "(truncated)" not in response.text  # the tool keeps to the limit itself
    assert reward == 0.0 and tool.tool.retriever.asked == [("capital of France", 3)]


@pytest.mark.parametrize("arguments", [{}, {"query": "a", "more": 1}, {"query": "  "}])
def test_a_wrong_call_reads_what_is_wrong(tool, arguments):
    tool.tool.retriever = Library()
    text = call(tool, arguments)[0].text
    assert "query" in text or "more" in text
    assert tool.tool.retriever.asked == []


def test_an_outage_is_no_evidence_but_ends_the_session(tool):
    tool.tool.retriever = Library(RetrievalOutage("nobody answers"))
    with pytest.raises(Outage, match="nobody answers"):
        call(tool, {"query": "capital of France"})


def test_verl_counts_such_a_session_as_failed():
    async def session():
        raise Outage("gone")

    async def settled():
        return await _settle_session_tasks([asyncio.create_task(session()), asyncio.create_task(asyncio.sleep(0))])

    (error,) = asyncio.run(settled())
    assert isinstance(error, Outage)


def test_a_wrong_setting_is_one_line():
    with pytest.raises(ConfigError, match=r"config\.search\.topk is 0; it must be above 0"):
        ToolboxTool({"type": "native", "name": "search", "topk": 0, "retrieval": {"urls": ["http://a"]}})
    with pytest.raises(ConfigError, match=r"config\.search\.top: unknown key; did you mean 'topk'"):
        ToolboxTool({"type": "native", "name": "search", "top": 3, "retrieval": {"urls": ["http://a"]}})
