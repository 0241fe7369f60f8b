"""The command line: quick to answer, and other people's arguments pass through untouched."""

import subprocess
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from verl_drmas.cli import app, main

HEAVY = {
    *("verl", "torch", "ray", "pandas", "hydra", "transformers", "vllm", "datasets"),
    *("faiss", "bm25s", "sentence_transformers", "fastapi", "uvicorn", "aiohttp", "prometheus_client"),
}


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_the_commands_and_imports_nothing_heavy():
    code = (
        "import sys, verl_drmas.cli as cli, typer.testing as t\n"
        "r = t.CliRunner().invoke(cli.app, ['--help'])\n"
        "assert all(c in r.output for c in ('doctor', 'check', 'data', 'retriever')), r.output\n"
        f"assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)\n"
        "assert 'verl_drmas.retrieval' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_retrievers_help_needs_none_of_its_libraries():
    """It is shown where only verl is installed, before a long build or a server."""
    code = (
        "import sys, verl_drmas.cli as cli, typer.testing as t\n"
        "for arguments in (['--help'], ['index', '--help'], ['serve', '--help']):\n"
        "    r = t.CliRunner().invoke(cli.app, ['retriever', *arguments])\n"
        "    assert r.exit_code == 0 and 'Usage: verl-drmas retriever' in r.output, r.output\n"
        f"assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)\n"
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


def test_retriever_is_an_app_of_its_own():
    shown = run("retriever", "--help")
    assert shown.exit_code == 0
    commands = {line.split()[1] for line in shown.output.split("Commands")[1].splitlines() if len(line.split()) > 2}
    assert {"index", "serve"} <= commands
    assert run("retriever", "no-such-command").exit_code == 2


@pytest.mark.parametrize("command", ["index", "serve"])
def test_a_retriever_command_reads_its_own_options(command):
    shown = run("retriever", command, "--help")
    assert shown.exit_code == 0 and f"verl-drmas retriever {command}" in shown.output
    assert run("retriever", command, "--no-such-option").exit_code == 2


def test_a_command_finds_modules_of_the_working_folder(tmp_path, monkeypatch):
    """`python -m verl.trainer.main_ppo` has the folder on its path; a console script has its own instead."""
    (tmp_path / "own_module_of_a_test.py").write_text("told = 'found'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    module, seen = ModuleType("verl_drmas.check_command"), []

    def check(arguments):
        seen.append(__import__(*arguments).told)
        return 0

    module.main = check
    monkeypatch.setitem(sys.modules, "verl_drmas.check_command", module)
    monkeypatch.setattr(sys, "argv", ["verl-drmas", "check", "own_module_of_a_test"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert seen == ["found"]
