"""The trainer's hold on its gateway: whatever becomes of the actor, the gate is as the trainer said last."""

import asyncio
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from pydantic import SecretStr
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from verl_drmas.config import ConfigError
from verl_drmas.gateway.errors import EngineAway
from verl_drmas.gateway.gate import Gate
from verl_drmas.store.settings import GatewayConfig
from verl_drmas.trainer.gateway_actor import GatewayActor, GatewayAway, GatewayKeeper, Held, RayActor
from verl_drmas.workflows import SessionFailed

TOKEN = "sesame-0123456789"


class FakeActor:
    """As `RayActor`: `die()` and it is away until `revive()`, then closed and with nothing remembered."""

    def __init__(self, *arguments):
        self.arguments, self.gate, self.boot, self.alive, self.killed = arguments, Gate(), 1, True, False
        self.asked, self.counts, self.error, self.opened = [], {}, None, []
        self.port = 0

    def hold(self, state, port, wait, timeout):
        self.asked.append((state, port))
        if self.error is not None:
            raise self.error
        if not self.alive:
            raise GatewayAway("the actor died")
        self.gate.take(state)
        self.opened.append(self.gate.state.open)
        self.port = port or 4711
        return Held(self.port, str(self.boot), 7000 + self.boot, dict(self.counts))

    def die(self):
        self.alive = False

    def revive(self):
        self.gate, self.boot, self.counts, self.alive = Gate(), self.boot + 1, {}, True

    def kill(self, timeout):
        self.killed = True


@pytest.fixture
def keep():
    """Makes a keeper over a fake actor; stops what is left of it."""
    keepers = []

    def make(start=True, settings=None, patience=300.0, poll=0.02):
        actors = []

        def start_actor(*arguments):
            actors.append(FakeActor(*arguments))
            return actors[-1]

        keeper = GatewayKeeper(
            "client",
            settings or GatewayConfig(),
            role="sub",
            token=TOKEN,
            start_actor=start_actor,
            poll=poll,
            patience=patience,
        )
        keepers.append(keeper)
        if start:
            keeper.url = keeper.start()
            return keeper, actors[0]
        return keeper, actors

    yield make
    for keeper in keepers:
        keeper.stop()


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def test_it_starts_closed_and_gives_its_endpoint(keep):
    keeper, actor = keep()
    assert keeper.url == "http://127.0.0.1:8731"
    assert not actor.gate.state.open
    client, settings, role, token = actor.arguments
    assert (client, settings, role, token.get_secret_value()) == ("client", keeper.settings, "sub", TOKEN)


def test_a_free_port_is_kept_when_the_actor_starts_again(keep):
    keeper, actor = keep(settings=GatewayConfig(port=0))
    assert keeper.url == "http://127.0.0.1:4711"
    actor.die()
    actor.revive()
    mark = len(actor.asked)
    until(lambda: len(actor.asked) > mark)
    assert {port for _, port in actor.asked[1:]} == {4711}


def test_what_the_trainer_says_holds_when_it_returns(keep):
    keeper, actor = keep()
    for version in range(1, 20):
        keeper.open(version)
        assert (actor.gate.state.open, actor.gate.state.version) == (True, version)
        keeper.close()
        assert (actor.gate.state.open, actor.gate.state.version) == (False, version)


@pytest.mark.parametrize("open", [True, False])
def test_an_actor_that_starts_again_learns_what_the_trainer_said_last(keep, open):
    keeper, actor = keep()
    keeper.open(5)
    if not open:
        keeper.close()
    actor.die()
    actor.revive()
    assert not actor.gate.state.open  # until it is told
    until(lambda: actor.gate.state.version == 5)
    assert actor.gate.state.open is open
    assert keeper.report()["restarts"] == 1


def test_closing_waits_until_the_actor_that_starts_again_has_heard_it(keep):
    keeper, actor = keep()
    keeper.open(5)
    actor.die()
    closing = threading.Thread(target=keeper.close)
    closing.start()
    time.sleep(0.2)
    assert closing.is_alive()
    actor.revive()
    closing.join(30)
    assert not closing.is_alive()
    assert actor.gate.state.order and not actor.gate.state.open
    assert not any(actor.opened[-1:])


def test_an_actor_that_dies_again_and_again_is_never_open_behind_the_trainers_back(keep):
    """Three seconds of deaths at random moments; whenever `close` has returned, no gate is open until `open`."""
    keeper, actor = keep(poll=0.001)
    stop, wrong = threading.Event(), []

    def kill():
        chance = random.Random(0)
        while not stop.is_set():
            actor.die()
            time.sleep(chance.uniform(0, 0.004))
            actor.revive()
            time.sleep(chance.uniform(0, 0.01))

    killer = threading.Thread(target=kill)
    killer.start()
    end, rounds = time.monotonic() + 3, 0
    while time.monotonic() < end or rounds < 20:
        keeper.open(rounds)
        keeper.close()
        for _ in range(20):
            if actor.gate.state.open:
                wrong.append(rounds)
            time.sleep(0.0005)
        rounds += 1
    stop.set()
    killer.join()
    actor.revive()
    assert not wrong
    keeper.open(7)
    assert actor.gate.state.open and actor.gate.state.version == 7


def test_a_gateway_that_stays_away_ends_the_run(keep, caplog):
    keeper, actor = keep(patience=0.3)
    keeper.open(1)
    keeper.check()
    actor.die()
    with pytest.raises(RuntimeError, match=r"port 8731 has not answered for .* s"):
        keeper.close()
    with pytest.raises(RuntimeError, match="not answered"):
        keeper.open(2)
    with pytest.raises(RuntimeError, match="not answered"):
        keeper.check()
    actor.revive()
    until(lambda: actor.gate.state.order == 3)  # the last word is still good
    keeper.check()


def test_it_says_so_once_when_the_gateway_goes_and_once_when_it_is_back(keep, caplog):
    keeper, actor = keep()
    keeper.open(1)
    for _ in range(2):
        actor.die()
        mark = len(actor.asked)
        until(lambda mark=mark: len(actor.asked) > mark + 3)
        actor.revive()
        until(lambda: actor.gate.state.open)
        until(lambda: keeper._missed_since is None)
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.split(",")[0] for line in lines] == ["the gateway is away", "the gateway is back"] * 2


def test_an_address_that_cannot_be_had_ends_the_start(keep):
    keeper, actors = keep(start=False)
    start_actor = keeper._start_actor

    def failing(*arguments):
        actor = start_actor(*arguments)
        actor.error = ConfigError("drmas.gateway.port is 8731: taken")
        return actor

    keeper._start_actor = failing
    with pytest.raises(ConfigError, match=r"drmas\.gateway\.port"):
        keeper.start()
    assert actors[0].killed
    keeper.stop()


def test_an_actor_that_does_not_start_ends_the_start(keep):
    keeper, actors = keep(start=False)
    start_actor = keeper._start_actor

    def failing(*arguments):
        actor = start_actor(*arguments)
        actor.die()
        return actor

    keeper._start_actor = failing
    with pytest.raises(RuntimeError, match="did not start: the actor died"):
        keeper.start()
    assert actors[0].killed


def test_a_port_that_is_lost_meanwhile_is_tried_again(keep):
    keeper, actor = keep()
    keeper.open(3)
    actor.die()
    actor.revive()
    actor.error = ConfigError("taken")
    until(lambda: keeper._missed_since is not None)
    actor.error = None
    until(lambda: actor.gate.state.open)


@pytest.mark.parametrize("token", ["", "two words"])
def test_a_token_that_is_none_is_refused_by_the_variables_name(token):
    with pytest.raises(ConfigError, match="the variable DRMAS_GATEWAY_TOKEN"):
        GatewayKeeper("client", GatewayConfig(), role="sub", token=token, start_actor=FakeActor)


def test_an_address_that_nobody_can_call_is_refused():
    with pytest.raises(ConfigError, match=r"drmas\.gateway\.public_url"):
        GatewayKeeper("client", GatewayConfig(host="0.0.0.0"), role="sub", token=TOKEN, start_actor=FakeActor)


def test_a_token_in_clear_is_warned_of(keep, caplog):
    keep(settings=GatewayConfig(host="10.0.0.3"))
    assert "sends its token in clear" in caplog.text and TOKEN not in caplog.text


def test_stopping_ends_actor_and_thread_and_can_be_said_twice(keep):
    keeper, actor = keep()
    keeper.stop()
    keeper.stop()
    assert actor.killed and not keeper._thread.is_alive()
    mark = len(actor.asked)
    time.sleep(0.1)
    assert len(actor.asked) == mark
    keep(start=False)[0].stop()  # and before the start


def test_calls_are_reported_across_restarts(keep):
    keeper, actor = keep()
    actor.counts = {"answered": 3, "joined": 1}
    keeper.open(1)
    assert keeper.report() == {"answered": 3.0, "joined": 1.0}
    assert keeper.report() == {}
    actor.counts = {"answered": 5, "joined": 1}
    keeper.close()
    actor.die()
    actor.revive()
    actor.counts = {"answered": 2}
    keeper.open(2)
    assert keeper.report() == {"answered": 4.0, "restarts": 1.0}


# -- the actor itself


class Client:
    """As `ResumingClient`, in the actor's process."""

    def __init__(self, error=None):
        self.error, self.retried = error, 2

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        if self.error is not None:
            raise self.error
        return SimpleNamespace(
            token_ids=[os.getpid() % 1000],
            log_probs=None,
            stop_reason="completed",
            num_preempted=None,
            extra_fields={"min_global_steps": 3, "max_global_steps": 3},
        )


def test_a_session_that_failed_for_want_of_a_server_is_told_from_an_engine_that_raised():
    async def ask(error):
        actor = GatewayActor(Client(error), GatewayConfig(), "sub", SecretStr(TOKEN))
        await actor._ask("a", [1], {})

    with pytest.raises(EngineAway, match="server"):
        asyncio.run(ask(SessionFailed("server", "no LLM server is left")))
    with pytest.raises(ValueError, match="prompt"):
        asyncio.run(ask(ValueError("prompt")))


AWAY = {
    "dead": ActorDiedError(),
    "being started again": ActorUnavailableError("restarting", None),
    "silent": GetTimeoutError("hold"),
    "raising": RayTaskError("hold", "traceback", KeyError("x")).as_instanceof_cause(),
}


@pytest.mark.parametrize("error", AWAY.values(), ids=AWAY)
def test_whatever_ray_says_of_the_actor_means_that_it_is_away(error, monkeypatch):
    actor = RayActor.__new__(RayActor)
    actor._actor = SimpleNamespace(hold=SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setattr("ray.get", lambda *_, **__: raise_(error))
    with pytest.raises(GatewayAway):
        actor.hold(None, 0, 0, 0)


def test_a_wrong_setting_comes_through_ray_as_it_is(monkeypatch):
    actor = RayActor.__new__(RayActor)
    actor._actor = SimpleNamespace(hold=SimpleNamespace(remote=lambda *_: None))
    error = RayTaskError("hold", "traceback", ConfigError("drmas.gateway.port is 1")).as_instanceof_cause()
    monkeypatch.setattr("ray.get", lambda *_, **__: raise_(error))
    with pytest.raises(ConfigError, match=r"^drmas\.gateway\.port is 1$"):
        actor.hold(None, 0, 0, 0)


def raise_(error):
    raise error


def call(url, id="a"):
    asked = {"id": id, "role": "sub", "prompt_ids": [1], "sampling": {"max_tokens": 4}, "min_version": 3}
    headers = {"authorization": f"Bearer {TOKEN}"}
    try:
        return httpx.post(f"{url}/v1/generate", json=asked, headers=headers, trust_env=False, timeout=30)
    except httpx.TransportError as error:
        return SimpleNamespace(status_code=type(error).__name__)


@pytest.mark.process
def test_a_real_actor_is_killed_and_comes_back_as_it_was():
    """Ray, uvicorn and `kill -9`, in the open and in the closed state."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", address="local")
    logs = Path(ray.worker.global_worker.node.get_logs_dir_path())
    client = Client()
    client.configuration = bytes(200_000)  # a real one has the run's: too much for a message, so Ray's store has it
    keeper = GatewayKeeper(client, GatewayConfig(port=port), role="sub", token=TOKEN)
    try:
        url = keeper.start()
        assert call(url).status_code == 503
        keeper.open(3)
        assert call(url).status_code == 200
        pid = kill(keeper)
        until(lambda: keeper.pid != pid, 180)  # the keeper hears of it a moment after the port is there again
        until(lambda: call(url, "open").status_code == 200, 180)
        keeper.close()
        pid, seen = kill(keeper), set()
        until(lambda: seen.add(call(url, "closed").status_code) or 503 in seen, 180)
        until(lambda: keeper.pid != pid, 180)
        time.sleep(1.0)
        seen.add(call(url, "closed").status_code)
        assert 200 not in seen
        keeper.open(4)
        assert call(url, "last").status_code == 200
        assert keeper.report()["restarts"] == 2
    finally:
        keeper.stop()
        ray.shutdown()
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again
    written = [path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()]
    assert any("GatewayActor" in text for text in written)  # these are the logs
    assert not any(TOKEN in text for text in written)


def kill(keeper):
    pid = keeper.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_what_the_actor_is_made_of_can_be_sent_to_another_process():
    keeper = GatewayKeeper(Client(), GatewayConfig(), role="sub", token=TOKEN, start_actor=FakeActor)
    _, settings, role, token = keeper._arguments
    assert pickle.loads(pickle.dumps((settings, role, token))) == (settings, role, token)
    assert TOKEN not in repr(keeper._arguments)
