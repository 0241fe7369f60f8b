"""The CPU job's team: sums of small numbers, for models of a million parameters that read and write single characters.

A verifier that mostly sees wrong proposals learns to reject everything, and its rising reward proves nothing. So the
class a verifier is shown alternates over a prompt's sessions: every group of an even size holds as many right as wrong
proposals, and a verifier with one word for everything has exactly half of its verdicts right.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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

    Attributes:
        proposers: The agents that are asked for the sum, at the same time; the first one's answer is the team's.
    """

    agents = ("solver", "verifier")
    proposers: ClassVar[tuple[str, ...]] = ("solver",)

    @dataclass
    class Settings:
        """Settings of `drmas.workflow`.

        Attributes:
            balanced: Show each group as many right as wrong proposals; False shows a proposer's own answer.
        """

        balanced: bool = True

    async def run(self, task: Task, team: Team) -> Outcome:
        truth = str(task.answer)
        question = [{"role": "user", "content": f"S:{task.question}="}]
        answers = await asyncio.gather(*(team[agent].act(question) for agent in self.proposers))
        for answer in answers:
            answer.parsed = answer.text.strip()
            answer.valid = answer.parsed.isdigit()
            answer.reward_parts["own"] = float(answer.parsed == truth)

        proposal = self._proposal(answers, truth, task)
        is_right = proposal == truth
        check = await team["verifier"].act([{"role": "user", "content": f"V:{task.question}={proposal}?"}])
        check.parsed = {"y": True, "n": False}.get(check.text.strip())
        check.valid = check.parsed is not None
        approved = bool(check.parsed)
        hit = float(check.valid and approved == is_right)
        check.reward_parts["own"] = hit

        metrics = {
            **{f"{answer.agent_id}_success": answer.reward_parts["own"] for answer in answers},
            "approved": float(approved),
            f"verifier_accuracy_{'right' if is_right else 'wrong'}": hit,
        }
        solution = answers[0]
        correct = solution.reward_parts["own"]
        return Outcome(reward=correct, correct=correct, answer=solution.parsed, metrics=metrics)

    def _proposal(self, answers: Sequence[Action], truth: str, task: Task) -> str:
        """What the verifier is shown: an answer of the wanted class if there is one, whoever gave it."""
        draw = random.Random(f"{task.index}/{task.session}/{task.step}")
        if not self.settings.balanced:
            return draw.choice([answer.parsed if answer.valid else "0" for answer in answers])
        wanted = (task.index + task.session + task.step) % 2 == 0  # the index balances validation with one session
        fitting = [answer.parsed for answer in answers if answer.valid and (answer.parsed == truth) == wanted]
        if fitting:
            return draw.choice(fitting)
        return truth if wanted else near_miss(int(truth), draw)

    def activations(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.agents, (1, 1))

    def reward(self, action: Action, outcome: Outcome) -> float:
        return action.reward_parts["own"]

    @classmethod
    def summarise(cls, sessions: Sequence[dict[str, float]]) -> dict[str, float]:
        return with_balanced_accuracy(super().summarise(sessions))


@register_workflow("arithmetic_rival")
class ArithmeticRival(Arithmetic):
    """A rival is asked for the sum too, and the verifier may be shown its answer instead of the solver's.

    Meant for a frozen rival: it goes on making real mistakes for the verifier to find when the solver makes none.
    """

    agents = ("solver", "rival", "verifier")
    proposers = ("solver", "rival")
