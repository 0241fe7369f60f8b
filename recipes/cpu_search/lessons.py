"""What the three agents of the search team read and should say, from the workflow itself over many small worlds.

The worlds share their people and relations and differ in their facts, so that a model can learn how to search and read
but none of the facts that it is trained on later.
"""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from verl_drmas.data.world import Question, World
from verl_drmas.retrieval import Hit, Passage, Retriever
from verl_drmas.workflows import Task
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.search_hierarchy import SearchHierarchy


@dataclass(frozen=True)
class Lesson:
    """One call of one agent.

    Attributes:
        agent_id: Who is asked.
        prompt: What it reads.
        said: What it should say.
        wrong: What it might say by mistake, in the same form.
    """

    agent_id: str
    prompt: str
    said: str
    wrong: tuple[str, ...]


class TitleRetriever(Retriever):
    """Finds the passage whose title is the query; stands for the index, where a name alone finds its own passage."""

    def __init__(self, world: World):
        self.passages = {p["title"]: Passage(**p) for p in world.passages()}

    async def search(self, query: str, k: int) -> list[Hit]:
        found = self.passages.get(query)
        return [Hit(found, 1.0)] if found else []


def session(
    workflow: SearchHierarchy, world: World, question: Question, draw: random.Random, astray: float
) -> list[Lesson]:
    """The calls of a team that does everything right, but for a share of its searches.

    Args:
        workflow: Whose control flow and prompts are played.
        world: What is searched.
        question: What is asked.
        draw: Chooses the searches that go astray.
        astray: Their share. What is right afterwards is still what the evidence lacks.
    """
    workflow.retriever = TitleRetriever(world)
    lessons: list[Lesson] = []
    read: list[str] = []  # people whose passages the team has

    def lacking() -> str | None:
        return next((person for person in question.support if person not in read), None)

    def teach(agent_id: str, messages: list[dict[str, Any]], said: str, wrong: set[str]) -> None:
        lessons.append(Lesson(agent_id, messages[-1]["content"], said, tuple(sorted(wrong))))

    def verify(messages: list[dict[str, Any]]) -> str:
        enough = lacking() is None
        teach("verifier", messages, verdict(enough), {verdict(not enough)})
        return verdict(enough)

    def search(messages: list[dict[str, Any]]) -> str:
        wanted = lacking()  # somebody, or the verifier would have ended the search
        others = {question.start, *read, *named()} - {wanted} or {anybody_but(wanted)}
        teach("search", messages, query(wanted), {query(person) for person in others})
        read.append(draw.choice(world.people) if draw.random() < astray else wanted)
        return query(read[-1])

    def answer(messages: list[dict[str, Any]]) -> str:
        # Where the evidence lacks something nobody could know, and any answer in the right form is as good.
        said = question.answer if lacking() is None else draw.choice(world.people)
        others = named() - {said} or {anybody_but(said)}
        teach("answer", messages, reply(said), {reply(person) for person in others})
        return reply(said)

    def anybody_but(person: str) -> str:
        return draw.choice([other for other in world.people if other != person])

    def named() -> set[str]:
        return {world.facts[person, relation] for person in read for relation in world.relations}

    team = ScriptedTeam({"verifier": verify, "search": search, "answer": answer})
    asyncio.run(workflow.run(Task(question=question.text, answer=question.answer), team))
    return lessons


def verdict(enough: bool) -> str:
    """What the verifier says."""
    return f"<verdict>{'yes' if enough else 'no'}</verdict>"


def query(person: str) -> str:
    """What the search agent says."""
    return f"<search>{person}</search>"


def reply(person: str) -> str:
    """What the answer agent says."""
    return f"<answer>{person}</answer>"
