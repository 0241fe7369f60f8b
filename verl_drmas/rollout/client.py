"""LLM calls that survive a dead server: it leaves the balancer, and the call is asked once more with the same seed."""

from __future__ import annotations

import logging
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_drmas.workflows import SessionFailed

logger = logging.getLogger(__name__)

# vLLM's word for an engine process that is gone while its actor lives. Its EngineGenerateError is about one request and
# recoverable (vllm/v1/engine/exceptions.py): a server must not leave the balancer for it.
DEAD_ENGINE = "EngineDeadError"
CUT = ("aborted", "abort")  # verl's and the engines' words for an answer that did not come to its end


def is_dead(error: BaseException) -> bool:
    """True if an error says that the server is gone, rather than that the request was wrong."""
    while isinstance(error, RayTaskError) and error.cause is not None:  # wrapped once for every actor it went through
        error = error.cause
    return isinstance(error, RayActorError) or type(error).__name__ == DEAD_ENGINE


class NoServerLeft(SessionFailed):
    """The balancer is empty; asking again is no use."""


class RetryingClient(LLMServerClient):
    """verl's client (`workers/rollout/llm_server.py`) with one retry on another server.

    Picklable like its base; `retried` counts the calls of this process.
    """

    goes_on = False  # whether an answer that a weight update cut is of use

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.retried = 0
        self._asked: dict[str, str] = {}
        self._buried: set[str] = set()

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, handle = await super()._acquire_server(request_id, **extra)
        self._asked[request_id] = server_id
        return server_id, handle

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """As in verl, with the retry.

        Raises:
            SessionFailed: No server could answer (`server`). An error about the request itself comes as it is.
        """
        kwargs["sampling_params"] = dict(kwargs["sampling_params"])
        try:
            return await self._ask(request_id, **kwargs)
        except NoServerLeft:
            raise
        except SessionFailed:
            self.retried += 1
            return await self._ask(request_id, **kwargs)

    async def _ask(self, request_id: str, **kwargs: Any) -> TokenOutput:
        try:
            output = await super().generate(request_id, **{**kwargs, "sampling_params": {**kwargs["sampling_params"]}})
        except Exception as error:
            server_id = self._asked.get(request_id)
            if server_id is not None and is_dead(error):
                # A server that fails at once is the least loaded one: left in, it would draw every request.
                await self._load_balancer.remove_servers.remote([server_id])
                if server_id not in self._buried:
                    self._buried.add(server_id)
                    logger.warning("LLM server %s is dead and out of the balancer: %s", server_id, type(error).__name__)
                raise SessionFailed("server", f"server {server_id} died: {error!r:.200}") from error
            if "No available servers" in str(error):
                raise NoServerLeft("server", "no LLM server is left") from error
            raise
        finally:
            self._asked.pop(request_id, None)
        if output.stop_reason in CUT and not self.goes_on:
            raise SessionFailed("server", "the request was aborted")
        return output


class TeamClient:
    """The clients of a team on several models, by model id; picklable.

    It stands where verl hands one client to its agent loops, and answers no request itself: a stock agent loop doesn't
    say which model it wants.
    """

    def __init__(self, clients: dict[str, RetryingClient]):
        self.clients = clients

    @property
    def retried(self) -> int:
        """Calls that were asked once more, of all models."""
        return sum(client.retried for client in self.clients.values())

    @retried.setter
    def retried(self, value: int) -> None:
        for client in self.clients.values():
            client.retried = value
