"""`verl-drmas plan`: what a run needs of each GPU, printed without one, and overrides that make it fit."""

import json
import shlex
import subprocess
import sys

import pytest
import ray
from typer.testing import CliRunner

from recipes.cpu_arithmetic.tiny_model import build_tiny_model
from verl_drmas.cli import app
from verl_drmas.plan.command import main

pytestmark = pytest.mark.long

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
TWO = [
    "++drmas.models={a:{},b:{}}",
    "drmas.agents.solver.model=a",
    "drmas.agents.verifier.model=b",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The shipped GPU configuration, on a model of billions without its weights."""
    folder = tmp_path_factory.mktemp("qwen3_4b")
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    return ["--config-name", "drmas_math", f"actor_rollout_ref.model.path={folder}"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = build_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    return ["--config-name", "cpu_arithmetic", f"actor_rollout_ref.model.path={folder}", "+data.note=1"]


@pytest.fixture
def plan(capsys):
    """Exit status and printed text (white space and table lines folded) of a plan."""

    def plan(*arguments):
        status = main(list(arguments))
        return status, " ".join(capsys.readouterr().out.replace("│", " ").split())

    return plan


def fixes(text):
    """The overrides of the `fix:` lines."""
    return [words.split()[0] for words in text.split("fix: ")[1:]]


def test_a_gpu_configuration_is_planned_on_a_machine_without_one(plan, large):
    status, text = plan(*large)
    assert status == 0 and text.endswith("fits in 80 GiB")
    # Four GPUs share 4.02 B float32 weights, gradients, and two numbers for each; a server has them whole in bfloat16.
    assert "base 4.02 B 3.75 3.75 7.49" in text and "optimiser" in text
    assert "base 4 x 1 GPUs 7.49" in text and "of 12,288" in text
    for phase in ("rollout 44.25", "log-probs (base)", "update (base)", "weight sync (base)"):
        assert phase in text
    assert "base 512 to 768 9,437,184 1 1" in text  # rows, tokens, updates, syncs
    assert "estimates" in text
    assert not ray.is_initialized()


def test_a_cpu_configuration_names_its_cache(plan, tiny):
    status, text = plan(*tiny, "--gpu-memory", "4")
    assert status == 0 and text.endswith("fits in 4 GiB")
    assert "base 1 x 1 GPUs 0.0028 " in text and " 0.06 32,768 512 of 64 tokens" in text  # 64 MiB of 2 KiB a token
    assert "contexts" not in text  # a process has none on a CPU
    assert "base 128 3,584 1 1" in text


def test_what_doesnt_fit_exits_1_with_overrides_that_make_it_fit(plan, large):
    asked = [*large, "trainer.n_gpus_per_node=1", *TWO]
    status, text = plan(*asked)
    assert status == 1 and "update (a) needs 86.91 of 80.00 GiB" in text and text.endswith("does not fit in 80 GiB")
    found = fixes(text)
    assert [fix.partition("=")[0] for fix in found] == [
        f"++drmas.models.{m}.actor_rollout_ref.actor.ppo_max_token_len_per_gpu" for m in "ab"
    ]
    assert "(now 49152)" in text
    status, text = plan(*asked, *found)
    assert status == 0 and text.endswith("fits in 80 GiB")


def test_models_of_a_pool_add_up_and_split_pools_dont(plan, large):
    shared = plan(*large, *TWO)[1]
    assert "rollout 65.00" in shared  # 2 x 0.4 x 80, and two trainers' contexts; all else is off-loaded
    own = ["++drmas.pools.right={n_gpus_per_node:4,nnodes:1}", "++drmas.models.b.pool=right"]
    split = plan(*large, *TWO, *own)[1]
    assert "pool run, 1 x 4 GPUs" in split and "pool right, 1 x 4 GPUs" in split
    assert split.count("rollout 36.25") == 2  # 0.4 x 80, a context, and the weights, which nobody has to make way for


def test_a_pool_of_its_own_is_offered_where_it_helps(plan, large):
    stays = "{actor_rollout_ref:{actor:{fsdp_config:{param_offload:false,optimizer_offload:false}}}}"
    asked = [
        *large,
        f"++drmas.models={{a:{stays},b:{stays}}}",
        *TWO[1:3],
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.47",
    ]
    status, text = plan(*asked)
    assert status == 1 and "rollout needs 98.68 of 80.00 GiB" in text
    found = fixes(text)
    # Off-loading both optimisers leaves 83.69 (0.94 of the memory is the servers'); one model's weights do the rest.
    assert [fix.partition("actor_rollout_ref.actor.")[2] for fix in found] == [
        "fsdp_config.optimizer_offload=true",
        "fsdp_config.optimizer_offload=true",
        "fsdp_config.param_offload=true",
    ]
    assert plan(*asked, *found)[0] == 0
    offered = shlex.split(text.split("or: ")[1].split(" (a pool of its own")[0])
    assert offered == ["++drmas.pools.b={n_gpus_per_node:4,nnodes:1}", "++drmas.models.b.pool=b"]
    assert plan(*asked, *offered)[0] == 0


def test_a_frozen_model_is_served_only(plan, large):
    status, text = plan(
        *large, "++drmas.models={a:{},judge:{trainable:false}}", *TWO[1:2], "drmas.agents.verifier.model=judge", TWO[3]
    )
    assert status == 0, text
    assert "judge 4.02 B - - - - - - -" in text
    assert "update (a)" in text and "(judge)" not in text
    assert "judge 256 3,145,728 0 0" in text


def test_lora_trains_adapters_only(plan, large):
    assert "base 4.02 B 3.75 0.02 0.03" in plan(*large, "actor_rollout_ref.model.lora_rank=8")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "many"], "--gpu-memory is 'many'; give the GiB of one GPU, such as 80"),
        (["--gpu-memory", "-1"], "--gpu-memory is '-1'"),
        (
            ["actor_rollout_ref.model.path=/no/folder"],
            "actor_rollout_ref.model.path is '/no/folder', whose config.json",
        ),
        (["actor_rollout_ref.actor.strategy=veomni"], "actor_rollout_ref.actor.strategy is 'veomni'; plan knows"),
        (["actor_rollout_ref.rollout.dtype=int3"], "actor_rollout_ref.rollout.dtype: 'int3' is a type of number"),
        (["--multirun"], "--multirun: not a flag"),
    ],
)
def test_wrong_input_is_one_line(capsys, large, arguments, message):
    assert main([*large, *arguments]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("refused: ") and message in lines[-1]
    assert len([line for line in lines if line.startswith("refused: ")]) == 1


def test_the_command_hands_on_every_argument(monkeypatch):
    seen = []
    monkeypatch.setattr("verl_drmas.plan.command.main", lambda arguments: seen.extend(arguments) or 3)
    arguments = ["--config-name", "drmas_math", "--gpu-memory", "40", "+a.b='c d'"]
    assert CliRunner().invoke(app, ["plan", *arguments]).exit_code == 3
    assert seen == arguments


def test_the_formulas_load_neither_ray_nor_verl():
    code = (
        "import sys, verl_drmas.plan.pool, verl_drmas.plan.fixes\n"
        "assert not {'ray', 'verl', 'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
