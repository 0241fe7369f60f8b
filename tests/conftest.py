"""What spares all tests the same work, and which files share a process of `--dist loadfile`."""

import copy
import gc

import pytest
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from xdist.scheduler import LoadFileScheduling

# By file: those of one name share launches of real engines, which are a session's fixtures.
TOGETHER = {
    "end_to_end/test_parity.py": "models",
    "end_to_end/test_models.py": "models",
    "end_to_end/test_delegate.py": "delegate",
    "end_to_end/test_pair.py": "delegate",
}


class Together(LoadFileScheduling):
    """Gives all files of one name to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file.removeprefix("tests/"), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> Together | None:
    """The `xdist_group` mark would be the usual way; pytest-xdist 3.8 doesn't see it under pytest 9."""
    return Together(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def packages_files_are_read_once():
    """Hydra reads and parses some 35 files of verl's and ours for each composition, more than half of what it takes.

    Files of installed packages don't change while tests run; of each, a composition gets a copy of its own.
    """
    Plugins.instance()  # registers the sources
    packaged = SourcesRegistry.instance().resolve("pkg")
    known, read = {}, packaged.load_config

    def load_config(source, config_path):
        key = (source.provider, source.path, config_path)
        if key not in known:
            known[key] = read(source, config_path)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packaged, "load_config", load_config)
        yield


def pytest_collection_finish():
    """Garbage is looked for less often, and never again among what was imported by now (torch, verl)."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_unconfigure():
    """Libraries that count their objects at the end of the process count what is frozen as leaked."""
    gc.unfreeze()
