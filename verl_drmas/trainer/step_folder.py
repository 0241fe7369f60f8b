"""Checkpoints of a team as folders `global_step_N`: which of them are whole, which is the newest, which may go.

A step's folder is whole if it holds the marker `complete.json` and every file that the marker lists, with its size. The
marker is written after everything else, so that no crash leaves a folder that looks whole and isn't. Only what this
process sees is listed and checked: where the folder isn't shared between nodes, the other nodes' shards are not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

logger = logging.getLogger(__name__)

MARKER = "complete.json"
TRACKER = "latest_checkpointed_iteration.txt"  # verl's name; its workers and users' scripts read it
FORMAT = 1
STEP = re.compile(r"global_step_(\d+)")
Count = Annotated[int, Field(ge=0)]


class IncompleteError(ValueError):
    """A step's folder that is not whole; the message says what is missing."""


@checked
class Marker:
    """What a whole step's folder holds.

    Attributes:
        format: Version of this file.
        step: The training step.
        save: Counts the saves below one root: it orders folders by when they were saved, also where a run went back to
            an earlier step and saves the later ones anew.
        models: Ids of the models saved.
        files: Size in bytes by path, relative to the folder.
    """

    format: Literal[1]
    step: Count
    save: Count
    models: list[str]
    files: dict[str, Count]


@dataclass(frozen=True)
class Whole:
    """A step's folder that is whole."""

    folder: Path
    marker: Marker


def step_of(folder: Path) -> int | None:
    """The step a folder is named after, or None if it isn't named `global_step_N`."""
    found = STEP.fullmatch(folder.name)
    return int(found[1]) if found else None


def step_folders(root: Path) -> list[Path]:
    """The step folders below `trainer.default_local_dir`, by step; none if it isn't there."""
    found = [path for path in root.glob("global_step_*") if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0)


def read_marker(folder: Path) -> Marker:
    """Read a folder's marker without a look at the files it lists.

    Args:
        folder: A `global_step_N` folder.

    Raises:
        IncompleteError: There is none that can be read; the message is the reason, without the folder's name.
    """
    try:
        content = (folder / MARKER).read_bytes()
    except OSError as error:
        raise IncompleteError(f"it has no {MARKER}, so its save didn't end") from error
    try:
        version = json.loads(content)["format"]
        if version != FORMAT:
            raise IncompleteError(f"its {MARKER} has format {version}; this version of verl-drmas reads {FORMAT}")
        return TypeAdapter(Marker).validate_json(content)
    except (ValidationError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise IncompleteError(f"its {MARKER} can't be read ({type(error).__name__})") from error


def inspect(folder: Path) -> Marker:
    """Read a folder's marker and hold every listed file against it.

    Args:
        folder: A `global_step_N` folder.

    Returns:
        The marker of a whole folder.

    Raises:
        IncompleteError: The folder isn't whole; the message is the reason, without the folder's name.
    """
    marker = read_marker(folder)
    for name, size in marker.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise IncompleteError(f"{name} is missing") from error
        if found != size:
            raise IncompleteError(f"{name} has {found} bytes instead of {size}")
    return marker


def survey(root: Path) -> tuple[list[Whole], dict[Path, str]]:
    """Look at every step's folder.

    Args:
        root: `trainer.default_local_dir`.

    Returns:
        The whole ones in the order of their saves, and the reason for each of the others.
    """
    whole, broken = [], {}
    for folder in step_folders(root):
        try:
            whole.append(Whole(folder, inspect(folder)))
        except IncompleteError as error:
            broken[folder] = str(error)
    return sorted(whole, key=lambda w: (w.marker.save, w.marker.step)), broken


def newest(root: Path) -> Whole | None:
    """The last checkpoint that was saved whole, whatever the tracker says.

    A WARNING names every folder that it passes over, and why: of a later step, or damaged.

    Args:
        root: `trainer.default_local_dir`.
    """
    whole, broken = survey(root)
    chosen = whole[-1] if whole else None
    step = chosen.marker.step if chosen else -1
    for folder, reason in broken.items():
        if (step_of(folder) or 0) > step or (folder / MARKER).exists():  # unfinished later, or damaged at any time
            logger.warning("passing over checkpoint %s: %s", folder, reason)
    for other in whole[:-1]:
        if other.marker.step > step:
            logger.warning("passing over checkpoint %s: step %d was saved after it", other.folder, step)
    return chosen


def complete(folder: Path, models: Sequence[str]) -> Marker:
    """Declare a step's folder whole: the last act of a save but the tracker.

    Args:
        folder: A `global_step_N` folder with everything in it.
        models: Ids of the models in it.

    Returns:
        The marker written.
    """
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MARKER
    }
    for model_id in models:
        if not any(name.startswith(f"actor/{model_id}/") for name in files):
            logger.warning(
                "checkpoint %s: this process sees no file of model %r, so a resume can't check them; "
                "trainer.default_local_dir should be on storage that all nodes share",
                folder,
                model_id,
            )
    saves = []
    for other in step_folders(folder.parent):
        with contextlib.suppress(IncompleteError):
            saves.append(read_marker(other).save)
    marker = Marker(FORMAT, step_of(folder) or 0, max(saves, default=-1) + 1, list(models), files)
    write_atomically(folder / MARKER, TypeAdapter(Marker).dump_json(marker, indent=1).decode())
    return marker


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is there with all its content or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the new name, too
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Remove a step's folder, its marker first: a crash in the middle leaves nothing that could be resumed."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def prune(root: Path, keep: int | None) -> None:
    """Remove whole step folders beyond the last `keep` saves, and the remains of saves older than those kept.

    Args:
        root: `trainer.default_local_dir`; folders that another run saved there count, too.
        keep: `trainer.max_actor_ckpt_to_keep`; None or less than 1 keeps all.
    """
    if keep is None or keep < 1:
        return
    whole, broken = survey(root)
    oldest = min((w.marker.step for w in whole[-keep:]), default=0)
    remains = [folder for folder in broken if (step_of(folder) or 0) < oldest]
    for folder in [*(w.folder for w in whole[:-keep]), *remains]:
        try:
            discard(folder)
        except OSError as error:  # a file in use on a network disk: worth a line, not the run
            logger.warning("checkpoint %s could not be removed: %s", folder, error)
