"""A team's save and resume, without a cluster: killed at every point of a save, a run resumes from a whole step."""

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_kl_controller

from verl_drmas.config import ConfigError
from verl_drmas.trainer.checkpoint import CheckpointedTrainer
from verl_drmas.trainer.step_folder import MARKER, TRACKER, survey


class Model:
    """A worker group whose weights are a number."""

    def __init__(self):
        self.weights, self.saves = 0, []

    def save_checkpoint(self, local_path, remote_path, global_step, max_ckpt_to_keep=None):
        self.saves.append((local_path, remote_path, global_step, max_ckpt_to_keep))
        Path(local_path).mkdir(parents=True, exist_ok=True)
        for shard in ("rank_0.pt", "rank_1.pt"):
            with (Path(local_path) / shard).open("w") as file:
                file.write(f"{self.weights}"[:1])
                file.flush()
                sys.audit("test.half_written")
                file.write(f"{self.weights}"[1:])

    def load_checkpoint(self, local_path, del_local_after_load):
        (self.weights,) = {int((Path(local_path) / shard).read_text()) for shard in ("rank_0.pt", "rank_1.pt")}


class Fan:
    """Hands saves and loads to each model, under its id."""

    def __init__(self, members):
        self.members = members

    def save_checkpoint(self, local_path, remote_path, global_step, max_ckpt_to_keep=None):
        for model_id, member in self.members.items():
            remote = remote_path and f"{remote_path}/{model_id}"
            member.save_checkpoint(f"{local_path}/{model_id}", remote, global_step, max_ckpt_to_keep)

    def load_checkpoint(self, local_path, **kwargs):
        for model_id, member in self.members.items():
            member.load_checkpoint(local_path=f"{local_path}/{model_id}", **kwargs)


class Loader:
    """A data loader whose state is a position."""

    position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Trainer(CheckpointedTrainer):
    """What a save and a resume need of a trainer; two models `a` and `b` unless told otherwise."""

    def __init__(self, root, models=("a", "b"), kl="fixed", **trainer):
        self.config = OmegaConf.create(
            {
                "trainer": {
                    "default_local_dir": str(root),
                    "default_hdfs_dir": None,
                    "resume_mode": "auto",
                    "resume_from_path": None,
                    "del_local_ckpt_after_load": False,
                    "max_actor_ckpt_to_keep": None,
                    **trainer,
                },
                "algorithm": {
                    "use_kl_in_reward": kl is not None,
                    "kl_ctrl": {"type": kl, "kl_coef": 0.1, "target_kl": 0.1, "horizon": 10},
                },
            }
        )
        OmegaConf.set_struct(self.config, True)
        if kl is not None:
            self.kl_ctrl_in_reward = get_kl_controller(self.config.algorithm.kl_ctrl)
        self.actor_rollout_wg = Fan({model: Model() for model in models})
        self.train_dataloader, self.use_critic, self.trainer_mode = Loader(), False, "sync"
        self.global_steps, self.told = 0, []
        self.checkpoint_callback = SimpleNamespace(on_save=lambda **told: self.told.append(told))

    def train_to(self, step, save=True):
        """Weights 1000 x step, plus one for the second model and so on; a data position of ten a step."""
        self.global_steps = step
        for i, model in enumerate(self.actor_rollout_wg.members.values()):
            model.weights = 1000 * step + i
        self.train_dataloader.position = 10 * step
        if save:
            self._save_checkpoint()
        return self

    def state(self):
        """(step, weights by model, data position)"""
        weights = [model.weights for model in self.actor_rollout_wg.members.values()]
        return self.global_steps, weights, self.train_dataloader.position


def resumed(root, **kwargs):
    trainer = Trainer(root, **kwargs)
    trainer._load_checkpoint()
    return trainer


def whole(step):
    """The state of a run at a step, all of it from the same step."""
    return step, [1000 * step, 1000 * step + 1], 10 * step


def steps(root):
    return sorted(int(path.name.rsplit("_", 1)[1]) for path in root.glob("global_step_*"))


# -- saving


def test_a_save_is_one_step_of_all_models(tmp_path):
    trainer = Trainer(tmp_path, default_hdfs_dir="hdfs://x", max_actor_ckpt_to_keep=1).train_to(3)
    folder = tmp_path / "global_step_3"
    marker = json.loads((folder / MARKER).read_text())
    assert marker["models"] == ["a", "b"]
    assert {*marker["files"]} == {
        *(f"actor/{m}/rank_{r}.pt" for m in "ab" for r in (0, 1)),
        "data.pt",
        "team.json",
    }
    assert (tmp_path / TRACKER).read_text() == "3"
    # No model is told to prune for itself.
    saved = (str(folder / "actor" / "b"), "hdfs://x/global_step_3/actor/b", 3, None)
    assert trainer.actor_rollout_wg.members["b"].saves == [saved]
    assert trainer.told == [{"trainer": trainer, "global_step": 3, "checkpoint_dir": str(folder), "async_save": False}]


def test_the_callback_is_told_when_all_is_done(tmp_path):
    Trainer(tmp_path).train_to(1)
    trainer, seen = Trainer(tmp_path, max_actor_ckpt_to_keep=1), []
    trainer.checkpoint_callback.on_save = lambda **_: seen.append((steps(tmp_path), (tmp_path / TRACKER).read_text()))
    trainer.train_to(2)
    assert seen == [([2], "2")]


@pytest.mark.parametrize("option", [{"max_actor_ckpt_to_keep": 2}, {"remove_previous_ckpt_in_save": True}])
def test_retention_prunes_whole_steps_of_earlier_processes_too(tmp_path, option):
    for step in (1, 2, 3, 4):
        Trainer(tmp_path, **option).train_to(step)
    assert steps(tmp_path) == ([3, 4] if "max_actor_ckpt_to_keep" in option else [4])


def test_remains_at_the_same_step_do_not_end_up_in_a_new_save(tmp_path):
    remains = tmp_path / "global_step_1" / "actor" / "a" / "rank_7.pt"
    remains.parent.mkdir(parents=True)
    remains.write_text("of a run with eight ranks")
    Trainer(tmp_path).train_to(1)
    assert not remains.exists()
    assert resumed(tmp_path).state() == whole(1)


# -- killed at every point


def kill_in_save(trainer, step, point):
    """Save in a child process that is killed at its n-th act on files. True if the save ended before that."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, f"point {point}: signal {os.WTERMSIG(status)}"
            return False
        assert os.WEXITSTATUS(status) == 0, f"point {point}: the save failed"
        return True
    try:
        left, root = point, trainer.config.trainer.default_local_dir
        acts = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "test.half_written"}

        def hook(event, args):
            nonlocal left
            if event in acts or (event == "open" and str(args[0]).startswith(root)):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        signal.alarm(60)
        sys.addaudithook(hook)
        trainer.train_to(step)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the child must not go on as a second pytest
        traceback.print_exc()
        os._exit(1)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """For every point of step 3's save: the folder as the kill left it. Steps 1 and 2 are whole, 1 is to be pruned."""
    start = tmp_path_factory.mktemp("start")
    for step in (1, 2):
        Trainer(start).train_to(step)
    folders = []
    while True:
        root = tmp_path_factory.mktemp("killed") / "checkpoints"
        shutil.copytree(start, root)
        folders.append(root)
        if kill_in_save(Trainer(root, max_actor_ckpt_to_keep=2), 3, len(folders) - 1):
            return folders


@pytest.mark.long
def test_every_kill_leaves_a_whole_step_to_resume_from(killed):
    picked = [resumed(root).state() for root in killed]
    assert len(picked) > 30
    assert picked == sorted(picked)  # the step before, up to one point, and the new one from there on
    assert {*map(str, picked)} == {str(whole(2)), str(whole(3))}


def test_the_tracker_is_never_half_written_and_never_ahead(killed):
    trackers = [int((root / TRACKER).read_text()) for root in killed]
    picked = [resumed(root).global_steps for root in killed]
    assert all(tracker <= step for tracker, step in zip(trackers, picked, strict=True))
    assert any(tracker < step for tracker, step in zip(trackers, picked, strict=True))  # whole, tracker not yet written


def test_retention_begins_when_the_new_step_is_whole(killed):
    for root in killed:
        if not (root / "global_step_1" / MARKER).exists():
            assert (root / TRACKER).read_text() == "3"
            assert [w.marker.step for w in survey(root)[0]] == [2, 3]


@pytest.mark.long
def test_after_every_kill_the_run_goes_on_and_clears_up(killed, tmp_path):
    for i, left in enumerate(killed):
        root = tmp_path / str(i)
        shutil.copytree(left, root)
        trainer = resumed(root, max_actor_ckpt_to_keep=2)
        last = trainer.global_steps + 2
        for step in range(trainer.global_steps + 1, last + 1):
            trainer.train_to(step)
        assert steps(root) == [last - 1, last]
        assert resumed(root).state() == whole(last)


# -- resuming


@pytest.mark.parametrize("tracker", [None, "", "garbage", "1", "99"])
def test_the_tracker_decides_nothing(tmp_path, tracker):
    for step in (1, 2):
        Trainer(tmp_path).train_to(step)
    (tmp_path / TRACKER).unlink() if tracker is None else (tmp_path / TRACKER).write_text(tracker)
    assert resumed(tmp_path).state() == whole(2)


def test_one_models_missing_shard_is_passed_over(tmp_path, caplog):
    for step in (1, 2):
        Trainer(tmp_path).train_to(step)
    (tmp_path / "global_step_2" / "actor" / "b" / "rank_1.pt").unlink()
    assert resumed(tmp_path).state() == whole(1)
    assert "global_step_2: actor/b/rank_1.pt is missing" in caplog.text


def test_nothing_to_resume_from_starts_from_scratch(tmp_path):
    assert resumed(tmp_path / "absent").state() == (0, [0, 0], 0)
    Trainer(tmp_path).train_to(1)
    assert resumed(tmp_path, resume_mode="disable").state() == (0, [0, 0], 0)


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_named_step_is_loaded_and_the_configuration_stays(tmp_path, ending):
    for step in (1, 2):
        Trainer(tmp_path).train_to(step)
    named = {"resume_mode": "resume_path", "resume_from_path": f"{tmp_path}/global_step_1{ending}"}
    trainer = resumed(tmp_path, **named)
    assert trainer.state() == whole(1)
    assert {key: trainer.config.trainer[key] for key in named} == named
    automatic = resumed(tmp_path)
    assert (automatic.config.trainer.resume_mode, automatic.config.trainer.resume_from_path) == ("auto", None)


def test_the_configuration_stays_where_loading_fails(tmp_path):
    Trainer(tmp_path).train_to(1)
    trainer = Trainer(tmp_path)
    trainer.train_dataloader = None
    with pytest.raises(AttributeError):
        trainer._load_checkpoint()
    assert trainer.config.trainer.resume_mode == "auto"


def test_relative_folders_are_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Trainer("out").train_to(1)
    assert resumed("out").state() == whole(1)
    named = resumed("out", resume_mode="resume_path", resume_from_path="out/global_step_1")
    assert named.state() == whole(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume_mode": "resume_path"}, r"resume_from_path is None; give .*global_step_N"),
        ({"resume_mode": "resume_path", "resume_from_path": "out/step_3"}, r"'out/step_3'; give .*global_step_N"),
        (
            {"resume_mode": "resume_path", "resume_from_path": "{root}/global_step_2"},
            r"global_step_2, which is not a whole checkpoint: data\.pt has .* bytes instead of .*resume_mode=auto",
        ),
        ({"resume_mode": "resume_path", "resume_from_path": "{root}/global_step_9"}, r"no complete\.json"),
        ({"resume_mode": "latest"}, r"resume_mode is 'latest'; use auto, disable or resume_path"),
        (
            {"models": ("base",)},
            r"global_step_1 holds the models a, b; this run trains base: .*drmas\.models\.<id>\.init_from=.*/actor/",
        ),
        ({"models": ("a", "b", "c")}, r"holds the models a, b; this run trains a, b, c"),
    ],
)
def test_what_can_not_be_resumed_is_one_clear_line(tmp_path, options, message):
    for step in (1, 2):
        Trainer(tmp_path).train_to(step)
    with (tmp_path / "global_step_2" / "data.pt").open("ab") as file:
        file.write(b"+")
    path = options.get("resume_from_path")
    if path:
        options = {**options, "resume_from_path": path.format(root=tmp_path)}
    with pytest.raises(ConfigError, match=message) as error:
        resumed(tmp_path, **options)
    assert "\n" not in str(error.value)


# -- team state


def test_the_adaptive_kl_coefficient_resumes_exactly(tmp_path):
    trainer = Trainer(tmp_path, kl="adaptive")
    trainer.kl_ctrl_in_reward.update(current_kl=0.7, n_steps=3)
    coefficient = trainer.kl_ctrl_in_reward.value
    trainer.train_to(1)
    assert coefficient != 0.1
    assert resumed(tmp_path, kl="adaptive").kl_ctrl_in_reward.value == coefficient


@pytest.mark.parametrize(("before", "after"), [("adaptive", "fixed"), ("fixed", "adaptive"), (None, "adaptive")])
def test_another_kl_setting_keeps_the_configurations_coefficient(tmp_path, before, after):
    trainer = Trainer(tmp_path, kl=before)
    if before:
        trainer.kl_ctrl_in_reward.value = 0.3
    trainer.train_to(1)
    assert resumed(tmp_path, kl=after).kl_ctrl_in_reward.value == 0.1


def test_a_subclass_adds_its_own_state(tmp_path):
    class Curriculum(Trainer):
        level = 0

        def team_state(self):
            return {**super().team_state(), "level": self.level}

        def load_team_state(self, state):
            super().load_team_state(state)
            self.level = state["level"]

    trainer = Curriculum(tmp_path)
    trainer.level = 4
    trainer.train_to(1)
    again = Curriculum(tmp_path)
    again._load_checkpoint()
    assert again.level == 4
