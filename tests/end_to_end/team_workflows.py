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


class Quartet(Workflow):
    """Four agents who read the question and nothing of each other; the critic speaks in every second session."""

    agents = ("writer", "editor", "critic", "judge")
    needs_answer = False

    async def run(self, task: Task, team: Team) -> Outcome:
        reward = 0.0
        for agent in self.agents:
            if agent == "critic" and task.session % 2:
                continue
            said = await team[agent].act([{"role": "user", "content": f"{agent[0]}: {task.question}"}])
            said.valid = True
            said.reward_parts["own"] = digits(said.text)
            reward += said.reward_parts["own"]
        return Outcome(reward=reward)

    def reward(self, action, outcome: Outcome) -> float:
        return action.reward_parts["own"]


class Duo(Quartet):
    """Two of them."""

    agents = ("writer", "editor")


class Trio(Workflow):
    """Writer and judge in every session, the editor in odd sessions of odd steps: no row of its model in the others."""

    agents = ("writer", "editor", "judge")
    needs_answer = False

    async def run(self, task: Task, team: Team) -> Outcome:
        said = await team["writer"].act([{"role": "user", "content": f"w: {task.question}"}])
        judged = await team["judge"].act([{"role": "user", "content": f"j: {task.question}"}])
        said.valid = judged.valid = True
        said.reward_parts["own"], judged.reward_parts["own"] = digits(said.text), digits(judged.text)
        if task.step % 2 and task.session % 2:
            edited = await team["editor"].act([{"role": "user", "content": f"e: {said.text}"}])
            edited.valid = True
            edited.reward_parts["own"] = digits(edited.text)
        return Outcome(reward=digits(said.text))

    def reward(self, action, outcome: Outcome) -> float:
        return action.reward_parts["own"]
