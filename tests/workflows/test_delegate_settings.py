"""What the workflow `delegate` may be told, and the one line that a wrong setting gives before a run starts."""

import pytest

from verl_drmas.check import check_team
from verl_drmas.config import ConfigError, parse
from verl_drmas.workflows.delegate import Delegate


def section(agents=("main", "finder"), **workflow):
    settings = {"subs": {"finder": {"tools": ["calculator"]}}, "tools": {"calculator": {}}} | workflow
    agents = {name: {"model": "base"} for name in agents}
    return parse({"workflow": {"name": "delegate", **settings}, "agents": agents})


def test_a_whole_configuration_is_taken():
    full = section(
        max_depth=1,
        judge={"kind": "contains"},
        main={"format": 0.2, "correct": 0.8},
        sub={"format": 0.1, "outcome": 0.9, "judge": 0.0},
        normalisation="wide",
        main_tools=["calculator"],
    )
    assert check_team(full) is Delegate
    assert check_team(section(("main",), subs={})) is Delegate


@pytest.mark.parametrize(
    "agents, workflow, told",
    [
        (("main",), {}, r"drmas\.agents: workflow 'delegate' needs agent 'finder'.*add `finder: \{model: base\}`"),
        (("main", "finder", "findr"), {}, r"drmas\.agents\.findr: .*no such agent; .*'?finder"),
        (("main", "finder"), {"subs": {}}, r"drmas\.agents\.finder: workflow 'delegate' has no such agent"),
        (None, {"max_turn": 3}, r"drmas\.workflow\.max_turn: unknown key; .*max_turns"),
        (None, {"subs": {"finder": {"max_turn": 3}}}, r"drmas\.workflow\.subs\.finder\.max_turn: .*max_turns"),
        (None, {"sub": {"outcom": 1.0}}, r"drmas\.workflow\.sub\.outcom: unknown key; .*outcome"),
        (None, {"main": {"corect": 1.0}}, r"drmas\.workflow\.main\.corect: unknown key; .*correct"),
        (None, {"judge": {"knd": "none"}}, r"drmas\.workflow\.judge\.knd: unknown key; .*kind"),
        (None, {"tools": {"calculater": {}}, "subs": {}}, r"drmas\.workflow: tools\.calculater\.kind: .*calculator"),
        (None, {"tools": {"calculator": {"digit": 1}}}, r"drmas\.workflow: tools\.calculator\.digit: .*digits"),
        (None, {"tools": {"calculator": {"kind": "verl", "a": 1}}}, r"workflow\.tools\.calculator\.a: .*leave it out"),
        (None, {"tools": {"delegate": {}}, "subs": {}}, r"drmas\.workflow\.tools\.delegate: .*choose another"),
        (
            None,
            {"main_tools": ["serch"]},
            r"drmas\.workflow\.main_tools: 'serch' is not in tools \(calculator\); add it",
        ),
        (None, {"subs": {"finder": {"tools": ["x"]}}}, r"drmas\.workflow\.subs\.finder\.tools: 'x' is not in tools"),
        (None, {"subs": {"finder": {"subs": ["x"]}}}, r"drmas\.workflow\.subs\.finder\.subs: 'x' is not in subs"),
        (None, {"subs": {"main": {}}}, r"drmas\.workflow\.subs\.main: is the main agent's name"),
        (None, {"max_turns": 0}, r"drmas\.workflow\.max_turns is 0; it must be at least 1"),
        (None, {"max_turns": 1}, r"drmas\.workflow\.max_turns is 1, .*set 2"),
        (None, {"max_parallel": 0}, r"drmas\.workflow\.max_parallel is 0; it must be at least 1"),
        (None, {"max_depth": 0}, r"drmas\.workflow\.max_depth is 0; it must be at least 1"),
        (None, {"subs": {"finder": {"max_turns": 0}}}, r"drmas\.workflow\.subs\.finder\.max_turns is 0"),
        (
            None,
            {"subs": {"finder": {"tools": ["calculator"], "max_turns": 1}}},
            r"drmas\.workflow\.subs\.finder\.max_turns is 1, .*set 2",
        ),
        (None, {"subs": {"finder": {"result_tokens": 0}}}, r"drmas\.workflow\.subs\.finder\.result_tokens is 0"),
        (None, {"max_turns": "8"}, r"drmas\.workflow\.max_turns: '8' is not valid"),
        (None, {"normalisation": "none"}, r"drmas\.workflow\.normalisation: 'none' is not valid"),
        (None, {"judge": {"kind": "endpoint"}}, r"drmas\.workflow\.judge\.kind is endpoint and urls is not set"),
        (None, {"sub": {"format": -1.0}}, r"drmas\.workflow\.sub\.format is -1"),
        (None, {"subs": {"finder": "yes"}}, r"drmas\.workflow\.subs\.finder: 'yes' is not valid: a section is needed"),
    ],
)
def test_a_wrong_configuration_gives_one_line(agents, workflow, told):
    with pytest.raises(ConfigError, match=told) as refused:
        check_team(section(agents or ("main", "finder"), **workflow))
    assert "\n" not in str(refused.value)
