"""`verl-drmas retriever index`: builds an index from JSONL files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from verl_drmas.retrieval.build import BuildReport, Progress

WORDS = ("stemmer", "stopwords", "k1", "b")
HNSW = ("hnsw_m", "ef_construction", "ef_search")
IVF = ("nlist", "nprobe")
VECTORS = ("faiss_kind", *HNSW, *IVF)
EMBEDDING = ("batch_size", "shard_size")
ENCODING = ("encoder", "query_prefix", "passage_prefix", "pooling", "max_length", "normalise", "device")


def index_command(
    context: typer.Context,
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...", help='.jsonl or .jsonl.gz; a line is {"id", "title", "text"} or {"id", "contents"}.'
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the index.", metavar="FOLDER")],
    kind: Annotated[
        str,
        typer.Option(help="words (BM25), dense (vectors; for text without spaces between words) or hybrid (both)."),
    ] = "words",
    stemmer: Annotated[
        str, typer.Option(help="words: language that brings them to their stems (Snowball's), or none.")
    ] = "english",
    stopwords: Annotated[
        str, typer.Option(help="words: language whose most frequent ones are left out, or none.")
    ] = "english",
    k1: Annotated[float, typer.Option(help="words: how much one that is repeated counts.")] = 1.5,
    b: Annotated[float, typer.Option(help="words: how much long passages are held back, 0 to 1.")] = 0.75,
    encoder: Annotated[
        str | None, typer.Option(help="Hugging Face id or folder of an encoder, or package.module:name.")
    ] = None,
    query_prefix: Annotated[str | None, typer.Option(help="Before each query; E5 models get theirs.")] = None,
    passage_prefix: Annotated[str | None, typer.Option(help="Before each passage; E5 models get theirs.")] = None,
    pooling: Annotated[str | None, typer.Option(help="mean, cls or last; default what the model declares.")] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a passage that are read.")] = 256,
    normalise: Annotated[bool, typer.Option(help="Bring vectors to length 1.")] = True,
    faiss_kind: Annotated[str, typer.Option(help="flat (exact), hnsw or ivf.")] = "flat",
    hnsw_m: Annotated[int, typer.Option(help="hnsw: neighbours of a passage.")] = 32,
    ef_construction: Annotated[int, typer.Option(help="hnsw: candidates when it is built.")] = 200,
    ef_search: Annotated[int, typer.Option(help="hnsw: candidates in a search.")] = 128,
    nlist: Annotated[int | None, typer.Option(help="ivf: clusters; default by the number of passages.")] = None,
    nprobe: Annotated[int | None, typer.Option(help="ivf: clusters looked into; default by nlist.")] = None,
    faiss: Annotated[
        Path | None, typer.Option(help="Take this faiss index of the same passages; embed nothing.", metavar="FILE")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Passages encoded at once.")] = 64,
    shard_size: Annotated[int, typer.Option(help="Passages whose embeddings an interruption may cost.")] = 16384,
    device: Annotated[str | None, typer.Option(help="Where the encoder runs; default a GPU if there is one.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Throw away what an earlier build left there.")] = False,
) -> None:
    """Build an index from JSONL files; run again after an interruption, it goes on where it stopped."""
    from verl_drmas.retrieval.build import IndexSettings, build_index
    from verl_drmas.retrieval.dense import VectorSettings
    from verl_drmas.retrieval.encoder import EncoderSettings
    from verl_drmas.retrieval.words import WordsSettings

    with _one_line_errors():
        _refuse_idle(context, kind, faiss_kind, taken=faiss is not None)
        vectors = VectorSettings(faiss_kind, hnsw_m, ef_construction, ef_search, nlist, nprobe)
        reads = None
        if encoder is not None:
            model = str(Path(encoder).resolve()) if Path(encoder).is_dir() else encoder
            reads = EncoderSettings(model, query_prefix, passage_prefix, pooling, max_length, normalise)
        settings = IndexSettings(
            kind=kind,
            words=WordsSettings(k1, b, *(None if name == "none" else name for name in (stopwords, stemmer))),
            encoder=reads,
            vectors=vectors,
            faiss_file=None if faiss is None else str(faiss),
            shard_size=shard_size,
        )
        with _bars() as progress:
            report = build_index(inputs, output, settings, progress, force=force, device=device, batch_size=batch_size)
    typer.echo(_summary(report, output))


def _refuse_idle(context: typer.Context, kind: str, faiss_kind: str, *, taken: bool) -> None:
    """Refuse options that were given and would do nothing.

    Raises:
        ValueError: One line that names them.
    """
    idle: dict[str, tuple[str, ...]] = {}
    if kind == "words":
        idle["--kind words"] = (*ENCODING, "faiss", *VECTORS, *EMBEDDING)
    elif kind == "dense":
        idle["--kind dense"] = WORDS
    if taken:
        idle["--faiss"] = (*VECTORS, *EMBEDDING)
    elif faiss_kind in ("flat", "hnsw", "ivf"):
        others = {"hnsw": IVF, "ivf": HNSW}.get(faiss_kind, HNSW + IVF)
        idle[f"--faiss-kind {faiss_kind}"] = others
    for because, names in idle.items():
        sources = {name: context.get_parameter_source(name) for name in names}
        given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        if given:
            options = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"with {because} these do nothing: {options}; leave them out, or change {because}")


def _summary(report: BuildReport, output: Path) -> str:
    rate = report.passages_per_second
    speed = f"{rate:,.0f} passages/s" if rate else f"{len(report.reused)} parts were there already"
    return (
        f"{output}: {report.passages:,} passages in {report.seconds:.1f} s ({speed}), "
        f"{report.disk_bytes_per_million / 1e6:,.0f} MB on disk per million passages, "
        f"peak memory {report.peak_memory / 1e6:,.0f} MB"
    )


@contextlib.contextmanager
def _bars() -> Iterator[Progress]:
    """A bar for each thing that is done, on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as shown:
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done, total=total)

        yield progress


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
