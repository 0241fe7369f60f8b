import asyncio
import inspect
import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_drmas.workflows.toolbox import visit
from verl_drmas.workflows.toolbox.visit import Visit, VisitSettings
from verl_drmas.workflows.tools import ToolError, ToolOutage


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(visit, "FIRST_WAIT", 0.001)


class Site:
    """A server on loopback: `pages` by path, each a response or a list of responses given in turn."""

    def __init__(self, pages):
        self.pages, self.asked, self.headers = pages, [], []

    async def handle(self, request):
        self.asked.append(request.path)
        self.headers.append(request.headers)
        answer = self.pages[request.path]
        answer = answer.pop(0) if isinstance(answer, list) else answer
        made = answer(request)
        return await made if inspect.isawaitable(made) else made


def page(text="<title>T</title><p>Hello</p>", **more):
    more = {"content_type": "text/html", **more}
    return lambda request: web.Response(text=text, **more)


def bytes_of(body, kind, **headers):
    return lambda request: web.Response(body=body, headers={"content-type": kind, **headers})


def onward(where, status=302):
    return lambda request: web.Response(status=status, headers={"location": where})


def late(seconds):
    return lambda request: asyncio.sleep(seconds, web.Response(text="late"))


def ask(pages, scenario, **own):
    """Run `scenario(tool, base)` against a site on loopback, which the tool may ask."""

    async def whole():
        site = Site(pages)
        app = web.Application()
        app.router.add_get("/{path:.*}", site.handle)
        async with TestServer(app) as server:
            own.setdefault("allow", [f"127.0.0.1:{server.port}"])
            tool = Visit(VisitSettings(**{"private": True, "timeout": 5.0, **own}))
            try:
                return await scenario(tool, f"http://127.0.0.1:{server.port}"), site, tool.report()
            finally:
                await tool.close()

    return asyncio.run(whole())


def get(path="/", **arguments):
    return lambda tool, base: tool.call({"url": base + path, **arguments})


def refused(path="/", error=ToolError):
    async def scenario(tool, base):
        with pytest.raises(error) as raised:
            await tool.call({"url": base + path})
        return str(raised.value)

    return scenario


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_page_is_read_below_its_address():
    text, site, report = ask({"/a": page()}, get("/a#part", goal="find\nHello"))
    head, blank, *rest = text.split("\n")
    assert head.startswith("Page: T - http://127.0.0.1:") and head.endswith("/a - goal: find Hello")
    assert blank == "" and rest == ["Hello"]
    assert report["calls"] == 1 and report["errors"] == 0 and site.headers[0]["user-agent"] == "verl-drmas"


@pytest.mark.parametrize("kind", ["text/plain; charset=utf-8", "application/json"])
def test_other_text_is_taken_as_it_is(kind):
    assert ask({"/": bytes_of("{é}".encode(), kind)}, get())[0].endswith("\n\n{é}")


def test_nothing_is_allowed_by_default():
    told, site, report = ask({}, refused(), allow=[])
    assert "no page may be visited" in told and site.asked == [] and report["errors"] == 1
    with pytest.raises(ValueError, match=r"visit\.allow is empty.*list patterns"):
        Visit(VisitSettings()).check()
    assert "*.wikipedia.org" in Visit(VisitSettings(allow=["*.wikipedia.org"])).check()


def test_loopback_needs_more_than_the_list():
    told, site, _ = ask({"/": page()}, refused(), private=False)
    assert "no public address" in told and site.asked == []


def test_a_name_that_stands_for_loopback_isnt_asked():
    async def scenario(tool, base):
        with pytest.raises(ToolError, match="localhost may not be visited; it has no public address"):
            await tool.call({"url": base.replace("127.0.0.1", "localhost")})

    _, site, _ = ask({"/": page()}, scenario, private=False, allow=["*:*"])
    assert site.asked == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status):
    text, site, _ = ask({"/a": onward("/b", status), "/b": onward("./c?x=1", status), "/c": page()}, get("/a"))
    assert "/c?x=1\n" in text and site.asked == ["/a", "/b", "/c"]


@pytest.mark.parametrize(
    "where, told",
    [
        ("http://169.254.169.254/latest", "may not be visited"),
        ("http://evil.test/", "evil.test may not be visited"),
        ("file:///etc/passwd", "no web address"),
        ("http://127.0.0.1:1/", "127.0.0.1:1 may not be visited"),
    ],
)
def test_a_redirect_is_held_against_the_list(where, told):
    answer, site, _ = ask({"/": onward(where)}, refused())
    assert "leads on to another address" in answer and told in answer and site.asked == ["/"]


def test_redirects_end():
    told, site, _ = ask({"/": onward("/")}, refused(), redirects=3)
    assert "more than 3 redirects" in told and len(site.asked) == 4


@pytest.mark.parametrize(
    "answer, told",
    [
        (page(status=404), "status 404"),
        (page(status=403), "status 403"),
        (page(status=204), "status 204"),
        (bytes_of(b"%PDF", "application/pdf"), "it is application/pdf, not text"),
        (bytes_of(b"x", "image/png"), "image/png"),
        (page("<script>x</script>"), "holds no text"),
        (page("x" * 3000), "more than 2000 bytes"),
        (onward("http://[", 302), "which is no address"),
    ],
)
def test_a_page_at_fault_is_told_to_the_agent_at_once(answer, told):
    answer, site, report = ask({"/": answer}, refused(), max_bytes=2000)
    assert answer.startswith("the page can't be read: ") and told in answer
    assert len(site.asked) == 1 and report["retries"] == 0 and report["errors"] == 1


def test_a_packed_page_is_measured_unpacked():
    import gzip

    body = gzip.compress(b"x" * 10**6)
    assert len(body) < 2000
    told, *_ = ask({"/": bytes_of(body, "text/plain", **{"content-encoding": "gzip"})}, refused(), max_bytes=2000)
    assert "more than 2000 bytes" in told


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_servers_error_is_tried_again(status):
    text, site, report = ask({"/": [page(status=status), page(status=status), page()]}, get())
    assert text.endswith("Hello") and len(site.asked) == 3 and report["retries"] == 2
    told, site, report = ask({"/": page(status=status)}, refused())
    assert f"status {status}" in told and len(site.asked) == 3 and report["errors"] == 1


def test_a_slow_page_is_given_up():
    told, site, _ = ask({"/": late(5)}, refused(), timeout=0.1, attempts=2)
    assert told == "the page can't be read: no answer within 0.1 s" and len(site.asked) == 2


def test_an_answer_that_breaks_off_is_tried_again():
    async def breaks(request):
        response = web.StreamResponse(headers={"content-type": "text/plain", "content-length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        request.transport.close()
        return response

    told, site, _ = ask({"/": breaks}, refused())
    assert "broke off" in told and len(site.asked) == 3


def test_a_long_page_is_cut_where_it_is_seen():
    text, _, report = ask({"/": page("word " * 1000)}, get(), characters=300)
    assert len(text) <= 300 and text.endswith("word [...]")
    assert report["cut_pages"] == 1 and report["cut_characters"] > 4000


def test_sessions_share_no_cookies():
    def sets(request):
        response = web.Response(text="x")
        response.set_cookie("who", "me")
        return response

    async def scenario(tool, base):
        for _ in range(2):  # by name: aiohttp keeps no cookie of a bare address
            await tool.call({"url": base.replace("127.0.0.1", "localhost")})

    _, site, _ = ask({"/": sets}, scenario, allow=["*:*"])
    assert len(site.headers) == 2
    assert all("cookie" not in headers for headers in site.headers)


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({}, "'url' is missing"),
        ({"url": 3}, "is int"),
        ({"url": "https://a/" + "x" * 3000}, "write at most 2048"),
        ({"url": "https://a/\ud800"}, "no proper Unicode"),
        ({"url": "https://a/", "goal": 3}, "'goal' is int"),
        ({"link": "https://a/"}, "unknown argument 'link'"),
    ],
)
def test_a_wrong_call_is_the_agents_fault(arguments, told):
    with pytest.raises(ToolError, match=told):
        asyncio.run(Visit(VisitSettings()).call(arguments))


# -- whose fault silence is
def silent(count):
    """Addresses on loopback where nobody listens, each of another host."""
    return [f"http://127.0.0.{number}:{free_port()}/" for number in range(2, 2 + count)]


async def outcomes(tool, urls):
    told = []
    for url in urls:
        try:
            await tool.call({"url": url})
            told.append("page")
        except ToolError:
            told.append("error")
        except ToolOutage as outage:
            assert outage.tool == "visit"
            told.append("outage")
    return told


def test_silence_of_one_host_is_the_hosts_and_of_three_ours():
    urls = silent(4)
    told, _, report = ask({}, lambda tool, base: outcomes(tool, [urls[0]] * 4 + urls), allow=["*:*"])
    assert told == ["error"] * 4 + ["error", "error", "outage", "outage"]
    assert report["outages"] == 2 and report["errors"] == 6


def test_a_sign_of_life_begins_the_count_anew():
    urls = silent(3)
    told, *_ = ask(
        {"/": page(status=404)}, lambda tool, base: outcomes(tool, [*urls[:2], base, urls[2], urls[0]]), allow=["*:*"]
    )
    assert told == ["error"] * 5


@pytest.mark.parametrize("code, ends", [(socket.EAI_NONAME, "error"), (socket.EAI_AGAIN, "outage")])
def test_a_name_that_doesnt_exist_isnt_silence(monkeypatch, code, ends):
    async def resolve(self, host, port=0, family=0):
        raise socket.gaierror(code, "lookup")

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    urls = [f"https://host{number}.test/" for number in range(3)]
    told, *_ = ask({}, lambda tool, base: outcomes(tool, urls), allow=["*"])
    assert told == ["error", "error", ends]


def test_waiting_for_a_turn_takes_no_time_off_an_attempt():
    async def scenario(tool, base):
        return await asyncio.gather(*(tool.call({"url": base}) for _ in range(4)))

    texts, *_ = ask({"/": late(0.15)}, scenario, connections=1, timeout=0.4, attempts=1)
    assert len(texts) == 4


def test_an_instance_serves_one_loop_after_another():
    kept = Visit(VisitSettings(allow=["127.0.0.1:*"], private=True, timeout=5.0))

    async def scenario(tool, base):
        try:
            return await kept.call({"url": base})
        finally:
            await kept.close()

    for _ in range(2):
        assert ask({"/": page()}, scenario)[0].endswith("Hello")


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"attempts": 0}, {"redirects": -1}, {"allow": ["http://a"]}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VisitSettings(**wrong)
