"""Saves all models of a team as one step that is whole or not there, and resumes from the newest whole one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_drmas.config import ConfigError
from verl_drmas.trainer import step_folder
from verl_drmas.trainer.step_folder import IncompleteError, Marker

logger = logging.getLogger(__name__)

DATA, TEAM = "data.pt", "team.json"


class CheckpointedTrainer(PPOTrainerSync):
    """A trainer whose checkpoint is one step of a whole team: `global_step_N/actor/<model_id>`, data and team state.

    A save writes the models, the data loader, the team state, the marker (see `step_folder`), the tracker, and only
    then removes what retention no longer wants, step by step and never for one model alone. Wherever it is killed, the
    newest folder with a marker is whole.

    The driver decides by what it sees. Where `trainer.default_local_dir` is not on storage shared by all nodes, the
    shards on other nodes' disks are neither checked nor pruned.
    """

    # -- what a subclass may add

    def saved_models(self) -> list[str]:
        """Ids of the models that a save reaches: the members of the worker group `Fan`."""
        return sorted(self.actor_rollout_wg.members)

    def team_state(self) -> dict[str, Any]:
        """What resumes beside weights and data; values that JSON keeps exactly. Extend it with `super()`'s."""
        return {"kl_coef": float(self.kl_ctrl_in_reward.value)} if self._adapts_kl() else {}

    def load_team_state(self, state: dict[str, Any]) -> None:
        """Take over what `team_state` gave.

        Args:
            state: As it was saved; may lack what an older version didn't save.
        """
        if self._adapts_kl() and "kl_coef" in state:
            self.kl_ctrl_in_reward.value = state["kl_coef"]

    def _adapts_kl(self) -> bool:
        # A fixed coefficient is the configuration's, which may be changed for a resume.
        algorithm = self.config.algorithm
        return bool(algorithm.use_kl_in_reward) and algorithm.kl_ctrl.type == "adaptive"

    # -- saving

    def _save_checkpoint(self) -> None:
        trainer, step = self.config.trainer, self.global_steps
        root = Path(trainer.default_local_dir).absolute()
        folder = root / f"global_step_{step}"
        logger.info("saving checkpoint %s", folder)
        if folder.exists():  # of a save that was cut off, or of a run that this one went back behind
            step_folder.discard(folder)
        remote = trainer.default_hdfs_dir and os.path.join(trainer.default_hdfs_dir, folder.name, "actor")
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), remote, step, max_ckpt_to_keep=None)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / DATA).open("wb") as file:
            torch.save(self.train_dataloader.state_dict(), file)
        step_folder.write_atomically(folder / TEAM, json.dumps(self.team_state()))
        step_folder.complete(folder, self.saved_models())
        step_folder.write_atomically(root / step_folder.TRACKER, str(step))
        # verl's deprecated spelling of "keep one" goes before, as in verl.
        keep = 1 if trainer.get("remove_previous_ckpt_in_save", False) else trainer.get("max_actor_ckpt_to_keep", None)
        step_folder.prune(root, keep)
        self.checkpoint_callback.on_save(trainer=self, global_step=step, checkpoint_dir=str(folder), async_save=False)

    # -- resuming

    def _load_checkpoint(self) -> None:
        self.global_steps = 0
        folder = self._choose()
        if folder is None:
            logger.info("no checkpoint to resume from: training from scratch")
            return
        logger.info("resuming from %s", folder)
        with _resume_path(self.config, str(folder)):
            super()._load_checkpoint()
        self.load_team_state(json.loads((folder / TEAM).read_text()))

    def _choose(self) -> Path | None:
        """The folder to resume from, or None.

        Raises:
            ConfigError: A folder was named that can't be resumed from, or its models aren't this run's.
        """
        trainer = self.config.trainer
        if trainer.resume_mode == "disable":
            return None
        if trainer.resume_mode == "auto":
            chosen = step_folder.newest(Path(trainer.default_local_dir).absolute())
            if chosen is None:
                return None
            folder, marker = chosen.folder, chosen.marker
        elif trainer.resume_mode == "resume_path":
            folder, marker = _named(trainer.resume_from_path)
        else:
            raise ConfigError(f"trainer.resume_mode is {trainer.resume_mode!r}; use auto, disable or resume_path")
        theirs, ours = sorted(marker.models), self.saved_models()
        if theirs != ours:
            raise ConfigError(
                f"checkpoint {folder} holds the models {', '.join(theirs)}; this run trains {', '.join(ours)}: to "
                f"start from those weights, set drmas.models.<id>.init_from={folder}/actor/<model> and give "
                "trainer.default_local_dir a folder of its own (or trainer.resume_mode=disable)"
            )
        return folder


def _named(path: str | None) -> tuple[Path, Marker]:
    """The folder of `trainer.resume_from_path`, and what is in it."""
    folder = Path(path or "").absolute()
    if step_folder.step_of(folder) is None:
        raise ConfigError(f"trainer.resume_from_path is {path!r}; give a checkpoint's folder .../global_step_N")
    try:
        return folder, step_folder.inspect(folder)
    except IncompleteError as error:
        raise ConfigError(
            f"trainer.resume_from_path is {path}, which is not a whole checkpoint: {error}; name another, or set "
            "trainer.resume_mode=auto for the newest whole one"
        ) from error


@contextmanager
def _resume_path(config: DictConfig, folder: str) -> Iterator[None]:
    """verl loads the folder it is told; its own search goes by the tracker."""
    trainer = config.trainer
    before = trainer.resume_mode, trainer.resume_from_path
    trainer.resume_mode, trainer.resume_from_path = "resume_path", folder
    try:
        yield
    finally:
        trainer.resume_mode, trainer.resume_from_path = before
