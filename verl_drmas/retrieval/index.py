"""An index on disk, opened for searching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_drmas.retrieval.corpus import Corpus
from verl_drmas.retrieval.dense import VectorIndex
from verl_drmas.retrieval.encoder import Encoder, EncoderSettings, embed, is_import_path, load_encoder
from verl_drmas.retrieval.errors import IndexProblem
from verl_drmas.retrieval.fusion import Ranking, fuse
from verl_drmas.retrieval.manifest import Manifest
from verl_drmas.retrieval.passages import Hit
from verl_drmas.retrieval.words import FOLDER as WORDS
from verl_drmas.retrieval.words import WordIndex, WordsSettings

# Passages that each side of a hybrid index puts forward (or k where that is more): enough for one that stands low on
# both sides to pass one that stands high on one.
FUSION_DEPTH = 100


class SearchIndex:
    """Answers queries; blocking, and for one caller at a time."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        corpus: Corpus,
        words: WordIndex | None,
        vectors: VectorIndex | None,
        encoder: Encoder | None,
    ):
        self.kind = manifest.kind
        self._folder = folder
        self._manifest = manifest
        self._corpus = corpus
        self._words = words
        self._vectors = vectors
        self._encoder = encoder

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for each query, best first; fewer than `k` where not more fit."""
        if k < 1:
            raise ValueError(f"k is {k}; ask for at least 1 passage")
        if not queries:
            return []
        queries = [query.encode(errors="replace").decode() for query in queries]  # halves of characters stop encoders
        depth = k if self.kind != "hybrid" else max(k, FUSION_DEPTH)
        found: list[list[Ranking]] = []
        if self._words:
            found.append(self._words.search(queries, depth))
        if self._vectors:
            normalise = self._manifest.settings["encoder"]["normalise"]
            found.append(self._vectors.search(embed(self._encoder, queries, queries=True, normalise=normalise), depth))
        rankings = found[0] if len(found) == 1 else [fuse(both, k) for both in zip(*found, strict=True)]
        return [[Hit(self._corpus[row], score) for row, score in ranking] for ranking in rankings]

    def describe(self) -> dict[str, Any]:
        """What it is and how it was built, as plain values; of this machine's folders the last names only."""
        about = {"folder": _last(self._folder.resolve()), "kind": self.kind, "passages": len(self)}
        about |= self._manifest.settings
        if self._vectors:
            about["encoder"] = {**about["encoder"], "model": _last(Path(about["encoder"]["model"]))}
            about |= self._vectors.describe()
        device = getattr(self._encoder, "device", None)
        return about if device is None else {**about, "encoder_on": str(device)}


def open_index(
    folder: str | Path,
    *,
    device: str | None = None,
    faiss_gpu: bool = False,
    encoder: Encoder | str | None = None,
    batch_size: int = 64,
) -> SearchIndex:
    """Open an index that is whole.

    Args:
        folder: What `build_index` wrote.
        device: Where the encoder runs; None takes a GPU where there is one.
        faiss_gpu: Move the vectors to the GPUs.
        encoder: Used for queries in place of the one the index was built with, which may lie elsewhere now: itself, or
            its id, folder or import path. An import path must be given here: one that an index names is not imported,
            for indexes come from elsewhere, and importing runs code.
        batch_size: Queries encoded at once.

    Raises:
        IndexProblem: One line that names the folder and the fix.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if manifest.missing:
        raise IndexProblem(
            f"{folder}: is half built ({' and '.join(manifest.missing)} missing); "
            "run the same `verl-drmas retriever index` command again to finish it"
        )
    corpus = Corpus.open(folder)
    if len(corpus) != manifest.passages:
        raise IndexProblem(
            f"{folder}: has {len(corpus)} passages, its manifest says {manifest.passages}; build it again with --force"
        )
    words = vectors = None
    if manifest.kind == "words":
        given = [name for name, value in (("encoder", encoder), ("device", device), ("faiss_gpu", faiss_gpu)) if value]
        if given:
            raise IndexProblem(
                f"{folder}: is an index of words, which needs no encoder and no GPU; leave out {' and '.join(given)}"
            )
    else:
        encoder = _encoder(folder, manifest, encoder, device, batch_size)
        vectors = VectorIndex.open(folder, len(corpus), encoder.dim, gpu=faiss_gpu)
    if manifest.kind != "dense":
        words = WordIndex.open(folder / WORDS, _settings(folder, manifest, "words", WordsSettings), len(corpus))
    return SearchIndex(folder, manifest, corpus, words, vectors, encoder)


def _encoder(
    folder: Path, manifest: Manifest, encoder: Encoder | str | None, device: str | None, batch_size: int
) -> Encoder:
    settings = _settings(folder, manifest, "encoder", EncoderSettings)
    if encoder is not None and not isinstance(encoder, str):
        return encoder
    if encoder:
        settings = EncoderSettings(**{**manifest.settings["encoder"], "model": encoder})
    elif is_import_path(settings.model):
        raise IndexProblem(
            f"{folder}: its encoder is code, {settings.model!r}, which is not run on an index's word; if you trust it, "
            f"name it: --encoder {settings.model}"
        )
    return load_encoder(settings, device=device, batch_size=batch_size)


def _last(path: Path) -> str:
    """A folder of this machine by its last name; anything else as it is."""
    return path.name if path.is_absolute() else str(path)


def _settings(folder: Path, manifest: Manifest, name: str, kind: type) -> Any:
    try:
        return kind(**manifest.settings[name])
    except (KeyError, TypeError) as error:
        raise IndexProblem(
            f"{folder}: its manifest has no proper {name} ({error}); build again with --force"
        ) from error
