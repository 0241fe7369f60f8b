"""An index can be interrupted anywhere, and is the same afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_drmas.retrieval import IndexProblem
from verl_drmas.retrieval import build as build_module
from verl_drmas.retrieval import manifest as manifest_module
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.retrieval.dense import VectorSettings
from verl_drmas.retrieval.encoder import EncoderSettings
from verl_drmas.retrieval.index import open_index
from verl_drmas.retrieval.manifest import STAGES
from verl_drmas.retrieval.words import PATTERN, WordsSettings

for module in ("bm25s", "Stemmer", "faiss"):
    pytest.importorskip(module)


def hybrid(stub_path, **others):
    return IndexSettings("hybrid", encoder=EncoderSettings(stub_path), **{"shard_size": 100, **others})


def files(folder):
    """Name and content of every file that counts."""
    found = {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
    return found


def test_a_build_reports_what_it_took(many_file, tmp_path, stub_path):
    seen = []
    report = build_index([many_file], tmp_path / "out", hybrid(stub_path), lambda *now: seen.append(now))
    assert report.passages == 600 and report.reused == []
    assert report.passages_per_second == pytest.approx(600 / report.seconds)
    assert list(report.stages) == ["corpus", "words", "dense"] and sum(report.stages.values()) <= report.seconds
    assert report.disk_bytes == sum(map(len, files(tmp_path / "out").values()))
    assert report.disk_bytes_per_million == pytest.approx(report.disk_bytes / 600 * 1e6)
    assert report.peak_memory > 10_000_000
    size = many_file.stat().st_size
    last = {what: (done, total) for what, done, total in seen}
    assert last == {
        "inputs": (size, size),
        "read": (size, size),
        "words": (2400, 2400),
        "embed": (600, 600),
        "vectors": (600, 600),
    }
    names = {name.split("/")[0] for name in files(tmp_path / "out")}
    assert names == {"manifest.json", "passages.arrow", "words", "dense.faiss", "build.lock"}


def test_a_whole_index_is_not_built_again(many_file, tmp_path, stub_path):
    build_index([many_file], tmp_path / "out", hybrid(stub_path))
    before = files(tmp_path / "out")
    report = build_index([many_file], tmp_path / "out", hybrid(stub_path))
    assert report.reused == list(STAGES["hybrid"]) and report.stages == {}
    assert report.passages_per_second is None
    assert files(tmp_path / "out") == before


class Killed(BaseException):
    """What no code catches, as if the process were gone."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_rename_it_goes_on(many_file, tmp_path, stub_path, monkeypatch, after):
    """Renames are the moments at which a part becomes whole; each is tried, just before it and just after."""
    build_index([many_file], tmp_path / "whole", hybrid(stub_path))
    expected, rename = files(tmp_path / "whole"), os.replace
    for moment in range(100):
        out, left = tmp_path / f"{moment}", [moment]

        def counted(*places, left=left):
            left[0] -= 1
            if left[0] < 0 and not after:
                raise Killed
            rename(*places)
            if left[0] < 0:
                raise Killed

        monkeypatch.setattr(os, "replace", counted)
        try:
            build_index([many_file], out, hybrid(stub_path))
            break
        except Killed:
            monkeypatch.setattr(os, "replace", rename)
        if not (after and moment >= 12):
            with pytest.raises(IndexProblem):
                open_index(out)
        report = build_index([many_file], out, hybrid(stub_path))
        assert files(out) == expected, moment
        assert report.reused or moment <= 2 - after  # nothing was noted yet
    assert moment == 13  # manifest x 4, corpus, words, six shards, vectors


BUILD = """
import sys
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.retrieval.dense import VectorSettings
from verl_drmas.retrieval.encoder import EncoderSettings
settings = IndexSettings("hybrid", encoder=EncoderSettings("stub_encoder:Stub"), shard_size=100,
                         vectors=VectorSettings("ivf"))
build_index([sys.argv[1]], sys.argv[2], settings)
"""


@pytest.mark.long
def test_killed_for_real_nothing_finished_is_done_again(many_file, tmp_path, stub_path):
    """SIGKILL in the middle of the embeddings; the second run encodes only what has no shard."""
    settings = hybrid(stub_path, vectors=VectorSettings("ivf"))
    log, out = tmp_path / "log", tmp_path / "out"
    path = os.pathsep.join([str(tmp_path), str(Path(build_module.__file__).parents[2])])
    env = {**os.environ, "STUB_LOG": str(log), "STUB_PAUSE": "0.3", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(many_file), str(out)], env=env)
    limit = time.monotonic() + 120
    while not (out / "embeddings" / "00001.npy").exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    with pytest.raises(IndexProblem, match="another build is running"):
        build_index([many_file], out, settings)
    process.send_signal(signal.SIGKILL)
    process.wait()

    shards = {file.name: file.stat().st_mtime_ns for file in (out / "embeddings").glob("*.npy")}
    assert 2 <= len(shards) < 6
    with pytest.raises(IndexProblem, match=r"half built \(dense missing\); run the same"):
        open_index(out)
    log.write_text("")
    del env["STUB_PAUSE"]
    subprocess.run([sys.executable, "-c", BUILD, str(many_file), str(out)], env=env, check=True, timeout=120)
    assert sum(map(int, log.read_text().split())) == 600 - 100 * len(shards)

    build_index([many_file], tmp_path / "whole", settings)
    queries = ["thing5 likes", "Page 17", "thing300 thing301"]
    assert files(out) == files(tmp_path / "whole")
    there, whole = (open_index(folder, encoder=stub_path) for folder in (out, tmp_path / "whole"))
    assert there.search(queries, 20) == whole.search(queries, 20)


def test_words_alone_need_no_encoder(corpus_file, tmp_path):
    report = build_index([corpus_file], tmp_path / "out", IndexSettings())
    assert list(report.stages) == ["corpus", "words"]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"] == {
        "words": {"k1": 1.5, "b": 0.75, "stopwords": "english", "stemmer": "english", "pattern": PATTERN}
    }


def test_other_settings_or_inputs_are_refused_until_forced(many_file, corpus_file, tmp_path, stub_path):
    out = tmp_path / "out"
    build_index([many_file], out, hybrid(stub_path))
    before = files(out)
    refused = [
        ([many_file], IndexSettings("words"), "was built as hybrid, not words"),
        ([many_file], hybrid(stub_path, words=WordsSettings(b=0.1)), r"words.b was 0.75, is 0.1"),
        ([many_file], hybrid(stub_path, vectors=VectorSettings("hnsw")), r"vectors.kind was 'flat', is 'hnsw'"),
        ([many_file], hybrid(stub_path, shard_size=50), "shard_size was 100, is 50"),
        ([corpus_file], hybrid(stub_path), r"other inputs \(many.jsonl"),
        ([many_file, corpus_file], hybrid(stub_path), "other inputs"),
    ]
    for inputs, settings, said in refused:
        with pytest.raises(IndexProblem, match=f"{said}.*--force"):
            build_index(inputs, out, settings)
    assert files(out) == before
    report = build_index([corpus_file], out, IndexSettings(), force=True)
    assert report.passages == 5 and report.reused == []
    assert "dense.faiss" not in files(out)


def test_a_file_counts_by_its_content(corpus_file, tmp_path, monkeypatch):
    build_index([corpus_file], tmp_path / "out", IndexSettings())
    with monkeypatch.context() as patch:  # a file that was not touched is not read again
        patch.setattr(manifest_module, "fingerprint", None)
        assert build_index([corpus_file], tmp_path / "out", IndexSettings()).reused
    os.utime(corpus_file)  # touched, and the same
    assert build_index([corpus_file], tmp_path / "out", IndexSettings()).reused
    corpus_file.write_bytes(corpus_file.read_bytes().replace(b"river", b"RIVER"))
    with pytest.raises(IndexProblem, match="other inputs"):
        build_index([corpus_file], tmp_path / "out", IndexSettings())


def test_what_a_stopped_force_left_is_not_taken_for_new(many_file, tmp_path, stub_path, monkeypatch):
    """Shards of other settings, whose manifest is gone already."""
    out = tmp_path / "out"
    (out / "embeddings").mkdir(parents=True)
    (out / "build.lock").touch()
    (out / "embeddings" / "00000.npy").write_bytes(b"of another encoder")
    report = build_index([many_file], out, hybrid(stub_path))
    assert report.reused == []


def test_shards_of_an_encoder_that_changed_are_refused(many_file, tmp_path, stub_path, monkeypatch):
    real = build_module.build_vectors
    monkeypatch.setattr(build_module, "build_vectors", lambda *all: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        build_index([many_file], tmp_path / "out", hybrid(stub_path))
    monkeypatch.setattr(build_module, "build_vectors", real)
    monkeypatch.setattr("stub_encoder.Stub.dim", 30)
    with pytest.raises(IndexProblem, match=r"00000.npy: shape \(100, 24\)"):
        build_index([many_file], tmp_path / "out", hybrid(stub_path))


def test_an_index_that_is_there_takes_the_place_of_embedding(many_file, tmp_path, stub_path, monkeypatch):
    build_index([many_file], tmp_path / "first", hybrid(stub_path))
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    given = hybrid(stub_path, faiss_file=str(tmp_path / "first" / "dense.faiss"))
    build_index([many_file], tmp_path / "second", given)
    assert not (tmp_path / "log").exists()
    query = ["thing9 likes thing63"]
    second, first = (open_index(tmp_path / name, encoder=stub_path) for name in ("second", "first"))
    assert second.search(query, 5) == first.search(query, 5)
    with pytest.raises(IndexProblem, match="no such file"):
        build_index([many_file], tmp_path / "third", hybrid(stub_path, faiss_file="gone.index"))


def test_folders_that_are_not_ours_are_left_alone(corpus_file, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("do not lose")
    for force in (False, True):
        with pytest.raises(IndexProblem, match="holds other files"):
            build_index([corpus_file], foreign, IndexSettings(), force=force)
    assert files(foreign) == {"thesis.txt": b"do not lose"}
    with pytest.raises(IndexProblem, match="is a file"):
        build_index([corpus_file], corpus_file, IndexSettings())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "sparse"}, "kind is 'sparse'"),
        ({"kind": "dense"}, "no encoder is given"),
        ({"encoder": EncoderSettings("x")}, "takes no vectors, but an encoder"),
        ({"faiss_file": "x"}, "takes no vectors, but a faiss index"),
        ({"shard_size": 0}, "shard_size is 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given, said):
    with pytest.raises(IndexProblem, match=said):
        IndexSettings(**given)


def test_nothing_is_written_for_inputs_that_are_missing(tmp_path):
    with pytest.raises(IndexProblem, match="no such file"):
        build_index([tmp_path / "no.jsonl"], tmp_path / "out", IndexSettings())
    with pytest.raises(IndexProblem, match="batch size is 0"):
        (tmp_path / "in.jsonl").write_text('{"text": "a b"}')
        build_index([tmp_path / "in.jsonl"], tmp_path / "out", IndexSettings(), batch_size=0)
    assert not (tmp_path / "out").exists()
