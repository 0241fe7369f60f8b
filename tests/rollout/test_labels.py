"""The version label of every answer is true, whatever comes in between: updates, hang-ups, duplicates, restarts.

A token's value is the version of the weights that sampled it, so every answer can be checked by itself.
"""

import asyncio
import random
from types import SimpleNamespace

import httpx
import pytest
from omegaconf import OmegaConf
from pydantic import SecretStr
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_drmas.gateway.app import Gateway, create_app
from verl_drmas.rollout import resuming
from verl_drmas.rollout.resuming import ResumingClient

CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
HEADERS = {"authorization": "Bearer sesame"}


class Running:
    cut = False


class Server:
    """Behaves as verl's vLLM server in a weight update (`vllm_rollout/vllm_async_server.py`): a closed door keeps new
    requests waiting, an abort ends running ones with what they have, and the version is stamped at a request's end.
    """

    def __init__(self, name, chance):
        self.name, self.chance, self.weights, self.global_steps = name, chance, 0, 0
        self.door, self.running = asyncio.Event(), set()
        self.door.set()

    async def generate(self, prompt_ids, sampling_params, **_):
        await asyncio.sleep(self.chance.uniform(0, 0.002))  # on its way to the engine
        while not self.door.is_set():
            await self.door.wait()
        me, tokens = Running(), []
        self.running.add(me)
        try:
            await asyncio.sleep(self.chance.uniform(0, 0.01))  # the prompt, before the first token
            while len(tokens) < sampling_params["max_tokens"] and not me.cut:
                await asyncio.sleep(self.chance.uniform(0, 0.002))
                if not me.cut:
                    tokens.append(self.weights)
        finally:
            self.running.discard(me)
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-1.0] * len(tokens) if tokens else None,
            stop_reason="aborted" if me.cut else "completed",
            extra_fields={"global_steps": self.global_steps},
        )

    async def abort(self):
        self.door.clear()
        for me in self.running:
            me.cut = True
        while self.running:
            await asyncio.sleep(0)

    async def update(self, version):
        await asyncio.sleep(self.chance.uniform(0, 0.004))
        self.weights = version
        await asyncio.sleep(self.chance.uniform(0, 0.004))
        self.global_steps = version

    def resume(self):
        self.door.set()


class Handle:
    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        if name == "abort_request":
            raise AttributeError(name)
        method = getattr(self._target, name)

        def remote(*args, **kwargs):
            async def call():
                result = method(*args, **kwargs)
                return await result if asyncio.iscoroutine(result) else result

            return asyncio.ensure_future(call())

        return SimpleNamespace(remote=remote)


class Job:
    """Two servers behind one gateway, and a trainer that updates them."""

    def __init__(self, chance, updates):
        self.chance, self.updates, self.version = chance, updates, 0
        self.servers = [Server(f"s{i}", chance) for i in range(2)]
        self.balancer = Handle(GlobalRequestLoadBalancer({s.name: Handle(s) for s in self.servers}))
        self.restart()
        self.gateway.gate.open(0)

    def restart(self):
        """A new process of the gateway: closed, and without memory. The engines go on with what the old one asked."""
        self.client = ResumingClient(CONFIG, self.balancer)
        self.gateway = Gateway(self.ask, "sub", SecretStr("sesame"), linger=0.01)
        transport = httpx.ASGITransport(create_app(self.gateway))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://sub", headers=HEADERS)

    async def ask(self, id, prompt_ids, sampling):
        return await self.client.generate(id, prompt_ids=prompt_ids, sampling_params=sampling)

    async def train(self):
        for version in range(1, self.updates + 1):
            await asyncio.sleep(self.chance.uniform(0, 0.02))
            self.gateway.gate.close()
            if self.chance.random() < 0.3:
                self.restart()  # while it is closed
            for server in self.servers:
                await server.abort()
            await asyncio.gather(*(server.update(version) for server in self.servers))
            for server in self.servers:
                server.resume()
                await asyncio.sleep(self.chance.uniform(0, 0.002))
            self.version = version
            if self.chance.random() < 0.3:
                self.restart()
            self.gateway.gate.open(version)


async def call(job, number, chance, answers):
    """One caller: asks until it is answered, hangs up now and then, and sometimes asks twice at once."""
    await asyncio.sleep(chance.uniform(0, 0.3))
    needed, length = job.version, chance.randint(1, 12)
    asked = {
        "id": f"call-{number}",
        "role": "sub",
        "prompt_ids": [number + 1],
        "sampling": {"max_tokens": length, "logprobs": True},
        "min_version": needed,
    }

    async def once():
        return await job.http.post("/v1/generate", json=asked)

    while True:
        if chance.random() < 0.2:
            impatient = asyncio.create_task(once())
            await asyncio.sleep(chance.uniform(0, 0.01))
            impatient.cancel()
        twice = await asyncio.gather(*(once() for _ in range(chance.choice([1, 1, 2]))))
        done = [answer.json() for answer in twice if answer.status_code == 200]
        assert {answer.status_code for answer in twice} <= {200, 503}
        answers += [(needed, length, answer) for answer in done]
        if done:
            return
        await asyncio.sleep(0.003)


@pytest.mark.parametrize("seed", range(3))
def test_every_label_is_true(seed, monkeypatch):
    monkeypatch.setattr(resuming, "PAUSE", 0.0)
    answers = []

    async def test():
        chance = random.Random(seed)
        job = Job(chance, updates=12)
        calls = [call(job, i, chance, answers) for i in range(150)]
        await asyncio.gather(job.train(), *calls)

    asyncio.run(asyncio.wait_for(test(), 120))
    assert len(answers) >= 150
    spans = 0
    for needed, length, answer in answers:
        tokens = answer["token_ids"]
        assert len(tokens) == len(answer["log_probs"]) == length
        assert (answer["min_version"], answer["max_version"]) == (min(tokens), max(tokens))
        assert answer["min_version"] >= needed
        spans += answer["min_version"] < answer["max_version"]
    assert spans >= 5  # updates did come in between
