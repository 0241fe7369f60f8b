"""Parts of the team trainer that need no cluster: counting failed sessions, and which rows reach a policy."""

import json
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_drmas.config import parse
from verl_drmas.placement import Pool
from verl_drmas.rollout.client import TeamClient
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer import copies as copies_module
from verl_drmas.trainer import metrics as metrics_module
from verl_drmas.trainer import team as team_module
from verl_drmas.trainer.alignment import Alignment
from verl_drmas.trainer.fan import Fan
from verl_drmas.trainer.lanes import Lanes
from verl_drmas.trainer.masked import MaskedRows
from verl_drmas.trainer.metrics import CollapseWatch
from verl_drmas.trainer.policy import Policy
from verl_drmas.trainer.step import StepRows
from verl_drmas.trainer.team import TeamTrainer, take
from verl_drmas.trainer.watchdog import Watchdog


def trainer(rows: dict[str, Row], *, prompts=2, n=2, report=None, **section) -> TeamTrainer:
    """A trainer with the given rows and without workers."""
    made = object.__new__(TeamTrainer)
    agents = {"solver": {"model": "base"}, "verifier": {"model": "base", "trainable": section.pop("trainable", True)}}
    made.section = parse({"agents": agents, **section})
    made.rows, made.global_steps, made.feeds = rows, 7, {}
    made.config = SimpleNamespace(
        data=SimpleNamespace(train_batch_size=prompts),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=n)),
    )
    made._padding, made._masked, made.alignment = {}, MaskedRows(dumped=False), None
    made.lanes = Lanes({"run": Pool("run", 1, 1, tuple(made.section.models))})
    made.agent_loop_manager = SimpleNamespace(report=lambda: dict(report or {}))
    made.watchdog = Watchdog([], poll=1, hang_timeout=1, on_dead=print, on_end=print)
    return made


def rows(*sessions: tuple[str, int]) -> dict[str, Row]:
    """A solver and a verifier row for every (uid, session)."""
    made = {}
    for uid, session in sessions:
        for order, agent in enumerate(("solver", "verifier")):
            made[f"{uid}_{session}_{order}"] = Row(uid, session, order, 0, agent, "base")
    return made


ALL = (("a", 0), ("a", 1), ("b", 0), ("b", 1))


def test_failed_sessions_are_counted():
    metrics = {}
    made = trainer(rows(*ALL[:3]), report={"failed/timeout": 1}, faults={"max_failed_share": 0.25})
    made._account(metrics)
    assert metrics["drmas/sessions/expected"] == 4
    assert metrics["drmas/sessions/failed"] == 1
    assert metrics["drmas/sessions/failed/timeout"] == 1


def test_masked_sessions_are_counted_and_tools_have_a_place_of_their_own():
    made, metrics = (
        trainer(rows(*ALL[:3]), report={"tools/retrieval/retries": 5}, faults={"max_failed_share": 0.25}),
        {},
    )
    made._masked.rows = {"b_1_0": Row("b", 1, 0, 0, "solver", "base", failed="retrieval")}
    made._account(metrics)
    assert (metrics["drmas/sessions/failed"], metrics["drmas/sessions/masked"]) == (1, 1)
    assert metrics["drmas/tools/retrieval/retries"] == 5


def test_a_step_in_which_every_session_failed_ends_the_run():
    made = trainer({}, report={"failed/retrieval": 4}, faults={"max_failed_share": 1.0})
    with pytest.raises(RuntimeError, match=r"every session of step 7 failed: .*failed/retrieval"):
        made._account({})


def test_too_many_failed_sessions_stop_the_run_with_their_reasons():
    made = trainer(rows(*ALL[:2]), report={"failed/server": 2}, faults={"max_failed_share": 0.4})
    with pytest.raises(RuntimeError, match=r"50% of the sessions of step 7 failed .*failed/server.*max_failed_share"):
        made._account({})


class FakePolicy:
    """Notes the rows of each stage and appends a padding row, as verl's balancing does."""

    def __init__(self):
        self.seen = []

    def _balance_batch(self, batch, metrics):
        self.seen.append(list(batch.keys))
        keys, tags = [*batch.keys, "pad0_0_0"], [*batch.tags, {"is_padding": True}]
        return KVBatchMeta(keys=keys, tags=tags, partition_id=batch.partition_id, extra_info=batch.extra_info)

    def _update_actor(self, batch, metrics):
        self.seen.append(list(batch.keys))
        return batch


def batch_of(made: dict[str, Row]) -> KVBatchMeta:
    return KVBatchMeta(keys=list(made), tags=[{} for _ in made], partition_id="train", extra_info={})


def test_with_every_agent_trained_the_policy_gets_the_whole_batch():
    known = rows(*ALL)
    made, policy = trainer(known), FakePolicy()
    made.policies = made.trained = {"base": policy}
    metrics = {}
    after = made._each("_update_actor", batch_of(known), metrics)
    assert after.keys == list(known)
    assert policy.seen == [list(known)]
    assert metrics["drmas/model/base/seconds/update_actor"] >= 0


def test_rows_of_a_frozen_agent_stay_in_the_batch_and_reach_no_policy():
    known = rows(*ALL)
    made, policy = trainer(known, trainable=False), FakePolicy()
    made.policies = made.trained = {"base": policy}
    padded = made._each("_balance_batch", batch_of(known), {})
    solver = [key for key, row in known.items() if row.agent_id == "solver"]
    assert policy.seen == [solver]
    assert sorted(padded.keys) == sorted([*known, "pad0_0_0"])
    made._each("_update_actor", padded, {})
    assert sorted(policy.seen[1]) == sorted([*solver, "pad0_0_0"])  # a padding row is the policy's own


def test_take_keeps_keys_and_tags_together():
    batch = KVBatchMeta(keys=["a", "b", "c"], tags=[{"n": 0}, {"n": 1}, {"n": 2}], partition_id="train", extra_info={})
    part = take(batch, [2, 0])
    assert (part.keys, part.tags, part.partition_id) == (["c", "a"], [{"n": 2}, {"n": 0}], "train")


# -- several models ----------------------------------------------------------------------------------------------------


class Writer:
    """A policy that pads its rows, writes settings of its own into the batch, and measures something."""

    use_reference_policy = True

    def __init__(self, name, grad_norm=0.0, reference=True):
        self.name, self.grad_norm, self.use_reference_policy = name, grad_norm, reference
        self.calls, self.info = [], []

    def _stage(self, stage, batch, metrics):
        self.calls.append((stage, list(batch.keys)))
        self.info.append(dict(batch.extra_info))
        batch.extra_info["temperature"] = self.name
        batch.extra_info[f"set by {self.name}"] = True
        metrics["actor/grad_norm"] = self.grad_norm

    def _balance_batch(self, batch, metrics):
        self._stage("balance", batch, metrics)
        keys, tags = [f"pad{self.name}_0_0", *reversed(batch.keys)], [{"is_padding": True}, *reversed(batch.tags)]
        return KVBatchMeta(keys=keys, tags=tags, partition_id=batch.partition_id, extra_info=batch.extra_info)

    def _compute_old_log_prob(self, batch, metrics):
        self._stage("old", batch, metrics)
        return batch

    def _compute_ref_log_prob(self, batch, metrics):
        self._stage("ref", batch, metrics)
        return batch

    def _update_actor(self, batch, metrics):
        self._stage("update", batch, metrics)
        return batch

    @property
    def seen(self):
        return self.calls[-1][1]


MAPPING = {"solver": "a", "verifier": "b", "judge": "c"}
TEAM = {
    f"{uid}_{session}_{order}": Row(uid, session, order, 0, agent, model_id)
    for uid, session in ALL
    for order, (agent, model_id) in enumerate(MAPPING.items())
}


def of(*models):
    return [key for key, row in TEAM.items() if row.model_id in models]


def on_models(*, pools=None, reference=(True, True), **algorithm):
    """A trainer with solver and verifier on models `a` and `b`, and a judge on the served model `c`."""
    made = trainer(dict(TEAM))
    agents = {agent: {"model": model_id} for agent, model_id in MAPPING.items()}
    made.section = parse({"agents": agents, "models": {"a": {}, "b": {}, "c": {"trainable": False}}})
    made.config = OmegaConf.create(
        {
            "data": {"train_batch_size": 2},
            "actor_rollout_ref": {"rollout": {"n": 2, "calculate_log_probs": False}},
            "algorithm": algorithm,
        }
    )
    made.lanes = Lanes(pools or {"run": Pool("run", 1, 1, ("a", "b", "c"))})
    made.trained = {
        m: Writer(m, grad_norm, ref) for m, grad_norm, ref in zip("ab", (0.5, 0.25), reference, strict=True)
    }
    made.policies = {**made.trained, "c": "served"}
    return made


SPLIT = {"left": Pool("left", 1, 1, ("a",)), "right": Pool("right", 1, 1, ("b", "c"))}


def team_batch(keys=TEAM):
    """A batch whose tags say which key they belong to."""
    tags = [{"of": key} for key in keys]
    return KVBatchMeta(keys=list(keys), tags=tags, partition_id="train", extra_info={"temperature": 1.0})


@pytest.mark.parametrize("pools", [None, SPLIT])
def test_every_policy_gets_its_own_models_rows_and_its_own_padding_back(pools):
    made = on_models(pools=pools)
    padded = made._each("_balance_batch", team_batch(), {})
    assert {m: policy.seen for m, policy in made.trained.items()} == {"a": of("a"), "b": of("b")}
    assert padded.keys == ["pada_0_0", *of("a")[::-1], "padb_0_0", *of("b")[::-1], *of("c")]
    assert all(tag.get("of", key) == key for key, tag in zip(padded.keys, padded.tags, strict=True))
    padded.reorder(list(range(len(padded)))[::-1])
    after = made._each("_update_actor", padded, {})
    assert made.trained["a"].seen == [*of("a"), "pada_0_0"]
    assert made.trained["b"].seen == [*of("b"), "padb_0_0"]
    assert sorted(after.keys) == sorted(padded.keys)  # the judge's rows went nowhere


def test_padding_of_an_earlier_step_is_forgotten(monkeypatch):
    made = on_models()
    made._read_rows = lambda batch: dict(TEAM)
    made._shown = True
    made._account = lambda metrics: None
    made._padding = {"padold_0_0": "a"}
    made._balance_batch(team_batch(), {})
    assert made._padding == {"pada_0_0": "a", "padb_0_0": "b"}


def test_rows_are_sorted_before_policies_see_them():
    """They come in completion order, and nothing later may depend on it."""
    made = on_models()
    made._shown, made._account = True, lambda metrics: None
    made._read_rows = lambda batch: {key: TEAM[key] for key in batch.keys}
    seen = []
    for keys in (list(TEAM), list(TEAM)[::-1]):
        made._balance_batch(team_batch(keys), {})
        seen.append([TEAM[key].order for key in made.trained["a"].seen])
    assert seen[0] == seen[1] == sorted(seen[0])


def test_a_models_numbers_stand_under_its_name_alone():
    made, metrics = on_models(), {}
    made._each("_update_actor", team_batch(), metrics)
    assert metrics["drmas/model/a/grad_norm"] == 0.5
    assert metrics["drmas/model/b/grad_norm"] == 0.25
    assert {name.split("/")[2] for name in metrics} == {"a", "b"}
    assert all(name.startswith("drmas/model/") for name in metrics)  # verl's own names would be one model's, by chance
    assert metrics["drmas/model/a/seconds/update_actor"] >= 0


def test_with_one_policy_verls_names_stay():
    known = rows(*ALL)
    made, metrics = trainer(known), {}
    made.policies = made.trained = {"base": Writer("base", 0.5)}
    made._each("_update_actor", batch_of(known), metrics)
    assert metrics["actor/grad_norm"] == metrics["drmas/model/base/grad_norm"] == 0.5


def test_only_the_named_models_take_part():
    made, metrics = on_models(), {}
    after = made._each("_update_actor", team_batch(), metrics, only=["b"])
    assert made.trained["a"].calls == []
    assert made.trained["b"].seen == of("b")
    assert sorted(after.keys) == sorted(TEAM)
    assert {name.split("/")[2] for name in metrics} == {"b"}
    assert sorted(made._each("_update_actor", team_batch(), {}, only=[]).keys) == sorted(TEAM)


def test_models_without_a_reference_are_not_asked_for_one():
    made = on_models(reference=(False, True), use_kl_in_reward=False)
    made._compute_ref_log_prob(team_batch(), {})
    assert made.trained["a"].calls == []
    assert made.trained["b"].calls == [("ref", of("b"))]


def test_a_model_without_rows_is_not_called():
    made, metrics = on_models(), {}
    batch = team_batch(of("b", "c"))
    padded = made._each("_balance_batch", batch, metrics)
    made._each("_update_actor", padded, metrics)
    assert made.trained["a"].calls == []
    assert [stage for stage, _ in made.trained["b"].calls] == ["balance", "update"]
    assert not [name for name in metrics if name.startswith("drmas/model/a/")]


def test_one_policys_settings_never_reach_another():
    """verl's stages write temperature and more into the batch."""
    made = on_models()
    batch = team_batch()
    for stage in ("_balance_batch", "_compute_old_log_prob", "_update_actor"):
        batch = made._each(stage, batch, {})
    for policy in made.trained.values():
        assert policy.info == [{"temperature": 1.0}] * 3
    assert batch.extra_info == {"temperature": 1.0}


# -- rows that nobody trains -------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch):
    """TransferQueue's calls over the rows' log-probs; what is written is in `puts`."""
    puts = []

    def get(keys, partition_id, select_fields):
        assert partition_id == "train" and set(select_fields) <= {"rollout_log_probs", "old_log_probs", "response_mask"}
        values = [torch.tensor([-float(list(TEAM).index(key) + 1)]) for key in keys]
        known = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return TensorDict(dict.fromkeys(select_fields, known), batch_size=len(keys))

    def put(keys, partition_id, fields):
        (name,) = fields.keys()
        puts.append((name, dict(zip(keys, (row.tolist() for row in fields[name].unbind()), strict=True))))

    fake = SimpleNamespace(kv_batch_get=get, kv_batch_put=put)
    monkeypatch.setattr(team_module, "tq", fake)
    monkeypatch.setattr(metrics_module, "tq", fake)
    return puts


def frozen_log_probs():
    return {key: [-float(i + 1)] for i, key in enumerate(TEAM) if TEAM[key].model_id == "c"}


def test_rows_of_a_served_model_keep_the_engines_log_probs(store):
    """TransferQueue drops a field for all rows if one lacks it."""
    made = on_models()
    after = made._compute_old_log_prob(team_batch(), {})
    assert store == [("old_log_probs", frozen_log_probs())]
    assert [policy.calls for policy in made.trained.values()] == [[("old", of("a"))], [("old", of("b"))]]
    assert sorted(after.keys) == sorted(TEAM)


def test_without_frozen_rows_nothing_is_copied(store):
    on_models()._compute_old_log_prob(team_batch(of("a", "b")), {})
    assert store == []


@pytest.mark.parametrize("kl", [True, False])
def test_a_frozen_row_has_no_distance_to_pay_for(store, kl):
    on_models(use_kl_in_reward=kl)._compute_ref_log_prob(team_batch(), {})
    assert store == ([("ref_log_prob", frozen_log_probs())] if kl else [])


@pytest.mark.parametrize("calculated", [True, False])
def test_the_gap_between_engine_and_trainer_is_logged_for_every_trained_model(store, calculated):
    made, metrics = on_models(), {}
    made.config.actor_rollout_ref.rollout.calculate_log_probs = calculated
    made._compute_old_log_prob(team_batch(), metrics)
    gaps = {name for name in metrics if "log_prob_gap" in name}
    wanted = {f"drmas/model/{m}/log_prob_gap/{what}" for m in "ab" for what in ("max", "mean")}
    assert gaps == (wanted if calculated else set())


# -- all models at once ------------------------------------------------------------------------------------------------


class Sync:
    """A checkpoint manager."""

    def __init__(self):
        self.updates = []

    def update_weights(self, global_steps):
        self.updates.append(global_steps)

    def sleep_replicas(self):
        """Nothing to free."""


def test_weight_syncs_are_counted_by_step_and_model():
    made = on_models()
    members = {m: Sync() for m in "abc"}
    made.checkpoint_manager, made.timing_raw = Fan(members, made.lanes), {}
    made.checkpoint_manager.update_weights(0)  # before the first step
    for step in (7, 8):
        made.global_steps = step
        made.on_step_end()
        counted = made._consume_sync_metrics()
        assert counted == {"drmas/model/a/weight_syncs": 1, "drmas/model/b/weight_syncs": 1}  # c isn't trained
    assert [member.updates for member in members.values()] == [[0, 7, 8]] * 3


def test_a_second_sync_in_a_step_would_be_seen(monkeypatch):
    made = on_models()
    made.checkpoint_manager, made.timing_raw = Fan({m: Sync() for m in "abc"}, made.lanes), {}
    monkeypatch.setattr(
        PPOTrainerSync, "on_step_end", lambda self: [self.checkpoint_manager.update_weights(i) for i in range(2)]
    )
    made.on_step_end()
    assert made._consume_sync_metrics()["drmas/model/a/weight_syncs"] == 2


def test_a_team_on_several_models_asks_through_a_team_client():
    made = on_models()
    made.policies = {m: SimpleNamespace(get_llm_client=lambda m=m: f"client of {m}") for m in "abc"}
    client = made.get_llm_client()
    assert isinstance(client, TeamClient)
    assert client.clients == {m: f"client of {m}" for m in "abc"}
    made.policies = {"a": made.policies["a"]}
    assert made.get_llm_client() == "client of a"


def test_throughput_is_per_gpu_of_all_pools():
    made = on_models()
    pools = {"left": Pool("left", 4, 2, ("a",)), "right": Pool("right", 2, 1, ("b", "c"))}
    made.prepared = SimpleNamespace(pools=pools)
    assert made._get_n_gpus_for_throughput() == 10


def test_a_run_starts_from_the_checkpoints_that_its_models_name(monkeypatch, caplog):
    made, started = on_models(), []
    made.section.models["b"].init_from = "runs/actor/b"
    made.trained = {m: SimpleNamespace(start_from=lambda f, m=m: started.append((m, f))) for m in "ab"}
    made._start_from_checkpoints()
    assert started == [("b", "runs/actor/b")]
    assert "model b starts from the weights of runs/actor/b" in caplog.text


# -- policies, one after another ---------------------------------------------------------------------------------------


def test_policies_are_built_in_turn_each_with_free_ranks_for_its_servers(monkeypatch):
    """A model's servers start when those before it made room; a served model has servers and no workers."""
    log = []

    def servers(base, count):
        return SimpleNamespace(get_replicas=lambda: [base + i for i in range(count)])

    class Built(Policy):
        def __init__(self, model_id, config, updates, placed, base, driver):
            log.append((model_id, config, updates, placed, base))
            self.base, self.count = base, {"a": 3}.get(model_id, 2)

        def _setup(self):
            log.append(("setup", self.base))
            self.llm_server_manager = servers(self.base, self.count)

    def frozen(model_id, config, pool, placed, base):
        log.append((model_id, config, pool.name, placed, base))
        return SimpleNamespace(llm_server_manager=servers(base, 1))

    monkeypatch.setattr(team_module, "Policy", Built)
    monkeypatch.setattr(team_module, "FrozenModel", frozen)
    monkeypatch.setattr(team_module, "create_pools", lambda pools: {name: f"placed {name}" for name in pools})
    monkeypatch.setattr(team_module, "policy_config", lambda config, section, model_id: f"config of {model_id}")
    monkeypatch.setattr(team_module, "in_rows", lambda policy, run, section: f"{policy}, in rows")
    monkeypatch.setattr(team_module, "default_updates", lambda policy: {"whole a": 4, "whole b": 5}[policy])
    made = on_models()
    made.section.models["b"].updates_per_step = 2
    pools = {"left": Pool("left", 4, 1, ("a", "c")), "right": Pool("right", 2, 1, ("b",))}
    made.prepared = SimpleNamespace(pools=pools, policies={m: f"whole {m}" for m in "abc"})
    built = made._build_policies()
    assert list(built) == ["a", "b", "c"]
    assert log == [
        ("a", "config of a, in rows", 4, "placed left", 0),  # verl's number of updates
        ("setup", 0),
        ("b", "config of b, in rows", 2, "placed right", 4),  # three ranks are taken, two GPUs a node
        ("setup", 4),
        ("c", "config of c", "left", "placed left", 8),
    ]


# -- M-GRPO ------------------------------------------------------------------------------------------------------------


def delegating(**alignment):
    """A trainer whose solver delegated 1, 4, 0 and 2 times to the verifier, with D 2."""
    made = trainer({}, alignment={"target": 2, **alignment})
    made.alignment = Alignment(made.section.alignment, ("verifier",), seed=0)
    known = {}
    for (uid, session), calls in zip(ALL, (1, 4, 0, 2), strict=True):
        for order in range(calls + 1):
            agent = "verifier" if order else "solver"
            known[f"{uid}_{session}_{order}"] = Row(
                uid, session, order, "ab".index(uid), agent, "base", path=f"{agent}.{order}"
            )
    made.rows = known
    return made


def step_of(made, batch):
    """What the estimator leaves, with copies as it finds them."""
    step = StepRows([made.rows.get(key) for key in batch.keys], made.section, alignment=made._aligned)
    step.copies = team_module.copies_of(step.known, made._aligned)
    return step


def test_a_steps_alignment_is_made_of_its_rows_and_number():
    made = delegating()
    batch = batch_of(made.rows)
    assert made._align(batch) is batch
    assert made._calls == {"verifier": [1, 4, 0, 2]}
    assert (made._aligned.target, made._aligned.mode, made._aligned.step) == ({"verifier": 2}, "sample", 7)
    assert made._copies_made is None


def test_rows_are_weighed_by_their_copies_in_their_models_batch(monkeypatch):
    """2 prompts of 2 sessions: 4 slots for the solver and 8 for the verifier, of 12 rows with padding."""
    made, written = delegating(), {}
    batch = made._align(batch_of(made.rows))
    padded = team_batch([*batch.keys, "pad0_0_0"])
    made._padding = {"pad0_0_0": "base"}
    monkeypatch.setattr(team_module, "put_row_weights", lambda b, w: written.update(zip(b.keys, w, strict=True)))
    step, metrics = step_of(made, padded), {}
    made._put_copies(padded, step, metrics)
    assert written.keys() == set(padded.keys)
    copies = dict(zip(made.rows, step.copies, strict=True))
    slots = {"solver": 4, "verifier": 8}
    assert written == {key: copies[key] * 12 / slots[row.agent_id] for key, row in made.rows.items()} | {"pad0_0_0": 1}
    assert sum(c for key, c in copies.items() if made.rows[key].agent_id == "verifier") == 3 * 2
    assert metrics["drmas/alignment/verifier/calls/mean"] == 7 / 4
    assert metrics["drmas/alignment/verifier/dropped"] == 2
    assert metrics["drmas/alignment/verifier/copies_added"] == 1


def test_physical_copies_are_rows_before_anything_else_and_have_no_weights(monkeypatch):
    made, stored = delegating(copies="physical"), []
    fake = SimpleNamespace(
        kv_clear=lambda **_: None, kv_batch_get=lambda **_: None, kv_batch_put=lambda **kw: stored.extend(kw["keys"])
    )
    monkeypatch.setattr(copies_module, "tq", fake)
    monkeypatch.setattr(team_module, "put_row_weights", lambda *_: pytest.fail("copies are rows already"))
    batch = made._align(batch_of(made.rows))
    assert len(stored) == 1 and set(batch.keys) == set(made.rows)
    per_session = [sum(r.agent_id == "verifier" and (r.uid, r.session) == s for r in made.rows.values()) for s in ALL]
    assert per_session == [2, 2, 0, 2]
    step, metrics = step_of(made, batch), {}
    assert step.copies.tolist() == [1.0] * len(batch)  # the estimator counts every row once
    made._put_copies(batch, step, metrics)
    # What was done is told from the rows as they came.
    assert metrics["drmas/alignment/verifier/calls/max"] == 4
    assert (metrics["drmas/alignment/verifier/dropped"], metrics["drmas/alignment/verifier/copies_added"]) == (2, 1)


@pytest.mark.parametrize("copies", ["weights", "physical"])
def test_the_batch_is_aligned_before_policies_see_it(monkeypatch, copies):
    made = delegating(copies=copies)
    known, policy = dict(made.rows), FakePolicy()
    made.policies = made.trained = {"base": policy}
    made._shown, made._account, made._read_rows = True, lambda metrics: None, lambda batch: dict(known)
    fake = SimpleNamespace(kv_clear=lambda **_: None, kv_batch_get=lambda **_: None, kv_batch_put=lambda **_: None)
    monkeypatch.setattr(copies_module, "tq", fake)
    made._balance_batch(batch_of(known), {})
    assert len(policy.seen[0]) == {"weights": 11, "physical": 4 + 3 * 2}[copies]
    orders = [made.rows[key].order for key in policy.seen[0]]
    assert orders == sorted(orders)


def test_a_measured_target_is_saved_with_the_team_and_taken_up_again(monkeypatch):
    made = delegating(target="auto", auto_steps=1)
    made._collapse, made._adapts_kl = CollapseWatch(), lambda: False
    made._align(batch_of(made.rows))
    assert made._aligned.target == {"verifier": 4}
    state = json.loads(json.dumps(made.team_state()))
    other = delegating(target="auto", auto_steps=1)
    other._collapse, other._adapts_kl = CollapseWatch(), lambda: False
    other.load_team_state(state)
    other.rows = {key: row for key, row in other.rows.items() if row.activation < 2}
    other._align(batch_of(other.rows))
    assert other._aligned.target == {"verifier": 4}  # measured no more
    assert other._calls == {"verifier": [1, 1, 0, 1]}


def test_a_run_without_alignment_saves_none_and_takes_a_state_with_one():
    made = trainer(rows(*ALL))
    made._collapse, made._adapts_kl = CollapseWatch(), lambda: False
    assert "alignment" not in made.team_state()
    made.load_team_state({"alignment": {"steps": 3, "seen": {}}})
