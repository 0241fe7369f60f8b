"""The search team's workflow over real questions: index the paragraphs, serve them, and play a scripted team."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_drmas.retrieval import RetrievalSettings
from verl_drmas.retrieval.client import RetrievalClient
from verl_drmas.rewards.qa import normalise
from verl_drmas.workflows import Task
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.search_hierarchy import SearchHierarchy

BESIDE = Path(__file__).parents[2].parent / "shared" / "data"
QUESTIONS = Path(os.environ.get("VERL_DRMAS_TEST_DATA", BESIDE)) / "hotpotqa" / "train.jsonl"
COMMAND = [sys.executable, "-m", "verl_drmas.cli"]
FOUND = re.compile(r"^\[\d+\] (.*?): ", re.MULTILINE)  # a passage in a prompt, its title first

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not QUESTIONS.exists(), reason=f"real questions not found in {QUESTIONS}: set VERL_DRMAS_TEST_DATA"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server over the paragraphs, all of it by the commands a user types."""
    folder = tmp_path_factory.mktemp("hotpotqa")
    for command in (
        ["data", "passages", str(QUESTIONS), "-o", str(folder / "corpus.jsonl")],
        ["retriever", "index", str(folder / "corpus.jsonl"), "-o", str(folder / "index"), "--kind", "words"],
    ):
        done = subprocess.run([*COMMAND, *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    command = [*COMMAND, "retriever", "serve", str(folder / "index"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            url = None
            for line in process.stdout:
                if found := re.search(r"http://[\d.]+:\d+", line):
                    url = found.group()
                    break
            assert url, "the server named no address"
            yield url
        finally:
            process.terminate()
            assert process.wait(20) == 0


def bridge(question: str, prompt: str) -> str:
    """The best title of the first search that the question doesn't name."""
    titles = FOUND.findall(prompt)
    asked = normalise(question)
    return next((title for title in titles if normalise(title.split("(")[0]) not in asked), titles[0])


async def play(workflow: SearchHierarchy, row: dict) -> tuple[list[bool], dict[str, float]]:
    """One session; returns whether all supporting titles were there after each search, and the session's numbers."""
    queries = iter([lambda _: row["question"], lambda prompt: bridge(row["question"], prompt)])
    team = ScriptedTeam(
        {
            "verifier": ["<verdict>no</verdict>", "<verdict>no</verdict>", "<verdict>yes</verdict>"],
            "search": lambda messages: f"<search>{next(queries)(messages[0]['content'])}</search>",
            "answer": [f"<answer>{row['answer']}</answer>"],
        }
    )
    outcome = await workflow.run(Task(question=row["question"], answer=row["answer"]), team)
    assert outcome.reward == 1.0
    prompts = [messages[0]["content"] for agent_id, messages in team.seen if agent_id == "verifier"]
    whole = [all(f"] {title}: " in prompt for title in row["support_titles"]) for prompt in prompts[1:]]
    return whole, outcome.metrics


@pytest.mark.parametrize(("topk", "one_search", "two_searches"), [(2, 0.28, 0.36), (5, 0.57, 0.64), (10, 0.77, 0.83)])
def test_two_searches_find_more_of_the_supporting_titles_than_one(server, topk, one_search, two_searches):
    """Floors a little below what was measured: 29.5, 61, 80.5 % after one search, 37.5, 68, 86.5 % after two."""
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]

    async def all_sessions():
        retriever = RetrievalClient(RetrievalSettings(urls=[server]))
        settings = SearchHierarchy.Settings(retrieval={"urls": [server]}, topk=topk, evidence_tokens=None)
        workflow = SearchHierarchy(settings, retriever=retriever)
        try:
            return await asyncio.gather(*(play(workflow, row) for row in rows)), retriever.report()
        finally:
            await retriever.close()

    sessions, report = asyncio.run(all_sessions())
    assert len(sessions) == len(rows) == 200
    assert (report["calls"], report["retries"], report["outages"]) == (400, 0, 0)
    shares = [sum(found[n] for found, _ in sessions) / len(sessions) for n in range(2)]
    print(f"\ntop {topk}: all supporting titles after one search {shares[0]:.1%}, after two {shares[1]:.1%}")
    assert shares[0] >= one_search and shares[1] >= two_searches
    assert all(numbers["searches"] == 2 for _, numbers in sessions)
