"""Builds the folder of an index, a stage at a time; what an earlier run finished is not done again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl_drmas.retrieval import corpus, dense, manifest
from verl_drmas.retrieval.corpus import Corpus, check_inputs, write_corpus
from verl_drmas.retrieval.dense import VectorSettings, adopt_vectors, build_vectors
from verl_drmas.retrieval.encoder import Encoder, EncoderSettings, embed, load_encoder
from verl_drmas.retrieval.errors import IndexProblem
from verl_drmas.retrieval.manifest import STAGES, Manifest, fingerprint, same_file, whole_file
from verl_drmas.retrieval.words import FOLDER as WORDS
from verl_drmas.retrieval.words import WordsSettings, build_words

Kind = Literal["words", "dense", "hybrid"]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (bytes, passages or steps)."""

EMBEDDINGS = "embeddings"
_LOCK = "build.lock"
_CHUNK_BATCHES = 8  # batches an encoder is given at once; it sorts them by length


@dataclass(frozen=True)
class IndexSettings:
    """What an index depends on, besides its inputs.

    Attributes:
        kind: `words`, `dense`, or `hybrid` (both, by reciprocal rank fusion).
        words: How words are found and scored.
        encoder: Which encoder; must be set unless the kind is `words`.
        vectors: How vectors are searched.
        faiss_file: A faiss index that is there already, in place of embedding the passages; `vectors` is not looked at.
        shard_size: Passages whose embeddings are kept in one file until the index is whole: what an interruption
            costs at most.
    """

    kind: Kind = "words"
    words: WordsSettings = field(default_factory=WordsSettings)
    encoder: EncoderSettings | None = None
    vectors: VectorSettings = field(default_factory=VectorSettings)
    faiss_file: str | None = None
    shard_size: int = 16384

    def __post_init__(self):
        if self.kind not in STAGES:
            raise IndexProblem(f"kind is {self.kind!r}; use one of {', '.join(STAGES)}")
        if self.kind == "words" and (self.encoder or self.faiss_file):
            given = "an encoder" if self.encoder else "a faiss index"
            raise IndexProblem(f"kind is words, which takes no vectors, but {given} is given; use dense or hybrid")
        if self.kind != "words" and self.encoder is None:
            raise IndexProblem(f"kind is {self.kind}, but no encoder is given; name one with --encoder")
        if self.shard_size < 1:
            raise IndexProblem(f"shard_size is {self.shard_size}; it must be above 0")

    def plain(self) -> dict[str, Any]:
        """As it stands in the manifest: only what this kind depends on."""
        parts: dict[str, Any] = {}
        if self.kind != "dense":
            parts["words"] = asdict(self.words)
        if self.kind != "words":
            parts["encoder"] = asdict(self.encoder)
            if self.faiss_file:
                file = Path(self.faiss_file)
                status = file.stat()
                parts["faiss_file"] = {"name": file.name, "bytes": status.st_size, "modified": status.st_mtime_ns}
            else:
                parts["vectors"] = asdict(self.vectors)
                parts["shard_size"] = self.shard_size
        return parts


@dataclass(frozen=True)
class BuildReport:
    """What a build took.

    Attributes:
        passages: In the index.
        seconds: Of this run.
        reused: Stages and shards of embeddings that an earlier run had finished.
        disk_bytes: Size of the folder.
        peak_memory: Largest resident size of this process so far, in bytes (mapped files included).
        stages: Seconds of each stage done in this run.
    """

    passages: int
    seconds: float
    reused: list[str]
    disk_bytes: int
    peak_memory: int
    stages: dict[str, float]

    @property
    def passages_per_second(self) -> float | None:
        """None where an earlier run did a part of the work."""
        return None if self.reused else self.passages / self.seconds

    @property
    def disk_bytes_per_million(self) -> float:
        return self.disk_bytes * 1e6 / self.passages


def build_index(
    inputs: Sequence[str | Path],
    out: str | Path,
    settings: IndexSettings,
    progress: Progress | None = None,
    *,
    force: bool = False,
    device: str | None = None,
    batch_size: int = 64,
) -> BuildReport:
    """Build an index, or go on where an interrupted build of the same inputs and settings stopped.

    Args:
        inputs: JSONL files of passages; see `corpus.write_corpus`.
        out: Folder of the index; made if it is not there.
        settings: What the index depends on.
        progress: Told how far the work is.
        force: Throw away what an earlier build left.
        device: Where the encoder runs; None takes a GPU where there is one.
        batch_size: Passages encoded at once.

    Raises:
        IndexProblem: One line that names what is wrong and the fix.
    """
    started = time.perf_counter()
    check_inputs(inputs)
    if settings.faiss_file and not Path(settings.faiss_file).is_file():
        raise IndexProblem(f"{settings.faiss_file}: no such file; give a faiss index, or leave it out to build one")
    if batch_size < 1:
        raise IndexProblem(f"batch size is {batch_size}; it must be above 0")
    folder = Path(out)
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_builder(folder):
        if force:
            _clear(folder)
        state = _start(folder, [Path(file) for file in inputs], settings, progress)
        build = _Build(folder, state, settings, progress, device, batch_size)
        build.run([Path(file) for file in inputs])
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return BuildReport(
        passages=state.passages,
        seconds=time.perf_counter() - started,
        reused=build.reused,
        disk_bytes=size,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        stages=build.seconds,
    )


class _Build:
    def __init__(
        self,
        folder: Path,
        state: Manifest,
        settings: IndexSettings,
        progress: Progress | None,
        device: str | None,
        batch_size: int,
    ):
        self._folder = folder
        self._state = state
        self._settings = settings
        self._progress = progress or (lambda what, done, total: None)
        self._device = device
        self._batch_size = batch_size
        self.reused: list[str] = []
        self.seconds: dict[str, float] = {}

    def run(self, inputs: Sequence[Path]) -> None:
        """Do the stages that are missing."""
        for leftover in self._folder.glob("*.part"):
            _remove(leftover)
        steps = {"corpus": lambda: self._corpus(inputs), "words": self._words, "dense": self._dense}
        for stage in STAGES[self._state.kind]:
            if stage in self._state.stages:
                self.reused.append(stage)
                continue
            started = time.perf_counter()
            result = steps[stage]()
            self.seconds[stage] = time.perf_counter() - started
            self._state.stages[stage] = result
            self._state.save(self._folder)
        _remove(self._folder / EMBEDDINGS)  # the index holds them now

    def _corpus(self, inputs: Sequence[Path]) -> dict[str, Any]:
        count = write_corpus(inputs, self._folder, lambda done, total: self._progress("read", done, total))
        return {"passages": count}

    def _words(self) -> dict[str, Any]:
        passages = Corpus.open(self._folder)
        part, whole = self._folder / f"{WORDS}.part", self._folder / WORDS
        _remove(whole)  # renamed, but not noted, by a run that was killed between
        part.mkdir()
        texts = (passage.contents for passage in passages)
        total = 4 * len(passages)
        build_words(texts, part, self._settings.words, lambda done: self._progress("words", done, total))
        self._progress("words", total, total)
        os.replace(part, whole)
        return {}

    def _dense(self) -> dict[str, Any]:
        passages = Corpus.open(self._folder)
        encoder = load_encoder(self._settings.encoder, device=self._device, batch_size=self._batch_size)
        if self._settings.faiss_file:
            adopt_vectors(Path(self._settings.faiss_file), self._folder, len(passages), encoder.dim)
        else:
            shards = self._embed(passages, encoder)
            self._progress("vectors", 0, len(passages))
            build_vectors(
                shards,
                self._folder,
                self._settings.vectors,
                lambda done: self._progress("vectors", done, len(passages)),
            )
        return {"dim": int(encoder.dim)}

    def _embed(self, passages: Corpus, encoder: Encoder) -> list[Path]:
        folder = self._folder / EMBEDDINGS
        folder.mkdir(exist_ok=True)
        for leftover in folder.glob("*.part"):
            _remove(leftover)
        size, shards = self._settings.shard_size, []
        for number, start in enumerate(range(0, len(passages), size)):
            stop = min(start + size, len(passages))
            shard = folder / f"{number:05d}.npy"
            shards.append(shard)
            if shard.exists():
                shape = np.load(shard, mmap_mode="r").shape
                if shape != (stop - start, encoder.dim):
                    raise IndexProblem(f"{shard}: shape {shape}, this encoder's would differ; start anew with --force")
                self.reused.append(f"{EMBEDDINGS}/{shard.name}")
            else:
                with whole_file(shard) as part, part.open("wb") as file:
                    np.save(file, self._embed_rows(passages, encoder, start, stop))
            self._progress("embed", stop, len(passages))
        return shards

    def _embed_rows(self, passages: Corpus, encoder: Encoder, start: int, stop: int) -> np.ndarray:
        vectors = np.empty((stop - start, encoder.dim), dtype=np.float32)
        done = 0
        for batch in passages.batches(self._batch_size * _CHUNK_BATCHES, start, stop):
            texts = [passage.contents for passage in batch]
            normalise = self._settings.encoder.normalise
            vectors[done : done + len(batch)] = embed(encoder, texts, queries=False, normalise=normalise)
            done += len(batch)
            self._progress("embed", start + done, len(passages))
        return vectors


def _start(folder: Path, inputs: Sequence[Path], settings: IndexSettings, progress: Progress | None) -> Manifest:
    """The manifest to go on with; a new one in an empty folder."""
    if not (folder / manifest.FILE).exists():
        _clear(folder)  # what is left of a build that was being thrown away
        total = sum(file.stat().st_size for file in inputs)
        if progress:
            progress("inputs", 0, total)
        prints = [fingerprint(file) for file in inputs]
        if progress:
            progress("inputs", total, total)
        state = Manifest(settings.kind, settings.plain(), prints)
        state.save(folder)
        return state
    state = Manifest.load(folder)
    fix = "give the same ones to go on, choose another folder, or start anew with --force"
    if state.kind != settings.kind:
        raise IndexProblem(f"{folder}: was built as {state.kind}, not {settings.kind}; {fix}")
    plain = settings.plain()
    for name in state.settings.keys() | plain.keys():
        before, now = state.settings.get(name), plain.get(name)
        if before != now:
            raise IndexProblem(f"{folder}: was built with other settings: {_difference(name, before, now)}; {fix}")
    same = len(state.inputs) == len(inputs) and all(map(same_file, inputs, state.inputs))
    if not same:
        names = ", ".join(known["name"] for known in state.inputs)
        raise IndexProblem(f"{folder}: was built from other inputs ({names}, as they were then); {fix}")
    return state


def _difference(name: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        return ", ".join(f"{name}.{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in sorted(keys))
    return f"{name} was {before!r}, is {now!r}"


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise IndexProblem(f"{folder}: is a file; give a folder for the index")
    ours = (manifest.FILE, f"{manifest.FILE}.part", _LOCK)
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / name).exists() for name in ours):
        raise IndexProblem(f"{folder}: holds other files and no index; give a new or empty folder")


def _clear(folder: Path) -> None:
    """Remove what a build writes, and nothing else; the manifest goes first, so that no half of it looks whole."""
    for name in (manifest.FILE, corpus.FILE, dense.FILE, WORDS, EMBEDDINGS):
        _remove(folder / name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Holds a lock that ends with the process, however it ends."""
    path = folder / _LOCK
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise IndexProblem(f"{folder}: another build is running there; wait for it or end it") from error
        yield
