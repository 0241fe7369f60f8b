import asyncio

import pytest

from verl_drmas.retrieval import Hit, IndexProblem, Passage, QueryRejected, RetrievalOutage, RetrievalSettings
from verl_drmas.workflows.toolbox.search import Search, SearchSettings, _share
from verl_drmas.workflows.tools import ToolError, ToolOutage


class Library:
    """A retriever that finds what it is told; a query may be one of its errors."""

    def __init__(self, found):
        self.found, self.asked, self.closed = found, [], False

    async def search(self, query, k):
        self.asked.append((query, k))
        await asyncio.sleep(0)
        answer = self.found.get(query, [])
        if isinstance(answer, Exception):
            raise answer
        return [Hit(passage, 1.0) for passage in answer[:k]]

    def check(self, k=1):
        return "a library"

    async def close(self):
        self.closed = True

    def report(self):
        return {"calls": float(len(self.asked))}


RHINE = Passage("1", "Rhine", "The Rhine flows\nthrough Germany.")
SPREE = Passage("2", "Spree", "Berlin lies on the Spree.")
BARE = Passage("3", "", "No title here.")
LONG = Passage("4", "Long", " ".join(f"word{i}" for i in range(400)))


def tool(found, **settings):
    search = Search(SearchSettings(RetrievalSettings(local="/nowhere"), **settings))
    search.retriever = Library(found)
    return search


def call(search, **arguments):
    return asyncio.run(search.call(arguments))


def test_passages_are_numbered_with_their_titles():
    search = tool({"rivers": [RHINE, SPREE, BARE, LONG]})
    text = call(search, query=" rivers ")
    assert (
        text == "[1] Rhine: The Rhine flows through Germany.\n[2] Spree: Berlin lies on the Spree.\n[3] No title here."
    )
    assert search.retriever.asked == [("rivers", 3)]


def test_several_queries_are_answered_one_by_one_and_a_passage_is_written_once():
    search = tool({"rhine": [RHINE, SPREE], "spree": [SPREE, BARE]})
    assert call(search, queries=["rhine", "spree", "nothing"]) == (
        "Search: rhine\n[1] Rhine: The Rhine flows through Germany.\n[2] Spree: Berlin lies on the Spree.\n\n"
        "Search: spree\n[2] (above)\n[3] No title here.\n\n"
        "Search: nothing\nnothing was found"
    )
    report = search.report()
    assert report["searches"] == 3 and report["passages"] == 3 and report["empty"] == 1 and report["calls"] == 3


def test_the_same_query_twice_is_asked_once():
    search = tool({"rhine": [RHINE]})
    assert call(search, queries=["rhine", "rhine"]).count("Rhine:") == 1 and len(search.retriever.asked) == 1


def test_a_query_that_finds_nothing_is_an_answer():
    search = tool({})
    assert call(search, query="x") == "nothing was found" and search.report()["empty"] == 1


def test_long_passages_are_cut_where_it_is_seen_and_counted():
    search = tool({"x": [LONG, RHINE]}, passage_characters=100)
    long, short = call(search, query="x").split("\n")
    assert long.endswith(" [...]") and len(long) <= 100 + len("[1] Long: ")
    assert long[: -len(" [...]")].split()[-1] in LONG.text.split()  # between words
    assert short == "[2] Rhine: The Rhine flows through Germany."
    report = search.report()
    assert report["cut_passages"] == 1
    assert report["cut_characters"] == len(LONG.text) - len(long.removeprefix("[1] Long: ").removesuffix(" [...]"))


@pytest.mark.parametrize("limit", [20, 60, 200, 500])
def test_an_answer_is_never_longer_than_its_limit(limit):
    long = [Passage(str(i), f"Title {i}", LONG.text) for i in range(3)]
    search = tool({"a": [*long, RHINE], "b": [SPREE]}, characters=limit, topk=4)
    assert len(call(search, queries=["a", "b"])) <= limit
    assert search.report()["cut_characters"] > 0


def test_short_passages_leave_their_room_to_long_ones():
    search = tool({"x": [LONG, RHINE]}, characters=300)
    text = call(search, query="x")
    assert 280 < len(text) <= 300 and "The Rhine flows through Germany." in text


def test_the_share_fits():
    assert _share([10, 10, 100], 60) == 40
    assert _share([10, 10], 60) == 10
    assert _share([50, 50], 60) == 30
    assert _share([], 60) == 0 and _share([5], -3) == 0


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({}, "argument 'query' is missing"),
        ({"query": ""}, "is empty"),
        ({"query": 3}, "is int; write it as text"),
        ({"query": "x" * 3000}, "3000 characters; write at most 2000"),
        ({"query": "\ud800"}, "no proper Unicode"),
        ({"query": "a", "queries": ["b"]}, "not both"),
        ({"queries": []}, "no list of texts"),
        ({"queries": 3}, "no list of texts"),
        ({"queries": ["a", 3]}, "query 2 is int"),
        ({"queries": list("abcd")}, "there are 4 queries; write at most 3"),
        ({"qeury": "a"}, "unknown argument 'qeury'; did you mean 'query'?"),
    ],
)
def test_a_wrong_call_is_the_agents_fault(arguments, told):
    search = tool({})
    with pytest.raises(ToolError, match=told):
        call(search, **arguments)
    assert search.retriever.asked == []


def test_one_query_a_call_may_be_all_there_is():
    search = tool({}, max_queries=1)
    assert list(search.parameters["properties"]) == ["query"] and search.parameters["required"] == ["query"]
    with pytest.raises(ToolError, match="unknown argument 'queries'"):
        call(search, queries=["a"])


def test_whose_fault_it_is():
    rejected, outage = QueryRejected("too long for the server"), RetrievalOutage("no server answers")
    search = tool({"bad": rejected, "down": outage, "broken": IndexProblem("no index"), "rhine": [RHINE]})
    with pytest.raises(ToolError, match="too long for the server"):
        call(search, query="bad")
    assert "Search: bad\ntoo long for the server\n\nSearch: rhine\n[1]" in call(search, queries=["bad", "rhine"])
    for queries in (["down"], ["rhine", "down"], ["bad", "down"], ["broken"]):
        with pytest.raises(ToolOutage) as error:
            call(search, queries=queries)
        assert error.value.tool == "search" and error.value.detail in ("no server answers", "no index")


def test_a_fault_of_ours_isnt_hidden():
    with pytest.raises(KeyError):
        call(tool({"x": KeyError("bug")}), query="x")


def test_the_retriever_is_looked_at_and_closed():
    search = tool({})
    asyncio.run(search.close())
    assert search.check() == "search: a library" and search.retriever.closed


@pytest.mark.parametrize("name", ["topk", "max_queries", "passage_characters", "characters"])
def test_settings_are_above_zero(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        SearchSettings(RetrievalSettings(local="a"), **{name: 0})
