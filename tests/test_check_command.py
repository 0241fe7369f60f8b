"""`verl-drmas check`: what a run would be, printed, or one line on what is wrong."""

import subprocess
import sys

import pytest
from rich.console import Console

from verl_drmas.check_command import compose_as_verl, main
from verl_drmas.config import ConfigError
from verl_drmas.data.parquet import prompt_row, write_rows

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Overrides that name a data file, a model folder and small sizes on a CPU."""
    folder = tmp_path_factory.mktemp("files")
    rows = [prompt_row(f"{i}+1", str(i + 1), data_source="sums", split="train", index=i) for i in range(4)]
    data = write_rows(rows, folder / "rows.parquet")
    (folder / "config.json").write_text("{}")
    return [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={folder}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=8",
        "+drmas_runtime=cpu",
    ]


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


@pytest.fixture
def check(files, capsys):
    """Exit status and printed text (white space and table lines folded) of a check."""

    def check(*arguments, base=None):
        status = main([*(files if base is None else base), *arguments])
        return status, " ".join(capsys.readouterr().out.replace("│", " ").split())

    return check


def test_a_team_is_shown_with_its_step_and_the_filled_keys(check, files):
    own = ["+drmas.agents.verifier.sampling.temperature=0.5", "+drmas.agents.verifier.response_length=64"]
    status, text = check("+drmas=solver_verifier", "drmas.workflow.max_rounds=3", *own)
    assert status == 0 and text.endswith("ready")
    assert "solver base yes 1.0 1 512 512 0.1 mean: agent, std: agent," in text
    assert "verifier base yes 0.5 1 512 64 0.1 mean: agent, std: agent," in text
    assert "sessions 32 (4 prompts x 8)" in text
    assert "rows 64 to 160 (solver 1-3, verifier 1-2 a session)" in text
    assert "updates 2 x 1 epochs" in text  # as verl would: 4 prompts / mini-batches of 2
    assert "padding rows at most 1 (1 ranks x 2 updates - 1)" in text
    assert f"model base: {files[2].partition('=')[2]}" in text
    assert "filled in: actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_drmas.rollout" in text


def test_fixed_rows_updates_and_a_frozen_agent(check):
    status, text = check("+drmas=arithmetic", "drmas.updates_per_step=4", "+drmas.agents.verifier.trainable=false")
    assert status == 0
    assert "rows 64 (solver 1, verifier 1 a session)" in text
    assert "updates 4 x 1 epochs" in text and "padding rows at most 3" in text
    assert "solver base yes" in text and "verifier base no" in text


def test_rows_of_a_stock_loop_and_a_verl_estimator_per_agent(check):
    status, text = check("+drmas=rows", "algorithm.adv_estimator=rloo", "drmas.group_by=agent")
    assert status == 0
    assert "default base yes" in text and "rloo per prompt and agent" in text
    assert "rows at least 32: as many as the agent loop returns" in text
    assert "algorithm.adv_estimator=drmas_per_agent, drmas_base_estimator=rloo" in text


def test_verls_switches_are_listed_only_when_they_are_turned(check):
    assert "supported" not in check("+drmas=arithmetic")[1]
    turned = ["algorithm.norm_adv_by_std_in_grpo=false", "actor_rollout_ref.actor.use_kl_loss=true"]
    text = check("+drmas=arithmetic", *turned, "algorithm.rollout_correction.rollout_is=token")[1]
    assert "algorithm.norm_adv_by_std_in_grpo=False: supported" in text
    assert "actor_rollout_ref.actor.use_kl_loss=True: supported" in text
    assert "algorithm.rollout_correction.rollout_is=token: supported" in text
    assert "std: none" in text


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+drmas=solver_verifer"], "Could not find 'drmas/solver_verifer'"),  # Hydra's own, over several lines
        (["+drmas=arithmetic", "+drmas.agnets={}"], "drmas.agnets: unknown key; did you mean 'agents'?"),
        (["+drmas=arithmetic", "trainer.v1.trainer_mode=sync"], "set trainer.v1.trainer_mode=drmas_sync"),
        (["+drmas=arithmetic", "data.train_files=${nothing}"], "Interpolation key 'nothing' not found"),
        (["+drmas=arithmetic", "trainer.no_such_key=1"], "Could not override 'trainer.no_such_key'"),
        (["+drmas=arithmetic", "actor_rollout_ref.actor.loss_agg_mode=foo"], "Invalid loss_agg_mode"),
        (["+drmas=arithmetic", "--multirun"], "--multirun: not a flag of check; give the arguments of main_ppo"),
        (["+drmas=arithmetic", "--config-dir", "/no/folder"], "/no/folder: no such folder"),
    ],
)
def test_wrong_input_is_one_line(files, capsys, arguments, message):
    assert main([*files, *arguments]) == 1
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("refused: ")]
    assert len(lines) == 1 and message in lines[0]
    assert printed.splitlines()[-1] == lines[0]
    assert "ready" not in printed and "Traceback" not in printed


OWN = """
defaults: [ppo_trainer, _self_]
hydra: {{callbacks: {{drmas: {{_target_: verl_drmas.hydra_callback.DrmasCallback}}}}}}
data: {{train_files: {data}, val_files: {data}, train_batch_size: 4}}
actor_rollout_ref:
  model: {{path: {model}}}
  actor: {{ppo_mini_batch_size: 4}}
drmas:
  workflow: {{name: solver_verifier, max_rounds: 2}}
  agents:
    solver:   {{model: base, invalid_penalty: 0.1}}
    verifier: {{model: base, invalid_penalty: 0.1, sampling: {{temperature: 0.6}}}}
  models:
    base: {{}}
  updates_per_step: 1
algorithm: {{adv_estimator: drmas}}
trainer: {{v1: {{trainer_mode: drmas_sync}}}}
"""


@pytest.fixture
def own(tmp_path, files):
    """A user's own config file, in a folder whose name needs quoting."""
    folder = tmp_path / "my team, v2"
    folder.mkdir()
    data, model = (files[i].partition("=")[2] for i in (0, 2))
    (folder / "team.yaml").write_text(OWN.format(data=data, model=model))
    return folder


@pytest.mark.parametrize("flags", [["--config-dir", "--config-name"], ["-cd", "-cn"]])
def test_a_config_file_of_the_users_own(check, own, flags):
    status, text = check(flags[0], str(own), flags[1], "team", "+drmas_runtime=cpu", base=[])
    assert status == 0, text
    assert "verifier base yes 0.6" in text and "updates 1 x 1 epochs" in text


def test_a_config_folder_is_relative_to_where_one_is(check, own, monkeypatch):
    monkeypatch.chdir(own.parent)
    status, _ = check("--config-dir", own.name, "--config-name", "team", "+drmas_runtime=cpu", base=[])
    assert status == 0


def test_a_cpu_seed_reaches_a_config_file_of_the_users_own(own):
    config = compose_as_verl(["-cd", str(own), "-cn", "team", "+drmas_runtime=cpu"])
    assert config.drmas.request_seed == 0


def test_a_config_path_replaces_verls_folder(own):
    text = (own / "team.yaml").read_text()
    (own / "alone.yaml").write_text(text.replace("hydra: {", "hydra: {searchpath: ['pkg://verl.trainer.config'], "))
    composed = compose_as_verl(["--config-path", str(own), "--config-name", "alone"])
    assert composed.drmas.agents.verifier.sampling.temperature == 0.6
    with pytest.raises(ConfigError, match="config_not_there: no such folder"):
        compose_as_verl(["--config-path", "config_not_there"])
    # A relative one starts beside verl's main_ppo.py, as Hydra has it.
    assert compose_as_verl(["--config-path", "config"]).trainer.v1.trainer_mode == "sync"


@pytest.mark.process
def test_from_an_empty_folder(tmp_path, files):
    code = "import sys; from verl_drmas.cli import main; main()"
    command = [sys.executable, "-c", code, "check", *files, "+drmas=solver_verifier"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("ready")
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


# -- several models ----------------------------------------------------------------------------------------------------


def cells(printed, title):
    """A printed table by its rows' first column."""
    lines = printed[printed.index(title) :].splitlines()[1:]
    found = {}
    for line in lines:
        if not line.startswith(("│", "┃")):
            if line.startswith("└"):
                break
            continue
        first, *rest = [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        found[first] = rest
    return found


@pytest.fixture
def three(files):
    """Solver and a frozen rival share the run's pool, the verifier has GPUs of its own."""
    folder = files[2].partition("=")[2]
    own = "{model: {path: '" + folder + "'}, actor: {optim: {lr: 3e-4}}}"
    return [
        "+drmas=arithmetic",
        "drmas.workflow.name=verl_drmas.workflows.arithmetic:ArithmeticRival",
        "drmas.agents.solver.model=large",
        "drmas.agents.verifier.model=small",
        "+drmas.agents.rival.model=served",
        "+drmas.models={large: {}, served: {trainable: false}, small: {pool: right, updates_per_step: 2, "
        f"actor_rollout_ref: {own}}}}}",
        "+drmas.pools={right: {n_gpus_per_node: 2}}",
        "drmas.updates_per_step=1",
    ]


def test_models_are_shown_with_their_agents_and_pools(files, three, capsys):
    status = main([*files, *three], Console(width=200))
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert cells(printed, "models") == {
        "model": ["agents", "trained", "strategy", "lr", "engine", "GPUs a server", "pool"],
        "large": ["solver", "yes", "fsdp2", "1e-06", "vllm", "1", "run: 1 x 1 (shared)"],
        "served": ["rival", "no (served)", "-", "-", "vllm", "1", "run: 1 x 1 (shared)"],
        "small": ["verifier", "yes", "fsdp2", "0.0003", "vllm", "1", "right: 1 x 2"],
    }
    team = cells(printed, "team")
    assert {agent: team[agent][:2] for agent in ("solver", "rival", "verifier")} == {
        "solver": ["large", "yes"],
        "rival": ["served", "no"],
        "verifier": ["small", "yes"],
    }


def test_a_step_is_shown_for_every_trained_model(files, three, capsys):
    main([*files, *three], Console(width=200))
    printed = capsys.readouterr().out
    assert cells(printed, "one step") == {
        "step": ["value"],
        "sessions": ["32 (4 prompts x 8)"],
        "rows": ["96 (solver 1, rival 1, verifier 1 a session)"],
        "updates of large": ["1 x 1 epochs"],
        "padding rows of large": ["at most 0 (1 ranks x 1 updates - 1)"],
        "updates of small": ["2 x 1 epochs"],
        "padding rows of small": ["at most 3 (2 ranks x 2 updates - 1)"],
    }
    folder = files[2].partition("=")[2]
    assert [line for line in printed.splitlines() if line.startswith("model ")] == [
        f"model {model_id}: {folder}" for model_id in ("large", "served", "small")
    ]
    filled = next(line for line in printed.splitlines() if line.startswith("filled in: "))
    assert "drmas.models.large.actor_rollout_ref.actor.fsdp_config.optimizer_offload=True" in filled  # it shares
    assert "drmas.models.served.actor_rollout_ref.rollout.load_format=auto" in filled  # nobody sends it weights
    assert "drmas.models.small" not in filled


# -- a pair of jobs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("DRMAS_GATEWAY_TOKEN", "long-and-random")


def test_a_model_of_another_job_is_shown_without_gpus(check, token):
    remote = [f"+drmas.models.far.remote.{key}" for key in ("store=sqlite:///pair.db", "role=finders")]
    status, text = check("+drmas=solver_verifier", "+drmas.models.base={}", *remote, "drmas.agents.verifier.model=far")
    assert status == 0 and text.endswith("ready")
    assert "far verifier by another" in text and "its gateway" in text and "finders" in text  # cells may wrap
    assert "base solver yes" in text and "updates of base 2 x 1 epochs" in text
    assert "updates of far" not in text and "verifier far elsewhere" in text


def test_a_job_that_trains_on_anothers_sessions_is_shown(check, token):
    store = ["+drmas.store.url=sqlite:///pair.db", "+drmas.store.role=finders", "~drmas.agents.solver"]
    status, text = check("+drmas=solver_verifier", "trainer.v1.trainer_mode=drmas_store", *store)
    assert status == 0 and text.endswith("ready")
    assert "verifier base yes" in text and "solver base" not in text
    assert "agent_loop_manager_class=verl_drmas.rollout.worker.IdleManager" in text
    assert "long-and-random" not in text
