"""A whole configuration is checked before anything starts: what is filled in, and what is refused in one line."""

import importlib.util
import logging
from copy import deepcopy

import pytest
from omegaconf import OmegaConf

from verl_drmas.check import check_team, prepare, prepare_trainer, read_section
from verl_drmas.check_command import compose_as_verl
from verl_drmas.config import ConfigError, DrmasConfig
from verl_drmas.data.parquet import prompt_row, write_rows
from verl_drmas.hydra_callback import DrmasCallback
from verl_drmas.support import GROUP_ESTIMATORS, REFUSED_ESTIMATORS, SWITCHES, estimator_refusals, switch_refusals
from verl_drmas.workflows import Outcome, Workflow

ROLLOUT = "actor_rollout_ref.rollout"
MODE = "trainer.v1.trainer_mode"


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Overrides that name a data file with gold answers and a model folder."""
    folder = tmp_path_factory.mktemp("files")
    rows = [prompt_row(f"{i}+1", str(i + 1), data_source="sums", split="train", index=i) for i in range(4)]
    data = write_rows(rows, folder / "rows.parquet")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    files = [f"data.train_files={data}", f"data.val_files={data}", f"actor_rollout_ref.model.path={model}"]
    return [*files, "data.train_batch_size=4"]


@pytest.fixture(scope="session")
def composed(files):
    """verl's configuration with each of our switches, composed once: a test takes a copy."""
    cpu = "+drmas_runtime=cpu"
    stock = compose_as_verl([*files, cpu])
    OmegaConf.set_struct(stock, False)
    del stock["drmas"]
    return {
        "team": compose_as_verl([*files, "+drmas=solver_verifier", cpu]),
        "rows": compose_as_verl([*files, "+drmas=rows", cpu]),
        "stock": stock,
        "gpu": compose_as_verl([*files, "+drmas=solver_verifier"]),
    }


@pytest.fixture
def make(composed, monkeypatch):
    """A composed configuration with changed keys, on a machine set up for CPU runs."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def make(name="team", **changes):
        config = deepcopy(composed[name])
        OmegaConf.set_struct(config, False)
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
        return config

    return make


def refusal(config, check=prepare):
    """The one line that refuses a configuration."""
    with pytest.raises(ConfigError) as caught:
        check(config)
    line = str(caught.value)
    assert "\n" not in line
    return line


# -- what is filled in -------------------------------------------------------------------------------------------------


def test_the_keys_a_team_needs_are_filled_in_and_said(make):
    config = make(**{"actor_rollout_ref.actor.use_dynamic_bsz": False})
    assert config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz is False
    prepared = prepare(config)
    assert prepared.filled == {
        f"{ROLLOUT}.agent.agent_loop_manager_class": "verl_drmas.rollout.worker.TeamManager",
        f"{ROLLOUT}.agent.default_agent_loop": "drmas_team",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
    }
    for key, value in prepared.filled.items():
        assert OmegaConf.select(config, key) == value
    # verl derives these from the actor's key; a run that filled in only that one would mix fixed and dynamic batches.
    assert config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz is True
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz is True
    assert prepared.workflow.__name__ == "SolverVerifier" and prepared.base_estimator is None


def test_a_second_check_changes_nothing(make):
    for config in (make(), make("rows", **{"drmas.group_by": "agent", "algorithm.adv_estimator": "rloo"})):
        first = prepare(config)
        second = prepare_trainer(config)  # the trainer's, inside the job
        assert first.filled and not second.filled
        assert second.base_estimator == first.base_estimator


def test_rows_of_a_stock_agent_loop_keep_their_loop(make):
    config = make("rows")
    prepared = prepare(config)
    assert prepared.workflow is None
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "single_turn_agent"
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class.endswith("TeamManager")


def test_stop_strings_need_the_engines_tokenizer(make):
    config = make(**{f"{ROLLOUT}.skip_tokenizer_init": True})
    assert f"{ROLLOUT}.skip_tokenizer_init" not in prepare(deepcopy(config)).filled
    OmegaConf.update(config, "drmas.agents.solver.sampling", {"stop": ["END"]}, force_add=True)
    assert prepare(config).filled[f"{ROLLOUT}.skip_tokenizer_init"] is False


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_verls_own_estimators_run_per_agent(make, estimator):
    config = make(**{"drmas.group_by": "agent", "algorithm.adv_estimator": estimator})
    prepared = prepare(config)
    assert config.algorithm.adv_estimator == "drmas_per_agent"
    assert config.drmas_base_estimator == prepared.base_estimator == estimator


def test_a_machine_in_a_cluster_needs_no_gpu_of_its_own(make, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert prepare(make("gpu")).section == read_section(make("gpu"))


def test_the_config_files_hold_the_defaults_of_the_typed_section(composed):
    assert read_section(compose_as_verl(["+drmas=rows"])) == DrmasConfig()
    team = read_section(composed["gpu"])
    cls = check_team(team)
    assert set(team.workflow) == {"name", *cls.setting_names()}  # each can be overridden without a `+`
    assert cls.Settings(**{k: v for k, v in team.workflow.items() if k != "name"}) == cls.Settings()
    assert {a.invalid_penalty for a in team.agents.values()} == {0.1}  # the paper's


@pytest.mark.parametrize("order", [1, -1])
def test_the_cpu_seed_and_interval_hold_in_either_order(order):
    section = read_section(compose_as_verl(["+drmas=arithmetic", "+drmas_runtime=cpu"][::order]))
    assert (section.request_seed, section.poll_interval) == (0, 0.05)
    assert section.updates_per_step == 1


# -- trainer mode, estimator, switches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "drmas"])
def test_another_trainer_mode_is_refused(make, mode):
    line = refusal(make(**{MODE: mode}))
    assert line == f"{MODE} is '{mode}', but a drmas section needs agent ids: set {MODE}=drmas_sync"


@pytest.mark.parametrize("estimator", ["drmas", "drmas_mean", "drmas_std", "grpo_team", "grpo_activation"])
def test_bare_keys_with_an_estimator_of_ours_are_refused_under_sync(make, estimator):
    config = make("stock", **{"algorithm.adv_estimator": estimator})
    assert refusal(config) == (
        f"{MODE} is 'sync', but algorithm.adv_estimator={estimator} needs agent ids: set {MODE}=drmas_sync"
    )
    config.trainer.v1.trainer_mode = "drmas_sync"
    assert prepare(config).section == DrmasConfig()


def test_a_stock_job_is_none_of_ours(make):
    assert refusal(make("stock")) == f"{MODE} is 'sync'; this check is for drmas_sync"


def test_the_legacy_trainer_is_refused(make):
    line = refusal(make(**{"trainer.use_v1": False}))
    assert line == "trainer.use_v1 is false; drmas_sync is a V1 trainer: set trainer.use_v1=true"


@pytest.mark.parametrize("estimator", REFUSED_ESTIMATORS)
@pytest.mark.parametrize("group_by", ["prompt", "agent"])
def test_estimators_that_do_not_fit_a_team_are_refused_with_the_reason(make, estimator, group_by):
    line = refusal(make(**{"algorithm.adv_estimator": estimator, "drmas.group_by": group_by}))
    reason = REFUSED_ESTIMATORS[estimator]
    assert line == f"algorithm.adv_estimator={estimator}: refused for teams: {reason}; use drmas"


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_verls_group_estimators_are_never_run_over_mixed_agents(make, estimator):
    line = refusal(make(**{"algorithm.adv_estimator": estimator}))
    assert line.startswith(f"algorithm.adv_estimator={estimator}: ") and "drmas.group_by=agent" in line


def test_every_estimator_of_verl_is_either_usable_or_refused():
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    assert {e.value for e in AdvantageEstimator} == {*GROUP_ESTIMATORS, *REFUSED_ESTIMATORS}


@pytest.mark.parametrize(
    ("estimator", "hint"), [("drmsa", "did you mean 'drmas'?"), ("GRPO", "known: "), ("rlo", "did you mean 'rloo'?")]
)
def test_an_unknown_estimator_is_refused(make, estimator, hint):
    line = refusal(make(**{"algorithm.adv_estimator": estimator}))
    assert line.startswith(f"algorithm.adv_estimator={estimator}: unknown; {hint}")


@pytest.mark.parametrize("estimator", ["drmas", "grpo_team", "mgrpo"])
def test_an_estimator_with_groups_of_its_own_takes_no_group_by(make, estimator):
    line = refusal(make(**{"algorithm.adv_estimator": estimator, "drmas.group_by": "agent"}))
    assert line == f"drmas.group_by=agent: {estimator} sets its own groups; drop one of the two"


class Tooled(Workflow):
    """A workflow with a tool."""

    agents = ("solver", "verifier")

    async def run(self, task, team):
        return Outcome(0.0)

    def preflight(self):
        return "3 passages"


class Missing(Tooled):
    def preflight(self):
        raise ConnectionError("nothing answers\nat http://127.0.0.1:9")


class Incomplete(Tooled):
    requires, extra = ("no_such_module_of_ours",), "search"


def test_a_workflows_tools_are_looked_at_before_a_run(make, monkeypatch):
    assert prepare(make()).found == ""
    config = make()
    config.drmas.workflow = {"name": "tooled"}
    monkeypatch.setattr("verl_drmas.check.load_workflow", lambda name: Tooled)
    assert prepare(deepcopy(config)).found == "3 passages"
    monkeypatch.setattr("verl_drmas.check.load_workflow", lambda name: Missing)
    assert refusal(deepcopy(config)) == "drmas.workflow: nothing answers at http://127.0.0.1:9"
    monkeypatch.setattr("verl_drmas.check.load_workflow", lambda name: Incomplete)
    line = refusal(deepcopy(config))
    assert line.endswith("needs the module no_such_module_of_ours; pip install 'verl-drmas[search]'")


@pytest.mark.parametrize("group_by", ["prompt", "agent"])
def test_the_estimator_that_the_check_fills_in_is_not_for_users(make, group_by):
    line = refusal(make(**{"algorithm.adv_estimator": "drmas_per_agent", "drmas.group_by": group_by}))
    assert line.startswith("algorithm.adv_estimator=drmas_per_agent: is set by the check; ")


# What M-GRPO's weights need of verl's loss and of the number of updates.
MGRPO = {
    "algorithm.adv_estimator": "mgrpo",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "drmas.updates_per_step": 1,
}
PHYSICAL = {**MGRPO, "drmas.alignment.copies": "physical"}

REFUSED = {
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": [
        {
            "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
            "drmas.models": {"base": {}, "far": {"remote": {"store": "sqlite:///pair.db", "role": "far"}}},
            "drmas.agents.verifier.model": "far",
        }
    ],
    "algorithm.filter_groups.metric": [
        {"algorithm.filter_groups.enable": True},
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "seq_final_reward"},
    ],
    "algorithm.filter_groups.enable": [
        {
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.metric": "outcome",
            "drmas.faults.failed_sessions": "mask",
        }
    ],
    "algorithm.rollout_correction.rollout_is": [
        {"algorithm.rollout_correction.rollout_is": "token", "drmas.advantage.balance": "agent"},
        {**MGRPO, "algorithm.rollout_correction.rollout_is": "sequence"},
    ],
    "algorithm.rollout_correction.bypass_mode": [
        {"algorithm.rollout_correction.bypass_mode": True, "drmas.advantage.balance": "session"},
        {**MGRPO, "algorithm.rollout_correction.bypass_mode": True},
    ],
    "algorithm.rollout_correction.rollout_is_batch_normalize": [
        {
            "algorithm.rollout_correction.rollout_is_batch_normalize": True,
            "drmas.models": {"base": {}, "other": {}},
            "drmas.agents.verifier.model": "other",
        }
    ],
    "actor_rollout_ref.actor.checkpoint.async_save": [{"actor_rollout_ref.actor.checkpoint.async_save": True}],
    "algorithm.kl_ctrl.type": [
        {
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.type": "adaptive",
            "drmas.agents.verifier.trainable": False,
        }
    ],
    f"{ROLLOUT}.disaggregation.enabled": [
        {
            f"{ROLLOUT}.disaggregation.enabled": True,
            "drmas.models": {"base": {}, "other": {}},
            "drmas.agents.verifier.model": "other",
        }
    ],
    "algorithm.use_pf_ppo": [{"algorithm.use_pf_ppo": True}],
    "reward.reward_model.enable": [{"reward.reward_model.enable": True}],
    "distillation.enabled": [{"distillation.enabled": True}],
    "critic.enable": [{"critic.enable": True}],
    "trainer.v1.drmas_sync.parameter_sync_step": [{"trainer.v1.drmas_sync.parameter_sync_step": 2}],
    "actor_rollout_ref.actor.shuffle": [{"actor_rollout_ref.actor.shuffle": True}],
    "drmas.request_seed": [{f"{ROLLOUT}.name": "sglang"}],  # the CPU runtime's seed
    f"{ROLLOUT}.temperature": [{f"{ROLLOUT}.temperature": 0.0}],
    "actor_rollout_ref.model.use_fused_kernels": [
        {
            "actor_rollout_ref.model.use_fused_kernels": True,
            "drmas.agents.verifier.sampling": {"temperature": 0.5},
        }
    ],
    f"{ROLLOUT}.calculate_log_probs": [
        {f"{ROLLOUT}.calculate_log_probs": False, "drmas.agents.verifier.trainable": False}
    ],
    "actor_rollout_ref.actor.use_kl_loss": [{**MGRPO, "actor_rollout_ref.actor.use_kl_loss": True}],
    "actor_rollout_ref.actor.loss_agg_mode": [
        {**MGRPO, "actor_rollout_ref.actor.loss_agg_mode": mode} for mode in ("token-mean", "token-sum")
    ],
    "actor_rollout_ref.actor.policy_loss.loss_mode": [
        {**MGRPO, "actor_rollout_ref.actor.policy_loss.loss_mode": mode} for mode in ("geo_mean", "clip_cov", "kl_cov")
    ],
    "actor_rollout_ref.actor.entropy_coeff": [{**MGRPO, "actor_rollout_ref.actor.entropy_coeff": 0.001}],
    "drmas.updates_per_step": [
        {**MGRPO, "drmas.updates_per_step": 2},
        {
            **MGRPO,
            "drmas.updates_per_step": None,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        },  # verl's way: 4 / 2
        {**MGRPO, "drmas.models": {"base": {"updates_per_step": 2}}},
    ],
    "drmas.advantage.balance": [
        {**MGRPO, "drmas.advantage.balance": "agent"},
        {**PHYSICAL, "drmas.advantage.balance": "session"},
    ],
}
ACCEPTED = [
    {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "outcome"},
    {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"},
    {"algorithm.rollout_correction.rollout_is": "token"},
    {"algorithm.rollout_correction.bypass_mode": True},
    {"drmas.advantage.balance": "agent"},
    {"algorithm.norm_adv_by_std_in_grpo": False},
    {"algorithm.use_kl_in_reward": True},
    {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
    {"actor_rollout_ref.actor.use_kl_loss": True},
    {"trainer.v1.drmas_sync.parameter_sync_step": 1},
    {"actor_rollout_ref.model.use_fused_kernels": True},
    {
        "actor_rollout_ref.model.use_fused_kernels": True,  # a frozen agent's rows are in no loss
        "drmas.agents.verifier": {"model": "base", "trainable": False, "sampling": {"temperature": 0.5}},
    },
    {f"{ROLLOUT}.calculate_log_probs": False},
    {"drmas.agents.verifier.trainable": False},
    MGRPO,
    {**MGRPO, "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm"},
    {**MGRPO, "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"},
    {**MGRPO, "drmas.updates_per_step": None, "actor_rollout_ref.actor.ppo_mini_batch_size": 4},
    {**MGRPO, "algorithm.norm_adv_by_std_in_grpo": False, "algorithm.use_kl_in_reward": True},
    {**MGRPO, "actor_rollout_ref.actor.ppo_epochs": 2},  # each epoch is one update over the whole batch
    {**MGRPO, "drmas.updates_per_step": 2, "drmas.models": {"base": {"updates_per_step": 1}}},
    {**MGRPO, "drmas.agents.verifier.trainable": False},
    {**MGRPO, "drmas.alignment.mode": "expected", "drmas.alignment.target": "auto"},
    {**PHYSICAL, "drmas.updates_per_step": 2, "actor_rollout_ref.actor.loss_agg_mode": "token-mean"},
]


def test_every_switch_that_can_be_refused_has_its_case():
    assert set(REFUSED) == {s.key for s in SWITCHES if s.refused is not None}


def test_every_switch_is_a_key_of_verls(composed):
    absent = object()
    keys = {s.key for s in SWITCHES if "drmas" not in s.key}  # a mode's own section is optional
    found = {k for k in keys if OmegaConf.select(composed["stock"], k, default=absent) is not absent}
    assert found == keys


@pytest.mark.parametrize(("key", "changes"), [(k, c) for k, cases in REFUSED.items() for c in cases])
def test_a_switch_that_stands_in_the_way_is_refused(make, key, changes):
    config = make(**changes)
    says = next(s.says for s in SWITCHES if s.key == key)
    line = refusal(config).removeprefix("model base: ")  # said where there are several
    assert line == f"{key}={OmegaConf.select(config, key)}: {says}"


@pytest.mark.parametrize("changes", ACCEPTED)
def test_a_switch_that_is_supported_passes(make, changes):
    config = make(**changes)
    assert switch_refusals(config, read_section(config)) == []
    assert estimator_refusals(config, read_section(config)) == []
    prepare(config)


def test_verls_own_way_of_averaging_is_refused_with_mgrpo_and_the_fix_named(make):
    """A user who only names the estimator."""
    line = refusal(make(**{"algorithm.adv_estimator": "mgrpo"}))
    assert line == (
        "actor_rollout_ref.actor.loss_agg_mode=token-mean: mgrpo needs one of seq-mean-token-sum, "
        "seq-mean-token-sum-norm, seq-mean-token-mean, where a weight is as good as copies; or set "
        "drmas.alignment.copies=physical"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode", "token-mean"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov"),
        ("actor_rollout_ref.actor.use_kl_loss", True),
        ("actor_rollout_ref.actor.entropy_coeff", 0.001),
        ("algorithm.rollout_correction.rollout_is", "token"),
        ("algorithm.rollout_correction.bypass_mode", True),
        ("drmas.updates_per_step", 2),
    ],
)
def test_physical_copies_lift_what_weights_can_not_do(make, key, value):
    weights, physical = make(**{**MGRPO, key: value}), make(**{**PHYSICAL, key: value})
    (line,) = switch_refusals(weights, read_section(weights))
    assert line.startswith(f"{key}={value}: ") and "drmas.alignment.copies=physical" in line
    assert switch_refusals(physical, read_section(physical)) == []


def test_mgrpo_is_held_against_every_trained_model_and_no_other(make):
    """A frozen model has no loss, and takes no settings of one."""
    own = {"actor": {"loss_agg_mode": "seq-mean-token-mean"}}
    models = {"drmas.agents.solver.model": "a", "drmas.agents.verifier.model": "b", "drmas.updates_per_step": 1}
    models["algorithm.adv_estimator"] = "mgrpo"
    prepare(make(**models, **{"drmas.models": {"a": {"actor_rollout_ref": own}, "b": {"trainable": False}}}))
    line = refusal(make(**models, **{"drmas.models": {"a": {"actor_rollout_ref": own}, "b": {}}}))
    assert line.startswith("model b: actor_rollout_ref.actor.loss_agg_mode=token-mean: mgrpo needs one of ")
    twice = {"a": {"actor_rollout_ref": own}, "b": {"actor_rollout_ref": own, "updates_per_step": 2}}
    assert refusal(make(**models, **{"drmas.models": twice})).startswith("drmas.updates_per_step=1: mgrpo's weights ")


def test_bare_keys_with_mgrpo_are_refused_under_sync(make):
    line = refusal(make("stock", **{"algorithm.adv_estimator": "mgrpo"}))
    assert line == f"{MODE} is 'sync', but algorithm.adv_estimator=mgrpo needs agent ids: set {MODE}=drmas_sync"


def test_mgrpo_needs_a_workflow(make):
    line = refusal(make("rows", **MGRPO))
    assert line == (
        "algorithm.adv_estimator=mgrpo: only a workflow says who the sub-agents are; set drmas.workflow.name"
    )


def test_fractions_of_copies_are_no_rows(make):
    assert refusal(make(**PHYSICAL, **{"drmas.alignment.mode": "expected"})) == (
        "drmas.alignment.copies is 'physical', but mode 'expected' has fractions of copies; choose sample, or weights"
    )


# -- the team ----------------------------------------------------------------------------------------------------------


def test_an_agent_that_the_workflow_needs_must_be_there(make):
    config = make()
    del config.drmas.agents["verifier"]
    assert refusal(config) == (
        "drmas.agents: workflow 'solver_verifier' needs agent 'verifier', which has no model; "
        "add `verifier: {model: base}`"
    )


def test_an_agent_that_the_workflow_does_not_know_is_refused(make):
    line = refusal(make(**{"drmas.agents.verifer": {"model": "base"}}))
    assert line == "drmas.agents.verifer: workflow 'solver_verifier' has no such agent; did you mean 'verifier'?"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"drmas.workflow.name": "solver_verifer"},
            "drmas.workflow.name: unknown workflow 'solver_verifer'; did you mean 'solver_verifier'? "
            "(or give an import path, package.module:Class)",
        ),
        (
            {"drmas.workflow.name": None},
            "drmas.workflow.name is missing; set a registry name or package.module:Class",
        ),
        ({"drmas.workflow.max_round": 2}, "drmas.workflow.max_round: unknown key; did you mean 'max_rounds'?"),
        ({"drmas.workflow.max_rounds": 0}, "drmas.workflow.max_rounds is 0; it must be at least 1"),
        (
            {"drmas.workflow.max_rounds": 1.5},
            "drmas.workflow.max_rounds: 1.5 is not valid: input should be a valid integer",
        ),
        (
            {"drmas.workflow.max_rounds": "2"},  # the workflow would get the text
            "drmas.workflow.max_rounds: '2' is not valid: input should be a valid integer",
        ),
        (
            {"drmas.workflow.on_invalid": "ignore"},
            "drmas.workflow.on_invalid: 'ignore' is not valid: input should be 'reject' or 'approve'",
        ),
        ({"drmas.advantge": {}}, "drmas.advantge: unknown key; did you mean 'advantage'?"),
        (
            {"drmas.agents.solver.model": "bse"},
            "drmas.agents.solver.model is 'bse', which drmas.models doesn't list; did you mean 'base'?",
        ),
        (
            {"drmas.models": {"base": {}, "judge": {}}},
            "drmas.models.judge: no agent is on it (agents are on base); give it one, or drop it",
        ),
        ({"drmas": "solver_verifier"}, "drmas: 'solver_verifier' is not valid: a section of keys is needed"),
        ({"drmas.request_seed": "${seed}"}, "drmas: Interpolation key 'seed' not found"),
    ],
)
def test_a_wrong_team_is_one_line(make, changes, line):
    assert refusal(make(**changes)).startswith(line)


class Settled(Workflow):
    """A user's workflow, named by its import path."""

    agents = ("one",)

    def __init__(self, settings=None):
        super().__init__(settings)
        raise ValueError("needs a search server")

    async def run(self, task, team):
        return Outcome(reward=0.0)


def test_a_workflow_that_refuses_to_be_built_is_one_line(monkeypatch):
    monkeypatch.setattr("verl_drmas.check.load_workflow", lambda name: Settled)
    section = DrmasConfig(workflow={"name": "x:Settled"}, agents={"one": {"model": "base"}})
    assert refusal(section, check_team) == "drmas.workflow: needs a search server"


# -- machine, model, data ----------------------------------------------------------------------------------------------


def test_a_gpu_config_on_a_machine_without_one_is_refused(make, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    monkeypatch.setattr("verl_drmas.check_machine._has_accelerator", lambda: False)
    assert refusal(make("gpu")) == (
        "trainer.device is 'cuda', but this machine has no GPU; for a CPU run set VERL_PLATFORM=cpu and add "
        "+drmas_runtime=cpu"
    )
    monkeypatch.setattr("verl_drmas.check_machine._has_accelerator", lambda: True)
    prepare(make("gpu"))


def test_a_gpu_config_on_the_cpu_platform_is_refused(make):
    assert refusal(make("gpu")) == (
        "trainer.device is 'cuda' under VERL_PLATFORM=cpu; add +drmas_runtime=cpu, or unset VERL_PLATFORM"
    )


def test_a_cpu_config_without_the_cpu_platform_is_refused(make, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    assert refusal(make()) == (
        "trainer.device is 'cpu', but the environment lacks VERL_PLATFORM=cpu; set it before verl starts"
    )


@pytest.mark.parametrize(("engine", "extra"), [("vllm", "cpu"), ("sglang", "cpu")])
def test_an_engine_that_is_not_installed_is_refused(make, monkeypatch, engine, extra):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == engine else found(name, *a))
    line = refusal(make(**{f"{ROLLOUT}.name": engine, "drmas.request_seed": None}))
    assert line == f"{ROLLOUT}.name is '{engine}', which is not installed; pip install 'verl-drmas[{extra}]'"


def test_the_machine_and_the_files_are_no_matter_inside_the_job(make, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    config = make("gpu", **{"data.train_files": "/nowhere.parquet", "actor_rollout_ref.model.path": "/nowhere"})
    assert prepare_trainer(config).filled


def test_a_model_folder_must_be_one(make, tmp_path):
    key = "actor_rollout_ref.model.path"
    assert refusal(make(**{key: "/no/model"})) == f"{key} is '/no/model', which is no folder; give one, or a model id"
    line = refusal(make(**{key: str(tmp_path)}))
    assert line == f"{key} is '{tmp_path}', a folder without config.json; give a saved model"
    assert refusal(make(**{key: None})) == f"{key} is not set; give a folder or a Hugging Face model id"
    prepare(make(**{key: "Qwen/Qwen3-4B"}))


def rows_file(path, rows):
    import pandas as pd

    pd.DataFrame(rows).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_data_files(make, tmp_path, key):
    good = prompt_row("1+1", "2", data_source="sums", split="train", index=0)
    wrong = {**good, "reward_model": {"style": "rule", "ground_truth": None}}
    empty = rows_file(tmp_path / "empty.parquet", [good])
    import pandas as pd

    pd.read_parquet(empty).head(0).to_parquet(empty)
    assert refusal(make(**{key: empty})) == f"{key}: {empty}: no rows; write at least one prompt into it"

    no_gold = rows_file(tmp_path / "no_gold.parquet", [good, wrong, wrong])
    line = refusal(make(**{key: no_gold}))
    assert line.startswith(f"{key}: {no_gold}: row 1: reward_model.ground_truth is missing or empty (2 such rows); ")

    missing = str(tmp_path / "missing.parquet")
    assert refusal(make(**{key: missing})).startswith(f"{key}: {missing}: no such file; ")
    pattern = str(tmp_path / "*.parquet")
    assert refusal(make(**{key: pattern})) == f"{key}: '{pattern}' is a pattern; verl takes file names"
    assert refusal(make(**{key: None})) == f"{key} is not set"
    assert refusal(make(**{key: [OmegaConf.select(make(), key), missing]})).startswith(f"{key}: {missing}: ")


def test_data_that_only_verl_can_read_is_left_to_it(make, tmp_path):
    prepare(make(**{"data.train_files": "hdfs://cluster/rows.parquet"}))
    own = {"data.custom_cls.path": "mine.py", "data.train_files": str(tmp_path / "rows.csv")}
    prepare(make(**own))


def test_a_batch_larger_than_the_data_would_never_be_full(make, tmp_path):
    assert refusal(make(**{"data.train_batch_size": 5})) == (
        "data.train_batch_size is 5, but data.train_files has 4 rows, less than one batch: lower it"
    )
    file = OmegaConf.select(make(), "data.train_files")
    more = write_rows([prompt_row("1+1", "2", data_source="sums", split="train", index=9)], tmp_path / "more.parquet")
    prepare(make(**{"data.train_batch_size": 5, "data.train_files": [file, str(more)]}))


def test_seeds_need_an_index_for_every_row(make):
    twice = [OmegaConf.select(make(), "data.train_files")] * 2
    assert "extra_info.index repeats; seeds are hashed from it" in refusal(make(**{"data.train_files": twice}))
    prepare(make(**{"data.train_files": twice, "drmas.request_seed": None}))


def test_the_prompt_column_may_have_another_name(make, tmp_path):
    row = prompt_row("1+1", "2", data_source="sums", split="train", index=0)
    row["messages"] = row.pop("prompt")
    file = rows_file(tmp_path / "named.parquet", [row])
    both = {"data.train_files": file, "data.val_files": file, "data.train_batch_size": 1}
    assert "no column 'prompt'" in refusal(make(**both))
    prepare(make(**both, **{"data.prompt_key": "messages"}))


# -- the Hydra callback ------------------------------------------------------------------------------------------------


def test_the_callback_ends_the_process_with_one_line(make):
    with pytest.raises(SystemExit) as caught:
        DrmasCallback().on_run_start(make(**{MODE: "sync"}))
    assert str(caught.value).startswith(f"verl-drmas: {MODE} is 'sync', but ")


def test_the_callback_lets_no_error_pass_as_a_warning(make, monkeypatch, caplog):
    def broken(config):
        raise ZeroDivisionError("of\nours")

    monkeypatch.setattr("verl_drmas.hydra_callback.prepare", broken)
    with pytest.raises(SystemExit, match=r"^verl-drmas: ZeroDivisionError: of ours$"):
        DrmasCallback().on_run_start(make())
    assert "ZeroDivisionError" in caplog.text


def test_the_callback_says_what_it_filled_in(make, caplog):
    config = make()
    with caplog.at_level(logging.WARNING):
        DrmasCallback().on_run_start(config, config_name="x")
        DrmasCallback().on_run_start(config)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"verl-drmas: filled in {ROLLOUT}.agent.agent_loop_manager_class=verl_drmas.rollout.worker.TeamManager, "
        f"{ROLLOUT}.agent.default_agent_loop=drmas_team"
    )


# -- several models ----------------------------------------------------------------------------------------------------


def two_models(**own):
    """Solver on `a` and verifier on `b`; `own` are settings of `b`."""
    return {
        "drmas.models": {"a": {}, "b": own},
        "drmas.agents.solver.model": "a",
        "drmas.agents.verifier.model": "b",
    }


@pytest.fixture
def checkpoint(tmp_path):
    """A step's folder as a run writes it, of models on the given numbers of ranks."""

    def checkpoint(**ranks):
        for model_id, count in ranks.items():
            folder = tmp_path / "global_step_3" / "actor" / model_id
            (folder / "huggingface").mkdir(parents=True)
            for rank in range(count):
                for what in ("model", "optim", "extra_state"):
                    (folder / f"{what}_world_size_{count}_rank_{rank}.pt").touch()
        return tmp_path / "global_step_3" / "actor"

    return checkpoint


def test_a_model_may_start_from_a_checkpoint(make, checkpoint):
    actor = checkpoint(old=1)
    prepared = prepare(make(**two_models(init_from=str(actor / "old"))))
    assert prepared.section.models["b"].init_from == str(actor / "old")


def test_a_megatron_checkpoint_is_split_by_nobodys_rank(make, tmp_path):
    (tmp_path / "model").mkdir()
    prepare(make(**two_models(init_from=str(tmp_path))))


def test_a_checkpoint_to_start_from_must_be_there(make, tmp_path):
    folder = tmp_path / "none"
    assert refusal(make(**two_models(init_from=str(folder)))) == (
        f"drmas.models.b.init_from is '{folder}', which is no folder; give .../global_step_N/actor/<model id> of a run "
        "with save_freq"
    )


@pytest.mark.parametrize(("up", "inner"), [("", "old"), ("..", "actor")])
def test_a_checkpoint_of_several_models_names_those_inside(make, checkpoint, up, inner):
    folder = checkpoint(old=1) / up
    line = refusal(make(**two_models(init_from=str(folder))))
    start = f"drmas.models.b.init_from is '{folder}', which holds no model's shards; give a model's own folder ("
    assert line.startswith(start)
    assert inner in line.removeprefix(start).rstrip(")").split(", ")


def test_an_empty_folder_has_nothing_to_start_from(make, tmp_path):
    assert refusal(make(**two_models(init_from=str(tmp_path)))).endswith("give a model's own folder (none)")


@pytest.mark.parametrize(("saved", "ranks"), [(2, 1), (1, 2), (4, 2)])
def test_a_checkpoint_of_another_number_of_ranks_is_refused(make, checkpoint, saved, ranks):
    folder = checkpoint(old=saved) / "old"
    pool = {"pool": "right"} if ranks > 1 else {}
    config = make(**two_models(init_from=str(folder), **pool))
    if pool:
        OmegaConf.update(config, "drmas.pools", {"right": {"n_gpus_per_node": ranks}}, force_add=True)
    assert refusal(config) == (
        f"drmas.models.b.init_from is '{folder}', whose {saved} shards don't fit the model's {ranks} ranks; "
        "write it out with `verl-drmas export` and give the result as actor_rollout_ref.model.path"
    )


def test_a_checkpoint_that_lacks_a_ranks_shard_is_refused(make, checkpoint):
    folder = checkpoint(old=2) / "old"
    (folder / "model_world_size_2_rank_1.pt").unlink()
    config = make(**two_models(init_from=str(folder), pool="right"))
    OmegaConf.update(config, "drmas.pools", {"right": {"n_gpus_per_node": 2}}, force_add=True)
    assert "whose 1 shards don't fit the model's 2 ranks" in refusal(config)


@pytest.mark.parametrize("check", [prepare, prepare_trainer])
def test_a_stock_agent_loop_speaks_to_one_model(make, check):
    agents = {"one": {"model": "a"}, "two": {"model": "b"}}
    line = refusal(make("rows", **{"drmas.models": {"a": {}, "b": {}}, "drmas.agents": agents}), check)
    assert line == (
        "drmas.models lists 2 models, and drmas.workflow is not set: a stock agent loop speaks to one; set "
        "drmas.workflow.name"
    )


def test_an_error_names_the_model_that_it_is_about(make):
    key = "actor_rollout_ref.model.path"
    models = two_models(actor_rollout_ref={"model": {"path": "/no/model"}})
    assert refusal(make(**models)) == f"model b: {key} is '/no/model', which is no folder; give one, or a model id"


# -- a pair of jobs ----------------------------------------------------------------------------------------------------

FAR = {"base": {}, "far": {"remote": {"store": "sqlite:///pair.db", "role": "far"}}}


@pytest.fixture
def pair(make, monkeypatch):
    """Configurations of the job that plays and of the one that trains the verifier."""
    monkeypatch.setenv("DRMAS_GATEWAY_TOKEN", "long-and-random")

    def pair(which, **changes):
        if which == "main":
            return make(**{"drmas.models": FAR, "drmas.agents.verifier.model": "far", **changes})
        config = make(**{MODE: "drmas_store", "drmas.store": {"url": "sqlite:///pair.db", "role": "far"}, **changes})
        del config.drmas.agents["solver"]
        return config

    return pair


def test_a_job_that_plays_for_another_needs_what_every_job_needs(pair):
    config = pair("main")
    prepared = prepare(config)
    assert prepared.agents() == ("solver", "verifier") and list(prepared.policies) == ["base", "far"]
    assert prepare_trainer(config).filled == {}
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class.endswith("TeamManager")


def test_a_job_that_plays_no_sessions_needs_no_data_and_validates_nothing(pair):
    config = pair(
        "sub", **{"data.train_files": "/no/file", "data.val_files": "/no/file", "trainer.val_before_train": True}
    )
    prepared = prepare(config)
    assert prepared.agents() == ("verifier",) and prepared.found == ""
    assert prepared.filled[f"{ROLLOUT}.agent.agent_loop_manager_class"] == "verl_drmas.rollout.worker.IdleManager"
    assert (config.trainer.val_before_train, config.trainer.test_freq) == (False, -1)
    assert f"{ROLLOUT}.agent.default_agent_loop" not in prepared.filled
    assert prepare_trainer(config).filled == {}


def test_the_idle_manager_is_what_verl_looks_for():
    from verl.utils.import_utils import load_class_from_fqn

    from verl_drmas.check import IDLE_MANAGER

    manager = load_class_from_fqn(IDLE_MANAGER, "AgentLoopManager").create(config=None, llm_client=None)
    assert manager.report() == {}
    with pytest.raises(NotImplementedError, match="plays no sessions"):
        manager.generate_sequences(None)


@pytest.mark.parametrize("which", ["main", "sub"])
@pytest.mark.parametrize("estimator", ["grpo_team", "grpo_activation", "drmas_mean", "drmas_std"])
def test_statistics_over_all_agents_are_refused_where_some_are_another_jobs(pair, make, which, estimator):
    line = refusal(pair(which, **{"algorithm.adv_estimator": estimator}))
    assert line.startswith(f"algorithm.adv_estimator={estimator}: its statistics are over all agents of a prompt")
    prepare(make(**{"algorithm.adv_estimator": estimator}))  # in one job they are there


@pytest.mark.parametrize("which", ["main", "sub"])
def test_statistics_of_an_agents_own_are_fine_in_a_pair(pair, which):
    for own in ({"algorithm.adv_estimator": "drmas"}, {"algorithm.adv_estimator": "rloo", "drmas.group_by": "agent"}):
        prepare(pair(which, **own))


@pytest.mark.parametrize("which", ["main", "sub"])
def test_a_pair_without_a_token_is_refused(pair, monkeypatch, which):
    config = pair(which)
    monkeypatch.delenv("DRMAS_GATEWAY_TOKEN")
    assert "DRMAS_GATEWAY_TOKEN" in refusal(config)


def test_mode_and_store_belong_together(pair):
    assert refusal(pair("sub", **{MODE: "drmas_sync"})).startswith("drmas.store is set, and ")
    assert "drmas.store is not set" in refusal(pair("sub", **{"drmas.store": None}))
