"""Vectors: each kind of faiss index is built, mapped and searched; another's index is taken only if it fits."""

import itertools
import os

import numpy as np
import pytest

from verl_drmas.retrieval import IndexProblem
from verl_drmas.retrieval import dense as dense_module
from verl_drmas.retrieval.dense import FILE, VectorIndex, VectorSettings, adopt_vectors, build_vectors

faiss = pytest.importorskip("faiss")

KINDS = ("flat", "hnsw", "ivf")


def unit(rows, dim=16, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def shards(folder, vectors, size=300):
    paths = []
    for start in range(0, len(vectors), size):
        paths.append(folder / f"{start}.npy")
        np.save(paths[-1], vectors[start : start + size])
    return paths


@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_are_found_in_the_mapped_file(tmp_path, kind):
    vectors, ticks = unit(1000), []
    build_vectors(shards(tmp_path, vectors), tmp_path, VectorSettings(kind, nprobe=25), ticks.append)
    assert ticks == [300, 600, 900, 1000]
    index = VectorIndex.open(tmp_path, 1000, 16)
    found = index.search(vectors[:50], 5)
    exact = np.argsort(-(vectors[:50] @ vectors.T), axis=1)[:, :5]
    hits = [len(set(e) & {row for row, _ in f}) for e, f in zip(exact.tolist(), found, strict=True)]
    assert [f[0][0] for f in found] == list(range(50))
    assert found[0][0][1] == pytest.approx(1, abs=1e-5)
    assert sum(hits) == 250 if kind != "hnsw" else sum(hits) > 240
    assert all(a >= b for f in found for (_, a), (_, b) in itertools.pairwise(f))
    assert index.search(np.zeros((0, 16), np.float32), 3) == []
    assert index.describe() == {"faiss": type(index._index).__name__, "faiss_on": "cpu"}


@pytest.mark.parametrize("kind", KINDS)
def test_mapped_means_not_copied(tmp_path, kind):
    """The process grows by far less memory of its own than the file is large."""
    vectors = unit(20_000, 128) if kind != "hnsw" else unit(2_000, 2048)
    settings = VectorSettings(kind, nlist=20, hnsw_m=16, ef_construction=40)
    build_vectors(shards(tmp_path, vectors, 20_000), tmp_path, settings)
    before = anonymous_bytes()
    index = VectorIndex.open(tmp_path, len(vectors), vectors.shape[1])
    grown = anonymous_bytes() - before
    assert index.search(vectors[:1], 1)[0][0][0] == 0
    assert grown < 0.3 * (tmp_path / FILE).stat().st_size


def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.parametrize("kind", KINDS)
def test_k_above_the_passages_gives_what_there_is(tmp_path, kind):
    vectors = unit(10)
    build_vectors(shards(tmp_path, vectors), tmp_path, VectorSettings(kind))
    found = VectorIndex.open(tmp_path, 10, 16).search(vectors[:2], 50)
    assert [sorted(row for row, _ in ranking) for ranking in found] == [list(range(10))] * 2


def test_clusters_that_are_not_looked_into_leave_fewer_hits(tmp_path):
    vectors = unit(1000)
    build_vectors(shards(tmp_path, vectors), tmp_path, VectorSettings("ivf", nprobe=1))
    assert 1 <= len(VectorIndex.open(tmp_path, 1000, 16).search(vectors[:1], 1000)[0]) < 1000


def test_settings_of_a_graph_reach_faiss_and_the_file(tmp_path):
    build_vectors(shards(tmp_path, unit(50)), tmp_path, VectorSettings("hnsw", 5, 33, 77))
    index = VectorIndex.open(tmp_path, 50, 16)._index
    assert (index.hnsw.efConstruction, index.hnsw.efSearch) == (33, 77)
    assert index.hnsw.nb_neighbors(1) == 5


def test_clusters_follow_the_number_of_passages():
    settings = VectorSettings("ivf")
    assert settings.lists(21_000_000) == 18330
    assert settings.lists(1000) == 1000 // 39
    assert settings.lists(5) == 1
    assert VectorSettings("ivf", nlist=7).lists(1000) == 7
    assert VectorSettings("ivf", nlist=700).lists(1000) == 25


@pytest.mark.parametrize("settings", [{"kind": "pq"}, {"nlist": 0}, {"ef_search": -1}])
def test_wrong_settings_are_named(settings):
    with pytest.raises(IndexProblem, match=f"faiss.{next(iter(settings))} is"):
        VectorSettings(**settings)


def write(path, index, vectors):
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize("linked", [True, False])
def test_an_index_that_is_there_is_taken(tmp_path, linked, monkeypatch):
    vectors = unit(40)
    file = write(tmp_path / "e5_Flat.index", faiss.IndexFlatIP(16), vectors)
    if not linked:
        monkeypatch.setattr(os, "link", lambda *places: (_ for _ in ()).throw(OSError("no links here")))
    out = tmp_path / "out"
    out.mkdir()
    adopt_vectors(file, out, 40, 16)
    assert [name.name for name in out.iterdir()] == [FILE]
    assert ((out / FILE).stat().st_ino == file.stat().st_ino) == linked
    assert VectorIndex.open(out, 40, 16).search(vectors[3:4], 1)[0][0][0] == 3


@pytest.mark.parametrize(
    ("passages", "dim", "make", "said"),
    [
        (41, 16, faiss.IndexFlatIP, "has 40 vectors, the corpus 41"),
        (40, 384, faiss.IndexFlatIP, "vectors of 16 numbers, the encoder's have 384"),
        (40, 16, faiss.IndexFlatL2, "metric"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, passages, dim, make, said):
    file = write(tmp_path / "other.index", make(16), unit(40))
    with pytest.raises(IndexProblem, match=said):
        adopt_vectors(file, tmp_path, passages, dim)
    assert not (tmp_path / FILE).exists()


def test_a_file_that_is_no_index_is_named(tmp_path):
    (tmp_path / FILE).write_bytes(b"not an index at all")
    with pytest.raises(IndexProblem, match=r"no faiss index .*--force"):
        VectorIndex.open(tmp_path, 1, 16)
    (tmp_path / FILE).unlink()
    with pytest.raises(IndexProblem, match="no such file"):
        VectorIndex.open(tmp_path, 1, 16)


def test_gpus_are_refused_where_faiss_has_none(tmp_path, monkeypatch):
    build_vectors(shards(tmp_path, unit(10)), tmp_path, VectorSettings())
    monkeypatch.delattr(faiss, "GpuMultipleClonerOptions", raising=False)
    with pytest.raises(IndexProblem, match="built without GPUs"):
        VectorIndex.open(tmp_path, 10, 16, gpu=True)


def test_gpus_get_shards_in_half_precision(tmp_path, monkeypatch):
    """With a faiss that has the calls; no GPU is touched."""
    build_vectors(shards(tmp_path, unit(10)), tmp_path, VectorSettings())

    class Options:
        useFloat16 = shard = False

    moved = []
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", Options, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", lambda index, co: moved.append(co) or index, raising=False)
    assert VectorIndex.open(tmp_path, 10, 16, gpu=True).describe()["faiss_on"] == "gpu"
    assert moved[0].useFloat16 and moved[0].shard
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    with pytest.raises(IndexProblem, match="sees no GPU"):
        VectorIndex.open(tmp_path, 10, 16, gpu=True)


def test_training_vectors_come_from_every_shard(tmp_path):
    arrays = [np.full((size, 2), number, np.float32) for number, size in enumerate((10, 200, 90))]
    drawn = dense_module._sample(arrays, 100)
    assert drawn.shape == (100, 2) and set(drawn[:, 0]) == {0, 1, 2}
    assert np.array_equal(drawn, dense_module._sample(arrays, 100))
