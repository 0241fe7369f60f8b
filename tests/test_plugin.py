"""The plugin's hooks: planted once, followed when verl's module comes, and loud but harmless when ours is broken."""

import importlib
import importlib.util
import logging
import os
import subprocess
import sys

import pytest
import wrapt

from verl_drmas import plugin

pytestmark = pytest.mark.process


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Makes modules of one line of text, and forgets them afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        made.append(name)
        importlib.invalidate_caches()

    yield make
    for name in made:
        sys.modules.pop(name, None)


def plant(monkeypatch, theirs, ours, platform=""):
    monkeypatch.setattr(plugin, "HOOKS", {theirs: (ours,)})
    monkeypatch.setenv("VERL_PLATFORM", platform)
    plugin.activate()


def test_ours_is_imported_when_theirs_has_been(module, monkeypatch):
    module("drmas_theirs_a", "x = 1")
    module("drmas_ours_a", "import drmas_theirs_a; y = drmas_theirs_a.x + 1")
    plant(monkeypatch, "drmas_theirs_a", "drmas_ours_a")
    assert "drmas_ours_a" not in sys.modules
    importlib.import_module("drmas_theirs_a")
    assert sys.modules["drmas_ours_a"].y == 2


def test_planting_again_follows_once(module, monkeypatch):
    module("drmas_theirs_b", "log = []")
    module("drmas_ours_b", "import drmas_theirs_b; drmas_theirs_b.log.append(1)")
    plant(monkeypatch, "drmas_theirs_b", "drmas_ours_b")
    plugin.activate()
    plugin.activate()
    assert importlib.import_module("drmas_theirs_b").log == [1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module_of_anybody", "ModuleNotFoundError: No module named 'no_such_module_of_anybody'"),
        ("raise ValueError('Trainer name is already registered')", "ValueError: Trainer name is already registered"),
    ],
)
def test_a_broken_module_of_ours_is_one_warning_and_theirs_still_loads(module, monkeypatch, caplog, text, reason):
    monkeypatch.setattr(logging.getLogger("verl_drmas"), "propagate", True)
    module("drmas_theirs_c", "x = 1")
    module("drmas_ours_c", text)
    monkeypatch.setattr(plugin, "_planted", set())
    plant(monkeypatch, "drmas_theirs_c", "drmas_ours_c")
    plugin.activate()  # planted twice, it would be said twice
    assert importlib.import_module("drmas_theirs_c").x == 1
    (record,) = [r for r in caplog.records if "drmas_ours_c" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"verl-drmas: drmas_ours_c is not available: {reason}"


def test_hooks_name_modules_that_exist():
    for hooks in (plugin.HOOKS, plugin.STORE_HOOKS, plugin.CPU_HOOKS):
        for ours in (name for names in hooks.values() for name in names):
            assert importlib.util.find_spec(ours) is not None, ours


@pytest.mark.parametrize("installed", [True, False])
def test_the_trainer_on_a_store_is_planted_where_its_libraries_are(monkeypatch, installed):
    planted = {}
    monkeypatch.setattr(plugin, "_planted", set())
    monkeypatch.setattr(plugin, "_follow", lambda ours: ours)
    monkeypatch.setattr(wrapt, "register_post_import_hook", lambda ours, theirs: planted.update({theirs: ours}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    plugin.activate()
    assert ("verl_drmas.trainer.sub" in planted["verl.trainer.ppo.v1"]) is installed
    assert "verl_drmas.trainer.team" in planted["verl.trainer.ppo.v1"]


BROKEN = """
import sys
sys.modules["verl_drmas.advantage"] = None  # importing it raises
import verl.trainer.ppo.core_algos as core_algos
assert "drmas" not in core_algos.ADV_ESTIMATOR_REGISTRY
print("imported", core_algos.get_adv_estimator_fn("rloo").__name__)
"""


def test_the_warning_is_visible_without_any_logging_set_up():
    """In a fresh process, as in a Ray worker: verl itself logs a failing plugin at DEBUG."""
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "auto", "VERL_PLATFORM": ""}
    done = subprocess.run([sys.executable, "-c", BROKEN], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported ")
    said = [line for line in done.stderr.splitlines() if "verl-drmas" in line]
    assert len(said) == 1
    assert "verl_drmas.trainer.estimators is not available" in said[0]
    assert "verl_drmas.advantage" in said[0]


ALONE = """
import sys
import verl_drmas.plugin
loaded = {m.split(".")[0] for m in sys.modules} & {"verl", "torch", "ray", "numpy", "pydantic", "hydra"}
assert not loaded, loaded
assert not [m for m in sys.modules if m.startswith("verl_drmas.") and m != "verl_drmas.plugin"]
"""


def test_alone_it_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env={**os.environ, "VERL_PLATFORM": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
