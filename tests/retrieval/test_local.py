"""The index of words in the rollout process: shared, lazy, and never in the way of the event loop."""

import asyncio
import pickle
import threading
import time
from pathlib import Path

import pytest

from verl_drmas.retrieval import IndexProblem, QueryRejected, RetrievalSettings, open_retriever
from verl_drmas.retrieval import local as local_module
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.retrieval.encoder import EncoderSettings
from verl_drmas.retrieval.local import LocalRetriever

pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")


@pytest.fixture
def folder(corpus_file, tmp_path):
    build_index([corpus_file], tmp_path / "index", IndexSettings())
    return tmp_path / "index"


def search(retriever, query, k=2):
    return asyncio.run(retriever.search(query, k))


def test_settings_open_it_and_it_finds(folder):
    retriever = open_retriever(RetrievalSettings(local=str(folder)))
    assert isinstance(retriever, LocalRetriever)
    assert "5 passages" in retriever.check()
    assert [hit.passage.id for hit in search(retriever, "capital of Germany", 1)] == ["b"]
    assert search(retriever, "zebra") == []


def test_it_is_opened_at_the_first_search_and_once(folder, monkeypatch):
    opened, real = [], local_module.open_index
    monkeypatch.setattr(local_module, "open_index", lambda place: opened.append(place) or real(place))
    first, second = LocalRetriever(folder), LocalRetriever(folder / ".." / "index")
    assert opened == []

    async def many():
        return await asyncio.gather(*(r.search("capital", 3) for r in (first, second) for _ in range(20)))

    found = asyncio.run(many())
    assert len(opened) == 1 and all(hits == found[0] for hits in found) and len(found[0]) == 3
    search(second, "capital")
    assert len(opened) == 1


def test_the_folder_is_resolved_once(folder, monkeypatch):
    resolved, real = [], Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda path, *rest: resolved.append(path) or real(path, *rest))
    retriever = LocalRetriever(folder)
    for _ in range(3):
        search(retriever, "capital")
    assert resolved.count(folder) == 1
    assert pickle.loads(pickle.dumps(retriever)).check(2)


def test_a_check_searches_as_the_run_will(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(local_module._Shared, "search", lambda self, query, k: asked.append(k) or [])
    LocalRetriever(folder).check()
    LocalRetriever(folder).check(k=7)
    assert asked == [1, 7]


def test_the_event_loop_stays_free(folder, monkeypatch):
    retriever = LocalRetriever(folder)
    search(retriever, "capital")
    threads = set()

    def slow(self, query, k):
        threads.add(threading.current_thread())
        time.sleep(0.2)
        return []

    monkeypatch.setattr(local_module._Shared, "search", slow)

    async def ticks():
        searches = asyncio.gather(*(retriever.search("capital", 1) for _ in range(2)))
        count = 0
        while not searches.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    assert asyncio.run(ticks()) > 10
    assert len(threads) == 1 and threading.main_thread() not in threads


@pytest.mark.parametrize("query", ["", " \n\t", "x" * 4097])
def test_queries_at_fault_are_rejected(folder, query):
    with pytest.raises(QueryRejected):
        search(LocalRetriever(folder), query)


def test_a_query_of_4096_characters_is_answered(folder):
    assert search(LocalRetriever(folder), "capital " * 512)


def test_calls_are_counted_until_they_are_reported(folder):
    retriever = LocalRetriever(folder)
    search(retriever, "capital")
    with pytest.raises(QueryRejected):
        search(retriever, "")
    report = retriever.report()
    assert report.pop("seconds") > 0
    assert report == {"calls": 2, "rejected": 1, "retries": 0, "outages": 0}
    assert set(retriever.report().values()) == {0}


def test_what_cant_be_used_is_named(folder, corpus_file, tmp_path, stub_path):
    missing = LocalRetriever(tmp_path / "later")
    for use in (missing.check, lambda: search(missing, "capital")):
        with pytest.raises(IndexProblem, match="no such folder"):
            use()
    build_index([corpus_file], tmp_path / "later", IndexSettings())
    assert "5 passages" in missing.check()  # a failure is not kept

    pytest.importorskip("faiss")
    build_index([corpus_file], tmp_path / "dense", IndexSettings("dense", encoder=EncoderSettings(stub_path)))
    with pytest.raises(IndexProblem, match=r"kind dense.*retriever serve.*retrieval.urls"):
        LocalRetriever(tmp_path / "dense").check()
