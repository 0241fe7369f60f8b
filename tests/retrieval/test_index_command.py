"""`verl-drmas retriever index`."""

import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from verl_drmas.retrieval.index import open_index
from verl_drmas.retrieval.index_command import index_command

for module in ("bm25s", "Stemmer", "faiss"):
    pytest.importorskip(module)

app = typer.Typer()
app.command("index")(index_command)


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


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
    about = open_index(tmp_path / "out").describe()
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
    assert clusters.exit_code == 0 and open_index(tmp_path / "ivf").describe()["faiss"] == "IndexIVFFlat"
    taken = ["--kind", "dense", "--encoder", stub_path, "--faiss", tmp_path / "ivf" / "dense.faiss"]
    assert run(corpus_file, "-o", tmp_path / "taken", *taken).exit_code == 0
    assert open_index(tmp_path / "taken").describe()["faiss"] == "IndexIVFFlat"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kind", "sparse"], "kind is 'sparse'"),
        (["--kind", "dense"], "--encoder"),
        (["--kind", "dense", "--encoder", "no_module:X"], "can't be imported"),
        (["--kind", "dense", "--encoder", "x", "--pooling", "max"], "pooling is 'max'"),
        (["--faiss-kind", "pq"], "faiss.kind is 'pq'"),
        (["--batch-size", 0], "batch size is 0"),
        (["--kind", "dense", "--encoder", "x", "--faiss", "none.index"], "none.index: no such file"),
    ],
)
def test_errors_are_one_line(corpus_file, tmp_path, options, said):
    done = run(corpus_file, "-o", tmp_path / "out", *options)
    assert done.exit_code == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0]
    assert done.stderr.strip().endswith(errors[0])


def test_other_settings_are_refused_until_forced(corpus_file, tmp_path, stub_path):
    out = tmp_path / "out"
    assert run(corpus_file, "-o", out).exit_code == 0
    dense = ["--kind", "dense", "--encoder", stub_path]
    refused = run(corpus_file, "-o", out, *dense)
    assert refused.exit_code == 1 and "--force" in refused.stderr
    assert run(corpus_file, "-o", out, *dense, "--force").exit_code == 0
    assert open_index(out).kind == "dense"


def test_help_loads_no_index_library():
    code = "import sys, verl_drmas.retrieval.index_command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"faiss", "bm25s", "torch", "sentence_transformers", "pyarrow", "numpy", "ray", "verl"}
    assert heavy & set(done.stdout.split()) == set()
