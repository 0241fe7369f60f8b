"""The CPU job's team: sums of small numbers, for models of a million parameters that read and write single characters.

A verifier that mostly sees wrong proposals learns to reject everything, and its rising reward proves nothing. So the
class a verifier is shown alternates over a prompt's sessions: every group of an even size holds as many right as wrong
proposals, and a verifier with one word for everything has exactly half of its verdicts right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from verl_drmas.workflows.base import Action, Outcome, Task, Team, Workflow
from verl_drmas.workflows.registry import register_workflow
from verl_drmas.workflows.verdict import with_balanced_accuracy

NEAR_MISSES = (-10, -2, -1, 1, 2, 10)


def near_miss(truth: int, draw: random.Random) -> str:
    """A wrong answer close to `truth`; never the truth itself and never negative."""
    return draw.choice([str(truth + miss) for miss in NEAR_MISSES if truth + miss >= 0])


@register_workflow("arithmetic")
class Arithmetic(Workflow):
    """One solver turn and one verifier turn over a balanced proposal.

    The solver's own answer is the proposal where its class is the wanted one; else the proposal is the truth or a near
    miss. The verifier is rewarded for its verdict (the paper's shared outcome doesn't teach a verifier that nobody
    listens to).
    """

    agents = ("solver", "verifier")

    @dataclass
    class Settings:
        """Settings of `drmas.workflow`.

        Attributes:
            balanced: Show each group as many right as wrong proposals; False shows the solver's own answers.
        """

        balanced: bool = True

    async def run(self, task: Task, team: Team) -> Outcome:
        truth = str(task.answer)
        solution = await team["solver"].act([{"role": "user", "content": f"S:{task.question}="}])
        solution.parsed = solution.text.strip()
        solution.valid = solution.parsed.isdigit()
        correct = float(solution.parsed == truth)

        draw = random.Random(f"{task.index}/{task.session}/{task.step}")
        proposal = solution.parsed if solution.valid else "0"
        if self.settings.balanced:
            wanted = (task.index + task.session + task.step) % 2 == 0  # the index balances validation with one session
            if wanted != bool(correct) or not solution.valid:
                proposal = truth if wanted else near_miss(int(truth), draw)
        is_right = proposal == truth

        check = await team["verifier"].act([{"role": "user", "content": f"V:{task.question}={proposal}?"}])
        check.parsed = {"y": True, "n": False}.get(check.text.strip())
        check.valid = check.parsed is not None
        approved = bool(check.parsed)
        hit = float(check.valid and approved == is_right)
        solution.reward_parts["own"], check.reward_parts["own"] = correct, hit

        metrics = {
            "solver_success": correct,
            "approved": float(approved),
            f"verifier_accuracy_{'right' if is_right else 'wrong'}": hit,
        }
        return Outcome(reward=correct, correct=correct, answer=solution.parsed, metrics=metrics)

    def activations(self) -> dict[str, tuple[int, int]]:
        return {"solver": (1, 1), "verifier": (1, 1)}

    def reward(self, action: Action, outcome: Outcome) -> float:
        return action.reward_parts["own"]

    @classmethod
    def summarise(cls, sessions: Sequence[dict[str, float]]) -> dict[str, float]:
        return with_balanced_accuracy(super().summarise(sessions))
