"""LLM calls that outlive a weight update: an answer that it cut goes on with the new weights, and says so."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from verl_drmas.rollout.client import CUT, RetryingClient

PAUSE = 0.5  # seconds before an answer goes on; the servers keep it waiting themselves while weights change


class ResumingClient(RetryingClient):
    """verl's `FullyAsyncLLMServerClient` (`workers/rollout/llm_server.py`), with our retry and true labels.

    verl's labels an answer with the version of its first and last piece, also if that piece is empty because the update
    came before its first token. Here only pieces with tokens count.

    What a resumed answer can't have: stop strings that begin in one piece and end in the next, and presence or
    frequency penalties for the tokens of the pieces before.
    """

    goes_on = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._running: dict[str, tuple[Any, str]] = {}

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """One answer, in as many pieces as it takes.

        Args:
            request_id: Of the answer; no two are on their way under one.
            prompt_ids: Token ids.
            sampling_params: With `max_tokens`, which all pieces share.
            kwargs: Of verl's client.

        Returns:
            The pieces as one; in `extra_fields`, `min_global_steps` and `max_global_steps` are the lowest and highest
            version of the weights that sampled its tokens.

        Raises:
            SessionFailed: No server could answer (`server`).
        """
        pieces: list[TokenOutput] = []
        tokens: list[int] = []
        while True:
            piece = await super().generate(
                request_id,
                prompt_ids=[*prompt_ids, *tokens],
                sampling_params=_rest(sampling_params, len(tokens)),
                **kwargs,
            )
            pieces.append(piece)
            tokens += piece.token_ids
            if piece.stop_reason not in CUT:
                return _joined(pieces, piece.stop_reason)
            if len(tokens) >= sampling_params["max_tokens"]:
                return _joined(pieces, "completed")  # verl's word also for an answer that used up its tokens
            await asyncio.sleep(PAUSE)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, handle = await super()._acquire_server(request_id, **extra)
        self._running[request_id] = (handle, "")
        return server_id, handle

    def _vllm_request_id(self, request_id: str) -> str:
        engine_id = super()._vllm_request_id(request_id)
        if request_id in self._running:
            self._running[request_id] = (self._running[request_id][0], engine_id)
        return engine_id

    async def _ask(self, request_id: str, **kwargs: Any) -> TokenOutput:
        try:
            return await super()._ask(request_id, **kwargs)
        except asyncio.CancelledError:
            # Ray goes on with a call that nobody waits for; the engine need not.
            handle, engine_id = self._running.get(request_id, (None, ""))
            if engine_id and hasattr(handle, "abort_request"):
                handle.abort_request.remote(engine_id, reset_prefix_cache=False)
            raise
        finally:
            self._running.pop(request_id, None)


def _rest(params: dict[str, Any], done: int) -> dict[str, Any]:
    """Sampling parameters of a piece after `done` tokens. Its draws are its own: with the first piece's seed, it would
    draw the first piece's random numbers again.
    """
    rest = {**params, "max_tokens": params["max_tokens"] - done}
    if not done:
        return rest
    if params.get("min_tokens"):
        rest["min_tokens"] = max(0, params["min_tokens"] - done)
    if params.get("seed") is not None:
        digest = hashlib.blake2b(f"{params['seed']}/{done}".encode(), digest_size=8).digest()
        rest["seed"] = int.from_bytes(digest, "big") % 2**31
    return rest


def _joined(pieces: list[TokenOutput], stop_reason: str | None) -> TokenOutput:
    """The pieces as one answer."""
    full = [piece for piece in pieces if piece.token_ids] or pieces[-1:]
    versions = [bound for piece in full for bound in _versions(piece)]
    known = [version for version in versions if version is not None]
    lowest, highest = (min(known), max(known)) if len(known) == len(versions) else (None, None)
    preempted = [piece.num_preempted for piece in pieces if piece.num_preempted is not None]
    cached = [piece.extra_fields.get("num_cached_tokens") for piece in pieces]
    return TokenOutput(
        token_ids=[token for piece in full for token in piece.token_ids],
        log_probs=_log_probs(full),
        stop_reason=stop_reason,
        num_preempted=sum(preempted) if preempted else None,
        extra_fields={
            "global_steps": highest,
            "min_global_steps": lowest,
            "max_global_steps": highest,
            "num_cached_tokens": next((n for n in cached if n is not None), None),
        },
    )


def _versions(piece: TokenOutput) -> tuple[Any, Any]:
    fields = piece.extra_fields
    return fields.get("min_global_steps"), fields.get("max_global_steps")


def _log_probs(pieces: list[TokenOutput]) -> list[float] | None:
    """None unless every token has one."""
    if any(piece.log_probs is None or len(piece.log_probs) != len(piece.token_ids) for piece in pieces):
        return None
    return [value for piece in pieces for value in piece.log_probs]
