"""Prepares the search team's model: taught to search and read by examples, then made unsure, so that training has room.

The clean phase teaches all three agents what a team that does everything right would say, on worlds that the training
never sees, until a gate finds them good. The noisy phase keeps that and flattens it: a share of the labels is wrong,
steered by what is measured, until every agent is in its band. What is left to training is to do surely, and together,
what the model does now and then. A seed that can't be brought there ends with an error that tells what was measured.

``python -m recipes.cpu_search.warm_start OUT --seed 1`` does it from the shell.
"""

import hashlib
import json
import logging
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipes.cpu_arithmetic import roles, tiny_model
from recipes.cpu_arithmetic.warm_start import limit_threads
from recipes.cpu_job import log_plainly
from recipes.cpu_search import lessons as lessons_module
from recipes.cpu_search import teaching, tokens
from recipes.cpu_search.lessons import Lesson, TitleRetriever, session
from recipes.cpu_search.teaching import DEFAULT_TURNS, Settings, Taught, teach
from recipes.cpu_search.tokens import build_tokenizer
from verl_drmas.data import world as world_module
from verl_drmas.data.parquet import write_rows
from verl_drmas.data.passages import write_passages
from verl_drmas.data.search import SEARCH_SCHEMA
from verl_drmas.data.world import World, world_rows
from verl_drmas.retrieval.build import IndexSettings, build_index
from verl_drmas.workflows import evidence, search_hierarchy
from verl_drmas.workflows.search_hierarchy import SearchHierarchy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmStart:
    """Where a warm start lies, and what was measured: exact probabilities at temperature 1, not samples."""

    model: Path
    train: Path
    val: Path
    index: Path
    report: Path
    measured: dict


def play_lessons(
    workflow: SearchHierarchy,
    settings: Settings,
    worlds: Sequence[World],
    hops: Sequence[int],
    draw: random.Random,
    *,
    astray: float,
) -> dict[str, list[Lesson]]:
    """Returns the lessons of sessions over some worlds, by agent."""
    found: dict[str, list[Lesson]] = {agent_id: [] for agent_id in SearchHierarchy.agents}
    for world in worlds:
        for kind in hops:
            questions = world.questions(kind)
            for question in draw.sample(questions, min(settings.sessions, len(questions))):
                for lesson in session(workflow, world, question, draw, astray):
                    found[lesson.agent_id].append(lesson)
    return found


def train_model(settings: Settings) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, World, dict]:
    """Builds and teaches a model.

    Returns:
        The model, its tokenizer, the world to train on, and what `teach` measured.

    Raises:
        WarmStartError: see `teach`.
    """
    shape = {"people": settings.people, "relations": settings.relations}
    world = World.build(**shape, seed=settings.seed)
    others = [World.build(**shape, seed=-1 - settings.seed * 100_000 - i) for i in range(settings.worlds)]
    limits = SearchHierarchy.Settings(
        retrieval={"local": "."}, topk=1, evidence_tokens=None, max_turns=max(DEFAULT_TURNS, settings.hops + 1)
    )
    workflow = SearchHierarchy(limits, retriever=TitleRetriever(world))
    draw = random.Random(settings.seed)
    hops = tuple(range(1, settings.hops + 1))
    lessons = play_lessons(workflow, settings, others, hops, draw, astray=settings.astray)
    own = play_lessons(workflow, settings, [world] * 8, (settings.hops,), draw, astray=0.0)
    tokenizer = build_tokenizer(
        world, [lesson for found in (lessons, own) for part in found.values() for lesson in part]
    )
    model, tokenizer = tiny_model.build_for(
        tokenizer, style="qwen3", seed=settings.seed, max_position_embeddings=settings.max_position_embeddings
    )
    taught, seen = ({a: Taught.of(part, tokenizer, draw) for a, part in found.items()} for found in (lessons, own))
    with limit_threads(settings.threads):
        measured = teach(model, taught, seen, settings)
    return model, tokenizer, world, measured


def warm_start(folder: str | Path, settings: Settings | None = None) -> WarmStart:
    """Returns a warm-started model with its data and index, made at the first call and reused by later ones.

    Args:
        folder: cache; each combination of settings, code and torch version has its own folder in it.
        settings: the CPU job's by default.

    Raises:
        WarmStartError: see `teach`; nothing is left in the cache then.
    """
    settings = settings or Settings()
    place = Path(folder) / f"{settings.name}-{_fingerprint(settings)}"
    names = ("model", "train.parquet", "val.parquet", "index", "warm_start.json")
    if not place.exists():
        started = time.monotonic()
        model, tokenizer, world, measured = train_model(settings)
        train, val = world_rows(
            world, hops=(settings.hops,), count=settings.questions, held_out=settings.held_out, seed=settings.seed
        )
        record = {"settings": asdict(settings), "seconds": round(time.monotonic() - started, 1), **measured}
        place.parent.mkdir(parents=True, exist_ok=True)
        # Renamed as a whole, so that an interrupted run leaves no half of a warm start to be reused.
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".building-") as building:
            draft = Path(building) / "draft"
            tiny_model.save(model, tokenizer, draft / "model")
            write_rows(train, draft / "train.parquet", schema=SEARCH_SCHEMA)
            write_rows(val, draft / "val.parquet", schema=SEARCH_SCHEMA)
            corpus = write_passages(world.passages(), draft / "corpus.jsonl")
            build_index([corpus], draft / "index", IndexSettings(kind="words"))
            (draft / "warm_start.json").write_text(json.dumps(record, indent=2) + "\n")
            draft.rename(place)
    else:
        logger.info("reusing %s", place)
    files = [place / name for name in names]
    return WarmStart(*files, measured=json.loads(files[-1].read_text()))


def _fingerprint(settings: Settings) -> str:
    """Changes with the settings, with the code that makes lessons, prompts, world and weights, and with torch."""
    digest = hashlib.sha256(json.dumps([asdict(settings), torch.__version__], sort_keys=True).encode())
    code = (lessons_module, teaching, tokens, roles, tiny_model, search_hierarchy, evidence, world_module)
    for source in (__file__, *(module.__file__ for module in code)):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:10]


def _main(out: Path, seed: int = 1) -> None:
    """Write a warm-started model, its data, its index and warm_start.json below the folder OUT."""
    log_plainly()
    made = warm_start(out, Settings(seed=seed))
    logger.info("%s\n%s", made.report.parent, json.dumps(made.measured, indent=2))


if __name__ == "__main__":
    typer.run(_main)
