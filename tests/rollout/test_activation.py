"""A row's own reward survives verl's postprocessing, which copies the session's last one onto every row."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import agent_loop_tq

from verl_drmas.config import parse
from verl_drmas.rollout.activation import Activation
from verl_drmas.rollout.delivery import Delivery
from verl_drmas.rollout.rows import DEFAULT_AGENT
from verl_drmas.rollout.worker import TeamWorker
from verl_drmas.workflows import SessionFailed

ROW = {"uid": "u", "session_id": 2, "global_steps": 4, "index": 7, "raw_prompt": [{"role": "user", "content": "?"}]}


def output(cls=AgentLoopOutput, tokens=(5, 6, 7), **fields):
    return cls(
        prompt_ids=[1, 2],
        response_ids=list(tokens),
        response_mask=[1] * len(tokens),
        response_logprobs=[-0.5] * len(tokens),
        metrics=AgentLoopMetrics(),
        **fields,
    )


@pytest.fixture
def store(monkeypatch):
    """What verl's postprocessing puts into TransferQueue."""
    puts = []

    async def put(**batch):
        puts.append(SimpleNamespace(**batch))

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put)
    return puts


def worker(reward=None):
    """A `TeamWorker` without Ray; `reward` is what verl's reward loop would give."""
    built = object.__new__(TeamWorker)
    built.reward_loop_worker_handles, built.distillation_enabled, built.processor = None, False, None
    built._said_default, built.mm_processor_kwargs = False, {}
    built.delivery = Delivery(parse({}))
    if reward is not None:

        async def compute_score(data):
            return {"reward_score": reward, "reward_extra_info": {"acc": reward}}

        handle = SimpleNamespace(compute_score=SimpleNamespace(remote=compute_score))
        built.reward_loop_worker_handles = [handle]
    return built


def rewards(put):
    return [row.sum().item() for row in put.fields["rm_scores"].unbind()]


def extra_fields(put):
    return [getattr(fields, "data", fields) for fields in put.fields["extra_fields"]]


def postprocess(built, rows, validate=False):
    asyncio.run(built._agent_loop_postprocess(rows, validate, **ROW))


def test_each_row_is_stored_with_its_own_reward(store):
    first = output(Activation, own_reward=0.25, extra_fields={"agent_id": "a", "reward_extra_info": {"acc": 1}})
    last = output(
        Activation, (5,), own_reward=1.0, reward_score=1.0, extra_fields={"agent_id": "b", "reward_extra_info": {}}
    )
    postprocess(worker(), [first, last])
    (put,) = store
    assert first.reward_score == 1.0  # verl did copy it
    assert rewards(put) == [0.25, 1.0]
    assert [row.tolist() for row in put.fields["rm_scores"].unbind()] == [[0.0, 0.0, 0.25], [1.0]]
    assert put.keys == ["u_2_0", "u_2_1"]
    assert put.partition_id == "train"
    assert not {"own_reward", "row_temperature"} & set(put.fields.keys())


def test_a_reward_of_zero_is_a_reward(store):
    zero = output(Activation, own_reward=0.0, extra_fields={"agent_id": "a"})
    one = output(Activation, own_reward=1.0, reward_score=1.0, extra_fields={"agent_id": "b", "reward_extra_info": {}})
    postprocess(worker(), [zero, one])
    assert rewards(store[0]) == [0.0, 1.0]


def test_stock_outputs_keep_the_rewards_their_loop_gave(store):
    rows = [
        output(reward_score=r, extra_fields={"agent_id": a, "reward_extra_info": {}})
        for a, r in (("x", 2.0), ("y", 0.0))
    ]
    postprocess(worker(), rows, validate=True)
    assert rewards(store[0]) == [2.0, 0.0]
    assert store[0].partition_id == "val"


def test_stock_outputs_without_extra_info_are_stored_too(store):
    """verl reads reward_extra_info of the last row, which a loop that scores itself need not have set."""
    postprocess(worker(), [output(reward_score=0.5), output(reward_score=1.0)])
    assert rewards(store[0]) == [0.5, 1.0]


def test_a_reward_of_verls_reward_loop_reaches_every_row(store):
    postprocess(worker(reward=0.75), [output(), output()])
    assert rewards(store[0]) == [0.75, 0.75]
    extra = [fields["reward_extra_info"] for fields in extra_fields(store[0])]
    assert extra == [{"acc": 0.75}, {"acc": 0.75}]


def test_rows_without_ids_are_the_default_agent(store):
    postprocess(worker(reward=1.0), output())
    (fields,) = extra_fields(store[0])
    assert fields["agent_id"] == DEFAULT_AGENT


def test_tags_carry_lengths_and_weight_versions(store):
    row = output(Activation, own_reward=1.0, reward_score=1.0)
    row.extra_fields = {"agent_id": "a", "min_global_steps": 3, "max_global_steps": 4}
    postprocess(worker(), [row])
    (tag,) = store[0].tags
    assert (tag["prompt_len"], tag["response_len"], tag["seq_len"]) == (2, 3, 5)
    assert (tag["min_global_steps"], tag["max_global_steps"], tag["global_steps"]) == (3, 4, 4)


def test_an_output_without_tokens_is_left_out_but_not_its_score(store):
    spoken = output(extra_fields={"agent_id": "a"})
    empty = output(tokens=(), reward_score=0.5, extra_fields={"agent_id": "b", "reward_extra_info": {"acc": 1}})
    postprocess(worker(), [spoken, empty])
    assert store[0].keys == ["u_2_0"]
    assert rewards(store[0]) == [0.5]
    assert extra_fields(store[0])[0]["reward_extra_info"] == {"acc": 1}


def test_a_session_without_any_token_fails_and_stores_nothing(store):
    with pytest.raises(SessionFailed) as failed:
        postprocess(worker(), [output(tokens=())])
    assert failed.value.reason == "empty"
    assert store == []


def test_temperature_goes_into_a_field_of_its_own(store):
    rows = [
        output(Activation, own_reward=1.0, row_temperature=t, extra_fields={"agent_id": "a", "reward_extra_info": {}})
        for t in (0.5, 1.5)
    ]
    rows[-1].reward_score = 1.0
    postprocess(worker(), rows)
    field = store[0].fields["row_temperature"]
    assert field.tolist() == [0.5, 1.5]
    assert field.dtype == torch.float32


def test_of_keeps_exactly_the_fields_that_were_set():
    """verl stores set fields only, and one field more in some rows would make the rows' fields differ."""
    stock = output(num_turns=2)
    stock.extra_fields["agent_id"] = "a"
    row = Activation.of(stock)
    assert row.model_fields_set == stock.model_fields_set
    assert dict(stock).items() <= dict(row).items()
    ours, theirs = row.as_dict(), stock.as_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]) if isinstance(value, torch.Tensor) else value == ours[name]


def test_of_makes_a_loops_reward_the_rows_own():
    row = Activation.of(output(reward_score=0.25))
    row.reward_score = 1.0  # what verl does to all but the last
    assert row.as_dict()["rm_scores"].tolist() == [0.0, 0.0, 0.25]


def test_of_leaves_an_activation_alone():
    row = output(Activation, own_reward=1.0)
    assert Activation.of(row) is row


def test_without_a_reward_there_is_no_score_field():
    assert "rm_scores" not in output(Activation).as_dict()
