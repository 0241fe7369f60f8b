"""What the commands of `verl-drmas data` share."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import typer


def refuse_output(output: Path, suffix: str = ".parquet") -> None:
    """Refuse a file that isn't of the kind that is written.

    Raises:
        ValueError: It has another ending.
    """
    if output.suffix != suffix:
        raise ValueError(f"--output {output}: give a file that ends in {suffix}")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """What is wrong with the input ends the command with one line and status 1."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
