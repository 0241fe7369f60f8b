import asyncio
import ipaddress

import pytest

from verl_drmas.workflows.toolbox.addresses import AllowList, PublicResolver, checked_url, is_public
from verl_drmas.workflows.tools import ToolError


@pytest.mark.parametrize(
    "pattern, host, port, fits",
    [
        ("en.wikipedia.org", "en.wikipedia.org", 443, True),
        ("EN.Wikipedia.org", "en.wikipedia.org", 80, True),
        ("en.wikipedia.org", "de.wikipedia.org", 443, False),
        ("en.wikipedia.org", "en.wikipedia.org", 8080, False),
        ("en.wikipedia.org:8080", "en.wikipedia.org", 8080, True),
        ("en.wikipedia.org:8080", "en.wikipedia.org", 443, False),
        ("en.wikipedia.org:*", "en.wikipedia.org", 22, True),
        ("*.wikipedia.org", "en.wikipedia.org", 443, True),
        ("*.wikipedia.org", "a.b.wikipedia.org", 443, True),
        ("*.wikipedia.org", "wikipedia.org", 443, False),
        ("*.wikipedia.org", "evilwikipedia.org", 443, False),
        ("*.wikipedia.org", "en.wikipedia.org.evil.com", 443, False),
        ("*", "anything.net", 443, True),
        ("*", "anything.net", 22, False),
        ("*:*", "anything.net", 22, True),
        ("bücher.de", "xn--bcher-kva.de", 443, True),
        ("127.0.0.1:8000", "127.0.0.1", 8000, True),
        ("::1", "::1", 443, True),
        ("[::1]:8000", "::1", 8000, True),
    ],
)
def test_patterns(pattern, host, port, fits):
    assert AllowList([pattern]).holds(host, port) is fits
    assert not AllowList([]).holds(host, port)


@pytest.mark.parametrize(
    "wrong", ["", "https://a.org", "a.org/path", "a*.org", "*.*.org", "*.", "a:b", "me@a.org", "a b"]
)
def test_a_pattern_that_cant_be_read_is_named(wrong):
    with pytest.raises(ValueError, match=r"^allow: "):
        AllowList([wrong])


INSIDE = [
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fd00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
]  # fmt: skip
OUTSIDE = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("text", INSIDE + OUTSIDE)
def test_addresses_inside_the_network_arent_public(text):
    assert is_public(ipaddress.ip_address(text)) is (text in OUTSIDE)
    url = f"http://[{text}]/" if ":" in text else f"http://{text}/"
    if text in OUTSIDE:
        checked_url(url, AllowList(["*"]), private=False)
    else:
        with pytest.raises(ToolError, match="no public address"):
            checked_url(url, AllowList(["*"]), private=False)


@pytest.mark.parametrize(
    "text, told",
    [
        ("file:///etc/passwd", "is no web address"),
        ("ftp://a.org/", "is no web address"),
        ("javascript:alert(1)", "is no web address"),
        ("a.org/page", "is no web address"),
        ("//a.org/page", "is no web address"),
        ("http://", "is no web address"),
        ("http://[::1", "is no web address"),
        ("http://a.org:99999/", "is no web address"),
        ("http://a .org/", "may not be visited"),
        ("https://me:secret@a.org/", "user name or password"),
        ("https://b.org/", "b.org may not be visited; pages may be visited on: a.org"),
        ("https://a.org:8443/", "a.org:8443 may not be visited"),
        ("https://a.org@b.org/", "user name or password"),
        ("https://b.org\\@a.org/", "."),
    ],
)
def test_what_may_not_be_visited(text, told):
    with pytest.raises(ToolError, match=told) as error:
        checked_url(text, AllowList(["a.org"]), private=False)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0127.0.0.1", "017700000001"])
def test_numbers_that_sockets_take_for_an_address_are_refused(host):
    with pytest.raises(ToolError, match="may not be visited"):
        checked_url(f"http://{host}/", AllowList(["*"]), private=True)


def test_with_an_empty_list_nothing_may_be_visited():
    with pytest.raises(ToolError, match="no page may be visited in this task"):
        checked_url("https://a.org/", AllowList([]), private=False)


def test_what_may_be_visited_keeps_its_path_and_loses_its_fragment():
    assert str(checked_url("https://A.org./x?y=1#z", AllowList(["a.org"]), private=False)).endswith("/x?y=1")


# -- names
class System:
    def __init__(self, *addresses):
        self.addresses = addresses

    async def resolve(self, host, port, family):
        return [{"host": address, "port": port, "hostname": host} for address in self.addresses]

    async def close(self):
        return None


def resolve(private, *addresses):
    resolver = PublicResolver(private=private)
    resolver._system = System(*addresses)
    return [one["host"] for one in asyncio.run(resolver.resolve("name.org", 443))]


def test_only_public_addresses_of_a_name_are_connected_to():
    assert resolve(False, "10.0.0.1", "8.8.8.8", "::1") == ["8.8.8.8"]
    assert resolve(True, "10.0.0.1", "8.8.8.8") == ["10.0.0.1", "8.8.8.8"]
    with pytest.raises(ToolError, match=r"name\.org may not be visited; it has no public address"):
        resolve(False, "127.0.0.1", "fe80::1%eth0")
