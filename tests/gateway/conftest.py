"""A gateway over an engine that is a Python object."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from pydantic import SecretStr

from verl_drmas.gateway.app import Gateway, create_app
from verl_drmas.store.settings import GatewayConfig

TOKEN = "sesame-0123456789"
SAMPLING = {"max_tokens": 8, "temperature": 1.0, "logprobs": True}


class Engine:
    """Answers each prompt with its ids, one higher. `hold()` keeps answers waiting until `let_go()`."""

    def __init__(self, version=3):
        self.version, self.error, self.calls, self.cancelled = version, None, [], []
        self._free = asyncio.Event()
        self._free.set()

    def hold(self):
        self._free.clear()

    def let_go(self):
        self._free.set()

    async def __call__(self, id, prompt_ids, sampling):
        self.calls.append((id, prompt_ids, sampling))
        began = self.version
        try:
            await self._free.wait()
        except asyncio.CancelledError:
            self.cancelled.append(id)
            raise
        if self.error is not None:
            raise self.error
        return SimpleNamespace(
            token_ids=[i + 1 for i in prompt_ids],
            log_probs=[-0.5] * len(prompt_ids),
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"min_global_steps": began, "max_global_steps": self.version, "num_cached_tokens": 2},
        )


class House:
    """A gateway, its engine, and a client that is not on a network."""

    def __init__(self, linger=5.0, **settings):
        self.engine = Engine()
        self.gateway = Gateway(self.engine, "sub", SecretStr(TOKEN), GatewayConfig(**settings), linger=linger)
        self.gate, self.answers = self.gateway.gate, self.gateway.answers
        self.app = create_app(self.gateway)
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://gateway")
        self.headers = {"authorization": f"Bearer {TOKEN}"}
        self.gate.open(3)

    def body(self, id="a", **changes):
        asked = {"id": id, "role": "sub", "prompt_ids": [5, 6, 7], "sampling": SAMPLING, "min_version": 0}
        return {**asked, **changes}

    async def ask(self, id="a", **changes):
        return await self.client.post("/v1/generate", json=self.body(id, **changes), headers=self.headers)

    async def until(self, condition, seconds=20.0):
        """Poll, so that a loaded machine takes its time."""
        end = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < end, "it never came"
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """Servers whose handlers a test left hanging end soon."""
    monkeypatch.setattr("verl_drmas.gateway.serve.GRACE", 1)


@pytest.fixture
def house():
    return House


@pytest.fixture
def token():
    return TOKEN
