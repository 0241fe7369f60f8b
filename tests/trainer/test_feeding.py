"""A trainer opens, closes and waits for steps in the stores of its remote models, on real stores."""

import json
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_drmas.config import ConfigError, parse
from verl_drmas.rollout.rows import Row
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.records import SessionRecord
from verl_drmas.trainer.checkpoint import CheckpointedTrainer
from verl_drmas.trainer.contract import check_terms, terms
from verl_drmas.trainer.feeding import FeedingTrainer

RUN = {
    "data": {"train_batch_size": 2},
    "actor_rollout_ref": {"rollout": {"n": 3, "temperature": 1.0}, "model": {"path": "org/main"}},
    "algorithm": {"adv_estimator": "mgrpo", "use_kl_in_reward": False},
    "trainer": {"resume_mode": "auto"},
}


class Feeding(FeedingTrainer, CheckpointedTrainer):
    """With the rest of a trainer left out."""


@pytest.fixture
def base(monkeypatch):
    """Calls that reach verl's trainer, by name."""
    log = []
    for name in ("prepare_step", "on_validate_begin", "fit", "_submit_batch_to_rollout"):
        monkeypatch.setattr(PPOTrainerSync, name, lambda self, *args, name=name: log.append(name) or name)
    monkeypatch.setattr(CheckpointedTrainer, "_save_checkpoint", lambda self: log.append("_save_checkpoint"))
    return log


@pytest.fixture
def make(tmp_path):
    def make(*remote, step=0, mode="auto", **settings):
        """A trainer with a model of its own and remote ones, all in one store."""
        made = object.__new__(Feeding)
        url = f"sqlite:///{tmp_path}/{settings.pop('name', 'pair')}.db"
        models = {"main": {}, **{m: {"remote": {"store": url, "role": m, **settings}} for m in remote}}
        agents = {"main": {"model": "main"}, **{f"agent-{m}": {"model": m} for m in remote}}
        made.section = parse({"workflow": {"name": "delegate"}, "models": models, "agents": agents})
        made.config = OmegaConf.create(RUN)
        made.config.trainer.resume_mode = mode
        policies = {m: OmegaConf.merge(RUN, {"actor_rollout_ref": {"model": {"path": f"org/{m}"}}}) for m in models}
        made.prepared = SimpleNamespace(policies=policies)
        made.alignment = SimpleNamespace(seed=17)
        made.global_steps, made.total_training_steps = step, 40
        made.watchdog = SimpleNamespace(check=lambda: None)
        made._build_feeds()
        return made

    return make


def prompts(*index):
    return TensorDict({"index": torch.tensor(index)}, batch_size=len(index))


def rows(*sessions):
    return {f"u{p}_{n}_0": Row(f"u{p}", n, 0, p, "main", "main") for p, n in sessions}


def play(made, *sessions, step=1):
    """Open a step and put its sessions in every store."""
    made.global_steps = step
    made._submit_batch_to_rollout(prompts(*{p for p, _ in sessions}))
    for feed in made.feeds.values():
        for p, n in sessions:
            feed.producer.put_session(SessionRecord(step, p, n, True, "", 0.0, step - 1))


# -- without a remote model --------------------------------------------------------------------------------------------


def test_a_run_of_its_own_is_left_alone(make, base):
    made = make()
    made._begin_feeding()
    made.prepare_step()
    made.on_validate_begin()
    made._submit_batch_to_rollout(object())  # not even looked at
    made._hand_over(rows((7, 0)), {})
    made._save_checkpoint()
    made.fit(None)
    assert base == ["prepare_step", "on_validate_begin", "_submit_batch_to_rollout", "_save_checkpoint", "fit"]
    assert made._store_metrics() == {} and "stores" not in made.team_state()


# -- a step ------------------------------------------------------------------------------------------------------------


def test_a_step_is_opened_before_it_is_played_and_may_grow(make, monkeypatch):
    made, seen = make("a", "b", step=3), []

    def submit(self, batch):
        seen.append([feed.producer.store.id for feed in self.feeds.values()])
        for feed in self.feeds.values():  # every prompt is open, with `n` sessions and no more
            assert feed.producer.put_session(SessionRecord(3, int(batch["index"][-1]), 2, True, "", 0.0, 2))
        return 2

    monkeypatch.setattr(PPOTrainerSync, "_submit_batch_to_rollout", submit)
    assert made._submit_batch_to_rollout(prompts(7, 8)) == 2
    assert made._submit_batch_to_rollout(prompts(9)) == 2  # verl refills
    assert len(seen) == 2


def test_what_is_in_the_batch_is_in_the_manifest_of_every_store(make, base):
    made = make("a", "b")
    play(made, (7, 0), (8, 1), (7, 2), (8, 0))
    two = rows((8, 1), (7, 2), (7, 0)) | {"u7_0_1": Row("u7", 0, 1, 7, "agent-a", "a")}
    made._hand_over(two, {"agent-a": 4})
    for feed in made.feeds.values():
        assert feed.producer.manifest(1) == {"sessions": [[7, 0], [7, 2], [8, 1]], "target": {"agent-a": 4}}


def test_a_step_that_is_handed_over_again_keeps_its_first_manifest(make, base):
    """A run that was killed after it closed a step, and before its checkpoint, plays the step again."""
    made = make("a")
    play(made, (7, 0), (7, 1))
    made._hand_over(rows((7, 0)), {"agent-a": 2})
    play(made, (7, 0), (7, 1))
    made._hand_over(rows((7, 0), (7, 1)), {"agent-a": 3})
    assert made.feeds["a"].producer.manifest(1) == {"sessions": [[7, 0]], "target": {"agent-a": 2}}


def test_sessions_wait_for_the_step_before_and_validation_for_the_step_itself(make, base):
    made, waits = make("a", "b", step=5), []
    for name, feed in made.feeds.items():
        feed.wait = lambda step, check, name=name: waits.append((name, step))
    made.prepare_step()
    made.on_validate_begin()
    assert waits == [("a", 5), ("b", 5), ("a", 6), ("b", 6)]
    assert base == ["prepare_step", "on_validate_begin"]


def test_a_wait_looks_at_the_watchdog(make, base):
    made = make("a", step=2)
    play(made, (7, 0))
    feed = made.feeds["a"]
    feed.producer.store.write(lambda connection: None)
    made._hand_over(rows((7, 0)), {})

    class Ready:
        """A gate that opens for nobody."""

        unfinished = (1,)

    feed.producer.gate = lambda step, lag: Ready

    def check():
        raise RuntimeError("no server left")

    made.watchdog.check = check
    with pytest.raises(RuntimeError, match="no server left"):
        made.prepare_step()


# -- the run -----------------------------------------------------------------------------------------------------------


def test_the_other_job_learns_what_is_played(make):
    made = make("a")
    made._begin_feeding()
    contract = made.feeds["a"].producer.contract()
    assert (contract["total_training_steps"], contract["alignment_seed"], contract["model"]) == (40, 17, "org/a")
    agents = {"agent-a": {"model": "mine"}}
    store = {"url": "sqlite:///x.db", "role": "a"}
    mine = parse({"workflow": {"name": "delegate"}, "models": {"mine": {}}, "agents": agents, "store": store})
    check_terms(contract["terms"], terms(OmegaConf.create(RUN), mine, ["agent-a"]))


def test_a_models_own_temperature_is_what_the_other_job_must_have(make):
    made = make("a")
    made.prepared.policies["a"].actor_rollout_ref.rollout.temperature = 0.5
    made._build_feeds()
    found = made.feeds["a"].producer.contract()["terms"]
    assert found["actor_rollout_ref.rollout.temperature"] == 0.5


def test_a_run_without_alignment_has_no_seed(make):
    made = make("a")
    made.alignment = None
    made._build_feeds()
    assert made.feeds["a"].producer.contract()["alignment_seed"] is None


def test_the_end_is_said_by_a_run_that_ended(make, base, monkeypatch, tmp_path):
    made, watching = make("a", step=9), Consumer(open_store(f"sqlite:///{tmp_path}/pair.db"), "a", lease=30)
    made._begin_feeding()
    watching.attach(0)
    made.fit(None)
    assert watching.finished() == 9
    made._build_feeds()  # a run that goes on
    assert watching.finished() is None

    def fail(self, manager):
        raise RuntimeError("died")

    monkeypatch.setattr(PPOTrainerSync, "fit", fail)
    with pytest.raises(RuntimeError, match="died"):
        made.fit(None)
    assert watching.finished() is None
    watching.detach()


def test_a_checkpoint_is_known_to_the_store_and_keeps_which_one_it_is(make, base):
    made = make("a", "b", step=4)
    made._save_checkpoint()
    assert base == ["_save_checkpoint"]
    assert [feed.producer.last_saved() for feed in made.feeds.values()] == [4, 4]
    state = json.loads(json.dumps(made.team_state()))
    assert state["stores"]["b"] == {"id": made.feeds["b"].producer.store.id, "role": "b"}

    resumed = make("a", "b", step=4)
    resumed.load_team_state(state)
    resumed._begin_feeding()
    elsewhere = make("a", "b", step=4, name="other")
    elsewhere.load_team_state(state)
    with pytest.raises(ConfigError, match=r"drmas.models.a.remote: the checkpoint of step 4 was saved with store"):
        elsewhere._begin_feeding()


@pytest.mark.parametrize(("mode", "refused"), [("auto", True), ("disable", False), ("resume_path", False)])
def test_a_later_checkpoint_is_left_behind_by_who_says_so(make, base, mode, refused):
    made = make("a", step=4)
    made._save_checkpoint()
    anew = make("a", step=0, mode=mode)
    if not refused:
        anew._begin_feeding()
        return
    with pytest.raises(ConfigError, match="knows of a checkpoint of step 4, and this run would start from step 0"):
        anew._begin_feeding()


def test_a_checkpoint_of_before_it_was_a_pair_is_taken(make):
    made = make("a", step=4)
    made.load_team_state({})
    made._begin_feeding()


def test_a_stores_numbers_stand_under_its_role(make, base):
    made = make("a", "b")
    play(made, (7, 0))
    numbers = made._store_metrics()
    assert numbers["drmas/store/a/steps/open"] == numbers["drmas/store/b/steps/open"] == 1
    assert numbers["drmas/store/a/waited"] == 0
