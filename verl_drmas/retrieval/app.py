"""The search server's HTTP side: `/retrieve`, `/health` and `/metrics` over one index."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from verl_drmas import __version__
from verl_drmas.body import BodyTooLong, Refused, read_body
from verl_drmas.retrieval.batching import Batcher, Searcher
from verl_drmas.retrieval.limits import ServerSettings
from verl_drmas.retrieval.measures import Measures
from verl_drmas.retrieval.wire import RequestBody, read_request, write_answer

JSON = "application/json"
LEAVE = 1.0  # seconds for what still runs at the very end, when every request has had its time
GONE = 499  # the caller hung up; nobody but the metrics sees this status


class ServedIndex(Searcher, Protocol):
    """What the server needs of an index."""

    kind: str

    def __len__(self) -> int: ...

    def describe(self) -> dict[str, Any]: ...


def create_app(index: ServedIndex, settings: ServerSettings) -> FastAPI:
    """The app over an index; `app.state.batcher.stopping = True` makes it turn new requests away."""
    measures = Measures()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.batcher = Batcher(index, settings, measures)
        yield
        await app.state.batcher.close(LEAVE)

    app = FastAPI(title="verl-drmas retriever", version=__version__, lifespan=lifespan)
    schema = {"content": {JSON: {"schema": RequestBody.model_json_schema()}}, "required": True}

    @app.post("/retrieve", openapi_extra={"requestBody": schema})
    async def retrieve(request: Request) -> Response:
        """Passages for `queries` (a list) or `query` (a string)."""
        try:
            asked = read_request(await _body(request, settings.max_body_bytes), settings)
            search = app.state.batcher.submit(asked.queries, asked.k)
            await _unless_gone(request, search)
            response = Response(write_answer(search.result(), scores=asked.scores), media_type=JSON)
        except Refused as refused:
            measures.rejected.labels(refused.reason).inc()
            response = _refusal(refused)
        except ClientDisconnect:
            response = Response(status_code=GONE)
        measures.requests.labels(response.status_code).inc()
        return response

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken, 503 once the server is stopping."""
        stopping = app.state.batcher.stopping
        told = {
            "status": "stopping" if stopping else "ok",
            "kind": index.kind,
            "passages": len(index),
            "version": __version__,
            "settings": settings,
            "index": index.describe(),
        }
        return Response(orjson.dumps(told, default=str), status_code=503 if stopping else 200, media_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        return Response(measures.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    return app


async def _body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        Refused: 413 where it is longer than the limit.
    """
    try:
        return await read_body(request, limit)
    except BodyTooLong:
        text = f"the body is longer than {limit} bytes; send fewer or shorter queries"
        raise Refused(413, "body", text) from None


async def _unless_gone(request: Request, search: asyncio.Future) -> None:
    """Wait for a search, and take it out of the queue where its caller hangs up meanwhile.

    Raises:
        ClientDisconnect: The caller hung up.
    """
    if search.done():
        return
    hung_up = asyncio.ensure_future(request.receive())  # after the body, the next message is the end of the connection
    hung_up.add_done_callback(lambda _: search.cancel())
    try:
        await asyncio.wait([search])
    finally:
        hung_up.cancel()
        search.cancel()  # no effect on one that is done
    if search.cancelled():
        raise ClientDisconnect


def _refusal(refused: Refused) -> Response:
    headers = {"retry-after": str(refused.retry_after)} if refused.retry_after else {}
    body = orjson.dumps({"detail": refused.text, "reason": refused.reason})
    return Response(body, status_code=refused.status, media_type=JSON, headers=headers)
