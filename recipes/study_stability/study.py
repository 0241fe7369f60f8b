"""The whole study as one command: trains every team, probes, measures, draws, and writes what it found as Markdown.

Files of `--out`: ``steps.jsonl`` (every step of every run), ``runs.jsonl`` (a line a run), ``probe.jsonl`` (estimators
at fixed policies), ``moments.jsonl`` (both sides of Lemma 4.2 on every group), ``penalty.jsonl``, the figures, and
``results.md``. Two calls with the same options write the same numbers; nothing in the files is a time.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from recipes.study_stability import figures, penalties, results
from recipes.study_stability.probe import probe, snapshots
from recipes.study_stability.summary import Run, lines
from recipes.study_stability.training import ESTIMATORS, PENALISED, Penalty, Setting, train

WORLDS = ("search", "rescue", "even")
RATES = {"adamw": (0.01, 0.03, 0.1, 0.3), "sgd": (1.0, 3.0, 10.0)}
PENALTIES = (
    None,
    Penalty(0.01),
    Penalty(0.1),
    Penalty(0.01, std_floor=0.1),
    Penalty(0.01, "outside"),
    Penalty(0.1, "outside"),
)
AT = (0.0, 0.3, 0.8)  # shares of the budget after which policies are held still


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    Attributes:
        seeds: of every arm.
        budget: actions a run samples.
        batches: of a probe, for each seed and snapshot.
    """

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    budget: int = 64_000
    batches: int = 200


def grid(scale: Scale) -> list[Setting]:
    """Returns the settings of all runs: worlds by estimators, learning rates in the uneven worlds, and penalties."""
    settings = []
    for seed in scale.seeds:
        for estimator in ESTIMATORS:
            for world in WORLDS:
                settings.append(Setting(world, estimator, seed, scale.budget))
            for world in WORLDS[:2]:
                for optimiser, rates in RATES.items():
                    settings += [
                        Setting(world, estimator, seed, scale.budget, rate, optimiser)
                        for rate in rates
                        if (optimiser, rate) != ("adamw", Setting.rate)
                    ]
        for estimator in PENALISED:
            settings += [
                replace(Setting("faulty", estimator, seed, scale.budget), penalty=penalty) for penalty in PENALTIES
            ]
    return settings


def run_study(out: Path, scale: Scale, processes: int) -> None:
    """Does everything and writes everything below `out`.

    Raises:
        StudyError: something that must hold of every group did not, see `training.check_factors`.
    """
    out.mkdir(parents=True, exist_ok=True)
    settings = grid(scale)
    probes = [
        (Setting(world, "grpo_team", seed, scale.budget), scale.batches) for world in WORLDS for seed in scale.seeds
    ]
    with (
        Progress() as progress,
        # Spawned, because torch's threads don't survive a fork.
        ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        trained = progress.track(pool.map(_train, settings), total=len(settings), description="training")
        runs = [Run(setting, steps) for setting, steps in zip(settings, trained, strict=True)]
        probed = list(progress.track(pool.map(_probe, probes), total=len(probes), description="probing"))
    directions = [row for rows, _ in probed for row in rows]
    moments = [row for _, rows in probed for row in rows]
    penalty = list(penalties.table())
    _write(out / "steps.jsonl", lines(runs))
    _write(out / "runs.jsonl", (run.as_dict() for run in runs))
    _write(out / "probe.jsonl", directions)
    _write(out / "moments.jsonl", moments)
    _write(out / "penalty.jsonl", penalty)
    pictures = figures.draw(out, runs, directions, moments, penalty)
    (out / "results.md").write_text(results.markdown(runs, directions, moments, penalty, pictures))


def _train(setting: Setting) -> list[dict[str, Any]]:
    return list(train(setting))


def _probe(job: tuple[Setting, int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    setting, batches = job
    directions: list[dict[str, Any]] = []
    moments: list[dict[str, Any]] = []
    for at, tables in zip(AT, snapshots(setting, AT), strict=True):
        rows, groups = probe(setting, tables, batches)
        where = {"world": setting.world, "seed": setting.seed, "at": at}
        directions += [{**where, **row} for row in rows]
        moments += [{**where, **group} for group in groups]
    return directions, moments


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(
    out: Annotated[Path, typer.Option(help="Folder of everything the study writes.")] = Path("runs/study_stability"),
    seeds: Annotated[int, typer.Option(help="Of every arm, from 1.", min=2)] = len(Scale.seeds),
    budget: Annotated[int, typer.Option(help="Actions that each run samples.", min=1000)] = Scale.budget,
    processes: Annotated[int, typer.Option(help="Runs at the same time.", min=1)] = 2,
) -> None:
    """Compare the team estimators on softmax teams: gradient norms, inflation factors, penalties, learning."""
    run_study(out, Scale(tuple(range(1, seeds + 1)), budget), processes)
    typer.echo(f"results {out / 'results.md'}")


if __name__ == "__main__":
    typer.run(main)
