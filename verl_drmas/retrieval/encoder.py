"""Text to vectors: any sentence-transformers or plain transformers model, or an encoder of the user's own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np

from verl_drmas.retrieval.errors import IndexProblem

CPU_BATCH = 16
Pooling = Literal["mean", "cls", "last"]
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_E5 = re.compile(r"(?<![a-z0-9])e5(?![a-z0-9])", re.IGNORECASE)


class Encoder(Protocol):
    """What an index needs of an encoder. Called from one thread at a time."""

    dim: int

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Vectors of queries, float32, (n, dim)."""
        ...

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        """Vectors of passages, float32, (n, dim)."""
        ...


@dataclass(frozen=True)
class EncoderSettings:
    """Which encoder, and how it is used; queries and passages must be encoded alike.

    Attributes:
        model: Hugging Face id or folder of a sentence-transformers or transformers model, or `package.module:name` of
            something that gives an `Encoder` when it is called without arguments (the settings below it then minds
            itself, but for `normalise`).
        query_prefix: Put before each query; None means `query: ` for E5 models, else what the model itself declares.
        passage_prefix: Put before each passage; None means `passage: ` for E5 models, else as declared.
        pooling: How token vectors become one; None means what the model declares, or the mean.
        max_length: Tokens of a text that are read.
        normalise: Bring vectors to length 1, so that the inner product is the cosine.
    """

    model: str
    query_prefix: str | None = None
    passage_prefix: str | None = None
    pooling: Pooling | None = None
    max_length: int = 256
    normalise: bool = True

    def __post_init__(self):
        if not self.model:
            raise IndexProblem("encoder is empty; give a Hugging Face id, a folder or package.module:name")
        if self.pooling not in (None, *get_args(Pooling)):
            raise IndexProblem(f"encoder.pooling is {self.pooling!r}; use one of {', '.join(get_args(Pooling))}")
        if self.max_length < 1:
            raise IndexProblem(f"encoder.max_length is {self.max_length}; it must be above 0")


def load_encoder(settings: EncoderSettings, *, device: str | None = None, batch_size: int = 64) -> Encoder:
    """The encoder that the settings name.

    Args:
        settings: Which encoder, and how it is used.
        device: Where it runs, such as `cpu` or `cuda:0`; None takes a GPU where there is one.
        batch_size: Texts that are encoded at once, at most; fewer on a CPU.

    Raises:
        IndexProblem: It can't be loaded.
    """
    if is_import_path(settings.model):
        return _imported(settings.model)
    return SentenceEncoder(settings, device=device, batch_size=batch_size)


def is_import_path(model: str) -> bool:
    """Whether this is `package.module:name`: code to run, and no model's id or folder."""
    return _IMPORT_PATH.fullmatch(model) is not None


def embed(encoder: Encoder, texts: Sequence[str], *, queries: bool, normalise: bool) -> np.ndarray:
    """Vectors as an index takes them, whoever made the encoder.

    Args:
        encoder: Asked once with all texts.
        texts: Queries or passages.
        queries: Which of them.
        normalise: Bring them to length 1.

    Returns:
        float32, C order, (n, dim).

    Raises:
        IndexProblem: The encoder gave another shape, or numbers that are not finite.
    """
    if not texts:
        return np.zeros((0, encoder.dim), dtype=np.float32)
    made = encoder.encode_queries(list(texts)) if queries else encoder.encode_passages(list(texts))
    vectors = np.ascontiguousarray(made, dtype=np.float32)
    if vectors.shape != (len(texts), encoder.dim):
        raise IndexProblem(f"encoder gave shape {vectors.shape} for {len(texts)} texts; ({len(texts)}, {encoder.dim})")
    if not np.isfinite(vectors).all():
        raise IndexProblem("encoder gave vectors with nan or inf; try another device or precision")
    if normalise:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors


class SentenceEncoder:
    """A model by sentence-transformers; in half precision on a GPU."""

    def __init__(self, settings: EncoderSettings, *, device: str | None = None, batch_size: int = 64):
        self._query_prefix, self._passage_prefix = prefixes(settings)
        self._model = _load(settings, device)
        self._model.eval()
        if self._model.device.type == "cuda":
            self._model.half()
        else:  # without a GPU, padding to the longest text of a batch costs more than a large batch saves
            batch_size = min(batch_size, CPU_BATCH)
        self._batch_size = batch_size
        own = self._model.max_seq_length
        self._model.max_seq_length = min(settings.max_length, own) if own else settings.max_length
        self.dim: int = self._model.get_embedding_dimension()

    @property
    def device(self) -> str:
        return str(self._model.device)

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Vectors of queries, float32, (n, dim)."""
        return self._encode(self._model.encode_query, self._query_prefix, texts)

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        """Vectors of passages, float32, (n, dim)."""
        return self._encode(self._model.encode_document, self._passage_prefix, texts)

    def _encode(self, declared, prefix: str | None, texts: list[str]) -> np.ndarray:
        # without a prefix of ours the model's own prompts hold; "" is a prefix and turns them off
        encode, extra = (declared, {}) if prefix is None else (self._model.encode, {"prompt": prefix})
        vectors = encode(texts, batch_size=self._batch_size, show_progress_bar=False, convert_to_numpy=True, **extra)
        return vectors.astype(np.float32, copy=False)


def prefixes(settings: EncoderSettings) -> tuple[str | None, str | None]:
    """Prefix of queries and of passages; None where the model's own prompts hold."""
    # the last part of a path, or the one that names the model in a Hugging Face cache
    parts = Path(settings.model).parts[-1:] + tuple(p for p in Path(settings.model).parts if p.startswith("models--"))
    e5 = any(_E5.search(part) for part in parts)
    query = "query: " if e5 and settings.query_prefix is None else settings.query_prefix
    passage = "passage: " if e5 and settings.passage_prefix is None else settings.passage_prefix
    return query, passage


def _load(settings: EncoderSettings, device: str | None):
    try:
        import sentence_transformers
        from sentence_transformers.sentence_transformer import modules
    except ImportError as error:
        raise IndexProblem(
            f"encoder {settings.model!r} needs sentence-transformers ({error}); pip install sentence-transformers"
        ) from error
    try:
        if settings.pooling is None:
            return sentence_transformers.SentenceTransformer(settings.model, device=device)
        reader = modules.Transformer(settings.model)
        mode = {"last": "lasttoken"}.get(settings.pooling, settings.pooling)
        pooling = modules.Pooling(reader.get_embedding_dimension(), pooling_mode=mode)
        return sentence_transformers.SentenceTransformer(modules=[reader, pooling], device=device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise IndexProblem(
            f"encoder {settings.model!r}: can't be loaded ({type(error).__name__}: {reason}); "
            "give a Hugging Face id or the folder of a model, and a device that is there"
        ) from error


def _imported(path: str) -> Encoder:
    module, _, name = path.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise IndexProblem(f"encoder {path!r}: can't be imported ({error}); check PYTHONPATH and the name") from error
    try:
        encoder = make()
    except TypeError as error:
        raise IndexProblem(f"encoder {path!r}: can't be called without arguments ({error}); wrap it") from error
    missing = [name for name in ("dim", "encode_queries", "encode_passages") if not hasattr(encoder, name)]
    if missing:
        raise IndexProblem(f"encoder {path!r} gives {type(encoder).__name__}, without {', '.join(missing)}; add that")
    return encoder
