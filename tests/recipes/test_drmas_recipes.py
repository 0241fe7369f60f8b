"""Every run of the Dr. MAS recipes composes as verl does it, passes verl's checks and ours, and has the paper's values.

The values stand here a second time, by the paper's sections and by the scripts of its code, and are compared with what
a run would train with; the columns of the tables too.
"""

import functools
import gc
import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config
from verl.utils.import_utils import load_extern_object

from recipes.drmas_math import run as math
from recipes.drmas_search import run as search
from verl_drmas.check import check_estimator, prepare_keys, validate_with_verl
from verl_drmas.config import ConfigError
from verl_drmas.study.cells import SINGLE, Cell, megatron
from verl_drmas.support import estimator_refusals

pytestmark = pytest.mark.long

RUNS = Path("/runs")
A = "actor_rollout_ref"

# The paper, section 5 and appendix, and where it is silent the scripts of its code.
BOTH = {
    f"{A}.actor.optim.lr": 1e-6,  # AdamW, constant rate
    f"{A}.actor.optim.weight_decay": 0.01,
    f"{A}.actor.optim.clip_grad": 1.0,
    f"{A}.actor.optim.lr_warmup_steps_ratio": 0.0,
    f"{A}.actor.ppo_epochs": 1,
    f"{A}.actor.clip_ratio": 0.2,
    f"{A}.actor.clip_ratio_c": 3.0,
    f"{A}.actor.loss_agg_mode": "token-mean",
    f"{A}.actor.use_kl_loss": False,
    "algorithm.use_kl_in_reward": False,
    "algorithm.norm_adv_by_std_in_grpo": True,
    f"{A}.rollout.temperature": 1.0,
    f"{A}.rollout.top_p": 1.0,
    f"{A}.rollout.tensor_model_parallel_size": 1,
    f"{A}.rollout.val_kwargs.temperature": 0.6,
    f"{A}.rollout.val_kwargs.top_p": 0.95,
    f"{A}.rollout.val_kwargs.do_sample": True,
    f"{A}.rollout.enable_chunked_prefill": False,
    "trainer.save_freq": 100,
}
MATH = {
    "data.train_batch_size": 32,
    f"{A}.rollout.n": 8,
    "data.max_prompt_length": 8192,
    "data.max_response_length": 4096,
    "data.truncation": "middle",
    "data.filter_overlong_prompts": True,
    "data.apply_chat_template_kwargs.enable_thinking": False,
    f"{A}.actor.entropy_coeff": 0.0,
    f"{A}.actor.ppo_max_token_len_per_gpu": 4 * (8192 + 4096),  # micro-batches of 4 rows, and of 8 for log-probs
    f"{A}.rollout.log_prob_max_token_len_per_gpu": 8 * (8192 + 4096),
    "trainer.total_epochs": 2,
    "trainer.test_freq": 10,
}
SEARCH = {
    "data.train_batch_size": 128,
    f"{A}.rollout.n": 5,
    "data.max_prompt_length": 4096,
    "data.max_response_length": 800,
    "data.truncation": "left",
    "data.filter_overlong_prompts": False,
    f"{A}.actor.entropy_coeff": 0.001,
    f"{A}.actor.ppo_max_token_len_per_gpu": 4 * (4096 + 800),  # micro-batches of 4 rows, and of 32 for log-probs
    f"{A}.rollout.log_prob_max_token_len_per_gpu": 32 * (4096 + 800),
    "trainer.total_epochs": 1,
    "trainer.test_freq": 5,
}
# Of the team alone: control flow, penalties, updates a step (ppo_mini_update_num).
TEAM = {
    "drmas_math": {"drmas.workflow.max_rounds": 2, "drmas.updates_per_step": 1, "penalty": 0.1},
    "drmas_search": {
        "drmas.workflow.max_turns": 4,
        "drmas.workflow.topk": 3,
        "drmas.updates_per_step": 5,
        "penalty": 0.01,
    },
}
PATHS = {"4b": "Qwen/Qwen3-4B", "8b": "Qwen/Qwen3-8B", "3b": "Qwen/Qwen2.5-3B", "7b": "Qwen/Qwen2.5-7B"}
GPUS = {"4b": 4, "8b": 8, "3b": 4, "7b": 8}  # README of the paper's code
# What a variant or another arm has in place of the values above.
INSTEAD = {
    "dapo": {
        f"{A}.actor.clip_ratio_low": 0.2,
        f"{A}.actor.clip_ratio_high": 0.28,
        f"{A}.actor.use_kl_loss": True,
        f"{A}.actor.kl_loss_coef": 0.01,
        f"{A}.actor.kl_loss_type": "low_var_kl",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
    },
    "gspo": {f"{A}.actor.policy_loss.loss_mode": "gspo", f"{A}.actor.loss_agg_mode": "seq-mean-token-mean"},
    "four_agents": {"trainer.n_gpus_per_node": 8},
}
ONE_ROW = {"data.max_prompt_length": 1024, "data.max_response_length": 4096 + 800 - 1024}  # search, single agent
FOUR_SEPARATE = {f"{A}.rollout.tensor_model_parallel_size": 4}  # four servers awake at once

TABLE_COLUMNS = ["single grpo", "shared grpo_team", "shared drmas", "separate grpo_team", "separate drmas"]
TABLES = {
    (math, "table1"): [f"{size} {column}" for size in ("4b", "8b") for column in TABLE_COLUMNS],
    (search, "table2"): [f"{size} {column}" for size in ("3b", "7b") for column in TABLE_COLUMNS],
    (search, "table3"): [f"7b separate {e}" for e in ("grpo_team", "drmas_mean", "drmas_std", "drmas")],
    (search, "heterogeneous"): ["7b shared drmas", "7b heterogeneous drmas"],
    (search, "gradient_norms"): [f"{s} separate {e}" for s in ("3b", "7b") for e in ("grpo_team", "drmas")],
}
AGENTS = {
    "drmas_math": ("solver", "verifier"),
    "drmas_search": ("verifier", "search", "answer"),
    "four_agents": ("solver", "critic", "refiner", "verifier"),
}


def launched(module, cell, further=()):
    if module is search:
        return search.plan(cell, seed=7, runs=RUNS, retriever="http://a:1,http://b:2", further=list(further))
    return math.STUDY.launch(cell, seed=7, runs=RUNS, further=further)


@pytest.fixture(scope="module", autouse=True)
def hydra():
    """verl's own command starts from the same module."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        yield
    checked.cache_clear()
    gc.unfreeze()
    gc.collect()  # what `checked` had frozen
    gc.freeze()


@functools.cache
def checked(module, cell):
    """The composed and checked run of a cell, and what the check prepared of it (None on verl's own trainer)."""
    gc.freeze()  # what is kept of earlier ones would be looked through again and again
    config, *rest = launched(module, cell).arguments[1:]
    config = compose(config, rest)
    if cell.mapping == SINGLE:
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
        return config, None
    prepared = prepare_keys(config)
    validate_with_verl(config, prepared.policies)
    return config, prepared


@contextmanager
def settled(module, cell):
    """As `checked`; runs that differ in a team's estimator and their names alone share what was composed and checked.

    Of such a run is checked anew what reads the estimator; outside of the block the shared configuration is as it was.
    """
    first = next(c for c in cells(module) if (c.size, c.mapping, c.variant) == (cell.size, cell.mapping, cell.variant))
    config, prepared = checked(module, first)
    if cell == first:
        yield config, prepared
        return
    assert without_estimator(module, cell) == without_estimator(module, first)
    algorithm = config.algorithm
    assert algorithm.adv_estimator == first.estimator
    algorithm.adv_estimator = cell.estimator
    try:
        check_estimator(cell.estimator)
        assert estimator_refusals(config, prepared.section) == []
        yield config, prepared
    finally:
        algorithm.adv_estimator = first.estimator


def without_estimator(module, cell):
    arguments = " ".join(launched(module, cell).arguments)
    assert f"algorithm.adv_estimator={cell.estimator} " in arguments
    arguments = arguments.replace(module.STUDY.experiment(cell), "<name>")
    return arguments.replace(f"adv_estimator={cell.estimator}", "adv_estimator=<estimator>")


def cells(module):
    return list(module.STUDY.cells())


ALL = [pytest.param(m, c, id=f"{m.STUDY.project}-{m.STUDY.experiment(c)}") for m in (math, search) for c in cells(m)]
ON_MEGATRON = [
    pytest.param(m, c, id=f"{m.STUDY.project}-{m.STUDY.experiment(c)}")
    for m, size in ((math, "8b"), (search, "7b"))
    for c in [megatron(Cell(size, *column.split())) for column in TABLE_COLUMNS[::2]]
] + [
    pytest.param(math, megatron(Cell("4b", "shared", "drmas", "four_agents")), id="drmas_math-four_agents"),
    pytest.param(search, megatron(Cell("7b", "heterogeneous", "drmas")), id="drmas_search-heterogeneous"),
]


@pytest.mark.parametrize(("module", "cell"), ALL)
def test_a_run_passes_verls_checks_and_ours_and_has_the_papers_values(module, cell):
    with settled(module, cell) as (config, prepared):
        assert config.algorithm.adv_estimator == cell.estimator
        has_the_papers_values(module, cell, config, prepared)


def has_the_papers_values(module, cell, config, prepared):
    project = module.STUDY.project
    expected = {**BOTH, **(MATH if module is math else SEARCH), "trainer.n_gpus_per_node": GPUS[cell.size]}
    expected |= INSTEAD.get(cell.variant, {})
    if cell.mapping == SINGLE and module is search:
        expected |= ONE_ROW
    if cell.variant == "four_agents" and cell.mapping == "separate":
        expected |= FOUR_SEPARATE
    found = {key: OmegaConf.select(config, key) for key in expected}
    assert found == expected
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    if prepared is None:
        return
    section = prepared.section
    team = AGENTS.get(cell.variant, AGENTS[project])
    assert prepared.agents() == team == tuple(section.agents)
    assert {key: OmegaConf.select(config, key) for key in TEAM[project] if key != "penalty"} == {
        key: value for key, value in TEAM[project].items() if key != "penalty"
    }
    assert {agent.invalid_penalty for agent in section.agents.values()} == {TEAM[project]["penalty"]}
    assert section.request_seed is None
    own = cell.mapping != "shared"
    assert {a: section.agent(a).model for a in team} == ({a: a for a in team} if own else dict.fromkeys(team, "base"))
    paths = {m: policy.actor_rollout_ref.model.path for m, policy in prepared.policies.items()}
    if cell.mapping == "heterogeneous":
        llama = "meta-llama/Llama-3.2-3B-Instruct"
        assert paths == {"verifier": PATHS["7b"], "search": llama, "answer": llama}
    else:
        assert set(paths.values()) == {PATHS[cell.size]}
    servers = sum(p.actor_rollout_ref.rollout.gpu_memory_utilization for p in prepared.policies.values())
    assert servers <= 0.95 + 1e-9 if own else servers == (0.5 if module is math else 0.4)
    if module is search:
        assert list(config.drmas.workflow.retrieval.urls) == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(("module", "cell"), ON_MEGATRON)
def test_a_megatron_run_passes_verls_checks_and_ours(module, cell):
    config, prepared = checked(module, cell)
    for policy in [config] if prepared is None else prepared.policies.values():
        actor = policy.actor_rollout_ref.actor
        assert (actor.strategy, actor.megatron.tensor_model_parallel_size) == ("megatron", 2)
        assert actor.megatron.override_transformer_config.recompute_granularity == "full"
    if cell.mapping == "heterogeneous":
        assert len({policy.actor_rollout_ref.model.path for policy in prepared.policies.values()}) == 2


@pytest.mark.parametrize(("module", "variant"), [(math, "dapo"), (search, "gspo"), (search, "dapo")])
def test_the_variants_go_with_a_single_agent_too(module, variant):
    (size, *_) = module.STUDY.models
    config, _ = checked(module, Cell(size, SINGLE, "grpo", variant))
    assert {key: OmegaConf.select(config, key) for key in INSTEAD[variant]} == INSTEAD[variant]
    assert config.trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize(("module", "size"), [(math, "4b"), (math, "8b"), (search, "3b"), (search, "7b")])
def test_a_single_agent_runs_on_verls_own_trainer_and_loop(module, size):
    config, _ = checked(module, Cell(size, SINGLE, "grpo"))
    assert "drmas" not in config
    assert config.trainer.v1.trainer_mode == "sync"
    assert OmegaConf.select(config, f"{A}.rollout.agent.agent_loop_manager_class") is None
    assert config.actor_rollout_ref.model.path == PATHS[size]
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    assert loop == ("single_turn_agent" if module is math else "tool_agent")
    data = config.data.custom_cls
    assert load_extern_object(data.path, data.name).__name__.endswith("Prompts")
    assert get_custom_reward_fn(config) is not None
    assert config.reward.custom_reward_function.reward_kwargs.invalid_penalty == TEAM[module.STUDY.project]["penalty"]
    updates = config.data.train_batch_size / config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert updates == (1 if module is math else 4)
    if module is search:
        turns = config.actor_rollout_ref.rollout.multi_turn
        assert (turns.max_assistant_turns, turns.max_parallel_calls, turns.format) == (4, 1, "hermes")
        assert Path(turns.tool_config_path) == Path(search.__file__).parent / "search_tool.yaml"
        assert config.ray_kwargs.ray_init.runtime_env.env_vars.DRMAS_RETRIEVER_URLS == "[http://a:1,http://b:2]"


@pytest.mark.parametrize(("module", "table"), TABLES, ids=lambda value: value if isinstance(value, str) else "")
def test_no_column_of_the_papers_tables_is_missing(module, table):
    found = [f"{c.size} {c.mapping} {c.estimator}" for c in module.STUDY.tables[table]]
    assert found == TABLES[module, table]
    assert all((c.variant, c.engine) == (None, "fsdp2") for c in module.STUDY.tables[table])


def test_every_cell_that_the_report_sets_beside_the_papers_numbers_is_a_run():
    tables = json.loads(resources.files("verl_drmas.report").joinpath("paper_tables.json").read_text())
    columns = [(m["mapping"], e) for m in tables["methods"].values() for e in m["estimators"]]
    wanted = {
        (task, model, mapping, estimator)
        for task, table in tables["tables"].items()
        for model in table["models"]
        for mapping, estimator in columns
    }
    ablation = tables["ablation"]
    wanted |= {(ablation["task"], ablation["model"], ablation["mapping"], estimator) for estimator in ablation["rows"]}
    runs = {
        (module.STUDY.project.removeprefix("drmas_"), PATHS[c.size].split("/")[1], c.mapping, c.estimator)
        for module in (math, search)
        for c in cells(module)
        if c.variant is None
    }
    assert len(wanted) == 22 and wanted <= runs


def test_a_seed_reaches_data_engines_and_names():
    config, _ = checked(math, Cell("4b", "shared", "drmas"))
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (config.data.seed, rollout.seed, actor.data_loader_seed) == (7, 7, 7)
    folder = "/runs/drmas_math/qwen3_4b_shared_drmas_seed7"
    assert config.trainer.default_local_dir == f"{folder}/checkpoints"
    assert f"{folder}/metrics.jsonl" == config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH


def test_names_of_runs_differ():
    for module in (math, search):
        folders = [launched(module, c).folder for c in (*cells(module), *map(megatron, cells(module)))]
        assert len(set(folders)) == len(folders)


def test_the_users_own_overrides_win():
    cell = Cell("4b", "shared", "drmas")
    further = ("data.seed=3", "trainer.total_epochs=9")
    config, *rest = launched(math, cell, further).arguments[1:]
    config = compose(config, rest)
    assert (config.data.seed, config.trainer.total_epochs) == (3, 9)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (Cell("7b", "shared", "drmas"), "--size is '7b'; known: 4b, 8b"),
        (Cell("4b", "heterogeneous", "drmas"), "--mapping is 'heterogeneous'; known: single, shared, separate"),
        (Cell("4b", "single", "drmas"), r"--estimator \(with --mapping single\) is 'drmas'; known: grpo"),
        (Cell("4b", "shared", "grpo"), r"--estimator \(with --mapping shared\) is 'grpo'; did you mean 'grpo_team'"),
        (Cell("4b", "single", "grpo", "four_agents"), "--mapping is 'single'; known: shared, separate"),
        (Cell("4b", "shared", "drmas", "gigpo"), "--variant is 'gigpo'; did you mean 'gspo'"),
        (Cell("4b", "shared", "drmas", None, "fsdp"), "--engine is 'fsdp'; did you mean 'fsdp2'"),
    ],
)
def test_a_run_that_is_none_is_refused_in_one_line(cell, message):
    with pytest.raises(ConfigError, match=message):
        math.STUDY.launch(cell, seed=0, runs=RUNS)


def test_the_heterogeneous_team_has_one_size():
    with pytest.raises(ConfigError, match=r"--size \(with --mapping heterogeneous\) is '3b'; known: 7b"):
        search.STUDY.config(Cell("3b", "heterogeneous", "drmas"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("module", "cell"),
    [(math, Cell("8b", "separate", "drmas_std")), (search, Cell("7b", "single", "grpo"))],
    ids=["math", "search"],
)
def test_a_copied_folder_prints_a_command_that_a_shell_takes_as_it_is(module, cell, tmp_path):
    """As in verl-recipe: the folder alone, somewhere else."""
    folder = Path(module.__file__).parent
    copied = shutil.copytree(folder, tmp_path / folder.name)
    options = [*cell.options(), "--seed", "7", "--runs", "/runs", "a.b=c d", "--dry-run"]
    done = script(copied / "run.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\n" not in done.stdout.strip()
    python, minus_m, program, *arguments = shlex.split(done.stdout)
    assert (python, minus_m, program) == ("python", "-m", "verl.trainer.main_ppo")
    arguments = [a.replace("[http://127.0.0.1:8000]", "[http://a:1,http://b:2]") for a in arguments]
    arguments = [a.replace(str(copied), str(folder)) for a in arguments]
    assert arguments == launched(module, cell, ["a.b=c d"]).arguments


@pytest.mark.process
def test_the_script_lists_the_runs_of_a_table_and_refuses_what_it_does_not_know():
    done = script(search.__file__, "--list", "table3")
    assert [line.split("#")[0].split() for line in done.stdout.splitlines()] == [
        Cell("7b", "separate", e).options() for e in ("grpo_team", "drmas", "drmas_mean", "drmas_std")
    ]
    wrong = script(search.__file__, "--list", "table9")
    assert wrong.returncode == 2 and re.fullmatch(r"error: --list is 'table9'; .*\n", wrong.stderr)


def script(path, *arguments, cwd=None):
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_a_folder_has_all_that_verl_recipe_asks_for():
    for module in (math, search):
        folder = Path(module.__file__).parent
        pin = (folder / "REQUIRED_VERL.txt").read_text()
        assert "verl-drmas" in pin and f"RECIPE_FOLDER={folder.name}" in pin
        readme = (folder / "README.md").read_text()
        for heading in ("Installation", "Training", "Evaluation", "Citation"):
            assert re.search(rf"^## {heading}", readme, re.MULTILINE)
        missing = [table for table in module.STUDY.tables if f"`{table}`" not in readme]
        assert missing == []


def test_start_leaves_the_command_in_the_runs_folder_and_becomes_it(tmp_path, monkeypatch):
    became = []
    monkeypatch.setattr("verl_drmas.study.launch.os.execv", lambda path, command: became.append((path, command)))
    run = math.STUDY.launch(Cell("4b", "shared", "drmas"), seed=1, runs=tmp_path)
    run.start()
    assert became == [(sys.executable, run.command)]
    assert json.loads((run.folder / "command.json").read_text()) == run.command
