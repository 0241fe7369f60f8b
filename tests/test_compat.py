"""The table of verl names is complete, true of the installed verl, and notices when verl moves something."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

import verl_drmas
from verl_drmas import compat
from verl_drmas.compat import NAMES, Name, missing

pytestmark = pytest.mark.long

PACKAGE = Path(verl_drmas.__file__).parent
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path.name != "compat.py"}


def imported_names():
    """(module, name) of everything imported from verl."""
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "verl":
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "verl")


def test_every_import_from_verl_is_in_the_table():
    known = {(n.module, n.name.split(".")[0]) for n in NAMES}
    known |= {(".".join(n.module.split(".")[:i]), "") for n in NAMES for i in range(1, 9)}  # `import verl.trainer`
    unknown = {f"{module}.{name}" for module, name in imported_names() if (module, name) not in known}
    assert sorted(unknown) == []


def verl_classes():
    """Our classes that stand on one of verl's."""
    for info in pkgutil.walk_packages(verl_drmas.__path__, "verl_drmas."):
        if ".hydra_plugins" in info.name or ".configs" in info.name:
            continue
        module = importlib.import_module(info.name)
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                bases = [b for b in cls.__mro__ if b.__module__.split(".")[0] == "verl"]
                if bases:
                    yield cls, bases


def touched(cls):
    """Names a class defines, sets on `self`, and reads through `self` and `super()`."""
    defines, sets, reads = set(), set(), set()
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defines.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            sets.add(node.target.id)
        elif isinstance(node, ast.Attribute):
            of = node.value.func if isinstance(node.value, ast.Call) else node.value
            if isinstance(of, ast.Name) and of.id in ("self", "super", "cls"):
                (sets if isinstance(node.ctx, ast.Store) else reads).add(node.attr)
    return defines, sets, reads


def resolve(name):
    found = importlib.import_module(name.module)
    for part in name.name.split("."):
        found = getattr(found, part)
    return found


def test_every_inherited_name_that_we_override_or_use_is_in_the_table():
    known = [(resolve(n), {*n.members, *n.attributes.split()}) for n in NAMES if n.members or n.attributes]
    unknown = set()
    for cls, bases in verl_classes():
        defines, sets, reads = touched(cls)
        promised = {
            a for b in bases for a in getattr(b, "__abstractmethods__", ())
        }  # if it changes, no object is built
        source = "\n".join(inspect.getsource(b) for b in bases)
        shared = {a for a in reads | sets if re.search(rf"\bself\.{a}\b", source)} - defines
        theirs = {a for a in defines | reads if any(a in vars(b) for b in bases)} | shared
        listed = set().union(*(members for found, members in known if found in cls.__mro__))
        unknown |= {f"{cls.__module__}.{cls.__name__}: {a}" for a in theirs - promised - listed if a[:2] != "__"}
    assert sorted(unknown) == []


@pytest.mark.parametrize("name", NAMES, ids=lambda n: f"{n.module}.{n.name}")
def test_the_table_holds_nothing_that_we_do_not_use(name):
    text = "\n".join(SOURCES.values())
    unused = [
        word
        for word in (*name.members, *name.attributes.split()) or (name.name.split(".")[0],)
        if not re.search(rf"\b{re.escape(word)}\b", text)
    ]
    assert unused == []


def test_the_installed_verl_has_every_name():
    assert missing() == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (Name("verl.no_such_module", "x", "a test"), "verl.no_such_module can't be imported"),
        (Name("verl.utils.config", "no_such_name", "a test"), "verl.utils.config.no_such_name is missing; for: a test"),
        (Name("verl.utils.config", "validate_config", "a test", "config colour"), "validate_config takes no 'colour'"),
        (
            Name("verl.workers.rollout.llm_server", "LLMServerManager", "a test", members={"get_replicas": "colour"}),
            "LLMServerManager.get_replicas takes no 'colour'",
        ),
        (
            Name("verl.workers.rollout.llm_server", "LLMServerClient", "a test", members={"no_such_method": ""}),
            "LLMServerClient.no_such_method is missing",
        ),
        (
            Name("verl.workers.rollout.llm_server", "LLMServerManager", "a test", attributes="rollout_replicas colour"),
            "LLMServerManager sets no self.colour",
        ),
    ],
)
def test_what_verl_moved_is_named(name, line, monkeypatch):
    monkeypatch.setattr(compat, "NAMES", (*NAMES[:2], name))
    (found,) = missing()
    assert line in found


def test_a_name_of_an_engine_that_is_not_installed_is_left_out():
    assert missing([Name("verl.no_such_module", "x", "a test", needs="no_such_engine")]) == []
