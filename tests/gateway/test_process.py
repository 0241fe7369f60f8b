"""A gateway in a process of its own: what it prints, and what a `kill -9` does to its callers."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import httpx
import pytest

pytestmark = pytest.mark.process

TOKEN, PROMPT, WRONG = "sesame-0123456789", 918273645, "wrong-9876543210"
SERVER = """
    import asyncio, logging, sys
    from types import SimpleNamespace

    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)

    from pydantic import SecretStr
    from verl_drmas.gateway.app import Gateway, create_app
    from verl_drmas.gateway.serve import Serving
    from verl_drmas.store.settings import GatewayConfig


    async def ask(id, prompt_ids, sampling):
        if id == "fail":
            raise ValueError(f"prompt {prompt_ids} is too long")
        if id == "slow":
            print("slow", flush=True)
            await asyncio.sleep(600)
        fields = {"min_global_steps": 3, "max_global_steps": 3}
        return SimpleNamespace(
            token_ids=prompt_ids, log_probs=None, stop_reason="completed", num_preempted=None, extra_fields=fields
        )


    async def main():
        settings = GatewayConfig(max_body=10_000)
        gateway = Gateway(ask, "sub", SecretStr("sesame-0123456789"), settings)
        gateway.gate.open(3)
        serving = await Serving.start(create_app(gateway), settings, int(sys.argv[1]), wait=60)
        print(f"port {serving.port}", flush=True)
        await serving._task


    asyncio.run(main(), debug=True)
"""


class Process:
    def __init__(self, tmp_path, port=0):
        script, self.log = tmp_path / "server.py", tmp_path / "log"
        script.write_text(textwrap.dedent(SERVER))
        with self.log.open("a") as log:
            before = log.tell()
            self.popen = subprocess.Popen(
                [sys.executable, str(script), str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.port = int(self.wait_for("port ", before).split("port ")[1].split()[0])
        self.url = f"http://127.0.0.1:{self.port}"

    def wait_for(self, text, start=0):
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with self.log.open() as log:
                log.seek(start)
                said = log.read()
            if f"\n{text}" in f"\n{said}" and said.endswith("\n"):
                return f"\n{said}".split(f"\n{text}")[1].join((f"\n{text}", ""))
            assert self.popen.poll() is None, said
            time.sleep(0.02)
        raise AssertionError(f"{text!r} never came:\n{said}")

    def kill(self, number=signal.SIGKILL):
        self.popen.send_signal(number)
        self.popen.wait(60)


@pytest.fixture
def start(tmp_path):
    started = []

    def run(port=0):
        started.append(Process(tmp_path, port))
        return started[-1]

    yield run
    for process in started:
        if process.popen.poll() is None:
            process.kill()


def body(id, **changes):
    asked = {"id": id, "role": "sub", "prompt_ids": [PROMPT], "sampling": {"max_tokens": 4}, "min_version": 3}
    return {**asked, **changes}


def test_nothing_secret_is_ever_printed(start):
    """Every way a call can end, with all loggers at their loudest and asyncio's debug mode on."""
    process = start()
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=process.url, trust_env=False, timeout=60) as client:

        def ask(asked, status, **given):
            answer = client.post("/v1/generate", json=asked, headers=given or headers)
            assert answer.status_code == status, answer.text
            return answer

        ask(body("a"), 200)
        ask(body("a"), 200)
        ask(body("a", prompt_ids=[PROMPT, 1]), 409)
        ask(body("b"), 401, authorization=f"Bearer {WRONG}")
        ask(body("b"), 401, authorization=WRONG)
        ask(body("c", role="x"), 404)
        ask(body("d", prompt_ids=[PROMPT] * 5000), 413)
        assert str(PROMPT) not in ask(body("e", prompt_ids=[-PROMPT]), 422).text
        assert str(PROMPT) not in ask(body("e", prompt_ids=[str(PROMPT)]), 422).text
        ask(body("f", min_version=9), 503)
        assert ask(body("fail"), 500).json() == {"error": "engine", "detail": "ValueError"}
        raw = client.post("/v1/generate", content=f'{{"prompt_ids": [{PROMPT}'.encode(), headers=headers)
        assert raw.status_code == 422 and str(PROMPT) not in raw.text
        with pytest.raises(httpx.ReadTimeout):  # hangs up
            client.post("/v1/generate", json=body("slow"), headers=headers, timeout=0.5)
    process.wait_for("slow")
    process.kill(signal.SIGTERM)
    printed = process.log.read_text()
    assert "an engine failed in a call: ValueError" in printed  # the log is on
    for secret in (TOKEN, WRONG, str(PROMPT)):
        assert secret not in printed


def test_a_killed_gateway_comes_back_on_its_port_and_serves_callers_that_knew_it(start):
    """Three kills, each while a call is on its way and connections are open."""
    import asyncio

    from verl_drmas.gateway.bearer import as_token
    from verl_drmas.gateway.caller import Caller
    from verl_drmas.gateway.errors import Unreachable
    from verl_drmas.gateway.wire import write_request

    async def ask(caller, url, id):
        return await caller.generate(url, write_request(id, "sub", [PROMPT], {"max_tokens": 4}, 3))

    async def test():
        caller, process = Caller(as_token(TOKEN)), start()
        for _ in range(3):
            assert (await ask(caller, process.url, "a")).token_ids == [PROMPT]
            mark = process.log.stat().st_size
            asked = asyncio.create_task(ask(caller, process.url, "slow"))
            await asyncio.to_thread(process.wait_for, "slow", mark)
            process.kill()
            with pytest.raises(Unreachable):
                await asked
            with pytest.raises(Unreachable):
                await ask(caller, process.url, "a")
            port = process.port
            process = await asyncio.to_thread(start, port)
            assert process.port == port
        assert (await ask(caller, process.url, "a")).token_ids == [PROMPT]
        await caller.close()

    asyncio.run(asyncio.wait_for(test(), 300))


def test_two_processes_at_one_port_take_turns(start, tmp_path):
    """A forerunner that is still ending holds the port; the next one waits for it."""
    first = start()
    script = tmp_path / "server.py"
    with (tmp_path / "second").open("w") as log:
        second = subprocess.Popen([sys.executable, str(script), str(first.port)], stdout=log, stderr=log)
    try:
        time.sleep(3)
        assert second.poll() is None
        first.kill()
        end = time.monotonic() + 120
        while f"port {first.port}" not in (tmp_path / "second").read_text():
            assert time.monotonic() < end and second.poll() is None
            time.sleep(0.05)
        assert httpx.get(f"{first.url}/health", trust_env=False).status_code == 200
    finally:
        second.kill()
        second.wait(60)


def test_neither_side_of_the_wire_needs_ray_or_verl():
    code = """
        import sys
        import verl_drmas.gateway.app, verl_drmas.gateway.caller, verl_drmas.gateway.finder, verl_drmas.gateway.serve
        print([m for m in ("ray", "verl", "torch", "vllm") if m in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
