"""Workflows by name and by import path."""

import sys

import pytest

from verl_drmas.workflows import Outcome, Workflow, load_workflow, register_workflow, registry, workflow_names
from verl_drmas.workflows.arithmetic import Arithmetic
from verl_drmas.workflows.solver_verifier import SolverVerifier


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Names registered in a test are gone after it."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))


def make(module="somewhere", name="Echo", agents=("echo",)):
    async def run(self, task, team):
        return Outcome(reward=0.0)

    return type(name, (Workflow,), {"agents": agents, "run": run, "__module__": module, "__qualname__": name})


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("solver_verifier", SolverVerifier),
        ("arithmetic", Arithmetic),
        ("verl_drmas.workflows.solver_verifier:SolverVerifier", SolverVerifier),
        ("verl_drmas.workflows.solver_verifier.SolverVerifier", SolverVerifier),
    ],
)
def test_a_workflow_is_found_by_name_and_by_path(name, cls):
    assert load_workflow(name) is cls


def test_bundled_names_are_known_before_they_are_imported(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})
    known = ["arithmetic", "arithmetic_rival", "delegate", "four_agents", "search_hierarchy", "solver_verifier"]
    assert workflow_names() == known
    assert load_workflow("arithmetic") is Arithmetic


def test_a_registered_workflow_is_found():
    cls = register_workflow("echo")(make())
    assert load_workflow("echo") is cls
    assert "echo" in workflow_names()


def test_the_same_class_may_come_again_and_the_newest_counts():
    register_workflow("echo")(make())
    again = register_workflow("echo")(make())  # a module that was loaded twice
    assert load_workflow("echo") is again


def test_another_class_of_the_same_name_is_refused():
    register_workflow("echo")(make())
    with pytest.raises(ValueError, match=r"workflow 'echo' is already somewhere:Echo; choose another name"):
        register_workflow("echo")(make(module="elsewhere"))


def test_a_bundled_name_is_taken_even_before_it_is_imported(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})
    with pytest.raises(ValueError, match=r"already verl_drmas\.workflows\.arithmetic:Arithmetic"):
        register_workflow("arithmetic")(make())


@pytest.mark.parametrize("thing", [object, lambda task, team: None, make(), "text"])
def test_only_workflows_with_agents_are_registered(thing):
    if isinstance(thing, type) and issubclass(thing, Workflow):
        thing = make(agents=())
        message = "declares no agents"
    else:
        message = "expects a subclass of Workflow"
    with pytest.raises(TypeError, match=message):
        register_workflow("thing")(thing)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("solver_verifer", "unknown workflow 'solver_verifer'; did you mean 'solver_verifier'?"),
        ("zzz", "unknown workflow 'zzz'; known: arithmetic, "),
        (":Class", "unknown workflow ':Class'"),
        ("no_such_module:Class", "can't be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("verl_drmas.workflows.solver_verifier:Solver", "can't be imported: AttributeError: "),
        (".relative:Class", "'.relative:Class' can't be imported: TypeError"),
        ("verl_drmas.workflows.base:Task", "not a subclass of verl_drmas.workflows.Workflow"),
        ("verl_drmas.workflows.base:Workflow", "declares no agents"),
    ],
)
def test_a_wrong_name_says_what_is_wrong_with_it(name, message):
    with pytest.raises(ValueError) as caught:
        load_workflow(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(("source", "message"), [("x = (", "SyntaxError"), ("y = unknown", "NameError")])
def test_a_module_with_a_mistake_is_named_with_it(source, message, tmp_path, monkeypatch):
    (tmp_path / "my_broken_workflow.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"'my_broken_workflow:Mine' can't be imported: {message}: "):
        load_workflow("my_broken_workflow:Mine")
    sys.modules.pop("my_broken_workflow", None)
