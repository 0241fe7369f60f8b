"""Parts of the team trainer that need no cluster: counting failed sessions, and which rows reach a policy."""

from types import SimpleNamespace

import pytest
from transfer_queue import KVBatchMeta

from verl_drmas.config import parse
from verl_drmas.placement import Pool
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.lanes import Lanes
from verl_drmas.trainer.team import TeamTrainer, take
from verl_drmas.trainer.watchdog import Watchdog


def trainer(rows: dict[str, Row], *, prompts=2, n=2, report=None, **section) -> TeamTrainer:
    """A trainer with the given rows and without workers."""
    made = object.__new__(TeamTrainer)
    agents = {"solver": {"model": "base"}, "verifier": {"model": "base", "trainable": section.pop("trainable", True)}}
    made.section = parse({"agents": agents, **section})
    made.rows, made.global_steps = rows, 7
    made.config = SimpleNamespace(
        data=SimpleNamespace(train_batch_size=prompts),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=n)),
    )
    made._padding = {}
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
