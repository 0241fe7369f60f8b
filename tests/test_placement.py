"""Which models share which GPUs, and what can't share them."""

import pytest
from omegaconf import OmegaConf

from verl_drmas.config import ConfigError, parse
from verl_drmas.placement import Pool, check_cluster, check_placement, placement, pool_of, server_size

RUN = OmegaConf.create({"trainer": {"n_gpus_per_node": 8, "nnodes": 2, "device": "cuda"}})


def section(**models):
    agents = {f"agent_{name}": {"model": name} for name in models}
    pools = {m["pool"]: {"n_gpus_per_node": 4} for m in models.values() if "pool" in m}
    return parse({"agents": agents, "models": models, "pools": pools})


def policy(*, device="cuda", **rollout):
    defaults = {"name": "vllm", "free_cache_engine": True, "gpu_memory_utilization": 0.4}
    return OmegaConf.create({"trainer": {"device": device}, "actor_rollout_ref": {"rollout": {**defaults, **rollout}}})


def refusal(pools, **policies):
    with pytest.raises(ConfigError) as error:
        check_placement(pools, policies)
    assert "\n" not in str(error.value)
    return str(error.value)


SHARED = {"run": Pool("run", 8, 1, ("a", "b"))}


def test_models_that_name_no_pool_share_the_runs():
    pools = placement(RUN, section(a={}, b={"pool": "right"}, c={}))
    assert list(pools.values()) == [Pool("run", 8, 2, ("a", "c")), Pool("right", 4, 1, ("b",))]
    assert (pools["run"].gpus, pools["right"].gpus) == (16, 4)
    assert pools["run"].shared and not pools["right"].shared
    assert pool_of(pools, "b").name == "right"


def test_without_models_of_its_own_the_runs_pool_is_not_made():
    assert list(placement(RUN, section(a={"pool": "left"}, b={"pool": "right"}))) == ["left", "right"]


def test_a_remote_model_is_in_no_pool():
    remote = {"remote": {"store": "sqlite:///pair.db", "role": "sub"}}
    pools = placement(RUN, section(a={}, far=remote))
    assert list(pools.values()) == [Pool("run", 8, 2, ("a",))] and not pools["run"].shared
    check_placement(pools, {"a": policy(), "far": policy(name="sglang", gpu_memory_utilization=0.9)})
    assert list(placement(RUN, section(far=remote, a={"pool": "left"}))) == ["left"]


@pytest.mark.parametrize(("models", "count"), [(1, 3), (3, 3), (4, 4), (7, 7)])
def test_a_gpu_has_room_for_a_worker_of_each_model(models, count):
    assert Pool("run", 1, 1, tuple(map(str, range(models)))).max_colocate_count == count


def test_a_server_takes_the_product_of_its_parallel_sizes():
    assert server_size(policy()) == 1
    assert server_size(policy(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)) == 8


def test_models_of_one_engine_whose_servers_fit_together_are_fine():
    check_placement(SHARED, {"a": policy(), "b": policy(gpu_memory_utilization=0.55)})


def test_servers_that_do_not_divide_their_pool():
    line = refusal({"left": Pool("left", 6, 1, ("a",))}, a=policy(tensor_model_parallel_size=4))
    assert line.startswith("model a: a server takes 4 GPUs") and "the 1 x 6 of pool 'left'" in line


def test_no_server_lies_across_two_nodes_in_parts():
    assert "the 2 x 3 of pool" in refusal({"x": Pool("x", 3, 2, ("a",))}, a=policy(tensor_model_parallel_size=2))
    check_placement({"x": Pool("x", 2, 4, ("a",))}, {"a": policy(tensor_model_parallel_size=4)})  # two whole nodes


def test_two_engines_on_one_pool():
    line = refusal(SHARED, a=policy(), b=policy(name="sglang"))
    assert line.startswith("pool 'run' has models on different engines (a: vllm, b: sglang)")
    assert "drmas.models.<id>.pool" in line


def test_two_engines_on_two_pools_are_fine():
    pools = {"left": Pool("left", 8, 1, ("a",)), "right": Pool("right", 8, 1, ("b",))}
    check_placement(pools, {"a": policy(), "b": policy(name="sglang")})


@pytest.mark.parametrize("name", ["free_cache_engine", "enable_sleep_mode"])
def test_servers_that_do_not_sleep(name):
    line = refusal(SHARED, a=policy(), b=policy(**{name: False}))
    assert line.startswith(f"model b: actor_rollout_ref.rollout.{name} is false") and "with a;" in line


def test_the_job_asks_for_the_gpus_of_all_its_pools():
    pools = {"run": Pool("run", 1, 1, ("a",)), "right": Pool("right", 2, 1, ("b",))}
    config = OmegaConf.create({"trainer": {"device": "cpu"}, "ray_kwargs": {"ray_init": {"num_gpus": 1}}})
    assert check_cluster(config, pools) == {"ray_kwargs.ray_init.num_gpus": 3}  # logical ones
    config.trainer.device = "cuda"
    with pytest.raises(ConfigError, match=r"num_gpus is 1, but the pools take 3: 1 \(run\) \+ 2 \(right\)"):
        check_cluster(config, pools)
    config.ray_kwargs.ray_init.num_gpus = 4
    assert check_cluster(config, pools) == {}
    assert check_cluster(OmegaConf.create({}), pools) == {}  # a cluster that is there already


def test_servers_that_are_awake_together_need_their_memory_together():
    line = refusal(SHARED, a=policy(gpu_memory_utilization=0.6), b=policy(gpu_memory_utilization=0.4))
    assert "adds up to 1.00: 0.6 (a) + 0.4 (b)" in line


def test_a_cpu_has_no_such_limits():
    check_placement(
        SHARED, {m: policy(device="cpu", free_cache_engine=False, gpu_memory_utilization=0.9) for m in "ab"}
    )
