"""The trainer of a job that plays no sessions: contract, store, gateway and step numbers; with fakes for the rest."""

from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_drmas.config import ConfigError, parse
from verl_drmas.placement import Pool
from verl_drmas.rollout.rows import Row
from verl_drmas.store.codec import PackedRow
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.errors import LeaseLost, RoleTaken, StoreError
from verl_drmas.store.producer import Producer
from verl_drmas.store.records import ClaimedStep, SessionRecord
from verl_drmas.trainer import sub as module
from verl_drmas.trainer.alignment import Alignment
from verl_drmas.trainer.checkpoint import CheckpointedTrainer
from verl_drmas.trainer.contract import terms
from verl_drmas.trainer.fan import Fan
from verl_drmas.trainer.guarded import GuardedTrainer
from verl_drmas.trainer.lanes import Lanes
from verl_drmas.trainer.source import ClaimBuffer, Finished
from verl_drmas.trainer.sub import StoreTrainer
from verl_drmas.trainer.team import TeamTrainer

AGENTS = {"finder": {"model": "sub"}, "reader": {"model": "sub"}}
ALIGNED = ("finder", "reader", "writer")  # writer is on another model of the team


def settings(url, **store):
    return parse(
        {
            "workflow": {"name": "delegate"},
            "agents": AGENTS,
            "models": {"sub": {}},
            "store": {"url": url, "role": "sub", "lease": 30, **store},
        }
    )


class Engines:
    """A model's checkpoint manager and gateway, which note their calls in one list."""

    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "check":
            return lambda: None
        if name == "report":
            return lambda: {"answered": 3.0}
        return lambda *args, **kwargs: self.log.append((name, *args, *kwargs.values()))


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/pair.db"


@pytest.fixture
def make(url):
    made = []

    def make(*, sleeps=False, attach=True, mode="auto", **store):
        one = object.__new__(StoreTrainer)
        one.section, one.global_steps, one.rows, one.feeds = settings(url, **store), 0, {}, {}
        rollout = {"n": 2, "temperature": 1.0}
        one.config = OmegaConf.create(
            {
                "data": {"train_batch_size": 2},
                "algorithm": {"adv_estimator": "mgrpo", "use_kl_in_reward": False},
                "actor_rollout_ref": {"rollout": rollout, "actor": {"optim": {}}},
                "trainer": {"resume_mode": mode, "total_training_steps": None, "save_freq": 2},
            }
        )
        one.alignment = Alignment(one.section.alignment, ALIGNED, seed=3)
        one.model_id, one._mixes, one._sleeps = "sub", False, sleeps
        one._trained_step = one._saved_step = 0
        one._store_saved, one.claimed, one.curr_step_profile, one.timing_raw = None, None, False, {}
        one._contract = None
        one.consumer = Consumer(open_store(url, patience=20), "sub", lease=one.section.store.lease)
        one.replay_buffer = ClaimBuffer(one.consumer, one._take)
        one.watchdog = SimpleNamespace(check=lambda: None, stop=lambda: None, deaths=0)
        engines = Engines()
        one.gateway, one.endpoint, one.log = engines, "http://here:1", engines.log
        one.trained = {"sub": None}
        one.checkpoint_manager = Fan({"sub": engines}, Lanes({"run": Pool("run", 1, 1, ("sub",))}))
        if attach:
            one.consumer.attach(0)
        made.append(one)
        return one

    yield make
    for one in made:
        one.consumer.detach()


@pytest.fixture
def producer(url):
    return Producer(open_store(url, patience=20), "sub")


def packed(agent="finder", position=0):
    fields = {"position": position, "num_turns": 2, "extra": {"path": f"main.0/{agent}.{position}"}}
    one = np.array([1])
    return PackedRow(agent, one, one, np.array([True]), np.array([-0.5]), 1.0, 0, 0, fields)


def play(producer, step, *sessions, target=2):
    """Sessions of prompt 7: the agents whose rows each has."""
    producer.open_step(step, [7], len(sessions))
    for n, agents in enumerate(sessions):
        rows = tuple(packed(agent, i) for i, agent in enumerate(agents))
        producer.put_session(SessionRecord(step, 7, n, True, "", 1.0, step - 1, rows))
    listed = [[7, n] for n in range(len(sessions))]
    producer.close_step(step, {"sessions": listed, "target": dict.fromkeys(ALIGNED, target)})


@pytest.fixture
def puts(monkeypatch):
    """Steps that came where verl looks for rows."""
    log = []

    def put(claimed, model_id, *, row_temperature):
        log.append((claimed.step, model_id, row_temperature))
        return KVBatchMeta(keys=["k"], tags=[{}], partition_id="train", extra_info={})

    monkeypatch.setattr(module, "put_step", put)
    return log


# -- the contract ------------------------------------------------------------------------------------------------------


def contract(one, **changes):
    agents = {"main": {"model": "main"}, **{name: {"model": "sub"} for name in AGENTS}}
    remote = {"store": "sqlite:///x.db", "role": "sub"}
    models = {"main": {}, "sub": {"remote": remote}}
    main = parse({"workflow": {"name": "delegate"}, "agents": agents, "models": models})
    agreed = terms(one.config, main, list(AGENTS))
    return {"terms": agreed, "total_training_steps": 40, "alignment_seed": 17, "model": "m", **changes}


def test_length_and_seed_of_the_run_are_the_other_jobs(make, producer):
    one = make()
    producer.put_contract(contract(one))
    one._init_dataloader()
    assert (one.total_training_steps, one.steps_per_epoch, one.alignment.seed) == (40, 40, 17)
    assert one.config.actor_rollout_ref.actor.optim.total_training_steps == 40  # of the learning-rate schedule
    assert one.train_dataloader.state_dict() == {}


@pytest.fixture
def no_waiting(monkeypatch):
    """What the store holds is what counts, at once."""
    monkeypatch.setattr(module, "BEGIN", -1.0)


def test_other_terms_are_refused(make, producer, no_waiting):
    one = make()
    producer.put_contract(contract(one))
    one.config.data.train_batch_size = 3
    with pytest.raises(ConfigError, match=r"data.train_batch_size is 2 there and 3 here"):
        one._init_dataloader()


@pytest.mark.parametrize("own", [40, 41])
def test_a_length_of_its_own_must_be_the_same(make, producer, no_waiting, own):
    one = make()
    producer.put_contract(contract(one))
    one.config.trainer.total_training_steps = own
    if own == 40:
        one._init_dataloader()
        return
    with pytest.raises(ConfigError, match=r"trainer.total_training_steps is 41, and 40 in the job that plays"):
        one._init_dataloader()


def test_the_other_job_may_come_later(make, producer, monkeypatch):
    one, naps = make(attach=False), []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            producer.put_contract(contract(one))

    monkeypatch.setattr(module.time, "sleep", sleep)
    one._init_dataloader()
    assert len(naps) == 3


@pytest.mark.parametrize("left", ["the end of an earlier run", "other terms"])
def test_what_an_earlier_run_left_may_still_be_replaced(make, producer, monkeypatch, left):
    one, naps = make(attach=False), []
    if left == "other terms":
        producer.put_contract(contract(one) | {"terms": {"data.train_batch_size": 1}})
    else:
        producer.put_contract(contract(one) | {"total_training_steps": 7})
        producer.finish(7)

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            producer.put_contract(contract(one))
            producer.begin(8)

    monkeypatch.setattr(module.time, "sleep", sleep)
    one._init_dataloader()
    assert len(naps) == 3
    assert one.total_training_steps == 40


def test_a_run_that_is_over_and_does_not_go_on_ends(make, producer, no_waiting):
    one = make()
    producer.put_contract(contract(one))
    producer.finish(40)
    one._init_dataloader()
    assert one.total_training_steps == 40


# -- setting up --------------------------------------------------------------------------------------------------------


@pytest.fixture
def resumed(make, monkeypatch):
    """A trainer whose checkpoint is of a step; `_setup` of the rest is left out."""

    def resumed(step, saved="own", **settings):
        one = make(attach=False, **settings)

        def setup(self):
            self.global_steps = step
            self._store_saved = self._store_state() if saved == "own" and step else None

        monkeypatch.setattr(TeamTrainer, "_setup", setup)
        return one

    return resumed


def test_what_was_trained_after_the_checkpoint_is_trained_again(make, producer, resumed, puts):
    for step in (1, 2, 3):
        play(producer, step, ["finder"])
    first = make()
    for step in (1, 2, 3):
        assert first.consumer.claim().step == step
        first.consumer.trained(step)
    first.consumer.saved(2)
    first.consumer.detach()
    one = resumed(2)
    one._setup()
    assert (one._trained_step, one._saved_step) == (2, 2)
    one.replay_buffer.sample()
    assert puts == [(3, "sub", False)] and one.global_steps == 3


def test_a_store_with_a_later_checkpoint_is_refused_unless_one_is_chosen(make, producer, resumed):
    for step in (1, 2):
        play(producer, step, ["finder"])
    first = make()
    for step in (1, 2):
        first.consumer.claim()
        first.consumer.trained(step)
    first.consumer.saved(2)
    first.consumer.detach()
    with pytest.raises(
        ConfigError, match=r"^drmas.store: the store knows of a checkpoint of step 2, and this run would"
    ):
        resumed(1)._setup()
    one = resumed(1, mode="resume_path")
    one._setup()
    assert one.consumer.claim().step == 2


def test_another_store_than_the_checkpoints_is_refused(resumed):
    one = resumed(2, saved=None)
    one.consumer.last_saved = lambda: 3
    with pytest.raises(ConfigError, match=r"holds another run's steps up to 3"):
        one._setup()


def test_a_lease_of_a_killed_job_runs_out(resumed, monkeypatch):
    one, tries = resumed(0), []

    def attach(position, *, rewind_saved):
        tries.append((position, rewind_saved))
        if len(tries) < 3:
            raise RoleTaken("taken", 5.0)

    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    one.consumer.attach = attach
    one._setup()
    assert tries == [(0, False)] * 3


def test_the_checkpoint_keeps_which_store_it_is(make):
    one = make()
    one._collapse, one.stage_watch = SimpleNamespace(state=dict, load=lambda state: None), None
    state = one.team_state()
    assert state["store"] == {"id": one.consumer.store.id, "role": "sub"} and "stores" not in state
    other = make(attach=False)
    other._collapse = one._collapse
    other.load_team_state(state)
    assert other._store_saved == state["store"]


# -- a step ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stages(monkeypatch):
    """verl's step: samples, and nothing else; `fail` makes it raise."""
    state = SimpleNamespace(fail=None)

    def step(self, metrics, timing_raw):
        assert self.prepare_step() == {}
        batch, _ = self.replay_buffer.sample(global_steps=self.global_steps, partition_id="train", batch_size=2)
        if state.fail:
            raise state.fail
        return batch

    monkeypatch.setattr(PPOTrainerSync, "step", step)
    return state


def test_a_step_has_the_other_jobs_number_and_is_done_once(make, producer, puts, stages):
    play(producer, 1, ["finder"])
    play(producer, 2, [])  # without a call of its agents it is never claimed
    play(producer, 3, ["reader"])
    one = make()
    one.global_steps = 1
    one.step({}, {})
    assert (one.global_steps, one._trained_step) == (1, 1)
    one.global_steps = 2
    one.step({}, {})
    assert (one.global_steps, one._trained_step) == (3, 3)
    assert [step for step, *_ in puts] == [1, 3]
    assert producer.gate(4, 0).unfinished == () and producer.gate(4, 0).needed == 3
    producer.finish(3)
    with pytest.raises(Finished):
        one.step({}, {})


def test_a_step_that_failed_is_not_trained(make, producer, puts, stages):
    play(producer, 1, ["finder"])
    one, stages.fail = make(), RuntimeError("a worker died")
    with pytest.raises(RuntimeError, match="a worker died"):
        one.step({}, {})
    assert one._trained_step == 0 and producer.gate(2, 0).unfinished == (1,)
    one.consumer.detach()
    stages.fail = None
    again = make()
    again.step({}, {})
    assert producer.gate(2, 0).unfinished == ()


def test_a_store_that_goes_back_is_no_store_of_this_run(make, producer, puts, stages):
    play(producer, 2, ["finder"])
    one = make()
    one._trained_step = 2
    with pytest.raises(RuntimeError, match=r"role sub has step 2 untrained, and this run has trained step 2"):
        one.step({}, {})
    assert puts == []


def test_a_lost_lease_ends_the_run(make, producer, puts, stages, url):
    play(producer, 1, ["finder"])
    one = make()
    thief = Consumer(open_store(url), "sub", lease=30, owner=one.consumer.owner)
    step = PPOTrainerSync.step

    def stolen(self, *args):
        batch = step(self, *args)
        thief.attach(0)
        return batch

    PPOTrainerSync.step, before = stolen, step
    try:
        with pytest.raises(LeaseLost):
            one.step({}, {})
    finally:
        PPOTrainerSync.step = before
    assert one.consumer is not thief and thief.claim().step == 1
    thief.detach()


# -- the step as the other job had it ----------------------------------------------------------------------------------


def test_sessions_without_a_call_count(make):
    one = make()
    sessions = [(packed(), packed("reader"), packed()), (), (packed("reader"),)]
    records = tuple(SessionRecord(4, 7, n, True, "", 1.0, 3, rows) for n, rows in enumerate(sessions))
    one.claimed = ClaimedStep(4, {"target": {"finder": 3, "reader": 5, "writer": 9}}, records)
    calls, aligned = one._aligned_step()
    assert calls == {"finder": [2, 0, 0], "reader": [1, 0, 1]}
    assert (aligned.aligned, aligned.target) == (("finder", "reader"), {"finder": 3, "reader": 5})
    assert (aligned.mode, aligned.seed, aligned.step) == ("sample", 3, 4)
    assert one._sessions_played() == 3
    one.rows, metrics = {f"4-7_0_{i}": Row("4-7", 0, i, 7, "finder", "sub") for i in range(4)}, {}
    one._account(metrics)
    assert metrics == {"drmas/sessions/expected": 3.0, "drmas/sessions/rows_per_session": 4 / 3}


def test_the_stores_numbers_stand_under_its_role(make, producer):
    one = make()
    play(producer, 1, ["finder"])
    one.replay_buffer.waited = 2.5
    metrics = one._team_metrics(None)
    assert metrics["drmas/store/sub/steps/ready"] == 1 and metrics["drmas/store/sub/waited"] == 2.5
    assert metrics["drmas/gateway/answered"] == 3.0  # what became of the calls at the gateway


# -- serving beside training -------------------------------------------------------------------------------------------


def test_the_gateway_is_closed_while_engines_sleep(make):
    one = make(sleeps=True)
    one.on_sample_end()
    assert [name for name, *_ in one.log] == ["close", "abort_replicas", "sleep_replicas"]


def test_engines_that_stay_awake_serve_during_training(make):
    one = make(sleeps=False)
    one.on_sample_end()
    assert [name for name, *_ in one.log] == ["sleep_replicas"]  # which verl makes nothing of


@pytest.mark.parametrize("sleeps", [True, False])
def test_new_weights_are_served_under_their_number(make, producer, sleeps):
    one = make(sleeps=sleeps)
    one.global_steps = one._trained_step = 4
    published = one.consumer.publish
    one.consumer.publish = lambda *args: one.log.append(("publish", *args)) or published(*args)
    one.on_step_end()
    names = [name for name, *_ in one.log]
    cut = [] if sleeps else ["abort_replicas"]  # no answer is of both weights without saying so
    assert names == ["close", *cut, "update_weights", "resume_generation_replicas", "open", "publish"]
    assert ("open", 4) in one.log and ("publish", 4, "http://here:1") in one.log
    assert (producer.consumer().version, producer.consumer().endpoint) == (4, "http://here:1")


def test_a_failed_weight_update_leaves_the_gateway_closed(make, monkeypatch):
    one = make()

    def fail(self):
        raise RuntimeError("a server died")

    monkeypatch.setattr(PPOTrainerSync, "on_step_end", fail)
    with pytest.raises(RuntimeError, match="a server died"):
        one.on_step_end()
    assert "open" not in [name for name, *_ in one.log]


def test_the_first_weights_are_served_at_once(make, monkeypatch):
    one, made = make(), []

    class Keeper(Engines):
        def __init__(self, *args, **kwargs):
            super().__init__()
            made.append((args, kwargs, self))

        def start(self):
            return "http://there:2"

    monkeypatch.setattr(module, "GatewayKeeper", Keeper)
    monkeypatch.setenv("DRMAS_GATEWAY_TOKEN", "secret")
    one.policies = {
        "sub": SimpleNamespace(llm_server_manager=SimpleNamespace(get_client=lambda client_cls: client_cls))
    }
    one._trained_step = 6
    one.on_init_end()
    ((args, kwargs, keeper),) = made
    assert args == (module.ResumingClient, one.section.gateway)
    assert (kwargs["role"], kwargs["token"].get_secret_value()) == ("sub", "secret")
    assert keeper.log == [("open", 6)] and one.endpoint == "http://there:2"


# -- checkpoints and the end -------------------------------------------------------------------------------------------


def test_a_step_is_saved_with_the_checkpoint_and_not_before(make, producer, puts, stages, monkeypatch):
    order = []
    monkeypatch.setattr(CheckpointedTrainer, "_save_checkpoint", lambda self: order.append(self.consumer.last_saved()))
    play(producer, 1, ["finder"])
    one = make()
    one.step({}, {})
    assert one.consumer.last_saved() == 0
    one._save_checkpoint()
    assert order == [0] and one.consumer.last_saved() == one._saved_step == 1


@pytest.fixture
def run(make, monkeypatch):
    """A trainer whose run is `loop`, one step after another; saved steps are in `run.saved`."""
    saved = []
    monkeypatch.setattr(CheckpointedTrainer, "_save_checkpoint", lambda self: saved.append(self.global_steps) or None)

    def run(loop, **settings):
        def fit(self, manager):
            loop(self)

        monkeypatch.setattr(PPOTrainerSync, "fit", fit)
        monkeypatch.setattr(GuardedTrainer, "_explain", lambda self, error: None)
        monkeypatch.setattr(StoreTrainer, "_shutdown_dump_executor", lambda self: saved.append("dump is shut"))
        one = make(**settings)
        one._build_watchdog = lambda: one.watchdog
        return one

    run.saved = saved
    return run


def test_a_run_ends_with_a_checkpoint_of_its_last_step(run, producer, puts, stages):
    """verl saves at the step it takes for the last one; the last one of the store may be another."""
    play(producer, 3, ["finder"])
    producer.finish(4)

    def loop(one):
        while True:
            one.step({}, {})
            one.global_steps += 1

    one = run(loop)
    one.fit(None)
    assert run.saved == ["dump is shut", 3]
    assert one.log[-1] == ("stop",) and not producer.consumer().alive


def test_a_run_that_saved_its_last_step_saves_it_once(run, producer):
    producer.finish(4)

    def loop(one):
        one._trained_step = one._saved_step = 4

    run(loop).fit(None)
    assert run.saved == []


def test_a_job_that_is_done_serves_until_the_other_one_is(run, producer, monkeypatch):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        assert producer.consumer().alive
        if len(naps) == 3:
            producer.finish(4)

    one = run(lambda one: None)
    monkeypatch.setattr(module.time, "sleep", sleep)
    one.fit(None)
    assert len(naps) == 3 and one.log == [("stop",)]


@pytest.mark.parametrize("serving", [True, False])
@pytest.mark.parametrize("trouble", ["servers", "gateway", "contract"])
def test_a_job_that_can_not_go_on_waits_no_more(run, producer, puts, stages, trouble, serving):
    """Neither for a step, nor for the other job's end: that job would wait for this one, too."""
    one = run(lambda one: None if serving else one.step({}, {}))
    one.replay_buffer.check = one._check

    def fail():
        raise RuntimeError("no server left")

    if trouble == "contract":
        producer.put_contract({"total_training_steps": 41})
    else:
        (one.watchdog if trouble == "servers" else one.gateway).check = fail
    with pytest.raises(RuntimeError, match="other settings" if trouble == "contract" else "no server left"):
        one.fit(None)
    assert one.log[-1] == ("stop",) and not producer.consumer().alive


def test_a_run_that_failed_gives_the_role_back(run, producer, puts, stages):
    play(producer, 1, ["finder"])
    stages.fail = RuntimeError("a worker died")
    one = run(lambda one: one.step({}, {}))
    with pytest.raises(RuntimeError, match="a worker died"):
        one.fit(None)
    assert run.saved == [] and one.log == [("stop",)]
    state = producer.consumer()
    assert not state.alive and state.step_in_training is None
    assert producer.gate(2, 0).unfinished == (1,)


def test_a_job_without_a_lease_asks_for_one(make):
    with pytest.raises(StoreError, match="attach"):
        make(attach=False).consumer.claim()
