"""Solver, critic, refiner and verifier: the four-agent math team of Dr. MAS' reference code."""

from __future__ import annotations

from verl_drmas.rewards.thinking import after_thinking
from verl_drmas.workflows.base import Message, Outcome, Task, Team
from verl_drmas.workflows.registry import register_workflow
from verl_drmas.workflows.solver_verifier import SOLVER, VERIFIER, SolverVerifier

CRITIC = (
    "You look for mistakes in a teammate's solution of a mathematics problem. Go through the latest solution step by "
    "step; name each step that is wrong or not justified, and say why. If you find none, say so. Don't write a "
    "solution of your own."
)
REFINER = (
    "You write the final version of a teammate's solution of a mathematics problem, with a critic's remarks at hand. "
    "Check each remark, mend what is really wrong, keep what is right, and finish with the final answer inside "
    "\\boxed{}."
)
ROLES = {"solver": SOLVER, "critic": CRITIC, "refiner": REFINER, "verifier": VERIFIER}
TITLES = {"solver": "Solution", "critic": "Remarks", "refiner": "Solution", "verifier": "Check"}


@register_workflow("four_agents")
class FourAgents(SolverVerifier):
    """At most `max_rounds` rounds of solver, critic and refiner, with a verifier turn between any two of them.

    The order of the agents is the reference code's; that the last round has no verifier, because nobody could act on
    its verdict, is as in `solver_verifier`. All see everything the team has said, though not its thinking; the last
    text of the refiner is the answer. A solution without a boxed answer, a verdict that isn't one, and remarks that are
    empty or cut at their limit are invalid actions.
    """

    agents = ("solver", "critic", "refiner", "verifier")

    async def run(self, task: Task, team: Team) -> Outcome:
        said: list[tuple[str, str]] = []
        drafts: list[float] = []
        scores: list[float] = []
        verdicts: list[tuple[bool, float]] = []
        for round_ in range(self.settings.max_rounds):
            draft = await team["solver"].act(self.prompt("solver", task, said))
            drafts.append((await self.grade(draft, task))[1])
            said.append(("solver", after_thinking(draft.text) or ""))
            remarks = await team["critic"].act(self.prompt("critic", task, said))
            said.append(("critic", after_thinking(remarks.text) or ""))
            remarks.valid = bool(said[-1][1].strip()) and not remarks.truncated
            solution = await team["refiner"].act(self.prompt("refiner", task, said))
            answer, correct = await self.grade(solution, task)
            scores.append(correct)
            said.append(("refiner", after_thinking(solution.text) or ""))
            if round_ + 1 == self.settings.max_rounds:
                break
            check = await team["verifier"].act(self.prompt("verifier", task, said))
            approved = self.judge(check, correct)
            verdicts.append((approved, correct))
            said.append(("verifier", after_thinking(check.text) or ""))
            if approved:
                break
        metrics = {**self.metrics(scores, verdicts), **refinement(drafts, scores)}
        return Outcome(reward=scores[-1], correct=scores[-1], answer=answer, metrics=metrics)

    def prompt(self, agent_id: str, task: Task, said: list[tuple[str, str]]) -> list[Message]:
        """What an agent sees: its role, the problem, and everything the team has said."""
        parts = [f"Problem:\n{task.question}", *(f"{TITLES[who]} by the {who}:\n{text}" for who, text in said)]
        return [{"role": "user", "content": "\n\n".join([ROLES[agent_id], *parts])}]

    def activations(self) -> dict[str, tuple[int, int]]:
        rounds = self.settings.max_rounds
        each = dict.fromkeys(("solver", "critic", "refiner"), (1, rounds))
        return {**each, "verifier": (min(1, rounds - 1), rounds - 1)}


def refinement(drafts: list[float], scores: list[float]) -> dict[str, float]:
    """Whether solver and refiner were right at the end of a session, and what the refiner made of the drafts: shares of
    the wrong ones that it mended, of the right ones that it spoilt.

    Args:
        drafts: Of each round, whether the solver was right.
        scores: Of each round, whether the refiner was.
    """
    numbers = {"solver_success": drafts[-1], "refiner_success": scores[-1]}
    for name, before in (("mended", 0.0), ("spoilt", 1.0)):
        changed = [float(after != before) for draft, after in zip(drafts, scores, strict=True) if draft == before]
        if changed:
            numbers[name] = sum(changed) / len(changed)
    return numbers
