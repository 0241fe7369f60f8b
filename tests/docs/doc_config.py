"""verl's configuration, composed without importing verl, which takes seconds."""

import importlib.util

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf


def composed(*overrides, name="ppo_trainer", folder=None):
    """verl's configuration with overrides, interpolations open; of a file in `folder`, or of verl's own."""
    verl = importlib.util.find_spec("verl").submodule_search_locations[0]
    GlobalHydra.instance().clear()
    place = f"hydra.searchpath=[file://{verl}/trainer/config]"
    with initialize_config_dir(str(folder or f"{verl}/trainer/config"), version_base=None):
        return compose(name, [*([place] if folder else []), *overrides])


def exists(config: DictConfig, key: str) -> bool:
    """Whether a configuration has a key, whatever its value."""
    node = config
    for part in key.split("."):
        if not OmegaConf.is_dict(node) or part not in list(node):
            return False
        node = node._get_node(part)
    return True
