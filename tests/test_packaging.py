"""The wheel: what is in it, and that it works from an empty folder without the checkout."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built offline from a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("verl_drmas", "configs", "tests", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [*PIP, "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_config_and_module_is_in_the_wheel(names):
    configs = {f"verl_drmas/configs/{p.relative_to(ROOT / 'configs')}" for p in (ROOT / "configs").rglob("*.yaml")}
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "verl_drmas").rglob("*.py") if "hydra_plugins" not in p.parts}
    assert configs
    assert configs | modules <= names
    assert {"hydra_plugins/verl_drmas_search_path.py", "verl_drmas/configs/__init__.py"} <= names


def test_what_pages_are_made_of_is_in_the_wheel(names):
    """Every file beside the modules that a module reads, named one by one."""
    read = {
        "verl_drmas/report/page.html",
        "verl_drmas/report/paper_tables.json",
        "verl_drmas/trace/page.css",
        "verl_drmas/trace/page.html",
        "verl_drmas/trace/page.js",
        "verl_drmas/cpu/requirements.txt",
    }
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "verl_drmas").rglob("*.*") if p.suffix not in (".py", ".pyc")}
    assert there == read
    assert read <= names


def test_nothing_else_is_in_the_wheel(names):
    others = {n for n in names if n.split("/")[0] not in ("verl_drmas", "hydra_plugins")}
    assert {n.split("/")[0].split("-")[0] for n in others} == {"verl_drmas"}  # the .dist-info
    assert not {n for n in names if n.startswith("hydra_plugins/")} - {"hydra_plugins/verl_drmas_search_path.py"}


def test_entry_points_and_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {n.split("/")[0] for n in archive.namelist() if ".dist-info/" in n}
        points = archive.read(f"{info}/entry_points.txt").decode()
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert re.search(r"\[verl\.plugins\]\ndrmas = verl_drmas\.plugin", points)
    assert re.search(r"\[console_scripts\]\nverl-drmas = verl_drmas\.cli:main", points)


COMPOSE = """
import importlib.util, json, sys
import hydra, verl_drmas
folder = importlib.util.find_spec("verl").submodule_search_locations[0] + "/trainer/config"
with hydra.initialize_config_dir(folder, version_base=None):
    config = hydra.compose("ppo_trainer", ["+drmas=solver_verifier", "+drmas_runtime=cpu"])
print(json.dumps([verl_drmas.__file__, config.drmas.workflow.name, config.trainer.device]))
"""


def test_the_installed_wheel_composes_verls_config_from_an_empty_folder(wheel, tmp_path):
    site = tmp_path / "site"
    subprocess.run([*PIP, "install", "-q", "--no-index", "--no-deps", "--target", str(site), str(wheel)], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    # -S and PYTHONPATH: the environment's packages without an editable installation of the checkout, a .pth file.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), sysconfig.get_path("purelib")])}
    command = [sys.executable, "-S", "-c", COMPOSE]
    done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    file, workflow, device = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(site)
    assert (workflow, device) == ("solver_verifier", "cpu")


def requirements(distribution, extras=("",)):
    """Canonical names of what a distribution asks for."""
    lines = map(Requirement, metadata.requires(distribution) or [])
    return {
        canonicalize_name(r.name) for r in lines if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)
    }


def test_every_third_party_import_is_declared():
    declared = requirements("verl-drmas", ("", "math", "report", "retriever", "store")) | requirements("verl")
    declared |= requirements("accelerate") | requirements("hydra-core")  # torch and omegaconf, which verl doesn't list
    owners = metadata.packages_distributions()
    undeclared = set()
    for path in (ROOT / "verl_drmas").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in {m.split(".")[0] for m in modules} - set(sys.stdlib_module_names) - {"verl_drmas", "vllm"}:
                if not {canonicalize_name(name) for name in owners.get(module, [])} & declared:
                    undeclared.add(module)
    assert undeclared == set()


@pytest.mark.parametrize("extra", ["gpu", "megatron", "sglang"])
def test_gpu_extras_are_verls_own(extra):
    theirs = set(metadata.metadata("verl").get_all("Provides-Extra"))
    lines = [Requirement(line) for line in metadata.requires("verl-drmas")]
    (verl,) = [r for r in lines if r.name == "verl" and r.marker and r.marker.evaluate({"extra": extra})]
    assert verl.extras and verl.extras <= theirs
    assert str(verl.specifier) == "<0.10,>=0.9.1"


def test_the_constraints_hold_no_path_and_cover_what_is_pinned():
    lines = [line for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(r.name): r for r in map(Requirement, lines)}
    assert all(len(r.specifier) == 1 and r.url is None for r in pins.values())
    needed = requirements("verl-drmas", ("", "cpu", "dev"))
    assert needed <= set(pins)
    assert str(pins["torch"].specifier) == "==2.13.0"
