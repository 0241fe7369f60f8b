"""docs/metrics.md has every name that the code logs, and none that it doesn't.

What is computed is computed here on small input, and what is counted is read from the sources; tests/trainer
(test_metrics.py) and the end-to-end tests hold the names of steps against the same page.
"""

import ast
import asyncio
import re
from pathlib import Path
from typing import get_args

import pytest
from metric_page import names_on_the_page, page_names_of, undocumented

import verl_drmas
from verl_drmas.retrieval.errors import QueryRejected
from verl_drmas.retrieval.passages import Hit, Passage
from verl_drmas.rewards.judge import Judgement
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.numbers import numbers
from verl_drmas.store.producer import Producer
from verl_drmas.trainer.validation import validation_metrics
from verl_drmas.workflows import Task, load_workflow
from verl_drmas.workflows.delegate import Delegate
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.search_hierarchy import SearchHierarchy

ROOT = Path(verl_drmas.__file__).parent
BOXED, GUESS = r"\boxed{4}", r"\boxed{5}"
YES, NO = "<verdict>yes</verdict>", "<verdict>no</verdict>"
APPROVE, REJECT = "<verdict>approve</verdict>", "<verdict>reject</verdict>"


class Library:
    """A retriever that refuses one query."""

    async def search(self, query, k):
        if query == "refused":
            raise QueryRejected("refused")
        return [Hit(Passage("1", "Bela", "Bela leads."), 1.0)] if query == "found" else []


class Judge:
    async def score(self, request):
        return Judgement(0.5, "", 0.1)


def delegate():
    settings = Delegate.Settings(subs={"finder": {"result_tokens": 8}}, max_turns=3)
    return Delegate(settings, tools={}, judge=Judge())


def hierarchy():
    return SearchHierarchy(SearchHierarchy.Settings(retrieval={"local": "unused"}), retriever=Library())


def asks(agent):
    return f'<tool_call>{{"name": "delegate", "arguments": {{"agent": "{agent}", "task": "look"}}}}</tool_call>'


def sessions():
    """(workflow's class, sessions' metrics), which together have every number of the bundled workflows."""
    plays = {
        "arithmetic_rival": [
            (None, {"solver": [answer], "rival": ["4"], "verifier": ["y"]}) for answer in ("4", "5", "4", "4")
        ],
        "solver_verifier": [
            (None, {"solver": [GUESS, BOXED], "verifier": [REJECT]}),
            (None, {"solver": [BOXED], "verifier": [APPROVE]}),
        ],
        "four_agents": [
            (None, {"solver": [one], "critic": ["Hm."], "refiner": [other], "verifier": [APPROVE]})
            for one, other in ((GUESS, BOXED), (BOXED, GUESS), (BOXED, BOXED))
        ],
        "search_hierarchy": [
            (hierarchy, {"verifier": verdicts, "search": [f"<search>{q}</search>" for q in queries], "answer": ["-"]})
            for verdicts, queries in (([NO, NO, YES], ["refused", "found"]), ([NO, YES], ["nothing"]))
        ],
        "delegate": [
            (delegate, {"main": [asks("finder"), "<result>4</result>"], "finder": ["<result>4</result>"]}),
            (delegate, {"main": ["talk"], "finder": []}),
        ],
    }
    for name, played in plays.items():
        cls, metrics = load_workflow(name), []
        for number, (make, scripts) in enumerate(played):
            task = Task(question="2+2", answer="Bela" if name == "search_hierarchy" else "4", session=number)
            workflow = make() if make else cls()
            outcome = asyncio.run(workflow.run(task, ScriptedTeam(scripts)))
            metrics.append({**outcome.metrics, "outcome": outcome.reward, "empty_outputs": 0.0})
        yield name, cls.summarise(metrics)


@pytest.fixture(scope="module")
def of_workflows():
    pytest.importorskip("math_verify", reason="solver_verifier needs math-verify, of the extra math")
    return {name: {f"drmas/workflow/{key}" for key in found} for name, found in sessions()}


@pytest.fixture(scope="module")
def of_store(tmp_path_factory):
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'store.db'}", patience=30)
    from played import play

    play(Producer(store, "sub"), 1)
    Consumer(store, "sub").attach(0)
    found = set(numbers(store, "sub"))
    store.close()
    return {f"drmas/store/sub/{name}" for name in found}


@pytest.fixture(scope="module")
def sources():
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def strings_in(node):
    return [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)]


def counters(tree):
    """Literal names in `counts[...]`, in `dict.fromkeys(...)` of functions that make counts, and in `count(...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(("counts", "_past")):
            literal = isinstance(node.slice, ast.Constant | ast.JoinedStr)
            yield from ["/".join(strings_in(node.slice)).replace("//", "/")] if literal else []
        elif isinstance(node, ast.FunctionDef) and node.name.endswith("no_counts"):
            yield from (text for stmt in node.body for text in strings_in(stmt) if re.fullmatch(r"\w+", text))


def in_files(sources, *folders):
    for path, tree in sources.items():
        if str(path.relative_to(ROOT)).startswith(folders):
            yield from counters(tree)


def test_every_number_of_the_bundled_workflows_is_on_the_page(of_workflows):
    missing = {name: undocumented(names) for name, names in of_workflows.items()}
    assert not any(missing.values()), missing
    as_validation = {name.replace("drmas/workflow/", "val/drmas/") for names in of_workflows.values() for name in names}
    assert undocumented(as_validation) == []


def test_every_counter_of_a_tool_is_on_the_page(sources):
    folders = ("workflows/toolbox/", "retrieval/client.py", "retrieval/local.py", "retrieval/counts.py")
    found = set(in_files(sources, *folders, "rewards/judge", "rollout/verl_tools.py"))
    assert {"calls", "outages", "cached", "tokens", "metric/", "rejected", "cut_pages"} <= found
    names = [f"drmas/tools/any/{name}{'x' if name.endswith('/') else ''}" for name in found]
    assert undocumented([*names, *(f"val/{name}" for name in names)]) == []


def test_every_count_of_an_activation_is_on_the_page(sources):
    (tree,) = (tree for path, tree in sources.items() if path.relative_to(ROOT) == Path("rollout/team.py"))
    dicts = [
        value
        for node in ast.walk(tree)
        for key, value in (
            zip(map(key_of, node.keys), node.values, strict=True)
            if isinstance(node, ast.Dict)
            else [("counts", node.value)]
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.counts"
            else []
        )
        if key == "counts"
    ]
    found = {key_of(key) for one in dicts for key in one.keys if key}
    assert {"cut_characters", "turns"} <= found
    assert undocumented(f"drmas/agent/any/{name}/mean" for name in found) == []


def test_every_counter_of_the_gateway_is_on_the_page(sources):
    found = set(in_files(sources, "gateway/", "trainer/gateway_actor.py"))
    assert {"answered", "refused/", "engine_retries", "restarts"} <= found
    assert undocumented(f"drmas/gateway/{name}{'503' if name.endswith('/') else ''}" for name in found) == []


def test_every_number_of_a_store_is_on_the_page(of_store, sources):
    assert {"drmas/store/sub/steps/ready", "drmas/store/sub/d/1"} <= of_store
    assert undocumented(of_store) == []
    counted = set()
    for path, tree in sources.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if re.search(r"(^|\.)count$", ast.unparse(call.func)) and "store" in str(path):
                counted |= {
                    key for arg in call.args if isinstance(arg, ast.Dict) for key in map(key_of, arg.keys) if key
                }
            elif re.search(r"_finder\.count$", ast.unparse(call.func)):
                counted.add(strings_in(call.args[0])[0])
    assert {"duplicate", "rewound", "retries", "dead"} <= counted
    assert undocumented(f"drmas/store/sub/count/{name}" for name in counted) == []


def key_of(node):
    return node.value if isinstance(node, ast.Constant) else None


def test_every_number_of_a_validation_is_on_the_page():
    found = validation_metrics(["aime"] * 3, ["a", "a", "b"], [1.0, 0.0, 1.0], {("aime", "a"): 2, ("aime", "b"): 2})
    assert undocumented(found) == [] and len(found) == 4


def test_every_place_in_the_code_that_names_a_metric_is_on_the_page(sources):
    """A new prefix can't slip by: literal names and the beginnings of f-strings that are keys of dictionaries."""
    beginnings = [re.split("<", name)[0] for name in [*names_on_the_page(), "val/drmas/"]]
    seen = set()
    for path, tree in sources.items():
        if path.relative_to(ROOT).parts[0] in ("report", "trace", "study"):
            continue  # they read logs
        keys = [n.slice for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        for node in ast.walk(tree):
            keys += node.keys if isinstance(node, ast.Dict) else []
            keys += [node.key] if isinstance(node, ast.DictComp) else []
        for key in keys:
            literal = isinstance(key, ast.Constant) and isinstance(key.value, str)
            begin = key.value if literal else key.values[0] if isinstance(key, ast.JoinedStr) and key.values else ""
            begin = begin.value if isinstance(begin, ast.Constant) else begin
            if not isinstance(begin, str) or not re.match(r"(drmas|val)/", begin):
                continue
            seen.add(begin)
            if literal:
                assert page_names_of(begin), (path, begin)
            else:
                assert any(one.startswith(begin) or begin == "val/" for one in beginnings), (path, begin)
    assert {"drmas/sessions/expected", "drmas/agent/", "drmas/curriculum/stage", "val/drmas/"} <= seen


def test_the_page_has_no_name_that_nothing_logs(of_workflows, of_store, sources):
    """Names with our own literals in them: each stands in the sources."""
    text = "\n".join(path.read_text() for path in sources)
    logged = {shown for names in of_workflows.values() for name in names for shown in page_names_of(name)}
    logged |= {shown for name in of_store for shown in page_names_of(name)}
    for name in set(names_on_the_page()) - logged:
        last = [part for part in re.split(r"/|@", name) if not part.startswith("<")][-1]
        last = re.sub(r"<\w+>.*", "", last)
        assert re.search(rf"\b{re.escape(last)}", text), name


def test_names_are_on_the_page_once():
    names = names_on_the_page()
    assert len(names) > 100
    assert sorted(set(names)) == sorted(names)


def test_the_kinds_of_ends_are_those_of_the_code():
    from verl_drmas.workflows.delegate import ENDS
    from verl_drmas.workflows.turns import Kind

    (row,) = re.findall(
        r"^\| `drmas/workflow/ends/<kind>` \| (.*)", (ROOT.parent / "docs/metrics.md").read_text(), re.M
    )
    assert set(re.findall(r"`(\w+)`", row)) == set(ENDS) == {*get_args(Kind), "last_turn"} - {"calls"}
