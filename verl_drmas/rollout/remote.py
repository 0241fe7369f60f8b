"""LLM calls to a model of another job: asked at its gateway until it answers, with one id however often."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type
from tenacity.wait import wait_exponential
from verl.workers.rollout.replica import TokenOutput

from verl_drmas.gateway.bearer import as_token, read_token
from verl_drmas.gateway.caller import Caller
from verl_drmas.gateway.errors import Busy, Failed, Rejected, Unreachable
from verl_drmas.gateway.finder import Finder, Store
from verl_drmas.gateway.wire import Answer, write_request
from verl_drmas.store.errors import StoreAway, StoreError
from verl_drmas.store.settings import RemoteConfig
from verl_drmas.workflows import SessionFailed

logger = logging.getLogger(__name__)

# Seconds between attempts, each with a random part on top: the first comes at once, since a gateway that was restarted
# is there again, and none is later than an answer lingers at the gateway for its caller (`gateway/answers.py`).
FIRST_WAIT, LONGEST_WAIT, LONGEST_BUSY = 0.5, 10.0, 5.0
FAILURES = 8  # failures of an engine in a row that are put down to the call
STORE_PATIENCE = 15.0  # seconds of one question to a store that is away; the call itself waits for `remote.patience`
SAY = 60.0  # seconds between lines about the same trouble


@dataclass
class _Call:
    """One call with all its attempts.

    Attributes:
        step: Of the main job; the weights must be new enough for it.
        id: The same in all attempts.
        min_version: Sent along; the same in all attempts that the gateway may know of. None: to be asked for.
        refused: The gateway said to come again, before or now.
        failures: Of an engine, in a row.
        away_since: When the other job was missed first; None: it is well.
        lost: The last attempt found no gateway.
    """

    step: int
    id: str = field(default_factory=lambda: uuid4().hex)
    min_version: int | None = None
    refused: bool = False
    failures: int = 0
    away_since: float | None = None
    lost: bool = False


class RemoteClient:
    """Stands where a model's `RetryingClient` stands, for a model that another job serves; picklable.

    Args:
        config: The run's configuration as the model sees it; its path gives tokenizer and template.
        remote: Where the other job is found.
        url: Of the store; None: `remote.store`.
        token: The gateway's; None: of the environment variable that `remote` names. It goes along when the client is
            pickled, since another machine of the cluster may not have the variable.
        producer: The store itself, instead of its URL.

    Attributes:
        retried: Attempts beside the first ones. Waiting for a gateway that is closed doesn't count.
    """

    def __init__(
        self,
        config: Any,
        remote: RemoteConfig,
        url: str | None = None,
        *,
        token: str | SecretStr | None = None,
        producer: Store | None = None,
    ):
        self.config, self.remote, self.url = config, remote, url or remote.store
        key = "drmas.models.<id>.remote.token_env"
        self._token = read_token(remote.token_env, key) if token is None else as_token(token)
        self._given = producer
        self.retried = 0
        self._prepare()

    def _prepare(self) -> None:
        self._producer = self._given
        self._caller = Caller(self._token, ca=self.remote.ca)
        self._finder = Finder(self._store, self.remote.max_lag)
        self._backoff = wait_exponential(FIRST_WAIT, LONGEST_WAIT)
        self._uncounted = 0
        self._counting: asyncio.Task | None = None
        self._said = 0.0  # when trouble was last logged; 0: there is none
        self._opening = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("config", "remote", "url", "_token", "_given", "retried")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        step: int,
        validate: bool = False,
    ) -> TokenOutput:
        """One answer of the model.

        Args:
            request_id: Not used: every call has an id of its own, all its attempts the same.
            prompt_ids: Token ids.
            sampling_params: With `max_tokens`.
            step: Global step of the session.
            validate: A session of validation, which comes after the step's training.

        Returns:
            As verl's client; `min_global_steps` and `max_global_steps` are the other job's versions.

        Raises:
            SessionFailed: `remote`: the other job shows no sign of life for `remote.patience` seconds, or its gateway
                gives no other answer however often it is asked.
        """
        call = _Call(step + bool(validate))
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((Unreachable, Busy, Failed, StoreError)),
            wait=self._wait,
            before_sleep=self._note,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    return _output(await self._attempt(call, prompt_ids, sampling_params))
        finally:
            self._count()
        raise AssertionError("unreachable: tenacity returns or raises")

    async def close(self) -> None:
        """Close this event loop's connections, and finish counting."""
        if self._counting is not None:
            await asyncio.wait([self._counting])
        await self._caller.close()

    async def _attempt(self, call: _Call, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Answer:
        """Ask once.

        Raises:
            CallFailed, StoreError: Another attempt may have an answer.
            SessionFailed: It won't.
        """
        url, began = None, time.monotonic()
        try:
            if call.min_version is None:
                call.min_version = await self._finder.needed(call.step, again=call.refused)
            url = await self._endpoint(call)
            body = write_request(call.id, self.remote.role, prompt_ids, sampling, call.min_version)
            answer = await self._caller.generate(url, body)
        except Rejected as error:
            raise SessionFailed("remote", str(error)) from None
        except Busy:
            call.away_since, call.lost, call.failures = None, False, 0
            # Perhaps nobody needs the version any more. The gateway doesn't know the call: its body may change.
            call.min_version, call.refused = None, True
            raise
        except Failed as error:
            call.away_since, call.lost, call.failures = None, False, call.failures + 1
            if call.failures >= FAILURES:
                raise SessionFailed("remote", f"{call.failures} failures in a row, the last: {error}") from None
            raise
        except Unreachable as error:
            call.lost = True
            if await self._lives(url, error):
                call.away_since = None
            else:
                self._lose_patience(call, error)
            raise
        except StoreError as error:
            if not isinstance(error, StoreAway):
                raise SessionFailed("remote", f"the store refuses: {error}") from error
            self._lose_patience(call, error)
            raise
        if 0 < self._said < began:  # an attempt that is older than the trouble says nothing of its end
            self._said = 0.0
            logger.info("the gateway of role %s answers again", self.remote.role)
        return answer

    async def _endpoint(self, call: _Call) -> str:
        try:
            state = await self._finder.other_job(again=call.lost)
        except StoreAway:
            state = self._finder.last  # a gateway can be well without the store
            if state is None:
                raise
        if state.endpoint is None:
            raise Unreachable("the store knows no gateway yet")
        return state.endpoint.rstrip("/")

    async def _lives(self, url: str | None, error: Unreachable) -> bool:
        """Whether the other job is there although a call found no answer: by its lease, or by its gateway."""
        try:
            if (await self._finder.other_job(again=True)).alive:
                return True
        except StoreError:
            pass  # it says nothing of the other job
        return url is not None and error.silent and await self._caller.lives(url)

    def _lose_patience(self, call: _Call, error: Exception) -> None:
        """Note that the other job, or the store, is away.

        Raises:
            SessionFailed: For longer than `remote.patience`.
        """
        now = time.monotonic()
        if call.away_since is None:
            call.away_since = now
        elif now - call.away_since >= self.remote.patience:
            raise SessionFailed(
                "remote",
                f"the job that serves role {self.remote.role} shows no sign of life for {now - call.away_since:.0f} s "
                f"(remote.patience): {error}; start it again",
            ) from None

    def _wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt."""
        error, backoff = state.outcome.exception(), self._backoff(state)
        if isinstance(error, Unreachable) and error.silent:
            backoff = 0.0  # the answer may be on its way, and waits for nobody for ever
        if isinstance(error, Busy):
            backoff = max(min(backoff, LONGEST_BUSY), error.retry_after)
        return backoff + random.uniform(0, FIRST_WAIT)

    def _note(self, state: RetryCallState) -> None:
        """Count an attempt that failed, and say so now and then."""
        error = state.outcome.exception()
        if isinstance(error, Busy):
            return
        self.retried += 1
        self._uncounted += 1
        if not self._said or time.monotonic() - self._said > SAY:
            self._said = time.monotonic()
            logger.warning("a call to role %s is asked again: %s", self.remote.role, error)

    def _count(self) -> None:
        """Tell the store of retries, without keeping the session waiting."""
        if self._uncounted and (self._counting is None or self._counting.done()):
            self._counting = asyncio.ensure_future(self._tell_store())

    async def _tell_store(self) -> None:
        while self._uncounted:  # more may come while the store is told of some
            number, self._uncounted = self._uncounted, 0
            try:
                await self._finder.count("retries", number)
            except StoreError as error:
                self._uncounted += number  # with the next ones
                logger.warning("%d retries are not in the store yet: %s", number, type(error).__name__)
                return

    def _store(self) -> Store:
        """The store, opened when it is first needed, in a thread."""
        with self._opening:
            if self._producer is None:
                from verl_drmas.store.database import open_store
                from verl_drmas.store.producer import Producer

                self._producer = Producer(open_store(self.url, patience=STORE_PATIENCE), self.remote.role)
            return self._producer


def _output(answer: Answer) -> TokenOutput:
    return TokenOutput(
        token_ids=answer.token_ids,
        log_probs=answer.log_probs,
        stop_reason=answer.stop_reason,
        num_preempted=answer.num_preempted,
        extra_fields={
            "global_steps": answer.max_version,
            "min_global_steps": answer.min_version,
            "max_global_steps": answer.max_version,
            "num_cached_tokens": answer.num_cached_tokens,
        },
    )
