"""The gateway behind real uvicorn on a real socket, in this process."""

import asyncio
import datetime
import ipaddress
import json
import socket
import ssl

import httpx
import pytest

from verl_drmas.config import ConfigError
from verl_drmas.gateway.serve import Serving, bind, check_address, endpoint, in_clear
from verl_drmas.store.settings import GatewayConfig


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


class Served:
    """`async with` serves a house on a free port and connects a client to it."""

    def __init__(self, here, verify=True):
        self.here, self.verify = here, verify

    async def __aenter__(self):
        settings = self.here.gateway.settings
        self.serving = await Serving.start(self.here.app, settings, 0)
        self.url = endpoint(settings, self.serving.port)
        self.here.client = httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False, verify=self.verify)
        return self

    async def __aexit__(self, *_):
        await self.here.client.aclose()
        await self.serving.stop()


def test_every_status_on_a_real_socket(house):
    async def test():
        here = house(max_body=3000)
        async with Served(here):
            assert (await here.ask()).json()["token_ids"] == [6, 7, 8]
            assert (await here.client.post("/v1/generate", json=here.body())).status_code == 401
            assert (await here.ask(id="b", role="main")).status_code == 404
            assert (await here.ask(prompt_ids=[1])).status_code == 409
            assert (await here.ask(id="c", prompt_ids=[1] * 2000)).status_code == 413
            assert (await here.ask(id="d", prompt_ids=[-1])).status_code == 422
            here.gate.close()
            refused = await here.ask(id="e")
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            here.engine.error = ValueError()
            here.gate.open(3)
            assert (await here.ask(id="f")).status_code == 500
            assert (await here.client.get("/health")).status_code == 200
            assert "server" not in refused.headers

    run(test())


@pytest.mark.parametrize("token", ["right", "wrong"])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_huge_body_is_refused_and_never_held(house, token, chunked):
    """100 MB offered against a limit of 1 kB: whoever sends it hears of it, or finds the connection closed."""

    async def test():
        here = house(max_body=1000)
        sent = []

        async def chunks():
            for _ in range(100):
                sent.append(1)
                yield b"x" * 2**20

        async with Served(here):
            headers = dict(here.headers) if token == "right" else {"authorization": "Bearer no"}
            if not chunked:
                headers["content-length"] = str(100 * 2**20)
            try:
                answer = await here.client.post("/v1/generate", content=chunks(), headers=headers)
                assert answer.status_code == (413 if token == "right" else 401)
            except httpx.TransportError:
                assert len(sent) < 100
            assert (await here.ask(prompt_ids=[1])).status_code == 200  # and the next caller is none the worse

    run(test())


def test_an_engine_is_stopped_when_its_caller_hangs_up_for_good(house):
    async def test():
        here = house(linger=0.05)
        here.engine.hold()
        async with Served(here):
            asked = asyncio.create_task(here.ask())
            await here.until(lambda: here.engine.calls)
            asked.cancel()
            await here.until(lambda: here.engine.cancelled == ["a"])
            assert here.answers.counts["hung_up"] == 1

    run(test())


def test_a_caller_whose_connection_broke_joins_its_own_call(house):
    async def test():
        here = house()
        here.engine.hold()
        async with Served(here) as served:
            body = json.dumps(here.body()).encode()
            head = f"POST /v1/generate HTTP/1.1\r\nHost: x\r\nAuthorization: {here.headers['authorization']}\r\n"
            _, writer = await asyncio.open_connection("127.0.0.1", served.serving.port)
            writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await here.until(lambda: here.engine.calls)
            writer.transport.abort()
            await here.until(lambda: here.answers.counts["hung_up"] == 1)
            asked = asyncio.create_task(here.ask())
            await here.until(lambda: here.answers.counts["joined"] == 1)
            here.engine.let_go()
            assert (await asked).status_code == 200
            assert len(here.engine.calls) == 1 and not here.engine.cancelled

    run(test())


def test_a_caller_that_hangs_up_within_its_body_leaves_nothing(house, caplog):
    async def test():
        here = house()
        async with Served(here) as served:
            head = f"POST /v1/generate HTTP/1.1\r\nHost: x\r\nAuthorization: {here.headers['authorization']}\r\n"
            _, writer = await asyncio.open_connection("127.0.0.1", served.serving.port)
            writer.write(head.encode() + b'Content-Length: 500\r\n\r\n{"id": "a"')
            await writer.drain()
            await asyncio.sleep(0.2)
            writer.transport.abort()
            await here.until(lambda: here.answers.counts["hung_up"] == 1)
            assert not here.engine.calls

    run(test())
    assert "ClientDisconnect" not in caplog.text


@pytest.mark.parametrize("garbage", [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01 hello"])
def test_what_is_no_http_gets_no_further(house, garbage):
    async def test():
        here = house()
        async with Served(here) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.serving.port)
            writer.write(garbage)
            writer.write_eof()
            assert b"200" not in (await asyncio.wait_for(reader.read(), 20))[:15]
            writer.close()
            assert (await here.ask()).status_code == 200

    run(test())


def test_who_waits_when_it_stops_is_told_within_seconds(house):
    async def test():
        here = house()
        here.engine.hold()
        async with Served(here) as served:
            asked = asyncio.create_task(here.ask())
            await here.until(lambda: here.engine.calls)
            here.answers.close()
            await asyncio.wait_for(served.serving.stop(), 30)
            assert not served.serving.running
            answer = await asked
            assert (answer.status_code, answer.json()["error"]) == (503, "stopping")

    run(test())


# -- the address


def test_a_port_can_be_had_again_at_once(house):
    async def test():
        here = house()
        async with Served(here) as served:
            await here.ask()
            port = served.serving.port
        again = await Serving.start(here.app, here.gateway.settings, port)
        assert again.port == port and again.running
        await again.stop()

    run(test())


def test_a_port_that_is_taken_is_waited_for():
    async def test():
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            waiting = asyncio.create_task(bind(GatewayConfig(), port, wait=60))
            await asyncio.sleep(0.5)
            assert not waiting.done()
        bound = await waiting
        assert bound.getsockname()[1] == port
        bound.close()

    run(test())


def test_a_port_that_stays_taken_names_the_key(house):
    async def test():
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"drmas\.gateway\.port is {port}: can't listen on 127\.0\.0\.1"):
                await Serving.start(house().app, GatewayConfig(), port, wait=0.3)

    run(test())


def test_a_host_that_is_none_names_the_key_at_once():
    with pytest.raises(ConfigError, match=r"drmas\.gateway\.host is '999\.1\.1\.1': no such address"):
        run(bind(GatewayConfig(host="999.1.1.1"), 0, wait=1000))


def test_the_endpoint_is_what_the_other_job_can_call():
    assert endpoint(GatewayConfig(), 8731) == "http://127.0.0.1:8731"
    assert endpoint(GatewayConfig(host="::1"), 8731) == "http://[::1]:8731"
    assert endpoint(GatewayConfig(host="a.b", tls_cert="c", tls_key="k"), 1) == "https://a.b:1"
    assert endpoint(GatewayConfig(host="0.0.0.0", public_url="https://sub.example/"), 1) == "https://sub.example"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_that_nobody_can_call_needs_a_public_one(host):
    with pytest.raises(ConfigError, match=r"set drmas\.gateway\.public_url"):
        check_address(GatewayConfig(host=host))
    check_address(GatewayConfig(host=host, public_url="http://a:1"))
    check_address(GatewayConfig())


def test_whether_the_token_can_be_read_on_the_way():
    assert not in_clear(GatewayConfig())
    assert in_clear(GatewayConfig(host="10.0.0.3"))
    assert in_clear(GatewayConfig(host="0.0.0.0", public_url="http://a:1"))
    assert not in_clear(GatewayConfig(host="10.0.0.3", tls_cert="c", tls_key="k"))


# -- TLS


@pytest.fixture
def certificate(tmp_path):
    """PEM files of a certificate for 127.0.0.1, and of its key."""
    x509 = pytest.importorskip("cryptography.x509", reason="makes the certificate; part of pip install cryptography")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_file.write_bytes(key.private_bytes(*form))
    return str(cert_file), str(key_file)


def test_a_certificate_makes_it_https(house, certificate):
    async def test():
        here = house(tls_cert=certificate[0], tls_key=certificate[1])
        async with Served(here, ssl.create_default_context(cafile=certificate[0])) as served:
            assert served.url.startswith("https://127.0.0.1:")
            assert (await here.ask()).status_code == 200
            async with httpx.AsyncClient(trust_env=False) as stranger:
                with pytest.raises(httpx.TransportError):
                    await stranger.get(served.url.replace("https", "http") + "/health")

    run(test())


def test_the_caller_checks_the_certificate(house, certificate, token):
    from verl_drmas.gateway.bearer import as_token
    from verl_drmas.gateway.caller import Caller
    from verl_drmas.gateway.errors import Rejected
    from verl_drmas.gateway.wire import write_request

    async def test():
        here = house(tls_cert=certificate[0], tls_key=certificate[1])
        body = write_request("a", "sub", [5], {"max_tokens": 1}, 0)
        async with Served(here) as served:
            caller, trusting = Caller(as_token(token)), Caller(as_token(token), ca=certificate[0])
            with pytest.raises(Rejected, match=r"certificate verify failed.*name the PEM file .* in `remote\.ca`"):
                await caller.generate(served.url, body)
            assert (await trusting.generate(served.url, body)).token_ids == [6]
            await caller.close()
            await trusting.close()

    run(test())


@pytest.mark.parametrize("content", [None, "no PEM"])
def test_files_that_are_no_certificate_name_their_keys(house, tmp_path, content):
    path = tmp_path / "cert.pem"
    if content:
        path.write_text(content)
    settings = GatewayConfig(tls_cert=str(path), tls_key=str(path))
    with pytest.raises(ConfigError, match=r"drmas\.gateway\.tls_cert is .*give the PEM files"):
        run(Serving.start(house().app, settings, 0))
