"""A claimed step becomes rows in verl's sample store, in the fields and tags of verl's own agent loop."""

import asyncio

import pytest
import torch
import transfer_queue as tq
from tensordict import NonTensorStack
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import agent_loop_tq

from verl_drmas.config import parse
from verl_drmas.rollout.activation import Activation
from verl_drmas.rollout.delivery import Delivery, packed
from verl_drmas.rollout.rows import Row
from verl_drmas.rollout.worker import TeamWorker
from verl_drmas.store.codec import pack, unpack
from verl_drmas.store.records import ClaimedStep, SessionRecord
from verl_drmas.trainer import claimed as module
from verl_drmas.trainer.claimed import put_step, uid_of, unpacked
from verl_drmas.trainer.row_weights import put_row_weights


def row(agent="finder", prompt=2, tokens=3, *, reward=0.5, temperature=None, own=None, model="finders"):
    """A row as the agent loop returns it; `temperature` as another job's worker notes it, `own` as this job's does."""
    extra = {"agent_id": agent, "model_id": model, "path": f"main.0/{agent}", "valid": False, "fault": None}
    extra |= {"min_global_steps": 2, "max_global_steps": 3, "counts": {"turns": 2.0}, "reward_parts": {"own": 0.1}}
    extra |= {"reward_extra_info": {"acc": 1.0, "outcome": 0.5}, "session_metrics": None, "activation": 0}
    if temperature is not None:
        extra["temperature"] = temperature
    return Activation(
        prompt_ids=list(range(1, prompt + 1)),
        response_ids=list(range(10, 10 + tokens)),
        response_mask=[*[0] * (tokens - 1), 1],
        response_logprobs=[-0.1 * (i + 1) for i in range(tokens)],
        num_turns=4,
        metrics=AgentLoopMetrics(),
        own_reward=reward,
        row_temperature=own,
        extra_fields=extra,
    )


def stored(made, position=0):
    """The row after its way through the store."""
    return unpack(pack(packed(made, position)))


def step_of(*sessions, step=5):
    """A claimed step; each session is (prompt, number, rows), whose places begin at 1."""
    records = [
        SessionRecord(step, p, n, True, "", 0.5, step - 1, tuple(stored(r, i + 1) for i, r in enumerate(rows)))
        for p, n, rows in sessions
    ]
    return ClaimedStep(step, {}, tuple(records))


# -- a row -------------------------------------------------------------------------------------------------------------


def test_a_row_comes_back_as_it_was_but_for_the_models_name():
    made, found = row(), unpacked(stored(row()), "mine", row_temperature=False)
    one, two = made.as_dict(), found.as_dict()
    assert one.keys() == two.keys()
    for name in one.keys() - {"extra_fields"}:
        same = torch.equal(one[name], two[name]) if isinstance(one[name], torch.Tensor) else one[name] == two[name]
        assert same and getattr(one[name], "dtype", None) == getattr(two[name], "dtype", None), name
    assert two["extra_fields"] == {**one["extra_fields"], "model_id": "mine"}
    read = [Row.read("u_0_1", fields["extra_fields"], 7, "x") for fields in (one, two)]
    assert vars(read[1]) == {**vars(read[0]), "model_id": "mine"}


@pytest.mark.parametrize("wanted", [True, False])
def test_a_rows_temperature_is_carried_where_agents_differ(wanted):
    found = unpacked(stored(row(temperature=0.25)), "mine", row_temperature=wanted).as_dict()
    assert "temperature" not in found["extra_fields"]
    assert ("row_temperature" in found) is wanted
    assert not wanted or (found["row_temperature"].item(), found["row_temperature"].dtype) == (0.25, torch.float32)


def test_a_row_without_a_reward_of_its_own_or_log_probs():
    made = row(reward=None)
    made.response_logprobs = None
    found = unpacked(stored(made), "mine", row_temperature=False)
    assert found.own_reward is None and found.response_logprobs is None
    assert not {"rm_scores", "rollout_log_probs"} & found.as_dict().keys()


def test_a_prompts_name_is_one_that_verl_takes_and_the_same_each_time():
    assert uid_of(5, 7) == "5-7" and "_" not in uid_of(12, 345)
    assert len({uid_of(step, prompt) for step in (1, 11, 111) for prompt in (1, 11, 111)}) == 9


# -- a step ------------------------------------------------------------------------------------------------------------


def test_fields_and_tags_are_those_of_verls_agent_loop(monkeypatch):
    """The same session through `TeamWorker` and through the store."""
    puts = []

    async def put(**batch):
        puts.append(batch)

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put)
    monkeypatch.setattr(module.tq, "kv_batch_put", lambda **batch: puts.append(batch))
    worker = object.__new__(TeamWorker)
    worker.reward_loop_worker_handles, worker.distillation_enabled, worker.processor = None, False, None
    worker._said_default, worker.mm_processor_kwargs, worker.delivery = False, {}, Delivery(parse({}))
    rows = [row("main", own=0.25), row(own=0.25), row("reader", 4, 1, reward=0.0, own=0.25)]
    rows[-1].reward_score = rows[-1].own_reward
    fields = {"uid": "5-7", "session_id": 1, "global_steps": 5, "index": 7}
    asyncio.run(worker._agent_loop_postprocess(rows, False, **fields))
    mine = [row(temperature=0.25), row("reader", 4, 1, reward=0.0, temperature=0.25)]
    put_step(step_of((7, 1, mine)), "finders", row_temperature=True)
    verls, ours = puts
    assert (ours["keys"], ours["tags"]) == (verls["keys"][1:], verls["tags"][1:])
    assert ours["partition_id"] == verls["partition_id"] == "train"
    assert set(ours["fields"].keys()) == set(verls["fields"].keys())
    for name in verls["fields"].keys():  # noqa: SIM118  a TensorDict iterates over rows
        one, two = list(verls["fields"][name])[1:], list(ours["fields"][name])
        for a, b in zip(one, two, strict=True):
            a, b = getattr(a, "data", a), getattr(b, "data", b)
            assert type(a) is type(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None), name
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
        assert isinstance(verls["fields"][name], NonTensorStack) is isinstance(ours["fields"][name], NonTensorStack)


def test_sessions_without_a_row_put_none(monkeypatch):
    puts = []
    monkeypatch.setattr(module.tq, "kv_batch_put", lambda **batch: puts.append(batch))
    batch = put_step(step_of((7, 0, []), (7, 3, [row(), row()]), (9, 0, [row()])), "mine", row_temperature=False)
    assert batch.keys == puts[0]["keys"] == ["5-7_3_1", "5-7_3_2", "5-9_0_1"]
    assert [int(getattr(i, "data", i)) for i in puts[0]["fields"]["index"]] == [7, 7, 9]
    assert (batch.partition_id, len(batch.tags)) == ("train", 3)


@pytest.mark.parametrize(
    "rows", [[row()], [row(), row()], [row(), row("reader", 5, 1)]], ids=["one", "equal lengths", "other lengths"]
)
def test_verls_later_stages_take_the_rows(queue, rows):
    """Rows of equal lengths come back stacked, or nested, as verl's own do."""
    batch = put_step(step_of((7, 1, rows)), "mine", row_temperature=False)
    padded = upsample_batch_to_divisible_size(batch, 4, 0)
    assert len(padded) == 4
    data = tq.kv_batch_get(padded.keys, "train", select_fields=["rm_scores", "response_mask", "index", "extra_fields"])
    scores = [score.sum().item() for score in data["rm_scores"].unbind()]
    assert scores == [0.5] * len(rows) + [0.0] * (4 - len(rows))
    assert [fields["agent_id"] for fields in data["extra_fields"]][: len(rows)] == [
        r.extra_fields["agent_id"] for r in rows
    ]
    put_row_weights(padded, torch.arange(4).double().numpy())
    weights = tq.kv_batch_get(padded.keys, "train", select_fields=["rollout_is_weights"])["rollout_is_weights"]
    assert [w.tolist() for w in weights.unbind()][: len(rows)] == [
        [float(i)] * len(r.response_ids) for i, r in enumerate(rows)
    ]
    # What verl's dump asks for beside it is not there, and that is fine with it.
    assert "reward_model" not in tq.kv_batch_get(padded.keys, "train", select_fields=["uid", "reward_model"])
    tq.kv_clear(keys=padded.keys, partition_id="train")
