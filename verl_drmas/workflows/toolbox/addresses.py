"""Which hosts a fetch may ask: patterns of names, and no address inside the network unless that is wanted."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from verl_drmas.workflows.tools import ToolError

_DEFAULT_PORTS = (80, 443)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AllowList:
    """Patterns of hosts: `en.wikipedia.org` is that host, `*.wikipedia.org` any below it, `*` any host. A pattern may
    name a port (`host:8080`, or `host:*` for any); without one the ports of http and https are meant.

    Raises:
        ValueError: A pattern can't be read.
    """

    def __init__(self, patterns: Sequence[str]):
        self._patterns = [_pattern(pattern) for pattern in patterns]
        self.told = ", ".join(patterns)

    def holds(self, host: str, port: int) -> bool:
        """Whether a host (lower case, as it is asked for) and port fit a pattern."""
        return any(_fits(pattern, host) and port in ports for pattern, ports in self._patterns)


def checked_url(text: str, allow: AllowList, *, private: bool) -> URL:
    """An address that may be asked for.

    Args:
        text: As an agent or a server wrote it.
        allow: Hosts that may be asked.
        private: Whether addresses inside the network may be asked.

    Raises:
        ToolError: It is no http(s) address, holds a password, or isn't allowed.
    """
    try:
        url = URL(text)
        host, port = (url.raw_host or "").rstrip(".").lower(), url.port
    except (ValueError, TypeError) as error:
        raise ToolError(f"{text[:200]!r} is no web address; write https://host/path") from error
    if url.scheme not in ("http", "https") or not host or port is None:
        raise ToolError(f"{text[:200]!r} is no web address; write https://host/path")
    if url.user or url.password:
        raise ToolError("an address with a user name or password isn't visited; leave them out")
    if not allow.holds(host, port):
        where = host if port in _DEFAULT_PORTS else f"{host}:{port}"
        told = f"pages may be visited on: {allow.told}" if allow.told else "no page may be visited in this task"
        raise ToolError(f"{where} may not be visited; {told}")
    address = _address(host)
    if address is None and (":" in host or host.replace(".", "").isdigit()):  # 127.1, 2130706433: sockets read these
        raise ToolError(f"{host} may not be visited; it is no proper address")
    if address is not None and not private and not is_public(address):
        raise ToolError(f"{host} may not be visited; it is no public address")
    return url.with_fragment(None)


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is one of the public internet; one that wraps another counts as that one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(wrapped is not None and not is_public(wrapped) for wrapped in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast


class PublicResolver(AbstractResolver):
    """Finds a host's addresses and leaves out those that aren't public. The connection goes to what is returned here,
    so a name can't stand for another address a moment later.

    Args:
        private: Whether addresses inside the network are kept.
    """

    def __init__(self, *, private: bool):
        self._private = private
        self._system: ThreadedResolver | None = None

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a host.

        Raises:
            ToolError: It has none that is public.
            OSError: It can't be looked up.
        """
        if self._system is None:
            self._system = ThreadedResolver()
        found = await self._system.resolve(host, port, family)
        kept = [one for one in found if self._private or is_public(ipaddress.ip_address(one["host"]))]
        if not kept:
            raise ToolError(f"{host} may not be visited; it has no public address")
        return kept

    async def close(self) -> None:
        if self._system is not None:
            await self._system.close()


def _pattern(text: str) -> tuple[str, Sequence[int]]:
    """Host and ports of a pattern."""
    text = text.strip()
    bare, ports = text, _DEFAULT_PORTS
    if text.endswith(":*"):
        bare, ports = text[:-2], range(1, 65536)
    wild = bare.startswith("*.")
    rest = bare[2:] if wild else bare
    if _address(rest) is not None and ":" in rest:
        rest = f"[{rest}]"
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname or "", parts.port
        if host != "*":
            host = URL.build(scheme="https", host=host).raw_host or ""
    except ValueError as error:
        raise ValueError(f"allow: {text!r} is no pattern of hosts ({error})") from error
    if not host or parts.path or parts.query or parts.username or ("*" in host and (host != "*" or wild)):
        raise ValueError(f"allow: {text!r} is no pattern of hosts; write host, *.domain or *, with or without :port")
    if port is not None:
        ports = (port,)
    return ("*." if wild else "") + host.rstrip(".").lower(), ports


def _fits(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern in ("*", host)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
