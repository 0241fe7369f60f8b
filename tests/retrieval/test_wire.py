import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_drmas.retrieval import Hit, Passage
from verl_drmas.retrieval.limits import ServerSettings
from verl_drmas.retrieval.wire import GarbageAnswer, Refused, read_answer, read_request, write_answer, write_request

SETTINGS = ServerSettings(topk=3, max_topk=10, max_queries=4, max_query_chars=20)
TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)))
HITS = st.builds(Hit, st.builds(Passage, TEXT, TEXT, TEXT), st.floats(allow_nan=False, allow_infinity=False))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NEAR = st.fixed_dictionaries(
    {},
    optional={
        "queries": st.lists(st.text() | JSON, max_size=6) | JSON,
        "query": st.text() | JSON,
        "topk": st.integers() | JSON,
        "return_scores": st.booleans() | JSON,
    },
)


def asked(**body):
    return read_request(json.dumps(body).encode(), SETTINGS)


def test_both_dialects_ask_the_same():
    several = asked(queries=["a", "b"], topk=2, return_scores=True)
    assert (several.queries, several.k, several.scores) == (["a", "b"], 2, True)
    one = asked(query="a")
    assert (one.queries, one.k, one.scores) == (["a"], 3, False)
    assert asked(queries=["a"], topk=None, query=None).k == 3
    assert asked(queries=[]).queries == []  # Search-R1's trainer sends it when no session searches


@pytest.mark.parametrize(
    "body, status, line",
    [
        ({}, 422, "neither is there"),
        ({"query": "a", "queries": ["a"]}, 422, "both are there"),
        ({"query": ["a"]}, 422, "query: Input should be a valid string"),
        ({"queries": "a"}, 422, "queries: Input should be a valid array"),
        ({"queries": ["a", 1]}, 422, "queries.1: Input should be a valid string"),
        ({"query": "a", "topk": "3"}, 422, "topk: Input should be a valid integer"),
        ({"query": "a", "topk": True}, 422, "topk: Input should be a valid integer"),
        ({"query": "a", "topk": 0}, 422, "topk: Input should be greater than or equal to 1"),
        ({"query": "a", "topk": 11}, 422, "topk is 11; this server gives 10 at most"),
        ('{"query": "a", "topk": 1' + "0" * 5000 + "}", 422, "body: "),
        ('{"query": "a", "topk": 1' + "0" * 50 + "}", 422, "topk: "),
        ("[1]", 422, "body: "),
        ("{", 422, "body: "),
        ({"query": "a", "return_scores": 1}, 422, "return_scores: Input should be a valid boolean"),
        ({"query": " \n"}, 422, "a query is blank"),
        ({"queries": ["a"] * 5}, 413, "5 queries; one request may have 4"),
        ({"query": "a" * 21}, 413, "a query of 21 characters; the limit is 20"),
    ],
)
def test_a_wrong_request_gets_one_line(body, status, line):
    body = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(Refused, match=line) as refused:
        read_request(body.encode(), SETTINGS)
    assert refused.value.status == status
    assert "\n" not in refused.value.text and len(refused.value.text) < 300


@given(st.binary() | (JSON | NEAR).map(lambda value: json.dumps(value).encode()))
def test_any_body_is_asked_within_limits_or_refused(body):
    try:
        request = read_request(body, SETTINGS)
    except Refused as refused:
        assert refused.status in (413, 422)
    else:
        assert 1 <= request.k <= 10 and len(request.queries) <= 4
        assert all(0 < len(query) <= 20 for query in request.queries)


def test_no_request_within_the_limits_is_above_the_body_limit():
    settings = ServerSettings(max_queries=50, max_query_chars=1000)
    longest = {"queries": ["\U0001f600" * 1000] * 50, "topk": 100, "return_scores": True}
    body = json.dumps(longest).encode()
    assert read_request(body, settings).queries == longest["queries"]
    assert len(body) <= settings.max_body_bytes


@given(TEXT.filter(str.strip), st.lists(HITS, max_size=5), st.sampled_from(["queries", "query"]))
def test_what_one_side_writes_the_other_reads(query, hits, dialect):
    settings = ServerSettings()
    request = read_request(write_request(query, 5, dialect), settings)
    assert (request.queries, request.k, request.scores) == ([query], 5, True)
    assert read_answer(write_answer([hits], scores=True), 5) == hits


def test_the_answer_has_the_documents_of_both_dialects():
    hits = [Hit(Passage("7", "Oslo", "A city."), 1.5)]
    document = {"id": "7", "title": "Oslo", "text": "A city.", "contents": '"Oslo"\nA city.'}
    assert json.loads(write_answer([hits, []], scores=True)) == {"result": [[{"document": document, "score": 1.5}], []]}
    assert json.loads(write_answer([hits], scores=False)) == {"result": [[document]]}


def answer(*hits):
    return json.dumps({"result": [list(hits)]}).encode()


def test_documents_of_other_servers_are_read():
    searchr1 = {"document": {"id": 12, "contents": '"Oslo"\nA city.'}, "score": 3}
    bare = {"document": {"contents": "A city."}, "score": 0.5}
    first, second = read_answer(answer(searchr1, bare), 3)
    assert first == Hit(Passage("12", "Oslo", "A city."), 3.0)
    assert (second.passage.title, second.passage.text) == ("", "A city.")
    assert second.passage.id and second.passage.id == read_answer(answer(bare), 3)[0].passage.id
    assert len(read_answer(answer(searchr1, searchr1, bare), 2)) == 2


GOOD = {"id": "1", "contents": "text"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Bad gateway</html>",
        b"[1]",
        b'{"result": {}}',
        b'{"result": []}',
        b'{"result": [[], []]}',
        b'{"result": ["no hits"]}',
        b'{"result": [null]}',
        answer("text"),
        answer(GOOD),
        answer({"document": GOOD}),
        answer({"document": "text", "score": 1.0}),
        answer({"document": {"id": "1"}, "score": 1.0}),
        answer({"document": {"id": ["1"], "contents": "text"}, "score": 1.0}),
        answer({"document": GOOD, "score": "1.0"}),
        answer({"document": GOOD, "score": True}),
        answer({"document": GOOD, "score": None}),
        answer({"document": GOOD, "score": float("nan")}),
        answer({"document": GOOD, "score": float("inf")}),
        b'{"result": [[{"document": {"contents": "text"}, "score": 1e999}]]}',
        b'{"result": ' + b"[" * 100_000,
    ],
)
def test_garbage_is_called_garbage(body):
    with pytest.raises(GarbageAnswer):
        read_answer(body, 3)


@given(st.binary() | JSON.map(lambda value: json.dumps({"result": [[value]]}).encode()))
def test_any_answer_is_hits_or_garbage(body):
    try:
        hits = read_answer(body, 3)
    except GarbageAnswer:
        return
    assert all(isinstance(hit, Hit) for hit in hits)


def test_a_lone_surrogate_is_no_text():
    with pytest.raises(TypeError):
        write_request("\ud800", 3, "queries")
    with pytest.raises(Refused, match="body"):
        read_request(b'{"query": "\\ud800"}', SETTINGS)


def test_settings_name_the_option_that_is_wrong():
    for name in ("topk", "max_batch", "max_queue"):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is 0"):
            ServerSettings(**{name: 0})
    with pytest.raises(ValueError, match="--cache is -1"):
        ServerSettings(cache=-1)
    with pytest.raises(ValueError, match="--max-wait-ms is nan"):
        ServerSettings(max_wait_ms=float("nan"))
    with pytest.raises(ValueError, match="raise --max-queue"):
        ServerSettings(max_queries=10, max_queue=9)
