"""How a recipe starts a run: verl's own command on a shipped configuration, with a folder for all that it leaves."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_drmas.aside import keep_aside
from verl_drmas.quoting import quoted

# verl's own keys that a seed stands in: the order of the data, the engines' sampling, the order within an update.
SEEDED = ("data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Launch:
    """One run.

    Attributes:
        config: Name of a shipped configuration.
        overrides: Hydra's, on top of it.
        folder: Where the run leaves `metrics.jsonl`, `checkpoints`, `hydra`, and `command.json` with its command.
    """

    config: str
    overrides: tuple[str, ...]
    folder: Path

    @property
    def arguments(self) -> list[str]:
        """The arguments of `verl.trainer.main_ppo`; `verl-drmas check` and `plan` take the same."""
        return ["--config-name", self.config, *self.overrides]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "verl.trainer.main_ppo", *self.arguments]

    def shown(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(["python", *self.command[1:]])

    def start(self) -> None:
        """Become the run: this process ends as it does, with its exit status.

        verl's file logger begins its file anew, and verl itself goes on from the last checkpoint: the metrics of an
        earlier start are kept beside it, where `verl-drmas report` finds them.
        """
        keep_aside(self.folder / METRICS)
        _become(self.command, self.folder)


@dataclass(frozen=True)
class PairLaunch:
    """A run as two jobs that meet in a database, both on this machine; `--dry-run` behind its command prints what
    starts each on machines of its own.

    Attributes:
        main: The job that plays the sessions.
        sub: The job that trains the sub-agents' model.
        folder: Where the run leaves `main`, `sub`, logs and the store, and `command.json`.
    """

    main: Launch
    sub: Launch
    folder: Path

    @property
    def command(self) -> list[str]:
        own = {"--main": self.main.overrides, "--sub": self.sub.overrides}
        options = [part for option, overrides in own.items() for text in overrides for part in (option, text)]
        folder = ["--run-dir", str(self.folder)]
        return [sys.executable, "-m", "verl_drmas.cli", "pair", self.main.config, self.sub.config, *folder, *options]

    def shown(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(["verl-drmas", *self.command[3:]])

    def start(self) -> None:
        """As `Launch.start`; the pair keeps its jobs' metrics itself."""
        _become(self.command, self.folder)


def launch(
    config: str,
    overrides: Sequence[str],
    *,
    project: str,
    experiment: str,
    runs: Path,
    seed: int,
    environment: Mapping[str, str] | None = None,
    further: Sequence[str] = (),
) -> Launch:
    """A run of a study.

    Args:
        config: Name of a shipped configuration.
        overrides: What the recipe chooses.
        project: The study.
        experiment: The run's name without its seed.
        runs: Folder of all runs; this one's is `runs/project/experiment_seed<seed>`.
        seed: See `SEEDED`. Requests stay unseeded unless `drmas.request_seed` is set.
        environment: Variables that the run's workers need, on whatever machine they are.
        further: The user's own overrides, which come last and win.
    """
    name = f"{experiment}_seed{seed}"
    folder = (runs / project / name).resolve()
    # As part of the command, because a process on another machine of a Ray cluster sees no variable of ours.
    variables = {"VERL_FILE_LOGGER_PATH": str(folder / METRICS), **(environment or {})}
    own = [
        f"trainer.project_name={project}",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={quoted(folder / 'checkpoints')}",
        f"hydra.run.dir={quoted(folder / 'hydra')}",
        *(f"{key}={seed}" for key in SEEDED),
        *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{key}={quoted(text)}" for key, text in variables.items()),
    ]
    return Launch(config, (*overrides, *own, *further), folder)


def launch_pair(
    configs: tuple[str, str],
    overrides: Sequence[str],
    *,
    project: str,
    experiment: str,
    runs: Path,
    seed: int,
    of_each: Mapping[str, Sequence[str]] | None = None,
    further: Sequence[str] = (),
) -> PairLaunch:
    """A run of a study as two jobs. `verl-drmas pair` itself gives each a folder, and sets the store in both.

    Args:
        configs: Names of the shipped configurations of main and sub.
        overrides: What the recipe chooses, in both jobs.
        project: The study.
        experiment: As in `launch`; the jobs' names end in `_main` and `_sub`.
        runs: As in `launch`.
        seed: As in `launch`.
        of_each: What it chooses in one of the jobs alone, by `main` and `sub`.
        further: The user's own overrides, of both jobs.
    """
    folder = (runs / project / f"{experiment}_seed{seed}").resolve()
    jobs = {}
    for part, config in zip(("main", "sub"), configs, strict=True):
        names = [f"trainer.project_name={project}", f"trainer.experiment_name={experiment}_seed{seed}_{part}"]
        seeds = [f"{key}={seed}" for key in SEEDED]
        own = (of_each or {}).get(part, ())
        jobs[part] = Launch(config, (*overrides, *own, *names, *seeds, *further), folder / part)
    return PairLaunch(jobs["main"], jobs["sub"], folder)


def _become(command: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "command.json").write_text(json.dumps(command, indent=2) + "\n")
    sys.stdout.flush()
    os.execv(command[0], command)
