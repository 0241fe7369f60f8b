"""Sockets that our HTTP servers listen on."""

from __future__ import annotations

import ipaddress
import socket


def listen_at(host: str, port: int) -> socket.socket:
    """A socket with this address that doesn't listen yet: a port that is taken shows before anything is loaded.

    A port whose last owner was killed is free at once, whatever its connections are still at.

    Raises:
        socket.gaierror: There is no such address here.
        OSError: The address can't be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The address as others write it."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if nobody on another machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
