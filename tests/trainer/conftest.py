"""verl's sample store, without a cluster."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))  # for metric_page


@pytest.fixture(scope="module")
def queue():
    """TransferQueue's controller and storage in this process, without Ray."""
    from transfer_queue import interface
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    config = OmegaConf.create({}, flags={"allow_objects": True})
    config = OmegaConf.merge(config, OmegaConf.load(resources.files("transfer_queue") / "config.yaml"))
    controller = TransferQueueController.__ray_actor_class__()
    units = [SimpleStorageUnit.__ray_actor_class__(config=dict(config.backend.SimpleStorage)) for _ in range(2)]
    config.controller.zmq_info = controller.get_zmq_server_info()
    config.backend.SimpleStorage.zmq_info = {f"unit{i}": unit.get_zmq_server_info() for i, unit in enumerate(units)}
    before, interface._TQ_CLIENT = interface._TQ_CLIENT, None
    interface._maybe_create_tq_client(config)
    yield
    interface._TQ_CLIENT.close()
    interface._TQ_CLIENT = before
    with ThreadPoolExecutor() as pool:  # each waits a second for its threads
        list(pool.map(lambda unit: unit.shutdown(), units))
