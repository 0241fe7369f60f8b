"""What spares all tests the same work."""

import copy

import pytest
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource as Packaged


@pytest.fixture(scope="session", autouse=True)
def packages_files_are_read_once():
    """Hydra reads and parses some 35 files of verl's and ours for each composition, most of the time it takes.

    Files of installed packages don't change while tests run; of each, a composition gets a copy of its own.
    """
    known, read = {}, Packaged.load_config

    def load_config(source, config_path):
        key = (source.provider, source.path, config_path)
        if key not in known:
            known[key] = read(source, config_path)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packaged, "load_config", load_config)
        yield
