"""`verl-drmas data gaia | xbench | webwalker`: benchmarks of research agents, from files of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_drmas.data import research
from verl_drmas.data.command_support import one_line_errors, refuse_output
from verl_drmas.data.hub import Loaded
from verl_drmas.data.parquet import write_rows
from verl_drmas.data.search import SEARCH_SCHEMA

Output = Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.")]
Limit = Annotated[int | None, typer.Option(help="Keep the first rows only.")]
Shuffle = Annotated[int | None, typer.Option(metavar="SEED", help="Shuffle all rows with this seed.")]
DropMissing = Annotated[bool, typer.Option(help="Drop and count rows without question or answer.")]


def gaia_command(
    file: Annotated[str, typer.Argument(help="metadata.jsonl or .parquet of the validation split.")],
    output: Output,
    level: Annotated[list[str] | None, typer.Option(help="1, 2 or 3; may be repeated. Default: all.")] = None,
    keep_attachments: Annotated[
        bool,
        typer.Option("--keep-attachments", help="Keep questions with a file, which no agent here reads."),
    ] = False,
    limit: Limit = None,
    shuffle: Shuffle = None,
    drop_missing: DropMissing = False,
) -> None:
    """GAIA's validation split; questions that come with a file are left out and counted."""
    with one_line_errors():
        refuse_output(output)
        loaded = research.load_gaia(
            file,
            levels=level or (),
            keep_attachments=keep_attachments,
            drop_missing=drop_missing,
            shuffle_seed=shuffle,
            limit=limit,
        )
        _write(loaded, output)


def xbench_command(
    file: Annotated[str, typer.Argument(help="DeepSearch-2505.csv, or a later one; encrypted or not.")],
    output: Output,
    limit: Limit = None,
    shuffle: Shuffle = None,
    drop_missing: DropMissing = False,
) -> None:
    """XBench-DeepSearch; a published file is decrypted with the keys in it."""
    with one_line_errors():
        refuse_output(output)
        loaded = research.load_xbench(file, drop_missing=drop_missing, shuffle_seed=shuffle, limit=limit)
        _write(loaded, output)


def webwalker_command(
    file: Annotated[str, typer.Argument(help="WebWalkerQA's .parquet, .json or .jsonl.")],
    output: Output,
    language: Annotated[
        list[str] | None, typer.Option(help="Keep those of info.lang (en, zh); may be repeated. Default: all.")
    ] = None,
    root_url: Annotated[bool, typer.Option("--root-url", help="Name the website in the question.")] = False,
    limit: Limit = None,
    shuffle: Shuffle = None,
    drop_missing: DropMissing = False,
) -> None:
    """WebWalkerQA, with type and difficulty of each question."""
    with one_line_errors():
        refuse_output(output)
        loaded = research.load_webwalker(
            file,
            languages=language or (),
            root_url=root_url,
            drop_missing=drop_missing,
            shuffle_seed=shuffle,
            limit=limit,
        )
        _write(loaded, output)


def _write(loaded: Loaded, output: Path) -> None:
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    written = write_rows(loaded.rows, output, schema=SEARCH_SCHEMA)
    typer.echo(f"wrote {len(loaded.rows)} prompts to {written}")
