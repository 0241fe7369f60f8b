"""Runs the gateway's app with uvicorn in a running event loop, on a port that may still be its killed forerunner's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from verl_drmas.config import ConfigError
from verl_drmas.listening import is_loopback, listen_at, url_of
from verl_drmas.store.settings import GatewayConfig

KEEP_ALIVE = 60  # seconds an idle connection stays; callers let go earlier, since a call into a hang-up is lost
GRACE = 5  # seconds for what still runs at the very end
LOOK_AGAIN = 0.2  # seconds between attempts at a port that is taken
WILDCARDS = ("", "0.0.0.0", "::")


def check_address(settings: GatewayConfig) -> None:
    """An address that the other job can call.

    Raises:
        ConfigError: There is none.
    """
    if settings.host in WILDCARDS and settings.public_url is None:
        raise ConfigError(
            f"drmas.gateway.host is {settings.host!r}, which is no address to call: set drmas.gateway.public_url to "
            "what the other job shall call"
        )


def in_clear(settings: GatewayConfig) -> bool:
    """True if the token may cross a network that others read."""
    return settings.tls_cert is None and not is_loopback(settings.host)


def endpoint(settings: GatewayConfig, port: int) -> str:
    """What the other job calls."""
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    return url_of(settings.host, port, "https" if settings.tls_cert else "http")


async def bind(settings: GatewayConfig, port: int, wait: float) -> socket.socket:
    """A socket of the gateway's address.

    Args:
        settings: The host.
        port: 0: any free one.
        wait: Seconds to wait for a port that is taken.

    Raises:
        ConfigError: There is no such address here, or the port stayed taken.
    """
    end = time.monotonic() + wait
    while True:
        try:
            return listen_at(settings.host, port)
        except socket.gaierror as error:
            raise ConfigError(
                f"drmas.gateway.host is {settings.host!r}: no such address here ({error.strerror})"
            ) from error
        except OSError as error:
            if time.monotonic() >= end:
                raise ConfigError(
                    f"drmas.gateway.port is {port}: can't listen on {settings.host} ({error.strerror}); give another "
                    "port, or 0 for a free one"
                ) from error
        await asyncio.sleep(LOOK_AGAIN)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the job's."""
        yield


class Serving:
    """A gateway that listens; make it with `start`."""

    def __init__(self, server: _Server, task: asyncio.Task, port: int):
        self._server, self._task, self.port = server, task, port

    @classmethod
    async def start(cls, app: FastAPI, settings: GatewayConfig, port: int, wait: float = 0.0) -> Serving:
        """Listen, and return when calls are taken.

        Args:
            app: The gateway's.
            settings: Its host and certificate.
            port: 0: any free one.
            wait: Seconds to wait for a port that is taken.

        Raises:
            ConfigError: The address can't be had, or the certificate can't be read.
        """
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
            ssl_certfile=settings.tls_cert and os.path.expanduser(settings.tls_cert),
            ssl_keyfile=settings.tls_key and os.path.expanduser(settings.tls_key),
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:  # the latter's text is of the file's form, not of its content
            raise ConfigError(
                f"drmas.gateway.tls_cert is {settings.tls_cert!r} and tls_key {settings.tls_key!r}: {error}; give the "
                "PEM files of a certificate and its key"
            ) from error
        bound = await bind(settings, port, wait)
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            if task.done():
                bound.close()
                task.result()
                raise ConfigError(f"drmas.gateway: the server on port {bound.getsockname()[1]} ended at once")
            await asyncio.sleep(0.01)
        return cls(server, task, bound.getsockname()[1])

    @property
    def running(self) -> bool:
        """False if it ended by itself."""
        return not self._task.done()

    async def stop(self) -> None:
        """Stop listening; what still runs has `GRACE` seconds."""
        self._server.should_exit = True
        await asyncio.wait([self._task])
