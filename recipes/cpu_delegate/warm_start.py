"""Prepares the delegating team: a model for the main agent and one for its sub-agent, each taught its own part alone.

As for the search team (`recipes/cpu_search`): first what is right, on worlds that the training never sees, then
mistakes until the model is unsure.

``python -m recipes.cpu_delegate.warm_start OUT --seed 1`` does it from the shell.
"""

import hashlib
import json
import logging
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipes.cpu_arithmetic import roles, tiny_model
from recipes.cpu_arithmetic.warm_start import limit_threads
from recipes.cpu_delegate import lessons as lessons_module
from recipes.cpu_delegate.lessons import FINDER, MARKS, TEMPLATE, build_workflow, session
from recipes.cpu_job import log_plainly
from recipes.cpu_search import teaching, tokens
from recipes.cpu_search.lessons import Lesson
from recipes.cpu_search.teaching import Settings, Taught, teach
from recipes.cpu_search.tokens import build_tokenizer
from verl_drmas.data import world as world_module
from verl_drmas.data.parquet import write_rows
from verl_drmas.data.passages import write_passages
from verl_drmas.data.search import SEARCH_SCHEMA
from verl_drmas.data.world import World, world_rows
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.workflows import delegate, turns
from verl_drmas.workflows.toolbox import search as search_tool

logger = logging.getLogger(__name__)

AGENTS = ("main", FINDER)
TEAM = "delegate"
SURE = 0.9  # least success of an agent that ends the clean phase
BANDS = {"main": (0.7, 0.82), FINDER: (0.7, 0.82)}


@dataclass(frozen=True)
class WarmStart:
    """Where a warm start lies, and what was measured: exact probabilities at temperature 1, not samples."""

    models: dict[str, Path]
    train: Path
    val: Path
    index: Path
    report: Path
    measured: dict


def turns_of(hops: int) -> int:
    """Turns of the main agent: one for each person it asks for, one to spare, and one for the result."""
    return hops + 2


def play_lessons(
    settings: Settings, worlds: Sequence[World], hops: Sequence[int], draw: random.Random, *, astray: float
) -> dict[str, list[Lesson]]:
    """Returns the lessons of sessions over some worlds, by agent."""
    workflow = build_workflow(worlds[0], max_turns=turns_of(settings.hops))
    found: dict[str, list[Lesson]] = {agent_id: [] for agent_id in AGENTS}
    for world in worlds:
        for kind in hops:
            questions = world.questions(kind)
            for question in draw.sample(questions, min(settings.sessions, len(questions))):
                for lesson in session(workflow, world, question, draw, astray):
                    found[lesson.agent_id].append(lesson)
    return found


def train_models(
    settings: Settings,
) -> tuple[dict[str, tuple[PreTrainedModel, PreTrainedTokenizerFast]], World, dict[str, dict]]:
    """Builds and teaches a model for each agent.

    Returns:
        Models and tokenizers by agent, the world to train on, and what `teach` measured, by agent.

    Raises:
        WarmStartError: see `teach`.
    """
    shape = {"people": settings.people, "relations": settings.relations}
    world = World.build(**shape, seed=settings.seed)
    others = [World.build(**shape, seed=-1 - settings.seed * 100_000 - i) for i in range(settings.worlds)]
    draw = random.Random(settings.seed)
    hops = tuple(range(1, settings.hops + 1))
    lessons = play_lessons(settings, others, hops, draw, astray=settings.astray)
    own = play_lessons(settings, [world] * 8, (settings.hops,), draw, astray=0.0)
    models, measured = {}, {}
    for number, agent_id in enumerate(AGENTS):
        mine = replace(
            settings,
            batch=settings.batch // len(AGENTS),
            clean_gate={agent_id: SURE if settings.clean_gate else 0.0},
            bands={agent_id: BANDS[agent_id] if settings.bands else (0.0, 1.0)},
        )
        tokenizer = build_tokenizer(world, [*lessons[agent_id], *own[agent_id]], template=TEMPLATE, marks=MARKS)
        model, tokenizer = tiny_model.build_for(
            tokenizer,
            style="llama",
            size=("medium", "small")[number],
            seed=settings.seed + number,
            max_position_embeddings=settings.max_position_embeddings,
        )
        taught = {agent_id: Taught.of(lessons[agent_id], tokenizer, draw)}
        seen = {agent_id: Taught.of(own[agent_id], tokenizer, draw)}
        logger.info("%s: teaching %s", settings.name, agent_id)
        with limit_threads(settings.threads):
            measured[agent_id] = teach(model, taught, seen, mine)
        models[agent_id] = (model, tokenizer)
    return models, world, measured


def warm_start(folder: str | Path, settings: Settings | None = None) -> WarmStart:
    """Returns warm-started models with their data and index, made at the first call and reused by later ones.

    Args:
        folder: cache; each combination of settings, code and torch version has its own folder in it.
        settings: the CPU job's by default; empty `clean_gate` and `bands` ask for nothing.

    Raises:
        WarmStartError: see `teach`; nothing is left in the cache then.
    """
    settings = settings or Settings(team=TEAM)
    place = Path(folder) / f"{settings.name}-{_fingerprint(settings)}"
    if not place.exists():
        started = time.monotonic()
        models, world, measured = train_models(settings)
        train, val = world_rows(
            world, hops=(settings.hops,), count=settings.questions, held_out=settings.held_out, seed=settings.seed
        )
        record = {"settings": asdict(settings), "seconds": round(time.monotonic() - started, 1), **measured}
        place.parent.mkdir(parents=True, exist_ok=True)
        # Renamed as a whole, so that an interrupted run leaves no half of a warm start to be reused.
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".building-") as building:
            draft = Path(building) / "draft"
            for agent_id, (model, tokenizer) in models.items():
                tiny_model.save(model, tokenizer, draft / agent_id)
            write_rows(train, draft / "train.parquet", schema=SEARCH_SCHEMA)
            write_rows(val, draft / "val.parquet", schema=SEARCH_SCHEMA)
            corpus = write_passages(world.passages(), draft / "corpus.jsonl")
            build_index([corpus], draft / "index", IndexSettings(kind="words"))
            (draft / "warm_start.json").write_text(json.dumps(record, indent=2) + "\n")
            draft.rename(place)
    else:
        logger.info("reusing %s", place)
    return WarmStart(
        models={agent_id: place / agent_id for agent_id in AGENTS},
        train=place / "train.parquet",
        val=place / "val.parquet",
        index=place / "index",
        report=place / "warm_start.json",
        measured=json.loads((place / "warm_start.json").read_text()),
    )


def _fingerprint(settings: Settings) -> str:
    """Changes with the settings, with the code that makes lessons, prompts, world and weights, and with torch."""
    digest = hashlib.sha256(json.dumps([asdict(settings), torch.__version__], sort_keys=True).encode())
    code = (lessons_module, teaching, tokens, roles, tiny_model, delegate, turns, search_tool, world_module)
    for source in (__file__, *(module.__file__ for module in code)):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:10]


def _main(out: Path, seed: int = 1) -> None:
    """Write warm-started models, their data, their index and warm_start.json below the folder OUT."""
    log_plainly()
    made = warm_start(out, Settings(team=TEAM, seed=seed))
    logger.info("%s\n%s", made.report.parent, json.dumps(made.measured, indent=2))


if __name__ == "__main__":
    typer.run(_main)
