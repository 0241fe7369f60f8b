"""Prepares a model of the arithmetic team: taught by examples, then made unsure, so that training has room to show.

A model is taught both roles, or one where it plays only that. Two phases: the clean phase teaches from true examples
until a gate finds every role nearly perfect on the training problems. The noisy phase keeps that knowledge and flattens
the answers: its labels are wrong for a share of the examples, steered by what is measured, and it stops as soon as a
second gate finds every role in its band. Both phases are bounded; what a seed needs more, it gets, and a seed that
can't be brought into the bands ends with an error that tells what was measured.

``python -m recipes.cpu_arithmetic.warm_start OUT --seed 1`` does it from the shell.
"""

import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipes.cpu_arithmetic import roles, tiny_model
from recipes.cpu_arithmetic.roles import Lessons, Table
from verl_drmas.data.arithmetic import arithmetic_rows
from verl_drmas.data.parquet import write_rows

logger = logging.getLogger(__name__)

Measures = dict[str, float]
Role = Literal["solver", "verifier"]
ROLES: tuple[Role, ...] = ("solver", "verifier")


class WarmStartError(RuntimeError):
    """A phase spent all its steps without passing its gate."""


@dataclass(frozen=True)
class Settings:
    """All that a warm start depends on; equal settings give equal weights on one machine.

    Attributes:
        style: ``llama`` or ``qwen3``, see `tiny_model`.
        size: of the model, see `tiny_model`.
        roles: that the model is taught; gates and bands of the others are not looked at.
        seed: of weights, examples and the split of the problems.
        max_position_embeddings: longest sequence of the model in tokens.
        held_out: problems kept for validation, of 100.
        threads: of torch; sums, and so weights, depend on it. On a busy machine two were slower than one.
        batch: examples a step of a model with both roles; one with a single role gets that role's share of them.
        solver_share: of a batch; the rest is the verifier's, half right and half wrong proposals.
        clean_steps: of the clean phase.
        clean_rate: its highest learning rate; warmed up over 30 steps, lowered to 0 over the last two fifths. Muon
            trains the blocks' matrices, in about half of AdamW's steps here.
        extra_steps: of one more clean round, at half the rate, where the gate asks for it.
        extra_rounds: most of those.
        clean_solver: least solver success that passes the clean gate.
        clean_verifier: least balanced verifier accuracy that passes the clean gate.
        noisy_rate: constant learning rate of the noisy phase.
        noisy_steps: most steps of the noisy phase.
        check_every: steps between two measurements of the noisy phase.
        solver_target: solver success that the noisy phase steers to.
        verifier_target: balanced verifier accuracy that it steers to.
        solver_band: solver success that ends the noisy phase.
        verifier_band: balanced verifier accuracy that ends the noisy phase.
        verifier_class_floor: least accuracy on right and on wrong proposals, each, that ends the noisy phase.
    """

    style: tiny_model.Style = "llama"
    size: tiny_model.Size = "medium"
    roles: tuple[Role, ...] = ROLES
    seed: int = 1
    max_position_embeddings: int = 256
    held_out: int = 16
    threads: int = 1
    batch: int = 64
    solver_share: float = 0.35
    clean_steps: int = 350
    clean_rate: float = 2e-3
    extra_steps: int = 200
    extra_rounds: int = 3
    clean_solver: float = 0.95
    clean_verifier: float = 0.9
    noisy_rate: float = 1e-4
    noisy_steps: int = 200
    check_every: int = 5
    solver_target: float = 0.42
    verifier_target: float = 0.6
    solver_band: tuple[float, float] = (0.32, 0.55)
    verifier_band: tuple[float, float] = (0.55, 0.65)
    verifier_class_floor: float = 0.48

    @property
    def name(self) -> str:
        """What is made, without what it is made by."""
        return f"{self.style}-{self.size}-{'-'.join(self.roles)}-seed{self.seed}"


@dataclass(frozen=True)
class WarmStart:
    """Where a warm start lies, and what was measured: exact probabilities at temperature 1, not samples."""

    model: Path
    train: Path
    val: Path
    report: Path
    measured: dict


def sequence_log_prob(model: PreTrainedModel, table: Table) -> Tensor:
    """Returns each row's log-probability of its answer and end of sequence: float32 (rows,)."""
    # Padding lies on the right, where a causal model never looks back at it: no attention mask is needed.
    logits = model(input_ids=table.ids, use_cache=False).logits[:, :-1]
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, table.ids[:, 1:, None])[..., 0]
    return (chosen * table.answer[:, 1:]).sum(-1)


@torch.no_grad()
def measure(model: PreTrainedModel, lessons: Lessons, taught: Sequence[Role] = ROLES) -> Measures:
    """Returns how often each role succeeds when it samples at temperature 1.

    Args:
        model: to be measured.
        lessons: of the problems to measure it on.
        taught: the roles to measure.

    Returns:
        ``solver``; ``verifier_right``, ``verifier_wrong`` (accuracy on right and on wrong proposals) and ``verifier``,
        the mean of the two: exact probabilities, averaged over the lessons' prompts.
    """

    def success(table: Table) -> float:
        return sequence_log_prob(model, table).exp().mean().item()

    measures = {}
    if "solver" in taught:
        measures["solver"] = success(lessons.problems)
    if "verifier" in taught:
        right, wrong = success(lessons.right[0]), success(lessons.wrong[0])
        measures |= {"verifier": (right + wrong) / 2, "verifier_right": right, "verifier_wrong": wrong}
    return {name: round(value, 4) for name, value in measures.items()}


class _Teacher:
    """Draws batches of lessons and takes optimiser steps."""

    def __init__(self, model: PreTrainedModel, lessons: Lessons, settings: Settings, generator: torch.Generator):
        self.model, self.settings, self.generator = model, settings, generator
        solver = round(settings.batch * settings.solver_share)
        right = (settings.batch - solver) // 2
        parts: list[tuple[Role, tuple[Table, Table], int]] = [
            ("solver", lessons.solver, solver),
            ("verifier", lessons.right, right),
            ("verifier", lessons.wrong, settings.batch - solver - right),
        ]
        self.parts = [part for part in parts if part[0] in settings.roles]
        self.truth: dict[Role, float] = dict.fromkeys(settings.roles, 1.0)

    def steer(self, measures: Measures) -> None:
        """Sets how probable the true answers are in the noisy labels: less than the target where success is above it.

        A role that fell below its target is pulled back three times as hard, before it forgets. The verifier's true
        answers are never less than even: taught the opposite it would unlearn, taught both it becomes unsure.
        """

        def share(target: float, success: float, least: float) -> float:
            gain = 3.0 if success < target else 1.0
            return min(max(target + gain * (target - success), least), 0.9)

        bounds = {"solver": (self.settings.solver_target, 0.1), "verifier": (self.settings.verifier_target, 0.5)}
        for role in self.settings.roles:
            target, least = bounds[role]
            self.truth[role] = share(target, measures[role], least)

    def clean(self, steps: int, rate: float) -> None:
        """Takes all steps of a clean round."""
        blocks = {id(p) for name, p in self.model.named_parameters() if p.ndim == 2 and ".layers." in name}
        matrices = [p for p in self.model.parameters() if id(p) in blocks]
        others = [p for p in self.model.parameters() if id(p) not in blocks]
        optimisers = (
            torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
        )
        for step in range(steps):
            self._step(optimisers, rate * min(1.0, (step + 1) / 30, (steps - step) / (0.4 * steps)), noisy=False)

    def noisy(self) -> Iterator[int]:
        """Takes one noisy step for each number it yields, from 1."""
        optimisers = (torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01),)
        for step in range(1, self.settings.noisy_steps + 1):
            self._step(optimisers, self.settings.noisy_rate, noisy=True)
            yield step

    def _step(self, optimisers: Sequence[torch.optim.Optimizer], rate: float, *, noisy: bool) -> None:
        tables, weights = [], []
        for role, (truthful, opposite), count in self.parts:
            rows = torch.randint(len(truthful), (count,), generator=self.generator)
            # Both answers of a prompt, weighted: what label noise is on average, without its variance.
            share = self.truth[role]
            for table, weight in ((truthful, share), (opposite, 1.0 - share)) if noisy else ((truthful, 1.0),):
                tables.append(table.take(rows))
                weights.append(torch.full((count,), weight))
        batch, weight = roles.stack(tables), torch.cat(weights)
        loss = -(sequence_log_prob(self.model, batch) * weight).sum() / (batch.answer.sum(-1) * weight).sum()
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()


def teach(
    model: PreTrainedModel, lessons: Lessons, held_out: Lessons, settings: Settings, generator: torch.Generator
) -> dict:
    """Runs both phases on a model, in place.

    Args:
        model: random weights.
        lessons: of the training problems.
        held_out: of the validation problems; only measured.
        settings: see there.
        generator: draws the examples.

    Returns:
        ``clean`` and ``final``, each with the phase's ``steps`` and its measures on ``train`` and ``held_out``.

    Raises:
        WarmStartError: a gate was not passed within the bounds; the message tells phase, measures and settings.
    """
    teacher = _Teacher(model, lessons, settings, generator)
    steps = 0
    for extra in range(settings.extra_rounds + 1):
        now, rate = (
            (settings.extra_steps, settings.clean_rate / 2) if extra else (settings.clean_steps, settings.clean_rate)
        )
        teacher.clean(now, rate)
        steps += now
        clean = measure(model, lessons, settings.roles)
        logger.info("%s: clean phase, %d steps: %s", settings.name, steps, clean)
        if _sure(clean, settings):
            break
    else:
        raise WarmStartError(
            f"{settings.name}: after {steps} clean steps {clean}, needs solver >= {settings.clean_solver} and "
            f"verifier >= {settings.clean_verifier}; raise clean_steps or extra_rounds"
        )
    measured = {"clean": {"steps": steps, "train": clean, "held_out": measure(model, held_out, settings.roles)}}
    teacher.steer(clean)
    for step in teacher.noisy():
        if step % settings.check_every:
            continue
        final = measure(model, lessons, settings.roles)
        logger.info("%s: noisy phase, %d steps: %s", settings.name, step, final)
        if _unsure(final, settings):
            measured["final"] = {"steps": step, "train": final, "held_out": measure(model, held_out, settings.roles)}
            return measured
        teacher.steer(final)
    raise WarmStartError(
        f"{settings.name}: after {settings.noisy_steps} noisy steps {final}, needs solver in "
        f"{settings.solver_band}, verifier in {settings.verifier_band} and both its classes >= "
        f"{settings.verifier_class_floor}; raise noisy_steps or move the targets"
    )


def _sure(measures: Measures, settings: Settings) -> bool:
    """Passes the clean gate; a role that isn't taught has no measure to fail it."""
    gates = {"solver": settings.clean_solver, "verifier": settings.clean_verifier}
    return all(measures[role] >= gate for role, gate in gates.items() if role in measures)


def _unsure(measures: Measures, settings: Settings) -> bool:
    """Every taught role is in its band."""
    bands = {"solver": settings.solver_band, "verifier": settings.verifier_band}
    classes = [measures[name] for name in ("verifier_right", "verifier_wrong") if name in measures]
    return all(low <= measures[role] <= high for role, (low, high) in bands.items() if role in measures) and all(
        accuracy >= settings.verifier_class_floor for accuracy in classes
    )


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_model(settings: Settings) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, list[dict], list[dict], dict]:
    """Builds and teaches a model.

    Returns:
        The model, its tokenizer, the training and the validation rows, and what `teach` measured.

    Raises:
        WarmStartError: see `teach`.
    """
    train, val = arithmetic_rows(held_out=settings.held_out, seed=settings.seed)
    model, tokenizer = tiny_model.build(
        settings.style,
        size=settings.size,
        seed=settings.seed,
        max_position_embeddings=settings.max_position_embeddings,
    )
    lessons, held_out = (Lessons.of(roles.problems(rows), tokenizer) for rows in (train, val))
    with limit_threads(settings.threads):
        measured = teach(model, lessons, held_out, settings, torch.Generator().manual_seed(settings.seed))
    return model, tokenizer, train, val, measured


def warm_start(folder: str | Path, settings: Settings | None = None) -> WarmStart:
    """Returns a warm-started model with its data, made at the first call and reused by later ones.

    Args:
        folder: cache; each combination of settings, code and torch version has its own folder in it.
        settings: the CPU job's by default.

    Raises:
        WarmStartError: see `teach`; nothing is left in the cache then.
    """
    settings = settings or Settings()
    place = Path(folder) / f"{settings.name}-{_fingerprint(settings)}"
    files = place / "model", place / "train.parquet", place / "val.parquet", place / "warm_start.json"
    if not place.exists():
        started = time.monotonic()
        model, tokenizer, train, val, measured = train_model(settings)
        record = {"settings": asdict(settings), "seconds": round(time.monotonic() - started, 1), **measured}
        place.parent.mkdir(parents=True, exist_ok=True)
        # Renamed as a whole, so that an interrupted run leaves no half of a warm start to be reused.
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".building-") as building:
            draft = Path(building) / "draft"
            tiny_model.save(model, tokenizer, draft / "model")
            write_rows(train, draft / "train.parquet")
            write_rows(val, draft / "val.parquet")
            (draft / "warm_start.json").write_text(json.dumps(record, indent=2) + "\n")
            draft.rename(place)
    else:
        logger.info("reusing %s", place)
    return WarmStart(*files, measured=json.loads(files[-1].read_text()))


def _fingerprint(settings: Settings) -> str:
    """Changes with the settings, with the code that makes the weights and with torch."""
    digest = hashlib.sha256(json.dumps([asdict(settings), torch.__version__], sort_keys=True).encode())
    for source in (__file__, roles.__file__, tiny_model.__file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:10]


def _main(
    out: Path,
    style: str = "llama",
    size: str = "medium",
    role: list[str] | None = None,
    seed: int = 1,
    threads: int = 1,
) -> None:
    """Write a warm-started model, train.parquet, val.parquet and warm_start.json below the folder OUT."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    roles_taught = tuple(role or ROLES)
    made = warm_start(out, Settings(style=style, size=size, roles=roles_taught, seed=seed, threads=threads))  # type: ignore[arg-type]
    logger.info("%s\n%s", made.report.parent, json.dumps(made.measured, indent=2))


if __name__ == "__main__":
    typer.run(_main)
