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
    """At most `max_rounds` rounds; in all but the last, critic, refiner and verifier follow the solver.

    As in the reference code (its class of the math team, at the commit that added the two agents): the last round ends
    with the solver, as in `solver_verifier`, so that two rounds are solver, critic, refiner, verifier, solver. All see
    everything the team has said, though not its thinking; the last solution, be it the solver's or the refiner's, is
    the answer. A solution without a boxed answer, a verdict that isn't one, and remarks that are empty or cut at their
    limit are invalid actions.
    """

    agents = ("solver", "critic", "refiner", "verifier")

    async def run(self, task: Task, team: Team) -> Outcome:
        said: list[tuple[str, str]] = []
        drafts: list[float] = []
        refined: list[float] = []
        verdicts: list[tuple[bool, float]] = []
        for round_ in range(self.settings.max_rounds):
            draft = await team["solver"].act(self.prompt("solver", task, said))
            answer, correct = await self.grade(draft, task)
            drafts.append(correct)
            said.append(("solver", after_thinking(draft.text) or ""))
            if round_ + 1 == self.settings.max_rounds:
                break
            remarks = await team["critic"].act(self.prompt("critic", task, said))
            said.append(("critic", after_thinking(remarks.text) or ""))
            remarks.valid = bool(said[-1][1].strip()) and not remarks.truncated
            solution = await team["refiner"].act(self.prompt("refiner", task, said))
            answer, correct = await self.grade(solution, task)
            refined.append(correct)
            said.append(("refiner", after_thinking(solution.text) or ""))
            check = await team["verifier"].act(self.prompt("verifier", task, said))
            approved = self.judge(check, correct)
            verdicts.append((approved, correct))
            said.append(("verifier", after_thinking(check.text) or ""))
            if approved:
                break
        by_round = [*refined, *drafts[len(refined) :]]  # what each round ended with
        metrics = {**self.metrics(by_round, verdicts), **refinement(drafts, refined)}
        return Outcome(reward=correct, correct=correct, answer=answer, metrics=metrics)

    def prompt(self, agent_id: str, task: Task, said: list[tuple[str, str]]) -> list[Message]:
        """What an agent sees: its role, the problem, and everything the team has said."""
        parts = [f"Problem:\n{task.question}", *(f"{TITLES[who]} by the {who}:\n{text}" for who, text in said)]
        return [{"role": "user", "content": "\n\n".join([ROLES[agent_id], *parts])}]

    def activations(self) -> dict[str, tuple[int, int]]:
        rounds = self.settings.max_rounds
        others = dict.fromkeys(("critic", "refiner", "verifier"), (min(1, rounds - 1), rounds - 1))
        return {"solver": (1, rounds), **others}


def refinement(drafts: list[float], refined: list[float]) -> dict[str, float]:
    """Whether solver and refiner were right when they last spoke, and what the refiner made of the drafts: shares of
    the wrong ones that it mended, of the right ones that it spoilt.

    Args:
        drafts: Of each round, whether the solver was right.
        refined: Of each round with a refiner, whether it was; at most one shorter than `drafts`.
    """
    numbers = {"solver_success": drafts[-1]}
    if refined:
        numbers["refiner_success"] = refined[-1]
    for name, before in (("mended", 0.0), ("spoilt", 1.0)):
        changed = [float(after != before) for draft, after in zip(drafts, refined, strict=False) if draft == before]
        if changed:
            numbers[name] = sum(changed) / len(changed)
    return numbers
