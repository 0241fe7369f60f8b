"""`verl-drmas retriever index`."""

import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from verl_drmas.retrieval.index import open_index
from verl_drmas.retrieval.index_command import index_command
from verl_drmas.retrieval.words import PATTERN

for module in ("bm25s", "Stemmer", "faiss"):
    pytest.importorskip(module)

app = typer.Typer()
app.command("index")(index_command)


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def described(folder, encoder):
    return open_index(folder, encoder=encoder).describe()


def test_words_are_the_default_and_the_last_line_tells_what_it_took(corpus_file, tmp_path):
    done = run(corpus_file, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    line = done.stdout.strip().splitlines()[-1]
    numbers = r"5 passages in [\d.]+ s \([\d,]+ passages/s\), [\d,]+ MB on disk per million passages, peak memory \d"
    assert re.search(numbers, line), line
    assert open_index(tmp_path / "out").kind == "words"
    again = run(corpus_file, "-o", tmp_path / "out")
    assert again.exit_code == 0 and "2 parts were there already" in again.stdout


def test_every_option_reaches_the_index(corpus_file, tmp_path, stub_path):
    options = ["--kind", "hybrid", "--encoder", stub_path, "--query-prefix", "q ", "--passage-prefix", "", "--pooling"]
    options += ["cls", "--max-length", 77, "--no-normalise", "--faiss-kind", "hnsw", "--hnsw-m", 5, "--ef-construction"]
    options += [21, "--ef-search", 22, "--batch-size", 2, "--shard-size", 3, "--device", "cpu", "--force"]
    done = run(corpus_file, "-o", tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    about = described(tmp_path / "out", stub_path)
    assert about["encoder"] == {
        "model": stub_path,
        "query_prefix": "q ",
        "passage_prefix": "",
        "pooling": "cls",
        "max_length": 77,
        "normalise": False,
    }
    assert about["vectors"] | {"kind": "hnsw", "hnsw_m": 5, "ef_construction": 21, "ef_search": 22} == about["vectors"]
    assert about["shard_size"] == 3 and about["faiss"] == "IndexHNSWFlat"

    clusters = run(
        corpus_file, "-o", tmp_path / "ivf", *options[:4], "--faiss-kind", "ivf", "--nlist", 1, "--nprobe", 1
    )
    assert clusters.exit_code == 0 and described(tmp_path / "ivf", stub_path)["faiss"] == "IndexIVFFlat"
    taken = ["--kind", "dense", "--encoder", stub_path, "--faiss", tmp_path / "ivf" / "dense.faiss"]
    assert run(corpus_file, "-o", tmp_path / "taken", *taken).exit_code == 0
    assert described(tmp_path / "taken", stub_path)["faiss"] == "IndexIVFFlat"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kind", "sparse"], "kind is 'sparse'"),
        (["--kind", "dense"], "--encoder"),
        (["--kind", "dense", "--encoder", "no_module:X"], "can't be imported"),
        (["--kind", "dense", "--encoder", "x", "--pooling", "max"], "pooling is 'max'"),
        (["--kind", "dense", "--encoder", "x", "--faiss-kind", "pq"], "faiss.kind is 'pq'"),
        (["--kind", "dense", "--encoder", "x", "--batch-size", 0], "batch size is 0"),
        (["--k1", -1], "words.k1 is -1"),
        (["--b", 2], "words.b is 2"),
        (["--stemmer", "klingon"], "words.stemmer is 'klingon'"),
        (["--stopwords", "klingon"], "words.stopwords is 'klingon'"),
        (["--kind", "dense", "--encoder", "x", "--faiss", "none.index"], "none.index: no such file"),
    ],
)
def test_errors_are_one_line(corpus_file, tmp_path, options, said):
    done = run(corpus_file, "-o", tmp_path / "out", *options)
    assert done.exit_code == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0]
    assert done.stderr.strip().endswith(errors[0])


def test_the_options_of_words_reach_the_index(corpus_file, tmp_path):
    options = ["--stemmer", "german", "--stopwords", "none", "--k1", 1.2, "--b", 0.5]
    assert run(corpus_file, "-o", tmp_path / "out", *options).exit_code == 0
    words = described(tmp_path / "out", None)["words"]
    assert words == {"k1": 1.2, "b": 0.5, "stopwords": None, "stemmer": "german", "pattern": PATTERN}
    assert run(corpus_file, "-o", tmp_path / "plain", "--stemmer", "none").exit_code == 0
    assert described(tmp_path / "plain", None)["words"]["stemmer"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--encoder", "a/b", "--pooling", "cls"], "with --kind words these do nothing: --encoder, --pooling;"),
        (["--passage-prefix", ""], "--passage-prefix"),
        (["--faiss-kind", "flat"], "--faiss-kind"),
        (["--max-length", 256], "--max-length"),
        (["--no-normalise"], "--normalise"),
        (["--nprobe", 4, "--shard-size", 5], "--nprobe, --shard-size"),
        (["--device", "cpu"], "--device"),
        (["--faiss", "x.faiss"], "--faiss"),
        (["--kind", "dense", "--encoder", "x", "--stemmer", "none", "--k1", 1], "--kind dense these do nothing: --st"),
        (["--kind", "dense", "--encoder", "x", "--hnsw-m", 8], "with --faiss-kind flat these do nothing: --hnsw-m"),
        (["--kind", "dense", "--encoder", "x", "--faiss-kind", "hnsw", "--nlist", 8], "--faiss-kind hnsw"),
        (["--kind", "hybrid", "--encoder", "x", "--faiss", "x", "--ef-search", 8], "with --faiss these do nothing"),
    ],
)
def test_options_that_would_do_nothing_are_refused(corpus_file, tmp_path, options, said):
    done = run(corpus_file, "-o", tmp_path / "out", *options)
    assert done.exit_code == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr and "leave them out" in done.stderr
    assert not (tmp_path / "out").exists()


def test_other_settings_are_refused_until_forced(corpus_file, tmp_path, stub_path):
    out = tmp_path / "out"
    assert run(corpus_file, "-o", out).exit_code == 0
    dense = ["--kind", "dense", "--encoder", stub_path]
    refused = run(corpus_file, "-o", out, *dense)
    assert refused.exit_code == 1 and "--force" in refused.stderr
    assert run(corpus_file, "-o", out, *dense, "--force").exit_code == 0
    assert described(out, stub_path)["kind"] == "dense"


def test_help_loads_no_index_library():
    code = "import sys, verl_drmas.retrieval.index_command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"faiss", "bm25s", "torch", "sentence_transformers", "pyarrow", "numpy", "ray", "verl"}
    assert heavy & set(done.stdout.split()) == set()
