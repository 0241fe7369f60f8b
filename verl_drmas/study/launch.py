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
        self.folder.mkdir(parents=True, exist_ok=True)
        keep_aside(self.folder / METRICS)
        (self.folder / "command.json").write_text(json.dumps(self.command, indent=2) + "\n")
        sys.stdout.flush()
        os.execv(self.command[0], self.command)


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
