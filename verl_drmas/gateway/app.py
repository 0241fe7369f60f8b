"""The gateway's HTTP side: `POST /v1/generate` and `GET /v1/status` for who has the token, `GET /health` for all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import SecretStr
from starlette.requests import ClientDisconnect

from verl_drmas import __version__
from verl_drmas.body import BodyTooLong, Refused, read_body
from verl_drmas.gateway.answers import LINGER, Answers, Ask, HungUp
from verl_drmas.gateway.bearer import is_right
from verl_drmas.gateway.gate import Gate
from verl_drmas.gateway.wire import read_request
from verl_drmas.store.settings import GatewayConfig

logger = logging.getLogger(__name__)

JSON = "application/json"
GONE = 499  # the caller hung up; nobody sees this status


@dataclass
class Gateway:
    """What one gateway serves.

    Attributes:
        ask: Asks the engines.
        role: What callers call the model.
        token: That callers must have.
        settings: Limits.
        gate: Who comes in; closed at first.
        linger: Seconds an answer goes on when its caller is gone.
    """

    ask: Ask
    role: str
    token: SecretStr
    settings: GatewayConfig = field(default_factory=GatewayConfig)
    gate: Gate = field(default_factory=Gate)
    linger: float = LINGER

    def __post_init__(self):
        self.answers = Answers(self.ask, self.gate, linger=self.linger)


def create_app(gateway: Gateway) -> FastAPI:
    """The app of a gateway. No page of it tells strangers more than that it is there."""

    app = FastAPI(title="verl-drmas gateway", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        """Token ids, log-probs and weight versions of one call's answer."""
        try:
            _let_in(request, gateway.token)
            asked = read_request(await _body(request, gateway.settings.max_body), gateway.role)
            async with _hanging_up(request) as hung_up:
                answer = await gateway.answers.answer(asked, hung_up)
            return Response(answer, media_type=JSON)
        except Refused as refused:
            gateway.answers.counts[f"refused/{refused.status}"] += 1
            return _refusal(refused)
        except (ClientDisconnect, HungUp):
            gateway.answers.counts["hung_up"] += 1
            return Response(status_code=GONE)
        except Exception as error:  # noqa: BLE001  a server prints what it can't handle, and that may repeat the prompt
            logger.error("the gateway failed in a call: %s", type(error).__name__)
            return _refusal(Refused(500, "gateway", type(error).__name__))

    @app.get("/v1/status")
    async def status(request: Request) -> Response:
        """Role, weights' version and whether calls are taken."""
        try:
            _let_in(request, gateway.token)
        except Refused as refused:
            return _refusal(refused)
        state = gateway.gate.state
        told = {"role": gateway.role, "version": state.version, "open": state.open}
        return Response(orjson.dumps(told), media_type=JSON)

    @app.get("/health")
    async def health() -> Response:
        """200 as long as the gateway lives, open or closed."""
        return Response(orjson.dumps({"status": "ok", "version": __version__}), media_type=JSON)

    return app


def _let_in(request: Request, token: SecretStr) -> None:
    """Before anything of a request is read.

    Raises:
        Refused: 401.
    """
    if not is_right(request.headers.get("authorization"), token):
        raise Refused(401, "token", "this gateway wants the bearer token that its job was started with")


async def _body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        Refused: 413 where it is longer than the limit.
    """
    try:
        return await read_body(request, limit)
    except BodyTooLong:
        raise Refused(413, "body", f"the body is longer than {limit} bytes (drmas.gateway.max_body)") from None


@contextlib.asynccontextmanager
async def _hanging_up(request: Request) -> AsyncIterator[asyncio.Future]:
    """A future that is done when the caller is gone: after the body, the next message is the end of the connection."""
    hung_up = asyncio.ensure_future(request.receive())
    try:
        yield hung_up
    finally:
        hung_up.cancel()


def _refusal(refused: Refused) -> Response:
    headers = {"retry-after": str(refused.retry_after)} if refused.retry_after else {}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = orjson.dumps({"error": refused.reason, "detail": refused.text})
    return Response(body, status_code=refused.status, media_type=JSON, headers=headers)
