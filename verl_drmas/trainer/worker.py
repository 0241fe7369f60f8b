"""verl's training worker for teams: a temperature per row, a weight update that outlives a dead server, and the job's
own socket for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import zmq
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_drmas.rollout.client import is_dead
from verl_drmas.sockets import use_job_socket

logger = logging.getLogger(__name__)


def use_row_temperature(data: TensorDict, mixes: bool) -> TensorDict:
    """Hand each row's sampling temperature to the engine, if the model's rows differ in it.

    verl's engines divide logits by a tensor `temperature` (rows,), but verl's worker overwrites a row field of that
    name with the run's, so the rows carry it as `row_temperature`.
    """
    if mixes and "row_temperature" in data:
        data["temperature"] = data["row_temperature"].reshape(-1).to(torch.float32)
    return data


class GuardedRollout:
    """Stands for verl's server adapter (`workers/rollout/base.py`) and keeps a dead server from hanging the trainer.

    A weight update gathers every parameter over all ranks. A rank whose server is dead must still take part, or the
    others wait for ever; so it goes through its share and sends nothing.
    """

    OWN = ("adapter", "sync_timeout", "dead")

    def __init__(self, adapter: Any, sync_timeout: float):
        self.adapter, self.sync_timeout, self.dead = adapter, sync_timeout, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """verl's worker sets `sleep_level` for LoRA, and the adapter reads it."""
        if name in self.OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.adapter, name, value)

    async def resume(self, *args: Any, **kwargs: Any) -> None:
        """Wake the server. A raise here would leave the other ranks alone in the gather that follows."""
        if self.dead:
            return
        try:
            await self.adapter.resume(*args, **kwargs)
        except Exception as error:
            if not is_dead(error):
                raise
            self._bury(error, "a wake-up")

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any) -> None:
        """Send the weights, or only gather them if the server is dead or dies meanwhile."""
        stream = iter(weights)
        if not self.dead:
            try:
                with _socket_timeout(self.sync_timeout):
                    await self.adapter.update_weights(stream, **kwargs)
                return
            except Exception as error:
                if not (isinstance(error, zmq.Again) or is_dead(error)):
                    raise
                self._bury(error, "a weight update")
        for _ in stream:
            pass

    def _bury(self, error: Exception, when: str) -> None:
        self.dead = True
        logger.warning(
            "LLM server of replica %s died in %s (%s); this worker goes on without it",
            getattr(self.adapter, "replica_rank", "?"),
            when,
            type(error).__name__,
        )


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Sockets that verl's sender opens meanwhile give up after `seconds`; it sets no time-out itself.

    pyzmq hands options of the shared context to every new socket, so no code of verl is touched. A time-out setting in
    verl's `BucketedWeightSender` would remove this.
    """
    context = zmq.Context.instance()
    before = {option: context.sockopts.get(option) for option in (zmq.RCVTIMEO, zmq.SNDTIMEO)}
    for option in before:
        context.setsockopt(option, int(seconds * 1000))
    try:
        yield
    finally:
        for option, value in before.items():
            context.sockopts.pop(option, None)
            if value is not None:
                context.setsockopt(option, value)


class TeamActorRolloutRefWorker(ActorRolloutRefWorker):
    """`ActorRolloutRefWorker` (verl/workers/engine_workers.py) with the additions above."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        adapter = self.rollout
        if adapter is None:
            return
        base = self.config.replica_base
        if base:
            # verl's worker doesn't pass the rank that its adapter takes; servers of other models have the first ones.
            adapter = type(adapter)(
                config=adapter.config,
                model_config=adapter.model_config,
                device_mesh=adapter.device_mesh,
                replica_rank=adapter.replica_rank + base,
            )
        use_job_socket(adapter)
        self.rollout = GuardedRollout(adapter, self.config.sync_timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, local_path: str) -> None:
        """Load a checkpoint's weights without its optimiser, schedule and random state."""
        engine = self.actor.engine
        # The misspelt name is verl's, in its Megatron engine.
        manager = getattr(engine, "checkpoint_manager", None) or engine.checkpoint_mananager
        contents = manager.checkpoint_load_contents
        # verl loads what the configuration lists; an argument of its `load_checkpoint` would remove this.
        manager.checkpoint_load_contents = ["model"]
        try:
            self.actor.load_checkpoint(local_path)
        finally:
            manager.checkpoint_load_contents = contents

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # a worker may be busy for as long as an update
    def drop_server(self, replica_rank: int) -> None:
        """Stop talking to a server that is known to be dead."""
        if self.rollout is not None and self.rollout.replica_rank == replica_rank:
            self.rollout.dead = True

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        return super().compute_log_prob(use_row_temperature(data, self.config.row_temperature))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict:
        return super().compute_ref_log_prob(use_row_temperature(data, self.config.row_temperature))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        return super().update_actor(use_row_temperature(data, self.config.row_temperature))
