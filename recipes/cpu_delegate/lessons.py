"""What the main agent and its sub-agent read and should say, turn by turn, from the workflow itself over many worlds.

The main agent asks for one person after the other; the sub-agent, `finder`, searches for a name and reads the passage.
"""

import asyncio
import json
import random
from typing import Any

from recipes.cpu_search.lessons import Lesson, TitleRetriever
from verl_drmas.data.world import Question, World
from verl_drmas.retrieval import RetrievalSettings
from verl_drmas.workflows import Task
from verl_drmas.workflows.delegate import Delegate
from verl_drmas.workflows.scripted import ScriptedTeam
from verl_drmas.workflows.toolbox.search import Search, SearchSettings

FINDER = "finder"
MARKS = ("<user>", "<assistant>", "<tool>")
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_workflow(world: World, *, max_turns: int) -> Delegate:
    """Returns the workflow of the CPU job, whose search finds a name's own passage."""
    tool = Search(SearchSettings(retrieval=RetrievalSettings(local="."), topk=1, max_queries=1))
    tool.retriever = TitleRetriever(world)
    settings = Delegate.Settings(
        subs={FINDER: {"tools": ["search"], "max_turns": 3}}, tools={"search": {}}, max_turns=max_turns
    )
    return Delegate(settings, tools={"search": tool})


def render(messages: list[dict[str, Any]]) -> str:
    """Returns the messages as `TEMPLATE` has them, up to where the agent speaks."""
    told = "".join(f"<{m['role']}>{m['content']}" + ("<eos>" if m["role"] == "assistant" else "") for m in messages)
    return f"{told}<assistant>"


def call(name: str, **arguments: str) -> str:
    """Returns a call in Hermes' form."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def ask(relation: str, person: str) -> str:
    """Returns what the main agent says to find out a relation of a person."""
    return call("delegate", agent=FINDER, task=f"Who is the {relation} of {person}?")


def result(person: str) -> str:
    """Returns a result."""
    return f"<result>{person}</result>"


def session(workflow: Delegate, world: World, question: Question, draw: random.Random, astray: float) -> list[Lesson]:
    """The turns of a team that does everything right, but for a share of its searches.

    Args:
        workflow: from `build_workflow`.
        world: what is searched.
        question: what is asked.
        draw: chooses the searches that go astray.
        astray: their share; the finder then reads another passage, and names somebody from it.
    """
    workflow.tools["search"].retriever = TitleRetriever(world)
    lessons: list[Lesson] = []
    people = [question.start]  # as far as the main agent knows

    def teach(agent_id: str, messages: list[dict[str, Any]], said: str, wrong: set[str]) -> str:
        others = wrong - {said} or {result(draw.choice([name for name in world.people if result(name) != said]))}
        lessons.append(Lesson(agent_id, render(messages), said, tuple(sorted(others))))
        return said

    def main(messages: list[dict[str, Any]]) -> str:
        if len(messages) > 1:
            people.append(messages[-1]["content"] if messages[-1]["role"] == "tool" else messages[-2]["content"])
        step = len(people) - 1
        if step == len(question.path):
            return teach("main", messages, result(people[-1]), {result(person) for person in people})
        said = ask(question.path[step], people[-1])
        wrong = {ask(relation, person) for relation in question.path for person in people}
        if step:
            wrong.add(result(people[-1]))
        else:  # a relation that isn't asked for
            others = [relation for relation in world.relations if relation not in question.path[:1]]
            wrong.add(ask(draw.choice(others), people[-1]))
        return teach("main", messages, said, wrong)

    def finder(messages: list[dict[str, Any]]) -> str:
        step = len(people) - 1
        relation, person = question.path[step], people[-1]
        if len(messages) == 1:
            other = draw.choice([name for name in world.people if name != person])
            said = teach(FINDER, messages, call("search", query=person), {call("search", query=other)})
            return call("search", query=other) if draw.random() < astray else said
        read = next(name for name in world.people if messages[2]["content"].startswith(f"[1] {name}"))
        named = [world.facts[read, r] for r in world.relations]
        return teach(FINDER, messages, result(world.facts[read, relation]), {result(name) for name in named})

    team = ScriptedTeam({"main": main, FINDER: finder})
    asyncio.run(workflow.run(Task(question=question.text, answer=question.answer), team))
    return lessons
