"""Search by vectors (faiss): exact, over a graph, or over clusters."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from verl_drmas.retrieval.errors import IndexProblem
from verl_drmas.retrieval.fusion import Ranking, ranked
from verl_drmas.retrieval.manifest import whole_file

FILE = "dense.faiss"
FaissKind = Literal["flat", "hnsw", "ivf"]
_SAMPLES_PER_LIST = 64  # vectors that train one cluster; faiss asks for 39 at least
_FEWEST_PER_LIST = 39


@dataclass(frozen=True)
class VectorSettings:
    """How vectors are searched, always by inner product.

    Attributes:
        kind: `flat` compares with every passage (exact); `hnsw` walks a graph; `ivf` looks into some clusters.
        hnsw_m: Neighbours of a passage in the graph.
        ef_construction: Candidates looked at when the graph is built.
        ef_search: Candidates looked at in a search.
        nlist: Clusters; None means four times the root of the passages, and at least 39 passages each.
        nprobe: Clusters looked into; None means a thirty-second of them, and at least 8.
    """

    kind: FaissKind = "flat"
    hnsw_m: int = 32
    ef_construction: int = 200
    ef_search: int = 128
    nlist: int | None = None
    nprobe: int | None = None

    def __post_init__(self):
        if self.kind not in get_args(FaissKind):
            raise IndexProblem(f"faiss.kind is {self.kind!r}; use one of {', '.join(get_args(FaissKind))}")
        for name in ("hnsw_m", "ef_construction", "ef_search", "nlist", "nprobe"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise IndexProblem(f"faiss.{name} is {value}; it must be above 0")

    def lists(self, passages: int) -> int:
        """Clusters for so many passages."""
        most = max(1, passages // _FEWEST_PER_LIST)
        return min(self.nlist or max(1, round(4 * math.sqrt(passages))), most)


class VectorIndex:
    """The vector part of an index."""

    def __init__(self, index, where: str):
        self._index = index
        self._where = where

    @classmethod
    def open(cls, folder: Path, passages: int, dim: int, *, gpu: bool = False) -> VectorIndex:
        """Map the file into memory, or move it to all GPUs.

        Args:
            folder: Of the index.
            passages: How many vectors there must be.
            dim: Of the encoder's vectors.
            gpu: Copy to the GPUs, in half precision, each taking a share of the passages.

        Raises:
            IndexProblem: The file is missing or damaged, or of another corpus or encoder; or there is no GPU for it.
        """
        index = _read(folder / FILE, mapped=not gpu)
        _check(index, folder / FILE, passages, dim)
        if gpu:
            return cls(_to_gpus(index), "gpu")
        return cls(index, "cpu")

    def search(self, vectors: np.ndarray, k: int) -> list[Ranking]:
        """The best rows for each vector, float32 (n, dim); fewer than `k` where clusters or passages run out."""
        if not len(vectors):
            return []
        scores, rows = self._index.search(vectors, min(k, self._index.ntotal))
        return [ranked(r[r >= 0], s[r >= 0], k) for r, s in zip(rows, scores, strict=True)]

    def describe(self) -> dict[str, str]:
        """Type of the index, and where it lies."""
        return {"faiss": type(self._index).__name__, "faiss_on": self._where}


def build_vectors(
    shards: Sequence[Path], folder: Path, settings: VectorSettings, tick: Callable[[int], None] | None = None
) -> None:
    """Index the vectors of `.npy` shards, float32 (rows, dim), in their order.

    Memory holds the whole index (4 bytes x dim a passage, and the graph) and one shard. The same shards give the same
    file; a graph does so only with one thread (`OMP_NUM_THREADS=1`).

    Args:
        shards: Files of embeddings.
        folder: Where the file appears when it is whole.
        settings: Kind and parameters.
        tick: Called with the passages added so far.
    """
    faiss = _import_faiss()
    arrays = [np.load(shard, mmap_mode="r") for shard in shards]
    passages, dim = sum(map(len, arrays)), arrays[0].shape[1]
    if settings.kind == "flat":
        index = faiss.IndexFlatIP(dim)
    elif settings.kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, settings.hnsw_m, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = settings.ef_construction
        index.hnsw.efSearch = settings.ef_search
    else:
        lists = settings.lists(passages)
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.train(_sample(arrays, min(passages, lists * _SAMPLES_PER_LIST)))
        index.nprobe = min(lists, settings.nprobe or max(8, lists // 32))
    for array in arrays:
        index.add(np.ascontiguousarray(array))
        if tick:
            tick(index.ntotal)
    with whole_file(folder / FILE) as part:
        faiss.write_index(index, str(part))


def adopt_vectors(file: Path, folder: Path, passages: int, dim: int) -> None:
    """Take a faiss index that is there already: a hard link to it, or a copy where that can't be.

    Raises:
        IndexProblem: It is no faiss index, or one of another corpus, encoder or metric.
    """
    _check(_read(file, mapped=True), file, passages, dim)
    with whole_file(folder / FILE) as part:
        part.unlink(missing_ok=True)
        try:
            os.link(file.resolve(), part)
        except OSError:  # another file system, or one without links
            shutil.copyfile(file, part)


def _sample(arrays: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Vectors drawn evenly from all shards, the same ones each time."""
    ends = np.cumsum([len(array) for array in arrays])
    chosen = np.sort(np.random.default_rng(0).choice(ends[-1], size=count, replace=False))
    parts = []
    for array, end in zip(arrays, ends, strict=True):
        start = end - len(array)
        parts.append(array[chosen[(chosen >= start) & (chosen < end)] - start])
    return np.concatenate(parts)


def _read(path: Path, *, mapped: bool):
    faiss = _import_faiss()
    if not path.is_file():
        raise IndexProblem(f"{path}: no such file; give a faiss index, or build the index again with --force")
    try:
        # IFC maps all three kinds; IO_FLAG_MMAP maps only the lists of an IVF index
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise IndexProblem(f"{path}: no faiss index ({reason}); give another, or build again with --force") from error


def _check(index, path: Path, passages: int, dim: int) -> None:
    if index.ntotal != passages:
        raise IndexProblem(f"{path}: has {index.ntotal} vectors, the corpus {passages} passages; they belong together")
    if index.d != dim:
        raise IndexProblem(f"{path}: has vectors of {index.d} numbers, the encoder's have {dim}; use its own encoder")
    if index.metric_type != _import_faiss().METRIC_INNER_PRODUCT:
        raise IndexProblem(f"{path}: compares by metric {index.metric_type}; build it with METRIC_INNER_PRODUCT")


def _to_gpus(index):
    faiss = _import_faiss()
    if not hasattr(faiss, "GpuMultipleClonerOptions"):
        raise IndexProblem("faiss_gpu: this faiss is built without GPUs; install faiss-gpu, or leave it on the CPU")
    if faiss.get_num_gpus() == 0:
        raise IndexProblem("faiss_gpu: faiss sees no GPU; check CUDA_VISIBLE_DEVICES, or leave it on the CPU")
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise IndexProblem(
            f"faiss_gpu: {type(index).__name__} can't go to a GPU ({reason}); use flat or ivf, or leave it on the CPU"
        ) from error


def _import_faiss():
    try:
        import faiss
    except ImportError as error:
        raise IndexProblem(f"search by vectors needs faiss ({error}); pip install faiss-cpu") from error
    return faiss
