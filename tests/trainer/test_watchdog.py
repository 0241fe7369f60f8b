"""Which servers count as dead, what is called for them, and what a health question makes of every kind of answer."""

import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from verl_drmas.trainer import watchdog as watchdog_module
from verl_drmas.trainer.watchdog import Server, Watchdog, ask_health


class Site:
    """Servers whose health is set by hand, a watchdog over them, and what it called."""

    def __init__(self, *models, hang_timeout=60.0, **callbacks):
        self.servers = [Server(model, f"host:{i}", object()) for i, model in enumerate(models)]
        self.health = {server.address: True for server in self.servers}
        self.dead, self.ended = [], []
        self.watchdog = Watchdog(
            self.servers,
            poll=0.01,
            hang_timeout=hang_timeout,
            on_dead=callbacks.get("on_dead", self.dead.append),
            on_end=callbacks.get("on_end", self.ended.append),
            ask=lambda address, timeout: self.health[address],
        )

    def look(self, times=1):
        for _ in range(times):
            self.watchdog.look()


def test_healthy_servers_are_left_alone():
    site = Site("base", "base")
    site.look(5)
    assert (site.dead, site.ended, site.watchdog.deaths) == ([], [], 0)
    site.watchdog.check()


def test_refused_twice_is_dead_and_said_once():
    site = Site("base", "base")
    site.health["host:0"] = False
    site.look()
    assert site.dead == []
    site.look()
    assert site.dead == [site.servers[0]]
    assert not site.servers[0].alive
    site.look(3)
    assert site.dead == [site.servers[0]]
    assert (site.ended, site.watchdog.deaths) == ([], 1)
    site.watchdog.check()  # another server is left


def test_one_refusal_is_forgiven():
    site = Site("base")
    for health in (False, True, False, True):
        site.health["host:0"] = health
        site.look()
    assert site.dead == []


def test_silence_is_death_only_after_the_time_out(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: now[0])
    site = Site("base", "base", hang_timeout=30.0)
    for server in site.servers:
        server.answered = now[0]
    site.health["host:1"] = None
    now[0] += 30.0
    site.look(3)
    assert site.dead == []
    now[0] += 0.5
    site.look()
    assert site.dead == [site.servers[1]]


def test_an_answer_ends_the_silence(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: now[0])
    site = Site("base", hang_timeout=30.0)
    site.servers[0].answered = now[0]
    for health in (None, True, None):
        now[0] += 20.0
        site.health["host:0"] = health
        site.look()
    assert site.dead == []


def test_the_last_server_of_a_model_ends_the_run():
    site = Site("base", "judge", "base")
    site.watchdog.phase = "the weight update"
    site.health["host:0"] = site.health["host:2"] = False
    site.look(4)
    assert site.ended == ["base"]
    assert site.watchdog.deaths == 2
    with pytest.raises(RuntimeError, match=r"LLM server host:2 of model 'base' died during the weight update .*resume"):
        site.watchdog.check()
    site.health["host:1"] = False
    site.look(3)
    assert site.ended == ["base"]  # once


def test_a_model_with_servers_is_not_saved_by_another():
    site = Site("base", "judge")
    site.health["host:1"] = False
    site.look(2)
    assert site.ended == ["judge"]


def test_the_run_ends_even_if_dropping_the_server_fails():
    def drop(server):
        raise RuntimeError("the balancer is gone, too")

    site = Site("base", on_dead=drop)
    site.health["host:0"] = False
    site.look()
    with pytest.raises(RuntimeError, match="balancer"):
        site.look()
    assert site.ended == ["base"]
    assert site.watchdog.fatal is not None


def test_the_thread_polls_outlives_an_error_and_stops():
    errors, rounds = [RuntimeError("once")], threading.Event()

    def drop(server):
        if errors:
            raise errors.pop()

    site = Site("base", "base", "base", on_dead=drop, on_end=lambda model: rounds.set())
    for address in site.health:
        site.health[address] = False
    site.watchdog.start()
    assert rounds.wait(20)
    assert errors == []
    site.watchdog.stop()
    site.watchdog.join(20)
    assert not site.watchdog.is_alive()


def test_servers_that_go_down_on_purpose_are_no_deaths():
    site = Site("base")
    site.watchdog.stop()
    site.health["host:0"] = False
    site.look(3)
    assert site.dead == []


# -- what a server answers ---------------------------------------------------------------------------------------------


@contextmanager
def served(status):
    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.paths.append(self.path)
            if status is None:
                self.server.hang.wait(20)
                return
            if status == "garbage":
                self.wfile.write(b"this is no HTTP\r\n\r\n")
                return
            if status == "hang up":
                return
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        server.paths, server.hang = [], threading.Event()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.hang.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "answer"), [(200, True), (503, False), (500, False), (404, True), ("hang up", False), ("garbage", None)]
)
def test_answers(status, answer):
    with served(status) as server:
        assert ask_health(f"127.0.0.1:{server.server_port}", 20) is answer
    assert server.paths == ["/health"]


def test_a_closed_port_is_a_server_that_is_gone():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert ask_health(f"127.0.0.1:{port}", 20) is False


def test_a_server_that_hangs_gives_no_answer_in_time():
    with served(None) as server:
        start = time.monotonic()
        assert ask_health(f"127.0.0.1:{server.server_port}", 0.1) is None
        assert time.monotonic() - start < 10


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    with served(503) as proxy, served(200) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert ask_health(f"127.0.0.1:{server.server_port}", 20) is True
    assert proxy.paths == []
