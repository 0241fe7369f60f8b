"""Puts our configs on Hydra's search path, so that `+drmas=<name>` works from any folder without `--config-dir`.

Installed as `hydra_plugins.verl_drmas_search_path`: Hydra imports every module of that namespace package at its start.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlDrmasSearchPath(SearchPathPlugin):
    """Appends, so that a user's own file of the same name wins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-drmas", path="pkg://verl_drmas.configs")
