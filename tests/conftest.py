"""What spares all tests the same work."""

import copy
import gc

import pytest
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins


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
