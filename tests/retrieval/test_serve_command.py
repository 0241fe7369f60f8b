import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
import typer
from typer.testing import CliRunner

from verl_drmas.retrieval import IndexProblem, serve_command
from verl_drmas.retrieval.limits import ServerSettings

pytestmark = pytest.mark.long

RUN = "import typer; from verl_drmas.retrieval.serve_command import serve_command as serve; typer.run(serve)"


def test_the_command_is_there_without_the_servers_libraries():
    heavy = "('fastapi', 'uvicorn', 'aiohttp', 'orjson', 'prometheus_client', 'faiss', 'bm25s', 'torch', 'ray', 'verl')"
    code = f"import sys, verl_drmas.retrieval.serve_command; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


class Index:
    kind = "echo"

    def __init__(self, passages=7):
        self.passages = passages

    def __len__(self):
        return self.passages


@pytest.fixture
def start(monkeypatch):
    """Runs the command with an index that is never read; what it would have served is in `served`."""
    app = typer.Typer()
    app.command()(serve_command.serve_command)

    def run(*arguments, index=None, problem=None):
        def open_index(folder, **options):
            run.opened = (str(folder), options)
            if problem:
                raise problem
            return Index() if index is None else index

        def serve(index, settings, bound, *, grace):
            run.served = (index, settings, bound.getsockname(), grace)

        monkeypatch.setattr("verl_drmas.retrieval.index.open_index", open_index)
        monkeypatch.setattr(serve_command, "serve", serve)
        return CliRunner().invoke(app, ["folder", "--port", "0", *arguments])

    run.served = run.opened = None
    return run


def test_the_options_reach_the_server(start):
    result = start(
        *("--topk", "5", "--max-topk", "50", "--max-batch", "8", "--max-wait-ms", "1.5", "--max-queue", "100"),
        *("--max-queries", "10"),
        *("--max-query-chars", "99", "--cache", "0", "--device", "cuda:1", "--faiss-gpu", "--encoder", "a.b:c"),
        *("--grace", "3"),
    )
    assert result.exit_code == 0, result.output
    _, settings, (host, port), grace = start.served
    assert settings == ServerSettings(
        topk=5, max_topk=50, max_batch=8, max_wait_ms=1.5, max_queue=100, max_queries=10, max_query_chars=99, cache=0
    )
    assert (host, grace) == ("127.0.0.1", 3.0) and port > 0
    assert start.opened == ("folder", {"device": "cuda:1", "faiss_gpu": True, "encoder": "a.b:c"})


def test_without_options_it_is_the_settings_defaults_on_the_loopback(start):
    result = start()
    assert (result.exit_code, result.output) == (0, "")
    assert start.served[1] == ServerSettings()


def test_an_address_that_others_reach_is_served_with_a_warning(start):
    result = start("--host", "0.0.0.0")
    assert result.exit_code == 0 and start.served
    assert result.stderr == "warning: 0.0.0.0 is open to other machines, and nobody has to log in to search\n"
    assert start("--host", "localhost").stderr == ""


def refused(result):
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_an_index_without_passages_is_refused(start):
    assert "the index has no passages; build it" in refused(start(index=Index(0)))
    assert start.served is None


def test_an_index_that_cannot_be_used_is_one_line(start):
    assert "folder: broken" in refused(start(problem=IndexProblem("folder:\n broken")))


def test_a_wrong_setting_is_one_line_and_nothing_is_loaded(start):
    assert "--max-batch is 0: give at least 1" in refused(start("--max-batch", "0"))
    assert start.opened is None


def test_a_port_that_is_taken_is_one_line_and_nothing_is_loaded(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused(start("--port", str(port)))
    assert f"can't listen on 127.0.0.1 port {port}: Address already in use; give another --port" in line
    assert start.opened is None


def test_a_host_that_is_none_is_one_line(start):
    assert "--host 999.1.1.1: no such address" in refused(start("--host", "999.1.1.1"))


@pytest.mark.parametrize("library", ["fastapi", "uvicorn", "prometheus_client", "orjson"])
def test_a_library_that_is_missing_is_one_line_and_nothing_is_loaded(start, monkeypatch, library):
    monkeypatch.delitem(sys.modules, "verl_drmas.retrieval.app", raising=False)  # so that it is imported anew
    monkeypatch.setitem(sys.modules, library, None)
    line = refused(start())
    assert library in line and "pip install 'verl-drmas[retriever]'" in line
    assert start.opened is None


@pytest.mark.parametrize("option", [["--device", "cpu"], ["--encoder", "a.b:c"], ["--faiss-gpu"]])
def test_options_that_do_nothing_for_words_are_refused(tmp_path, option):
    from verl_drmas.retrieval.build import IndexSettings, build_index

    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "Oslo", "text": "a town"}\n')
    build_index([tmp_path / "corpus.jsonl"], tmp_path / "index", IndexSettings())
    app = typer.Typer()
    app.command()(serve_command.serve_command)
    line = refused(CliRunner().invoke(app, [str(tmp_path / "index"), "--port", "0", *option]))
    assert "is an index of words" in line and f"leave out {option[0][2:].replace('-', '_')}" in line


def test_a_real_index_is_served_until_ctrl_c(tmp_path):
    from verl_drmas.retrieval.build import IndexSettings, build_index

    corpus = tmp_path / "corpus.jsonl"
    towns = {"Oslo": "the capital of Norway", "Rome": "the capital of Italy", "Bern": "a quiet town"}
    corpus.write_text(
        "".join(json.dumps({"id": town, "title": town, "text": text}) + "\n" for town, text in towns.items())
    )
    build_index([corpus], tmp_path / "index", IndexSettings(kind="words"))
    command = [sys.executable, "-c", RUN, str(tmp_path / "index"), "--port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving 3 passages (words) on http://127.0.0.1:"), process.stderr.read()
        url = line.split()[-1]
        body = json.dumps({"queries": ["norway", "italy"], "topk": 1, "return_scores": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
            result = json.load(answer)["result"]
        assert [hits[0]["document"]["title"] for hits in result] == ["Oslo", "Rome"]
        with urllib.request.urlopen(url.replace("/retrieve", "/health"), timeout=10) as answer:
            assert json.load(answer)["passages"] == 3
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
        process.communicate()
