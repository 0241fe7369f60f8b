"""Solver and verifier (Dr. MAS, math task): the solver answers, the verifier approves or sends it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verl_drmas.rewards.math import math_score_async
from verl_drmas.rewards.thinking import after_thinking
from verl_drmas.workflows.base import Action, Message, Outcome, Task, Team, Workflow
from verl_drmas.workflows.registry import register_workflow
from verl_drmas.workflows.verdict import parse_verdict, with_balanced_accuracy

SOLVER = (
    "You solve mathematics problems in a team. Work through the problem step by step and finish with the final answer "
    "inside \\boxed{}. If a teammate has criticised an earlier attempt, check the criticism and correct your solution "
    "where it is right."
)
VERIFIER = (
    "You check the work of a teammate who solves mathematics problems. Go through the latest solution step by step and "
    "say what is wrong with it, if anything. Finish with exactly one line: <verdict>approve</verdict> if the final "
    "answer is right, or <verdict>reject</verdict> if it is not."
)


@register_workflow("solver_verifier")
class SolverVerifier(Workflow):
    """At most `max_rounds` solver turns, with a verifier turn between any two of them.

    The last round has no verifier, because nobody could act on its verdict (Dr. MAS, section 5 and appendix: two rounds
    are solver, verifier, solver). Both agents see everything the team has said, though not its thinking; the last
    solver text is the answer.
    """

    agents = ("solver", "verifier")
    requires = ("math_verify",)
    extra = "math"

    @dataclass
    class Settings:
        """Settings of `drmas.workflow`.

        Attributes:
            max_rounds: Most solver turns in a session.
            on_invalid: What a verifier turn without exactly one known verdict counts as.
            verdict_reward: Reward of a verifier whose verdict was right; 0 gives it the shared outcome, as in the
                paper.
        """

        max_rounds: int = 2
        on_invalid: Literal["reject", "approve"] = "reject"
        verdict_reward: float = 0.0

        def __post_init__(self):
            if self.max_rounds < 1:
                raise ValueError(f"max_rounds is {self.max_rounds}; it must be at least 1")

    async def run(self, task: Task, team: Team) -> Outcome:
        said: list[tuple[str, str]] = []
        scores: list[float] = []
        verdicts: list[tuple[bool, float]] = []
        for round_ in range(self.settings.max_rounds):
            solution = await team["solver"].act(self.prompt("solver", task, said))
            answer, correct = await self.grade(solution, task)
            scores.append(correct)
            said.append(("solver", after_thinking(solution.text) or ""))
            if round_ + 1 == self.settings.max_rounds:
                break
            check = await team["verifier"].act(self.prompt("verifier", task, said))
            approved = self.judge(check, correct)
            verdicts.append((approved, correct))
            said.append(("verifier", after_thinking(check.text) or ""))
            if approved:
                break
        return Outcome(reward=scores[-1], correct=scores[-1], answer=answer, metrics=self.metrics(scores, verdicts))

    def prompt(self, agent_id: str, task: Task, said: list[tuple[str, str]]) -> list[Message]:
        """What an agent sees: its role, the problem, and everything the team has said."""
        parts = [f"Problem:\n{task.question}"]
        parts += [f"{'Solution' if who == 'solver' else 'Check'} by the {who}:\n{text}" for who, text in said]
        role = SOLVER if agent_id == "solver" else VERIFIER
        return [{"role": "user", "content": "\n\n".join([role, *parts])}]

    async def grade(self, solution: Action, task: Task) -> tuple[str | None, float]:
        """The solver's answer and whether it is right; a solution without a boxed answer is an invalid action."""
        gold = "" if task.answer is None else str(task.answer)  # an empty one is refused
        score = await math_score_async(solution.text, gold)
        solution.parsed, solution.valid = score.answer, score.answer is not None
        return score.answer, score.score

    def judge(self, check: Action, correct: float) -> bool:
        """Whether the verifier approves; anything but one known verdict is an invalid action."""
        check.parsed = parse_verdict(check.text, words=("approve", "reject"))
        check.valid = check.parsed is not None
        approved = (check.parsed or self.settings.on_invalid) == "approve"
        if self.settings.verdict_reward:
            right = check.valid and approved == bool(correct)
            check.reward_parts["verdict"] = self.settings.verdict_reward * float(right)
        return approved

    def reward(self, action: Action, outcome: Outcome) -> float:
        if "verdict" in action.reward_parts:  # with a verdict reward the verifier answers for its verdict alone
            return action.reward_parts["verdict"]
        return super().reward(action, outcome)

    def activations(self) -> dict[str, tuple[int, int]]:
        rounds = self.settings.max_rounds
        return {"solver": (1, rounds), "verifier": (min(1, rounds - 1), rounds - 1)}

    @staticmethod
    def metrics(scores: list[float], verdicts: list[tuple[bool, float]]) -> dict[str, float]:
        """Numbers of a session; verdict accuracy stands apart for right and wrong proposals."""
        numbers = {"rounds": float(len(scores)), "solver_success": scores[-1], "first_success": scores[0]}
        if verdicts:
            numbers["approved"] = float(verdicts[-1][0])
        for name, wanted in (("right", True), ("wrong", False)):
            hits = [float(approved == wanted) for approved, correct in verdicts if bool(correct) == wanted]
            if hits:
                numbers[f"verifier_accuracy_{name}"] = sum(hits) / len(hits)
        return numbers

    @classmethod
    def summarise(cls, sessions: Sequence[dict[str, float]]) -> dict[str, float]:
        return with_balanced_accuracy(super().summarise(sessions))
