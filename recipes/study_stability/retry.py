"""A team of the arithmetic warm starts whose agents act unevenly: the solver tries until the verifier is content."""

from __future__ import annotations

from verl_drmas.workflows import Action, Task
from verl_drmas.workflows.base import Message
from verl_drmas.workflows.solver_verifier import SolverVerifier


class Retry(SolverVerifier):
    """Solver and verifier in rounds, in the single characters that the tiny models were taught; one outcome for all.

    The control flow is the bundled workflow's: the solver acts 1 to `max_rounds` times, the verifier up to one time
    less, and everybody is rewarded with the last answer. Only what is said and how it is read is of this team.
    """

    requires = ()
    extra = ""

    def prompt(self, agent_id: str, task: Task, said: list[tuple[str, str]]) -> list[Message]:
        """What an agent reads: the sum, and in the verifier's case the proposal."""
        text = f"S:{task.question}=" if agent_id == "solver" else f"V:{task.question}={said[-1][1].strip()}?"
        return [{"role": "user", "content": text}]

    async def grade(self, solution: Action, task: Task) -> tuple[str | None, float]:
        """The solver's number and whether it is the sum; anything else is an invalid action."""
        solution.parsed = solution.text.strip()
        solution.valid = solution.parsed.isdigit()
        return solution.parsed, float(solution.parsed == str(task.answer))

    def judge(self, check: Action, correct: float) -> bool:
        """Whether the verifier says ``y``; anything but ``y`` and ``n`` is an invalid action and a no."""
        check.parsed = {"y": True, "n": False}.get(check.text.strip())
        check.valid = check.parsed is not None
        return bool(check.parsed)
