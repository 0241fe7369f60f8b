"""Teaches the search team's model: first what is right until it knows, then mistakes until it is unsure."""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipes.cpu_arithmetic.roles import Table, stack, tokenise
from recipes.cpu_arithmetic.warm_start import WarmStartError, sequence_log_prob
from recipes.cpu_search.lessons import Lesson

logger = logging.getLogger(__name__)

Measures = dict[str, float]
DEFAULT_TURNS = 4  # of the workflow; a question of more hops than 3 takes more


@dataclass(frozen=True)
class Settings:
    """All that a warm start depends on; equal settings give equal weights on one machine.

    Attributes:
        team: that is prepared, for names.
        seed: of weights, lessons and the world that is trained on.
        people: in every world.
        relations: of every person.
        hops: searches that a question of the training takes; lessons also have easier ones.
        questions: of the training, held-out ones included; None for all there are.
        held_out: questions kept for validation.
        worlds: that lessons are taken from.
        sessions: a world and number of hops.
        astray: share of a lesson's searches that look for somebody else, so that the team learns to notice.
        max_position_embeddings: longest sequence of the model in tokens.
        threads: of torch; sums, and so weights, depend on it.
        batch: examples a step, a third of them each agent's.
        language: weight of predicting every token of a lesson, beside those that are said; reading is learned from it.
        clean_steps: of the clean phase.
        clean_rate: its highest learning rate; warmed up over 30 steps, lowered to 0 over the last two fifths.
        extra_steps: of one more clean round, at half the rate, where the gate asks for it.
        extra_rounds: most of those.
        clean_gate: least success of each agent that ends the clean phase.
        noisy_rate: constant learning rate of the noisy phase.
        noisy_steps: most steps of it.
        check_every: steps between two measurements of it.
        bands: success of each agent that ends the noisy phase; it steers to the middle.
    """

    team: str = "search"
    seed: int = 1
    people: int = 40
    relations: int = 3
    hops: int = 2
    questions: int | None = None
    held_out: int = 32
    worlds: int = 300
    sessions: int = 12
    astray: float = 0.15
    max_position_embeddings: int = 256
    threads: int = 2
    batch: int = 63
    language: float = 0.3
    clean_steps: int = 300
    clean_rate: float = 2e-3
    extra_steps: int = 150
    extra_rounds: int = 3
    clean_gate: Mapping[str, float] = field(default_factory=lambda: {"verifier": 0.85, "search": 0.8, "answer": 0.85})
    noisy_rate: float = 1e-4
    noisy_steps: int = 200
    check_every: int = 5
    bands: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"verifier": (0.72, 0.85), "search": (0.62, 0.75), "answer": (0.62, 0.75)}
    )

    @property
    def name(self) -> str:
        """What is made, without what it is made by."""
        return f"{self.team}-{self.people}-{self.relations}-{self.hops}hop-seed{self.seed}"


@dataclass(frozen=True)
class Taught:
    """One agent's lessons as tokens: what it should say, and one thing that it might say by mistake, row by row."""

    said: Table
    wrong: Table

    @classmethod
    def of(cls, lessons: Sequence[Lesson], tokenizer: PreTrainedTokenizerFast, draw: random.Random) -> "Taught":
        """Returns the table of the lessons; all are as long as the longest."""
        pairs = [(lesson.prompt, lesson.said, draw.choice(lesson.wrong)) for lesson in lessons]
        longest = max(len(tokenizer(prompt)["input_ids"]) for prompt, *_ in pairs) + 4
        said, wrong = ([(pair[0], pair[which]) for pair in pairs] for which in (1, 2))
        return cls(tokenise(said, tokenizer, longest), tokenise(wrong, tokenizer, longest))


@torch.no_grad()
def measure(model: PreTrainedModel, taught: Mapping[str, Taught]) -> Measures:
    """Returns how often each agent says the right thing when it samples at temperature 1, on all of its lessons."""
    return {
        agent_id: round(sequence_log_prob(model, lesson.said).exp().mean().item(), 4)
        for agent_id, lesson in taught.items()
    }


class Teacher:
    """Draws batches of lessons and takes optimiser steps."""

    def __init__(self, model: PreTrainedModel, taught: Mapping[str, Taught], settings: Settings):
        self.model, self.taught, self.settings = model, taught, settings
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.truth = dict.fromkeys(taught, 1.0)

    def clean(self, steps: int, rate: float) -> None:
        """Takes all steps of a clean round. Muon trains the blocks' matrices, in fewer steps than AdamW."""
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and ".layers." in name]
        ids = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in ids]
        optimisers = (
            torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
        )
        for step in range(steps):
            self._step(optimisers, rate * min(1.0, (step + 1) / 30, (steps - step) / (0.4 * steps)))

    def noisy(self, reached: Callable[[Measures], bool], measures: Callable[[], Measures]) -> tuple[int, Measures]:
        """Takes noisy steps until the measures are where they should be; returns the steps and the last measures."""
        optimisers = (torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01),)
        now = measures()
        for step in range(self.settings.noisy_steps + 1):
            if step % self.settings.check_every == 0 or step == self.settings.noisy_steps:
                now = measures() if step else now
                logger.info("%s: noisy phase, %d steps: %s", self.settings.name, step, now)
                if reached(now):
                    return step, now
                self._steer(now)
            if step < self.settings.noisy_steps:
                self._step(optimisers, self.settings.noisy_rate)
        return -1, now

    def _steer(self, now: Measures) -> None:
        """An agent above its band is taught mistakes more often than it should make them; one below it, truth."""
        for agent_id, (low, high) in self.settings.bands.items():
            middle = (low + high) / 2
            self.truth[agent_id] = min(max(middle + (middle - now[agent_id]), 0.1), 1.0)

    def _step(self, optimisers: Sequence[torch.optim.Optimizer], rate: float) -> None:
        loss = torch.zeros(())
        for agent_id, lesson in self.taught.items():
            count = self.settings.batch // len(self.taught)
            rows = torch.randint(len(lesson.said), (count,), generator=self.generator)
            share = self.truth[agent_id]
            tables = [lesson.said.take(rows)] if share == 1.0 else [lesson.said.take(rows), lesson.wrong.take(rows)]
            weight = torch.cat([torch.full((count,), w) for w in (share, 1.0 - share)[: len(tables)]])
            loss = loss + self._loss(stack(tables), weight)
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()

    def _loss(self, table: Table, weight: torch.Tensor) -> torch.Tensor:
        """Of what is said, a row each, and of every token."""
        logits = self.model(input_ids=table.ids, use_cache=False).logits[:, :-1]
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, table.ids[:, 1:, None])[..., 0]
        there = table.ids[:, 1:] != self.model.config.pad_token_id
        said = ((chosen * table.answer[:, 1:]).sum(-1) * weight).sum() / weight.sum()
        return -said - self.settings.language * (chosen * there).sum() / there.sum()


def teach(model: PreTrainedModel, taught: Mapping[str, Taught], seen: Mapping[str, Taught], settings: Settings) -> dict:
    """Runs both phases on a model, in place.

    Args:
        model: random weights.
        taught: lessons by agent.
        seen: those of the world that will be trained on; only measured.
        settings: see there.

    Returns:
        ``clean`` and ``final``, each with the phase's ``steps`` and its measures.

    Raises:
        WarmStartError: a gate was not passed within the bounds; the message tells phase, measures and gate.
    """
    teacher, steps = Teacher(model, taught, settings), 0
    for extra in range(settings.extra_rounds + 1):
        now = (settings.extra_steps, settings.clean_rate / 2) if extra else (settings.clean_steps, settings.clean_rate)
        teacher.clean(*now)
        steps += now[0]
        clean = measure(model, seen)
        logger.info("%s: clean phase, %d steps: %s", settings.name, steps, clean)
        if all(clean[agent_id] >= least for agent_id, least in settings.clean_gate.items()):
            break
    else:
        raise WarmStartError(
            f"{settings.name}: after {steps} clean steps {clean}, needs {dict(settings.clean_gate)}; raise clean_steps "
            "or extra_rounds"
        )

    def inside(measures: Measures) -> bool:
        return all(low <= measures[agent_id] <= high for agent_id, (low, high) in settings.bands.items())

    noisy, final = teacher.noisy(inside, lambda: measure(model, seen))
    if noisy < 0:
        raise WarmStartError(
            f"{settings.name}: after {settings.noisy_steps} noisy steps {final}, needs {dict(settings.bands)}; raise "
            "noisy_steps or move the bands"
        )
    return {"clean": {"steps": steps, **clean}, "final": {"steps": noisy, **final}}
