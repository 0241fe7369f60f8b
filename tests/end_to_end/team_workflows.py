"""A workflow by import path, as a user would write one: an agent with two turns in one row, another called unevenly."""

from verl_drmas.workflows import Outcome, Task, Team, Workflow


def digits(text: str) -> float:
    """Share of a text's characters that are digits: a reward with spread for random weights."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


class TwoTurns(Workflow):
    """The writer drafts, is told something, and drafts again in the same row; odd sessions also call the editor."""

    agents = ("writer", "editor")
    needs_answer = False

    async def run(self, task: Task, team: Team) -> Outcome:
        async with team["writer"].converse([{"role": "user", "content": f"Write: {task.question}"}]) as talk:
            first = digits((await talk.turn()).text)
            talk.observe("Now once more.")
            draft = await talk.turn()
        draft.valid = not draft.empty
        draft.reward_parts["first"] = first
        reward = digits(draft.text)
        if task.session % 2:
            edited = await team["editor"].act([{"role": "user", "content": f"Edit: {draft.text}"}])
            edited.valid = any(c.isalpha() for c in edited.text)
            reward += digits(edited.text)
        return Outcome(reward=reward, metrics={"turns": float(draft.turns)})
