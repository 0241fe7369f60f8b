"""`verl-drmas retriever serve INDEX`: one process that answers searches until it is told to stop."""

from __future__ import annotations

import math
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_drmas.listening import is_loopback, listen_at, url_of
from verl_drmas.retrieval.errors import IndexProblem
from verl_drmas.retrieval.limits import ServerSettings

if TYPE_CHECKING:
    from verl_drmas.retrieval.app import ServedIndex

KEEP_ALIVE = 60  # seconds an idle connection stays: sessions come again, and a call into a hang-up is lost

_D = ServerSettings()


def serve_command(
    index: Annotated[Path, typer.Argument(help="Folder written by `verl-drmas retriever index`.")],
    host: Annotated[str, typer.Option(help="Address to listen on; anyone who reaches it may search.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and says which.", min=0, max=65535)] = 8000,
    topk: Annotated[int, typer.Option(help="Passages a query gets where the request names no number.")] = _D.topk,
    max_topk: Annotated[int, typer.Option(help="Most passages a request may ask for.")] = _D.max_topk,
    max_batch: Annotated[int, typer.Option(help="Most queries the index is asked at once.")] = _D.max_batch,
    max_wait_ms: Annotated[
        float, typer.Option(help="Milliseconds an idle server waits for more queries after one.")
    ] = _D.max_wait_ms,
    max_queue: Annotated[int, typer.Option(help="Queries that may wait; more get status 429.")] = _D.max_queue,
    max_queries: Annotated[int, typer.Option(help="Most queries of one request.")] = _D.max_queries,
    max_query_chars: Annotated[int, typer.Option(help="Most characters of one query.")] = _D.max_query_chars,
    cache: Annotated[int, typer.Option(help="Answers kept for queries that come again; 0 keeps none.")] = _D.cache,
    device: Annotated[str | None, typer.Option(help="Device of the encoder, such as cuda:0; default its own.")] = None,
    faiss_gpu: Annotated[bool, typer.Option("--faiss-gpu", help="Hold the vectors on the GPU.")] = False,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Encoder instead of the index's own: its id, folder or package.module:name; the latter is imported "
            "only when it is named here."
        ),
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that running requests get at the end.", min=0)] = 30.0,
) -> None:
    """Serve an index on POST /retrieve, with /health and /metrics, until SIGTERM or Ctrl-C."""
    try:
        settings = ServerSettings(
            topk=topk,
            max_topk=max_topk,
            max_batch=max_batch,
            max_wait_ms=max_wait_ms,
            max_queue=max_queue,
            max_queries=max_queries,
            max_query_chars=max_query_chars,
            cache=cache,
        )
        _check_libraries()
        bound = bind(host, port)
        with bound:
            from verl_drmas.retrieval.index import open_index

            opened = open_index(index, device=device, faiss_gpu=faiss_gpu, encoder=encoder)
            if not len(opened):
                raise IndexProblem(f"{index}: the index has no passages; build it from a corpus that has some")
            if not is_loopback(host):
                typer.echo(f"warning: {host} is open to other machines, and nobody has to log in to search", err=True)
            serve(opened, settings, bound, grace=grace)
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error


def _check_libraries() -> None:
    """Before an index is loaded, which may take minutes.

    Raises:
        IndexProblem: One is missing.
    """
    try:
        import uvicorn  # noqa: F401

        import verl_drmas.retrieval.app  # noqa: F401
    except ImportError as error:
        raise IndexProblem(f"a server needs libraries ({error}); pip install 'verl-drmas[retriever]'") from error


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address that doesn't listen yet: a port that is taken shows before an index is loaded.

    Raises:
        OSError: One line that names host, port and fix.
    """
    try:
        return listen_at(host, port)
    except socket.gaierror as error:
        raise OSError(f"--host {host}: no such address here ({error.strerror})") from error
    except OSError as error:
        fix = "give another --port, or 0 for a free one"
        raise OSError(f"can't listen on {host} port {port}: {error.strerror}; {fix}") from error


def serve(index: ServedIndex, settings: ServerSettings, bound: socket.socket, *, grace: float) -> None:
    """Answer searches on a bound socket until SIGTERM or SIGINT; then finish what runs, within `grace` seconds."""
    import uvicorn

    from verl_drmas.retrieval.app import create_app

    app = create_app(index, settings)
    line = f"serving {len(index):,} passages ({index.kind}) on {url_of(*bound.getsockname()[:2])}/retrieve"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                typer.echo(line)

        def handle_exit(self, sig, frame) -> None:
            if self.started:
                app.state.batcher.stopping = True
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(grace),
    )
    # uvicorn raises the signals it caught once more when it is done, which would end the process with their status.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Server(config).run(sockets=[bound])
