import json
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from verl_drmas.retrieval import Hit, Passage
from verl_drmas.retrieval.app import create_app
from verl_drmas.retrieval.limits import ServerSettings

TIGHT = ServerSettings(
    topk=2, max_topk=5, max_batch=4, max_wait_ms=0, max_queue=4, max_queries=3, max_query_chars=30, cache=8
)


class Index:
    kind = "echo"

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Semaphore(0)

    def __len__(self):
        return 1234

    def describe(self):
        return {"built": "today"}

    def search(self, queries, k):
        self.asked.release()
        assert self.gate.wait(10)
        if "break the index, please" in queries:
            raise RuntimeError("the index is broken")
        return [[Hit(Passage(str(i), f"about {query}", "text"), 1.0 / (i + 1)) for i in range(k)] for query in queries]


@pytest.fixture(scope="module")
def index():
    return Index()


@pytest.fixture(scope="module")
def server(index):
    with TestClient(create_app(index, TIGHT), raise_server_exceptions=False) as client:
        yield client


def sample(server, name):
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_search_r1s_dialect(server):
    answer = server.post("/retrieve", json={"queries": ["a", "b"], "topk": 1, "return_scores": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    document = {"id": "0", "title": "about a", "text": "text", "contents": '"about a"\ntext'}
    first, second = answer.json()["result"]
    assert first == [{"document": document, "score": 1.0}]
    assert [hit["document"]["title"] for hit in second] == ["about b"]


def test_the_references_dialect(server):
    answer = server.post("/retrieve", json={"query": "a"})
    assert answer.status_code == 200
    (documents,) = answer.json()["result"]
    assert [document["contents"] for document in documents] == ['"about a"\ntext'] * 2


@pytest.mark.parametrize(
    "body, status, reason, named",
    [
        ({"query": "a" * 31}, 413, "query_chars", "the limit is 30"),
        ({"query": "a" * 10_000}, 413, "query_chars", "10000 characters"),
        ({"queries": ["a"] * 4}, 413, "queries", "may have 3"),
        ({"query": "a", "topk": 6}, 422, "topk", "gives 5 at most"),
        ({"query": ""}, 422, "blank", "blank"),
        ({"q": "a"}, 422, "malformed", "neither is there"),
        ({"query": "a", "pad": "x" * TIGHT.max_body_bytes}, 413, "body", f"{TIGHT.max_body_bytes} bytes"),
    ],
)
def test_what_is_above_a_limit_is_refused_in_one_line_and_counted(server, body, status, reason, named):
    before = sample(server, f'retriever_rejected_total{{reason="{reason}"}}')
    answer = server.post("/retrieve", json=body)
    assert answer.status_code == status
    assert named in answer.json()["detail"] and "\n" not in answer.json()["detail"]
    assert answer.json()["reason"] == reason
    assert sample(server, f'retriever_rejected_total{{reason="{reason}"}}') == before + 1


def test_health_tells_what_is_served(server):
    answer = server.get("/health")
    assert answer.status_code == 200
    told = answer.json()
    assert (told["status"], told["kind"], told["passages"]) == ("ok", "echo", 1234)
    assert told["settings"]["max_query_chars"] == 30 and told["index"] == {"built": "today"}
    assert told["version"]


def test_an_error_of_the_index_is_a_500_of_that_request_alone(server, caplog):
    answer = server.post("/retrieve", json={"query": "break the index, please"})
    assert answer.status_code == 500
    assert answer.json()["detail"] == "the search failed: RuntimeError: the index is broken"
    assert "Traceback" in caplog.text
    assert server.post("/retrieve", json={"query": "a"}).status_code == 200


def test_a_full_queue_is_a_429_with_retry_after(server, index):
    index.gate.clear()
    answers = {}
    while index.asked.acquire(blocking=False):
        pass

    def ask(*queries):
        answers[queries] = server.post("/retrieve", json={"queries": queries})

    threads = [threading.Thread(target=ask, args=("runs",))]
    threads[0].start()
    assert index.asked.acquire(timeout=10)
    for queries in (("w1", "w2"), ("w3", "w4")):
        threads.append(threading.Thread(target=ask, args=queries))
        threads[-1].start()
    for _ in range(1000):
        if sample(server, "retriever_queue_depth") == 4:
            break
    refused = server.post("/retrieve", json={"query": "one more"})
    index.gate.set()
    for thread in threads:
        thread.join(10)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "4 queries wait, the limit is 4" in refused.json()["detail"]
    assert [answer.status_code for answer in answers.values()] == [200] * 3


def test_the_metrics_count_requests_queries_batches_and_the_cache(server):
    names = ("retriever_requests_total", "retriever_queries_total", "retriever_batch_size_count")
    before = [sample(server, name) for name in names]
    hits = sample(server, "retriever_cache_hits_total")
    for _ in range(2):
        server.post("/retrieve", json={"queries": ["m1", "m2", "m3"]})
    assert [sample(server, name) for name in names] == [before[0] + 2, before[1] + 6, before[2] + 1]
    assert sample(server, "retriever_cache_hits_total") == hits + 3
    text = server.get("/metrics").text
    for name in ("wait_seconds_bucket", "search_seconds_bucket", 'requests_total{status="200"}', "queue_depth"):
        assert f"retriever_{name}" in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "queries": st.lists(st.text(max_size=40) | JSON, max_size=4) | JSON,
        "query": st.text(max_size=40) | JSON,
        "topk": st.integers(-1, 7) | JSON,
        "return_scores": st.booleans() | JSON,
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(body=BODY | JSON)
def test_no_json_makes_the_server_fail(server, body):
    answer = server.post("/retrieve", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 413, 422)
    if answer.status_code == 200:
        asked = body["queries"] if body.get("queries") is not None else [body["query"]]
        assert len(answer.json()["result"]) == len(asked)
    else:
        assert isinstance(answer.json()["detail"], str)


def test_a_stopping_server_says_so():
    with TestClient(create_app(Index(), TIGHT)) as server:
        server.app.state.batcher.stopping = True
        assert server.get("/health").status_code == 503
        assert server.get("/health").json()["status"] == "stopping"
        refused = server.post("/retrieve", json={"query": "a"})
        assert refused.status_code == 503 and refused.json()["detail"] == "the server is stopping"
