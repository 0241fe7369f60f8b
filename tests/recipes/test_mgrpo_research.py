"""Every run of the M-GRPO recipe composes as verl does it, passes verl's checks and ours, and has the paper's values.

The values stand here a second time, by the paper's sections and by its public scripts, and are compared with what a run
would train with.
"""

import functools
import gc
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config
from verl.utils.import_utils import load_extern_object

from recipes.mgrpo_research import run as recipe
from recipes.mgrpo_research.run import ARMS, STUDY, ResearchCell, plan
from verl_drmas.check import build_workflow, prepare_keys, validate_with_verl
from verl_drmas.config import ConfigError
from verl_drmas.pair.facts import read
from verl_drmas.pair.jobs import GPUS, check_fit, split_gpus
from verl_drmas.study.cells import SINGLE, megatron
from verl_drmas.study.launch import PairLaunch
from verl_drmas.trainer.contract import check_terms, terms

pytestmark = pytest.mark.long

A = "actor_rollout_ref"
CONFIGS = Path(__file__).parents[2] / "configs"
START = Path("/start")
STORE = "sqlite:///store.db"
# The store, which `verl-drmas pair` sets where the user doesn't.
STORES = {"main": [f"drmas.models.sub.remote.store={STORE}"], "sub": [f"drmas.store.url={STORE}"]}

# By the paper (M-GRPO, sections 3 to 5), and where it is silent by its public scripts.
VALUES = {
    f"{A}.rollout.n": 8,  # K
    f"{A}.actor.loss_agg_mode": "seq-mean-token-mean",
    f"{A}.actor.use_kl_loss": False,
    f"{A}.actor.entropy_coeff": 0.0,
    "algorithm.use_kl_in_reward": False,
    f"{A}.rollout.val_kwargs.n": 3,
    "trainer.test_freq": 25,
    "trainer.save_freq": 25,
    # of the scripts
    f"{A}.actor.optim.lr": 1e-6,
    f"{A}.actor.optim.weight_decay": 0.1,
    f"{A}.actor.optim.betas": [0.9, 0.98],
    f"{A}.actor.clip_ratio_low": 0.2,
    f"{A}.actor.clip_ratio_high": 0.28,
    f"{A}.rollout.temperature": 1.0,
    f"{A}.rollout.max_model_len": 32768,
    f"{A}.rollout.tensor_model_parallel_size": 4,
    # ours
    "data.train_batch_size": 32,
    "data.apply_chat_template_kwargs": {"enable_thinking": False},
    f"{A}.actor.ppo_mini_batch_size": 32,  # one update a step
    f"{A}.actor.use_dynamic_bsz": True,
    f"{A}.actor.ppo_max_token_len_per_gpu": 32768,
}
TEAM = {
    "drmas.alignment.target": 8,  # D
    "drmas.advantage.ddof": 0,
    "drmas.advantage.eps": 0.0,
    "drmas.workflow.main": {"format": 0.1, "correct": 0.9},
    "drmas.workflow.sub": {"format": 0.1, "outcome": 0.4, "judge": 0.5},
    "drmas.workflow.judge.kind": "endpoint",
    "drmas.workflow.judge.max_tokens": 4096,  # a helper that thinks
    "drmas.workflow.tools.reason.max_tokens": 8192,
    "drmas.workflow.main_tools": ["reason"],
    "drmas.workflow.subs.searcher.tools": ["search", "visit"],
    "drmas.workflow.tools.visit.characters": 12000,  # so that several pages fit a trajectory
    "drmas.workflow.max_turns": 20,
    "drmas.workflow.subs.searcher.max_turns": 20,
    "drmas.workflow.max_depth": 1,
    "drmas.request_seed": None,
}
# What the paper's figures compare; its section 4.2 has the two jobs.
FIGURES = {
    "figure5": {("co_train", "1"), ("single", "1")},
    "figure6": {("co_train", "2"), ("main_only", "2")},
    "figure7": {("co_train", "2"), ("main_only", "2"), ("single", "2")},
    "figure8": {("co_train", "2"), ("unaligned", "2")},
}
PATH = "Qwen/Qwen3-30B-A3B"


def launched(cell, further=()):
    return plan(
        cell,
        seed=7,
        runs=Path("/runs"),
        retriever="http://a:1,http://b:2",
        helper="http://c:3/v1",
        helper_model="org/helper",
        start=START if cell.stage == "2" else None,
        further=list(further),
    )


def research(arm, stage, **other):
    """A cell of the paper's model."""
    return ResearchCell(**{**vars(recipe.cell(arm, stage, other.pop("mapping", None))), **other})


CELLS = list(STUDY.cells())
ON_MEGATRON = [
    megatron(research("co_train", "2")),
    megatron(research("single", "2")),
    megatron(research("co_train", "both", mapping="pair")),
]
SMALLER = [research("co_train", "both", size="4b")]


@pytest.fixture(scope="module", autouse=True)
def hydra():
    """verl's own command starts from the same module; one start for all keeps the files that it has read."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        yield
    jobs_of.cache_clear()
    gc.unfreeze()


@functools.cache
def jobs_of(cell):
    """By job of the run (`""` where it is one): the composed and checked configuration, and what was prepared of it."""
    gc.freeze()  # what is kept of earlier ones would be looked through again and again
    run = launched(cell)
    runs = {"main": run.main, "sub": run.sub} if isinstance(run, PairLaunch) else {"": run}
    found = {}
    for job, one in runs.items():
        config = compose(one.config, [*one.overrides, *STORES.get(job, ())])
        if cell.mapping == SINGLE:
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
            found[job] = config, None
            continue
        prepared = prepare_keys(config)
        validate_with_verl(config, prepared.policies)
        found[job] = config, prepared
    return found


def plain(config, key):
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


@pytest.mark.parametrize("cell", CELLS, ids=STUDY.experiment)
def test_a_run_passes_verls_checks_and_ours_and_has_the_papers_values(cell):
    for job, (config, prepared) in jobs_of(cell).items():
        values = VALUES | ({"trainer.test_freq": -1} if job == "sub" else {})  # it has no prompts to validate on
        assert {key: plain(config, key) for key in VALUES} == values
        assert config.algorithm.adv_estimator == cell.estimator
        assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (8, 4)
        assert config.actor_rollout_ref.actor.strategy == "fsdp2"
        # A row fits a micro-batch, and prompt and response the context.
        assert config.data.max_prompt_length + config.data.max_response_length == 32768
        if prepared is None:
            continue
        assert {key: plain(config, key) for key in TEAM} == TEAM
        section = prepared.section
        assert prepared.agents() == (("searcher",) if job == "sub" else ("main", "searcher"))
        assert {agent.turn_length for agent in section.agents.values()} == {1024}
        workflow = config.drmas.workflow
        assert list(workflow.tools.search.retrieval.urls) == ["http://a:1", "http://b:2"]
        for asked in (workflow.tools.reason, workflow.judge):
            assert (list(asked.urls), asked.model) == (["http://c:3/v1"], "org/helper")
        assert section.alignment.mode == ("none" if cell.arm == "unaligned" else "sample")


@pytest.mark.parametrize("cell", CELLS, ids=STUDY.experiment)
def test_who_is_trained_from_what(cell):
    start = cell.stage == "2"
    for job, (config, prepared) in jobs_of(cell).items():
        if prepared is None:
            assert config.actor_rollout_ref.model.path == ("/start/main" if start else PATH)
            continue
        section = prepared.section
        trained = {agent: section.agent(agent).model for agent in section.agents if section.trained(agent)}
        both = {"main": "main", "searcher": "main" if cell.mapping == "shared" else "sub"}
        expected = {"main": {"main": "main"}, "sub": {"searcher": "sub"}}.get(job, both)
        assert trained == ({"main": "main"} if cell.arm == "main_only" else expected)
        paths = {model: policy.actor_rollout_ref.model.path for model, policy in prepared.policies.items()}
        assert paths == {model: f"/start/{model}" if start else PATH for model in section.models}


@pytest.mark.parametrize("cell", [*CELLS, ON_MEGATRON[-1]], ids=STUDY.experiment)
def test_stages_read_their_own_files(cell):
    files = {stage: f"~/data/mgrpo/stage{stage}.parquet" for stage in ("1", "2")}
    for job, (config, prepared) in jobs_of(cell).items():
        if job == "sub":
            assert not prepared.section.curriculum
            continue
        if cell.stage != "both":
            assert config.data.train_files == files[cell.stage]
            assert prepared is None or not prepared.section.curriculum
            continue
        first, second = prepared.section.curriculum
        assert (first.files, second.files) == ([files["1"]], [files["2"]])
        assert first.ends and not second.ends
        assert config.data.dataloader_num_workers == 0
        assert list(config.data.train_files) == [files["1"], files["2"]]


@pytest.mark.parametrize("cell", ON_MEGATRON, ids=STUDY.experiment)
def test_a_megatron_run_passes_verls_checks_and_ours(cell):
    for job, (config, prepared) in jobs_of(cell).items():
        models = {"main": config} if prepared is None else prepared.policies
        for model, policy in models.items():
            if prepared is not None and not prepared.section.models[model].trained_here:
                continue
            actor = policy.actor_rollout_ref.actor
            assert actor.strategy == "megatron"
            found = [actor.megatron[f"{kind}_model_parallel_size"] for kind in ("tensor", "pipeline", "expert")]
            assert found == [4, 2 if model == "main" else 1, 4], job  # the scripts'
            assert actor.megatron.override_transformer_config.recompute_granularity == "full"


@pytest.mark.parametrize("cell", SMALLER, ids=STUDY.experiment)
def test_smaller_models_take_one_node(cell):
    ((config, _),) = jobs_of(cell).values()
    assert config.actor_rollout_ref.model.path == f"Qwen/Qwen3-{cell.size.upper()}"
    assert (config.trainer.nnodes, config.actor_rollout_ref.rollout.tensor_model_parallel_size) == (1, 1)


@pytest.mark.parametrize("figure", FIGURES)
def test_no_curve_of_the_papers_figures_is_missing(figure):
    cells = STUDY.tables[figure]
    assert {(cell.arm, cell.stage) for cell in cells} == FIGURES[figure]
    assert {(cell.size, cell.variant, cell.engine) for cell in cells} == {("30b", None, "fsdp2")}
    assert all(cell.mapping == (SINGLE if cell.arm == "single" else "separate") for cell in cells)
    assert {cell.arm for cell in CELLS} == set(ARMS)


def test_the_single_agent_runs_on_verls_own_trainer_and_loop_with_the_teams_tools(monkeypatch):
    ((config, _),) = jobs_of(research("single", "2")).values()
    assert "drmas" not in config
    assert (config.trainer.v1.trainer_mode, config.algorithm.adv_estimator) == ("sync", "grpo")
    rollout = config.actor_rollout_ref.rollout
    assert rollout.agent.default_agent_loop == "tool_agent"
    turns = rollout.multi_turn
    assert (turns.max_assistant_turns, turns.max_parallel_calls, turns.format) == (20, 1, "hermes")
    assert load_extern_object(config.data.custom_cls.path, config.data.custom_cls.name).__name__ == "SearcherPrompts"
    assert get_custom_reward_fn(config) is not None
    assert config.reward.custom_reward_function.reward_kwargs == {"format_weight": 0.1, "correct_weight": 0.9}
    for name, text in config.ray_kwargs.ray_init.runtime_env.env_vars.items():
        monkeypatch.setenv(name, text)
    from verl.tools.tool_registry import initialize_tools_from_config

    own = {tool.name: tool.tool for tool in initialize_tools_from_config(turns.tool_config_path)}
    ((_, prepared),) = jobs_of(research("co_train", "2")).values()
    team = build_workflow(prepared.section).tools
    assert {name: tool.settings for name, tool in own.items()} == {name: tool.settings for name, tool in team.items()}
    assert max(tool.settings.characters for tool in own.values()) <= turns.max_tool_response_length


def test_the_two_jobs_of_a_pair_fit():
    found = jobs_of(research("co_train", "2", mapping="pair"))
    (main, of_main), (sub, of_sub) = found["main"], found["sub"]
    check_fit(read(main), read(sub), one_machine=False)
    check_terms(terms(main, of_main.section, ["searcher"]), terms(sub, of_sub.section, ["searcher"]))
    assert {str(config.trainer.experiment_name) for config in (main, sub)} == {
        f"qwen3_30b_a3b_co_train_stage2_pair_mgrpo_seed7_{job}" for job in ("main", "sub")
    }


def test_smaller_pairs_fit_one_machine_and_the_papers_does_not():
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    small = launched(research("co_train", "1", size="8b", mapping="pair"), ["trainer.n_gpus_per_node=4"])
    jobs = {"main": small.main, "sub": small.sub}
    main, sub = (read(compose(job.config, [*job.overrides, *STORES[name]])) for name, job in jobs.items())
    check_fit(main, sub, one_machine=True)
    assert split_gpus(main, sub, eight) == ({GPUS: "0,1,2,3"}, {GPUS: "4,5,6,7"})
    assert OmegaConf.load(CONFIGS / "drmas_model" / "qwen3_4b.yaml").trainer.n_gpus_per_node == 4  # as it is
    (main, _), (sub, _) = (jobs_of(research("co_train", "2", mapping="pair"))[name] for name in jobs)
    with pytest.raises(ConfigError, match=r"trainer\.nnodes is 4, and a pair is started on one machine"):
        check_fit(read(main), read(sub), one_machine=True)


def test_the_users_own_overrides_reach_both_jobs_and_win():
    run = launched(research("co_train", "1", mapping="pair"), ["data.seed=3"])
    for job in (run.main, run.sub):
        assert job.overrides[-1] == "data.seed=3" and "data.seed=7" in job.overrides
    words = shlex.split(run.shown())
    assert words[:6] == ["verl-drmas", "pair", "mgrpo_main", "mgrpo_sub", "--run-dir", str(run.folder)]
    given = {name: tuple(b for a, b in itertools.pairwise(words) if a == f"--{name}") for name in STORES}
    assert given == {"main": run.main.overrides, "sub": run.sub.overrides}


def test_names_of_runs_differ():
    cells = [*CELLS, *ON_MEGATRON, *SMALLER]
    assert len({launched(cell).folder for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arm", "main-only"], "--arm is 'main-only'; did you mean 'main_only'"),
        (["--arm", "main_only"], r"--stage \(with --arm main_only\) is 'both'; known: 2"),
        (["--arm", "single"], r"--stage \(with --arm single\) is 'both'; known: 1, 2"),
        (["--arm", "single", "--mapping", "separate", "--stage", "1"], r"--mapping .* is 'separate'; known: single"),
        (["--arm", "main_only", "--mapping", "pair"], r"--mapping \(with --arm main_only\) is 'pair'; known: separate"),
        (["--mapping", "single"], r"--mapping \(with --arm co_train\) is 'single'; known: separate, shared, pair"),
        (["--stage", "2"], "--start is missing: stage 2 goes on from stage 1"),
        (["--start", "here"], "--start is for --stage 2, and the stage is both"),
        (["--size", "7b"], "--size is '7b'; known: 30b, 4b, 8b"),
        (["--variant", "dapo"], "--variant is 'dapo'; known: gspo"),
        (["--estimator", "grpo"], r"--estimator .* is 'grpo'; did you mean 'mgrpo'"),
        (
            ["--arm", "unaligned", "--estimator", "drmas"],
            r"--estimator \(with --arm unaligned\) is 'drmas'; known",
        ),
        (
            ["--mapping", "pair", "--estimator", "grpo_team"],
            r"--estimator \(with --mapping pair\) is 'grpo_team'; known",
        ),
        (["--list", "figure9"], "--list is 'figure9'; did you mean 'figure"),
    ],
)
def test_a_run_that_is_none_is_refused_in_one_line(options, message):
    from typer import Typer
    from typer.testing import CliRunner

    app = Typer()
    app.command()(recipe.main)
    result = CliRunner().invoke(app, [*options, "--dry-run"])
    assert result.exit_code == 2 and re.search(message, result.output), result.output
    assert result.output.count("\n") == 1


def test_a_start_without_its_models_is_refused_before_anything_starts(tmp_path, monkeypatch):
    from typer import Typer
    from typer.testing import CliRunner

    became = []
    monkeypatch.setattr("verl_drmas.study.launch.os.execv", lambda path, command: became.append(command))
    app = Typer()
    app.command()(recipe.main)

    def started(*options):
        more = ["--stage", "2", "--start", str(tmp_path), "--runs", str(tmp_path / "runs"), *options]
        return CliRunner().invoke(app, more)

    def put(model):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text("{}")

    def refused(model, *options):
        result = started(*options)
        told = f"--start is {str(tmp_path)!r}, and {model}/config.json isn't there"
        assert result.exit_code == 2 and told in result.output and result.output.count("\n") == 1

    refused("main", "--mapping", "shared")
    put("main")
    refused("sub", "--arm", "main_only")
    assert became == []
    assert started("--dry-run").exit_code == 0 and started("--arm", "single").exit_code == 0
    put("sub")
    assert started("--mapping", "pair").exit_code == 0 and len(became) == 2


def test_start_becomes_the_pair(tmp_path, monkeypatch):
    became = []
    monkeypatch.setattr("verl_drmas.study.launch.os.execv", lambda path, command: became.append(command))
    run = plan(
        research("co_train", "1", mapping="pair"),
        seed=1,
        runs=tmp_path,
        retriever="http://a:1",
        helper="http://b:1/v1",
        helper_model="m",
    )
    run.start()
    assert became == [run.command] and run.command[:4] == [sys.executable, "-m", "verl_drmas.cli", "pair"]
    assert json.loads((run.folder / "command.json").read_text()) == run.command


def test_a_copied_folder_prints_a_command_that_a_shell_takes_as_it_is(tmp_path):
    """As in verl-recipe: the folder alone, somewhere else."""
    folder = Path(recipe.__file__).parent
    copied = shutil.copytree(folder, tmp_path / folder.name)
    cell = research("single", "2")
    options = [*cell.options(), "--seed", "7", "--runs", "/runs", "--start", "/start", "--dry-run", "a.b=c d"]
    options += ["--retriever", "http://a:1,http://b:2", "--helper", "http://c:3/v1", "--helper-model", "org/helper"]
    command = [sys.executable, str(copied / "run.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    python, minus_m, program, *arguments = shlex.split(done.stdout)
    assert (python, minus_m, program) == ("python", "-m", "verl.trainer.main_ppo")
    arguments = [argument.replace(str(copied), str(folder)) for argument in arguments]
    assert arguments == launched(cell, ["a.b=c d"]).arguments


def test_the_folder_has_all_that_verl_recipe_asks_for():
    folder = Path(recipe.__file__).parent
    pin = (folder / "REQUIRED_VERL.txt").read_text()
    assert "verl-drmas" in pin and f"RECIPE_FOLDER={folder.name}" in pin
    readme = (folder / "README.md").read_text()
    for heading in ("Installation", "Data", "Training", "Evaluation", "Values", "Citation"):
        assert re.search(rf"^## {heading}", readme, re.MULTILINE)
    assert [name for name in (*STUDY.tables, *ARMS) if f"`{name}`" not in readme] == []
