"""The command line: quick to answer, and other people's arguments pass through untouched."""

import subprocess
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from verl_drmas.cli import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_the_commands_and_imports_nothing_heavy():
    code = (
        "import sys, verl_drmas.cli as cli, typer.testing as t\n"
        "r = t.CliRunner().invoke(cli.app, ['--help'])\n"
        "assert all(c in r.output for c in ('doctor', 'check', 'data')), r.output\n"
        "assert not {'verl', 'torch', 'ray', 'pandas', 'hydra'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("status", [0, 3])
def test_check_hands_on_every_argument(monkeypatch, status):
    seen = []
    module = ModuleType("verl_drmas.check_command")
    module.main = lambda arguments: seen.extend(arguments) or status
    monkeypatch.setitem(sys.modules, "verl_drmas.check_command", module)
    arguments = ["--config-name", "drmas_math", "-cd", "here", "+drmas=solver_verifier", "~data.x", "a.b='c d'"]
    assert run("check", *arguments).exit_code == status
    assert seen == arguments


def test_doctor_ends_with_its_status(monkeypatch):
    monkeypatch.setattr("verl_drmas.doctor.main", lambda: 1)
    assert run("doctor").exit_code == 1


def test_data_is_an_app_of_its_own():
    assert "arithmetic" in run("data", "--help").output
    assert run("data", "no-such-command").exit_code == 2
