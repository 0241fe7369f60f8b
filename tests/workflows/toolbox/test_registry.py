import subprocess
import sys
import textwrap

import pytest

from verl_drmas.config import ConfigError
from verl_drmas.workflows.toolbox import open_tools
from verl_drmas.workflows.tools import Tool

MODULE = """
    from verl_drmas.workflows.tools import Tool


    class Echo(Tool):
        name, description, parameters = "echo", "Repeats.", {"type": "object", "properties": {}}

        def __init__(self, times=1):
            if times < 1:
                raise ValueError(f"times is {times}")
            self.times = times

        async def call(self, arguments):
            return "echo" * self.times


    class Other:
        pass
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_tools.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_tools.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_tools", None)


def test_every_bundled_kind_opens():
    tools = open_tools(
        {
            "search": {"retrieval": {"local": "/nowhere"}, "topk": 5},
            "read": {"kind": "visit", "allow": ["*.wikipedia.org"]},
            "reason": {"urls": ["http://127.0.0.1:1/v1"], "model": "m"},
            "calc": {"kind": "calculator"},
            "calculator": None,
        }
    )
    assert list(tools) == ["search", "read", "reason", "calc", "calculator"]
    for name, tool in tools.items():
        function = tool.schema["function"]
        assert isinstance(tool, Tool) and tool.name == function["name"] == name and function["description"]
        assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])
    assert tools["search"].settings.topk == 5


def test_a_tool_of_ones_own_opens_by_import_path():
    tools = open_tools({"shout": {"kind": "own_tools:Echo", "times": 2}, "echo": {"kind": "own_tools:Echo"}})
    assert {name: tool.name for name, tool in tools.items()} == {"shout": "shout", "echo": "echo"}
    assert tools["shout"].times == 2


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"serch": {}}, "tools.serch.kind: 'serch' is unknown; did you mean 'search'?"),
        ({"a": {"kind": "calculater"}}, "tools.a.kind: 'calculater' is unknown; did you mean 'calculator'?"),
        ({"a": {"kind": 3}}, "tools.a.kind: 3 is unknown; known: calculator, reason, search, visit"),
        ({"calculator": {"digit": 9}}, "tools.calculator.digit: unknown key; did you mean 'digits'?"),
        ({"calculator": {"digits": 0}}, "tools.calculator.digits is 0; it must be above 0"),
        ({"calculator": {"digits": "many"}}, "tools.calculator.digits: 'many' is not valid"),
        ({"search": {}}, "tools.search.retrieval: missing; set it"),
        ({"search": {"retrieval": {"lokal": "a"}}}, "tools.search.retrieval.lokal: unknown key; did you mean 'local'?"),
        ({"visit": {"allow": ["https://a/b"]}}, "tools.visit.allow: 'https://a/b' is no pattern of hosts"),
        ({"reason": {"urls": ["a:1"], "model": "m"}}, "tools.reason.urls: 'a:1' is no address"),
        ({"calculator": [1]}, "tools.calculator: [1] is not valid: a section is needed"),
        ({"my tool": {"kind": "calculator"}}, "'my tool' is no name for a tool"),
        ({"echo": {"kind": "own_tools:Ecko"}}, "'own_tools:Ecko' can't be imported: AttributeError"),
        ({"echo": {"kind": "none_such:Echo"}}, "'none_such:Echo' can't be imported: No module named 'none_such'"),
        ({"echo": {"kind": "broken_tools:Echo"}}, "can't be imported: ZeroDivisionError"),
        ({"echo": {"kind": "own_tools:Other"}}, "not a subclass of verl_drmas.workflows.tools.Tool"),
        ({"echo": {"kind": "own_tools:Echo", "time": 1}}, "unexpected keyword argument 'time'"),
        ({"echo": {"kind": "own_tools:Echo", "times": 0}}, "times is 0"),
        ([], "tools: [] is no section of tools"),
    ],
)
def test_a_wrong_section_is_refused_in_one_line(settings, told):
    with pytest.raises(ConfigError) as error:
        open_tools(settings)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_the_place_of_the_section_is_named():
    with pytest.raises(ConfigError, match=r"^drmas\.workflow\.tools\.x\.kind: "):
        open_tools({"x": {}}, "drmas.workflow.tools")


def test_what_a_tool_needs_and_isnt_there_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "verl_drmas.workflows.toolbox.visit", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "verl_drmas.workflows.toolbox.addresses", raising=False)
    with pytest.raises(ConfigError, match=r"visit needs aiohttp.*pip install 'verl-drmas\[search\]'"):
        open_tools({"visit": {}})


def test_opening_tools_loads_neither_ray_nor_verl_nor_torch():
    code = (
        "import sys\n"
        "from verl_drmas.workflows.toolbox import open_tools\n"
        "assert 'aiohttp' not in sys.modules\n"
        "open_tools({'calculator': {}, 'visit': {}, 'search': {'retrieval': {'urls': ['http://a']}},"
        " 'reason': {'urls': ['http://a/v1'], 'model': 'm'}})\n"
        "assert not {'ray', 'verl', 'torch', 'bm25s'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
