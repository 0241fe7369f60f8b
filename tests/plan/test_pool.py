"""Phases of a step: what adds up on a pool's GPUs, and what doesn't."""

import dataclasses

import pytest

from verl_drmas.plan import formulas
from verl_drmas.plan.fixes import apply, lacking, own_pools, suggest
from verl_drmas.plan.formulas import CONTEXT, GIB, Server, Shape, Trainer
from verl_drmas.plan.pool import Model, PoolNeeds, plan_pool

MEMORY = 80 * GIB
# As large as Qwen3-4B.
SHAPE = Shape(
    parameters=4_022_468_096,
    trainable=4_022_468_096,
    layer=100_930_816,
    rest=388_958_720,
    largest=388_956_160,
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=9728,
    experts=0,
    norms=2 * 2560 + 40 * 128,
    norm_rows=42,
    vocabulary=151936,
)


def model(model_id="a", trained=True, **changes):
    """A model; changes go to its trainer, or to its server if only that has the field."""
    names = {f.name for f in dataclasses.fields(Server)} - {f.name for f in dataclasses.fields(Trainer)}
    server = Server(
        **{"length": 8192, "share": 0.4, "bucket": 2 * GIB} | {k: changes.pop(k) for k in names & {*changes}}
    )
    trainer = Trainer(**{"engine": "fsdp", "gpus": 4, "tokens": 16384, "infer_tokens": 16384, "least": 8192} | changes)
    return Model(model_id, SHAPE, trainer if trained else None, server)


def pool(*models, gpus=4, **changes):
    return PoolNeeds("run", gpus, 1, models, **changes)


def phases(needs, memory=MEMORY):
    return {(p.name, p.model_id): p for p in plan_pool(needs, memory).phases}


OFF = {"param_offload": True, "optimizer_offload": True}


def test_phases_of_one_model():
    one = model()
    found = phases(pool(one))
    assert list(found) == [("rollout", None), ("log-probs", "a"), ("update", "a"), ("weight sync", "a")]
    held, state = formulas.weights(SHAPE, one.trainer), formulas.optimizer(SHAPE, one.trainer)
    assert found["rollout", None].total == CONTEXT + int(0.4 * MEMORY) + held + state
    update = dict(found["update", "a"].parts)
    assert update["weights"] == held and update["optimiser"] == state == 2 * held
    assert update["gradients"] == formulas.gradients(SHAPE, one.trainer)
    assert update["servers"] == CONTEXT  # asleep
    sync = dict(found["weight sync", "a"].parts)
    assert sync["servers"] == CONTEXT + SHAPE.parameters * 2  # its cache comes back afterwards
    assert sync["sending"] == 2 * GIB + SHAPE.largest * (4 + 2)


def test_off_loaded_state_is_there_only_while_its_model_works():
    stays, goes = phases(pool(model())), phases(pool(model(**OFF)))
    held = formulas.weights(SHAPE, model().trainer)
    assert stays["rollout", None].total - goes["rollout", None].total == 3 * held
    assert stays["update", "a"].total == goes["update", "a"].total
    assert stays["log-probs", "a"].total - goes["log-probs", "a"].total == 2 * held  # no need of the optimiser there
    policy = phases(pool(model(cpu_policy=True)))
    assert goes["update", "a"].total - policy["update", "a"].total == 4 * held


def test_two_models_in_a_pool_add_their_servers_and_take_turns():
    a, b = model("a", **OFF), model("b", **OFF, share=0.3)
    both = phases(pool(a, b))
    assert dict(both["rollout", None].parts)["servers"] == int(0.4 * MEMORY) + int(0.3 * MEMORY)
    alone = phases(pool(a))
    # The other's context and sleeping server are there, its weights and optimiser aren't.
    assert both["update", "a"].total - alone["update", "a"].total == 2 * CONTEXT
    # The second is synchronised while the first serves again.
    first, second = (dict(both["weight sync", m].parts)["servers"] for m in ("a", "b"))
    assert second - first == int(0.4 * MEMORY) - CONTEXT
    kept = phases(pool(a, model("b")))
    assert kept["update", "a"].total - both["update", "a"].total == 3 * formulas.weights(SHAPE, a.trainer)


def test_split_pools_dont_add_up():
    a, b = model("a"), model("b")
    assert phases(pool(a))["rollout", None].total < phases(pool(a, b))["rollout", None].total
    assert phases(pool(a)) == phases(dataclasses.replace(pool(a), name="left"))


def test_a_frozen_model_is_served_only():
    found = phases(pool(model("a"), model("judge", trained=False)))
    assert {m for _, m in found} == {None, "a"}
    assert dict(found["rollout", None].parts)["servers"] == 2 * int(0.4 * MEMORY)
    assert dict(found["rollout", None].parts)["contexts"] == CONTEXT  # one trainer
    only = phases(pool(model("judge", trained=False)))
    assert list(only) == [("rollout", None)] and only["rollout", None].total == int(0.4 * MEMORY)


def test_servers_that_never_sleep_are_there_in_an_update():
    awake, asleep = phases(pool(model(sleeps=False))), phases(pool(model()))
    assert awake["update", "a"].total - asleep["update", "a"].total == int(0.4 * MEMORY) - CONTEXT
    assert awake["rollout", None].total == asleep["rollout", None].total


def test_a_reference_model_takes_a_pass_and_megatrons_its_weights():
    plain, ref = phases(pool(model())), phases(pool(model(ref_tokens=65536)))
    assert ref["log-probs", "a"].total > plain["log-probs", "a"].total
    assert ref["update", "a"].total == plain["update", "a"].total  # in host memory
    engine = {"engine": "megatron", "tensor": 4, "weight_bytes": 2, "ref_tokens": 16384}
    stays, goes = (phases(pool(model(**engine, ref_offload=off))) for off in (False, True))
    assert stays["update", "a"].total - goes["update", "a"].total == SHAPE.parameters * 2 // 4


def test_megatrons_gradients_count_once():
    engine = {"engine": "megatron", "tensor": 4, "weight_bytes": 2}
    for off in (False, True):
        parts = phases(pool(model(**engine, param_offload=off)))["update", "a"].parts
        assert [size for what, size in parts if what == "gradients"] == [SHAPE.parameters]
    assert ("gradients", SHAPE.parameters) in phases(pool(model(**engine)))["log-probs", "a"].parts
    assert dict(phases(pool(model(**engine)))["rollout", None].parts)["idle models"] == sum(
        part(SHAPE, model(**engine).trainer) for part in (formulas.weights, formulas.gradients, formulas.optimizer)
    )


def test_on_a_cpu_there_are_no_contexts():
    cpu = phases(pool(model(kv_bytes=GIB, sleeps=False), context=0))
    assert dict(cpu["rollout", None].parts)["contexts"] == 0
    assert dict(cpu["rollout", None].parts)["servers"] == dict(cpu["update", "a"].parts)["servers"]


# -- fixes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "keys"),
    [
        (pool(model()), []),
        (pool(model(share=0.9)), ["actor.fsdp_config.optimizer_offload"]),
        (pool(model(share=0.95)), ["actor.fsdp_config.optimizer_offload", "actor.fsdp_config.param_offload"]),
        (pool(model(share=1.0, **OFF)), ["rollout.gpu_memory_utilization"]),
        (pool(model(share=0.1, **OFF)), ["rollout.gpu_memory_utilization"]),
        (pool(model(sleeps=False, share=0.8, **OFF)), ["rollout.free_cache_engine"]),
        (pool(model(checkpointing=False)), ["model.enable_gradient_checkpointing"]),
        (pool(model(tokens=10**6)), ["actor.ppo_max_token_len_per_gpu"]),
        (pool(model(infer_tokens=10**6)), ["rollout.log_prob_max_token_len_per_gpu"]),
        (pool(model(ref_tokens=10**6)), ["ref.log_prob_max_token_len_per_gpu"]),
        (pool(model(gpus=1, share=0.5), gpus=1), ["actor.fsdp_config.optimizer_offload"]),
        (
            pool(model(gpus=1, defer_sync=True, **OFF), gpus=1),
            ["actor.fsdp_config.use_no_sync_for_gradient_accumulation"],
        ),
        (pool(model(kv_bytes=GIB // 4, **OFF)), ["rollout.engine_kwargs.vllm.kv_cache_memory_bytes"]),
        (pool(model(kv_bytes=100 * GIB, **OFF)), ["rollout.engine_kwargs.vllm.kv_cache_memory_bytes"]),
        (pool(model("a", share=0.6, **OFF), model("b", share=0.6, **OFF)), ["rollout.gpu_memory_utilization"] * 2),
        (
            pool(model("a"), model("b", param_offload=True, share=0.5)),
            ["actor.fsdp_config.optimizer_offload"] * 2,
        ),
    ],
)
def test_what_doesnt_fit_gets_changes_that_make_it_fit(needs, keys):
    fixes = suggest(needs, MEMORY)
    assert [fix.key for fix in fixes] == keys
    assert plan_pool(needs, MEMORY).fits == (not keys)
    assert plan_pool(apply(needs, fixes), MEMORY).fits
    for fix in fixes:  # none is needless
        assert lacking(plan_pool(apply(needs, [f for f in fixes if f is not fix]), MEMORY)) > 0
        assert fix.now != fix.then


def test_changes_of_several_kinds():
    needs = pool(model(share=1.0, infer_tokens=10**6, tokens=10**6))
    fixes = suggest(needs, MEMORY)
    assert {fix.field for fix in fixes} > {"infer_tokens", "tokens"}
    assert plan_pool(apply(needs, fixes), MEMORY).fits


def test_a_number_is_changed_no_more_than_it_must():
    needs = pool(model(tokens=10**6))
    (fix,) = suggest(needs, MEMORY)
    more = dataclasses.replace(fix, value=fix.value + 256)
    assert not plan_pool(apply(needs, [more]), MEMORY).fits
    needs = pool(model(share=1.0, **OFF))
    (fix,) = suggest(needs, MEMORY)
    assert fix.value == 0.99
    assert not plan_pool(apply(needs, [dataclasses.replace(fix, value=fix.value + 0.01)]), MEMORY).fits


def test_where_no_setting_is_enough_there_must_be_more_gpus():
    memory = 16 * GIB
    needs = pool(model(**OFF, gpus=1, share=0.7, fsdp2=False), gpus=1)
    fixes = suggest(needs, memory)
    assert "n_gpus_per_node" in [fix.key for fix in fixes]
    after = apply(needs, fixes)
    assert after.gpus > 1 and after.models[0].trainer.gpus == after.gpus
    assert plan_pool(after, memory).fits


def test_what_nothing_makes_fit_gets_no_fix():
    assert suggest(pool(model()), GIB) is None


def test_a_micro_batch_holds_the_longest_row():
    needs = pool(model(tokens=10**6, least=9 * 10**5))
    fixes = suggest(needs, MEMORY)
    assert all(fix.then >= 9 * 10**5 for fix in fixes or [] if fix.field == "tokens")


def test_own_pools_are_a_way_out_if_each_fits_alone():
    assert own_pools(pool(model("a", share=0.6, **OFF), model("b", share=0.6, **OFF)), MEMORY)
    assert not own_pools(pool(model("a"), model("b", tokens=10**6)), MEMORY)
    assert not own_pools(pool(model("a")), MEMORY)
