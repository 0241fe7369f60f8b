"""What an index folder says of itself: settings, inputs, and which stages are done."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl_drmas.retrieval.errors import IndexProblem

FILE = "manifest.json"
SCHEMA = 1
STAGES = {"words": ("corpus", "words"), "dense": ("corpus", "dense"), "hybrid": ("corpus", "words", "dense")}


@dataclass
class Manifest:
    """Written anew after each stage.

    Attributes:
        kind: `words`, `dense` or `hybrid`.
        settings: What the index depends on, as plain values.
        inputs: What identifies each file that was read, in order; see `fingerprint`.
        stages: Results of the stages that are done, by name.
    """

    kind: str
    settings: dict[str, Any]
    inputs: list[dict[str, Any]]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """Stages still to be done."""
        return [stage for stage in STAGES[self.kind] if stage not in self.stages]

    @property
    def passages(self) -> int:
        return self.stages["corpus"]["passages"]

    def save(self, folder: Path) -> None:
        """Replace the folder's manifest, in one step."""
        with whole_file(folder / FILE) as part:
            part.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """The manifest of an index, whole or half built.

        Raises:
            IndexProblem: There is no such folder, or it is no index that this version can read.
        """
        make = "build one with `verl-drmas retriever index`"
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "no such folder"
            raise IndexProblem(f"{folder}: {what}; give the folder of an index, or {make}")
        path = folder / FILE
        if not path.is_file():
            what = "is no index (it has no manifest.json)" if any(folder.iterdir()) else "is empty"
            raise IndexProblem(f"{folder}: {what}; give the folder of an index, or {make}")
        try:
            content = json.loads(path.read_text())
            schema = content.pop("schema")
            if isinstance(schema, int) and schema > SCHEMA:
                raise IndexProblem(f"{path}: written by a newer version (schema {schema}); upgrade verl-drmas")
            if schema != SCHEMA:
                raise IndexProblem(f"{path}: schema {schema!r} is unknown; build the index again in a new folder")
            manifest = cls(**content)
            _ = manifest.missing
            if not manifest.missing:
                _ = manifest.passages
        except IndexProblem:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexProblem(f"{path}: no manifest of an index ({error}); {make}") from error
        return manifest


def fingerprint(file: Path) -> dict[str, Any]:
    """Name, size, time of change and digest of the content (all of it is read, about a second per GB)."""
    status = file.stat()
    digest = blake2b(digest_size=16)
    with file.open("rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return {
        "name": file.name,
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
        "digest": digest.hexdigest(),
    }


def same_file(file: Path, known: dict[str, Any]) -> bool:
    """Whether a file is the one of that fingerprint; its content is read only if it was touched since."""
    status = file.stat()
    if (file.name, status.st_size) != (known["name"], known["bytes"]):
        return False
    return status.st_mtime_ns == known["modified"] or fingerprint(file)["digest"] == known["digest"]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file that is there whole or not at all: gives a name to write to, and renames it at the end."""
    part = path.with_name(f"{path.name}.part")
    yield part
    with part.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(part, path)
