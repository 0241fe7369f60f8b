"""The `drmas` section: every wrong key or value is one line that names key, value and fix."""

from dataclasses import asdict

import pytest

from verl_drmas.config import (
    AdvantageConfig,
    AgentConfig,
    AlignmentConfig,
    ConfigError,
    DrmasConfig,
    ModelConfig,
    StageConfig,
    nearest,
    parse,
)
from verl_drmas.store.settings import GatewayConfig, RemoteConfig

AGENT = {"solver": {"model": "base"}}


def refusal(section, *args, **kwargs):
    """The one line that refuses a section."""
    with pytest.raises(ConfigError) as caught:
        parse(section, *args, **kwargs)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("section", [None, {}])
def test_defaults(section):
    config = parse(section)
    assert config == DrmasConfig()
    assert config.workflow is None and config.agents == {} and config.models == {"base": ModelConfig()}
    assert config.updates_per_step is None and config.request_seed is None
    assert config.advantage == AdvantageConfig("inside", "none", 1, 1e-6, 0.0, "zero", "zero", True)
    assert config.faults.max_failed_share == 0.1
    assert config.alignment == AlignmentConfig(8, "sample", "weights", 10) and config.curriculum == []


def test_a_full_section_becomes_typed():
    config = parse(
        {
            "workflow": {"name": "solver_verifier", "max_rounds": 3},
            "agents": {"solver": {"model": "big", "sampling": {"temperature": 0.7, "stop": ["END"]}, "turn_length": 9}},
            "models": {"big": {}},
            "advantage": {"penalty": "outside", "ddof": 0},
        }
    )
    solver = config.agents["solver"]
    assert (solver.model, solver.turn_length, solver.trainable) == ("big", 9, True)
    assert (solver.sampling.temperature, solver.sampling.stop, solver.sampling.top_p) == (0.7, ["END"], None)
    assert (config.advantage.penalty, config.advantage.ddof) == ("outside", 0)
    assert config.workflow == {"name": "solver_verifier", "max_rounds": 3}


def test_the_defaults_of_two_sections_are_not_shared():
    first = parse({})
    first.models["other"] = ModelConfig()
    assert list(parse({}).models) == ["base"]


def test_an_agent_that_is_not_listed_is_on_the_first_model():
    config = parse({"models": {"small": {}}})
    assert config.agent("default") == AgentConfig(model="small")
    config = parse({"agents": {"solver": {"model": "base", "invalid_penalty": 0.1}}})
    assert config.agent("solver").invalid_penalty == 0.1


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"agnets": {}}, "drmas.agnets: unknown key; did you mean 'agents'?"),
        ({"agents": {"solver": {"modle": "base"}}}, "drmas.agents.solver.modle: unknown key; did you mean 'model'?"),
        (
            {"agents": {"solver": {"model": "base", "sampling": {"temprature": 1}}}},
            "drmas.agents.solver.sampling.temprature: unknown key; did you mean 'temperature'?",
        ),
        ({"advantage": {"dof": 1}}, "drmas.advantage.dof: unknown key; did you mean 'ddof'?"),
        (
            {"faults": {"poll_helth": 1}},
            "drmas.faults.poll_helth: unknown key; did you mean 'poll_health'?",
        ),
        (
            {"models": {"base": {"path": "x"}}},
            "drmas.models.base.path: unknown key; known: "
            "trainable, actor_rollout_ref, pool, updates_per_step, init_from, remote",
        ),
        ({"agents": {"solver": {}}}, "drmas.agents.solver.model: missing (an agent without a model); set it"),
        (
            {"agents": {"solver": {"model": "bse"}}},
            "drmas.agents.solver.model is 'bse', which drmas.models doesn't list; did you mean 'base'?",
        ),
        (
            {"agents": {"solver": {"model": "big"}}, "models": {"left": {}, "right": {}}},
            "drmas.agents.solver.model is 'big', which drmas.models doesn't list; known: left, right",
        ),
        (
            {"models": {"base": {"pool": "left"}}, "pools": {"lefft": {"n_gpus_per_node": 1}}},
            "drmas.models.base.pool is 'left', which drmas.pools doesn't list; did you mean 'lefft'?",
        ),
        (
            {"agents": {"solver": {"model": "base", "sampling": {"temperature": 0}}}},
            "drmas.agents.solver.sampling.temperature is 0.0; training divides the logits by it, so it must be above 0",
        ),
        (
            {"updates_per_step": "many"},
            "drmas.updates_per_step: 'many' is not valid: input should be a valid integer, "
            "unable to parse string as an integer",
        ),
        (
            {"advantage": {"penalty": "Inside"}},
            "drmas.advantage.penalty: 'Inside' is not valid: input should be 'inside' or 'outside'",
        ),
        ({"advantage": {"ddof": 2}}, "drmas.advantage.ddof: 2 is not valid: input should be 0 or 1"),
        ({"alignment": {"taget": 8}}, "drmas.alignment.taget: unknown key; did you mean 'target'?"),
        (
            {"alignment": {"mode": "samples"}},
            "drmas.alignment.mode: 'samples' is not valid: input should be 'sample', 'expected', 'mask' or 'none'",
        ),
        (
            {"alignment": {"copies": "physical", "mode": "expected"}},
            "drmas.alignment.copies is 'physical', but mode 'expected' has fractions of copies; choose sample, or "
            "weights",
        ),
        (
            {"curriculum": [{"name": "format", "files": [], "until_step": 3}]},
            "drmas.curriculum.0.files is empty; name the stage's data files",
        ),
        (
            {"curriculum": [{"name": "format", "files": ["a"], "until_metric": "m"}]},
            "drmas.curriculum.0.until_metric and above belong together; set both or neither",
        ),
        (
            {"curriculum": [{"name": "format", "files": ["a"], "above": 0.5}]},
            "drmas.curriculum.0.until_metric and above belong together; set both or neither",
        ),
        (
            {"curriculum": [{"name": "easy", "files": ["a"]}, {"name": "hard", "files": ["b"]}]},
            "drmas.curriculum: stage 'easy' never ends; set until_step or until_metric",
        ),
        (
            {"curriculum": [{"name": "easy", "files": ["a"], "until_step": 3}]},
            "drmas.curriculum: stage 'easy' is the last and ends; drop until_step and until_metric",
        ),
        (
            {"curriculum": [{"name": "easy", "files": ["a"], "until_stp": 3}]},
            "drmas.curriculum.0.until_stp: unknown key; did you mean 'until_step'?",
        ),
        (
            {"models": {"base": None}},
            "drmas.models.base: None is not valid: a section is needed, such as `base: {...}`",
        ),
        (
            {"workflow": "solver_verifier"},
            "drmas.workflow: 'solver_verifier' is not valid: a section is needed, such as `workflow: {...}`",
        ),
        ("solver_verifier", "drmas: 'solver_verifier' is not valid: a section of keys is needed"),
    ],
)
def test_what_is_wrong_is_one_line_with_key_value_and_fix(section, line):
    assert refusal(section) == line


@pytest.mark.parametrize("temperature", [-1.0, float("nan")])
def test_a_temperature_must_be_above_zero(temperature):
    agents = {"a": {"model": "base", "sampling": {"temperature": temperature}}}
    assert f"temperature is {temperature};" in refusal({"agents": agents})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("updates_per_step", 0),
        ("poll_interval", 0.0),
        ("agents.solver.prompt_length", 0),
        ("agents.solver.response_length", -1),
        ("agents.solver.turn_length", 0),
        ("agents.solver.invalid_penalty", -0.1),  # a minus would reward invalid actions
        ("agents.solver.sampling.top_p", 1.5),
        ("agents.solver.sampling.top_p", 0.0),
        ("agents.solver.sampling.top_k", -2),
        ("agents.solver.sampling.min_p", 2.0),
        ("agents.solver.sampling.repetition_penalty", 0.0),
        ("advantage.eps", -1e-6),
        ("advantage.std_floor", -1.0),
        ("faults.max_failed_share", 1.1),
        ("faults.session_timeout", 0.0),
        ("faults.poll_health", -1.0),
        ("alignment.auto_steps", 0),
    ],
)
def test_a_value_out_of_its_range_is_refused(key, value):
    section = {"agents": {"solver": {"model": "base", "sampling": {}}}, "advantage": {}, "faults": {}, "alignment": {}}
    *path, last = key.split(".")
    place = section
    for part in path:
        place = place[part]
    place[last] = value
    line = refusal(section)
    assert line.startswith(f"drmas.{key}: {value!r} is not valid: input should be ")


def test_the_misspelling_of_a_required_key_is_shown_before_its_absence():
    assert "modle" in refusal({"agents": {"solver": {"modle": "base", "trainable": True}}})


def test_strict_refuses_what_only_fits_after_a_conversion():
    assert parse({"ddof": 0, "eps": 1}, AdvantageConfig, "x", strict=True).eps == 1.0
    assert refusal({"eps": "1"}, AdvantageConfig, "x", strict=True).startswith("x.eps: '1' is not valid:")


def test_nearest_names_one_or_all():
    assert nearest("solvr", ["solver", "verifier"]) == "did you mean 'solver'?"
    assert nearest("zzz", ["solver", "verifier"]) == "known: solver, verifier"
    assert nearest("zzz", []) == "known: none"


def test_a_section_survives_the_way_through_plain_containers():
    config = parse({"agents": AGENT, "updates_per_step": 2})
    assert parse(asdict(config)) == config


@pytest.mark.parametrize("target", [0, -1, "automatic", 1.5])
def test_a_target_is_a_whole_number_or_auto(target):
    line = refusal({"alignment": {"target": target}})
    assert line.startswith("drmas.alignment.target") and repr(target) in line
    assert [parse({"alignment": {"target": t}}).alignment.target for t in ("auto", 3)] == ["auto", 3]


REMOTE = {"store": "sqlite:///pair.db", "role": "sub"}


def with_remote(remote=REMOTE, **model):
    agents = {"main": {"model": "main"}, "sub": {"model": "far"}}
    return {"agents": agents, "models": {"main": {}, "far": {"remote": remote, **model}}}


def test_a_remote_model_is_trained_but_not_here():
    config = parse(with_remote())
    assert config.remote == {"far": RemoteConfig("sqlite:///pair.db", "sub")}
    assert (config.remote["far"].max_lag, config.remote["far"].stale) == (0, "wait")
    assert [config.models[m].trained_here for m in config.models] == [True, False] and config.models["far"].trainable
    assert (config.trained("main"), config.trained("sub")) == (True, False)
    assert config.store is None and config.gateway == GatewayConfig()
    assert parse(asdict(config)) == config
    agents = {"a": {"model": "x"}, "b": {"model": "judge"}}
    frozen = parse({"agents": agents, "models": {"x": {}, "judge": {"trainable": False}}})
    assert frozen.remote == {} and not frozen.models["judge"].trained_here


def test_a_remote_agents_temperature_mixes_nothing_here():
    agents = {"main": {"model": "main"}, "sub": {"model": "far", "sampling": {"temperature": 0.5}}}
    assert not parse({**with_remote(), "agents": agents}).mixes_temperature(1.0)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        (
            with_remote(pool="x") | {"pools": {"x": {"n_gpus_per_node": 1}}},
            "drmas.models.far.pool is set, but the model is another job's (remote); drop it",
        ),
        (
            with_remote(updates_per_step=2),
            "drmas.models.far.updates_per_step is set, but the model is another job's (remote); drop it",
        ),
        (
            with_remote(init_from="x"),
            "drmas.models.far.init_from is set, but the model is another job's (remote); drop it",
        ),
        (
            with_remote(actor_rollout_ref={"actor": {"optim": {"lr": 1}}}),
            "drmas.models.far.actor_rollout_ref.actor is set, but the model is another job's (remote) and has no "
            "optimiser or training worker here; drop the override, or train the model here",
        ),
        (
            with_remote(trainable=False),
            "drmas.models.far.remote is set, but the model is frozen; serve a frozen model in this job",
        ),
        (with_remote({"store": "x"}), "drmas.models.far.remote.role: missing"),
        (with_remote({**REMOTE, "role": "a/b"}), "role is 'a/b'; use 1 to 64 letters, digits, '-' and '.'"),
        (with_remote({**REMOTE, "role": ""}), "role is ''; use 1 to 64"),
        (with_remote({**REMOTE, "max_lag": -1}), "drmas.models.far.remote.max_lag: -1 is not valid: "),
        (with_remote({**REMOTE, "stale": "keep"}), "drmas.models.far.remote.stale: 'keep' is not valid: "),
        (with_remote({**REMOTE, "patience": 0}), "drmas.models.far.remote.patience: 0 is not valid: "),
        (
            with_remote({**REMOTE, "max_lagg": 1}),
            "drmas.models.far.remote.max_lagg: unknown key; did you mean 'max_lag'?",
        ),
        ({"models": {"far": {"remote": REMOTE}}}, "drmas.models has no model that this job trains; "),
        (
            {
                "agents": {"a": {"model": "main"}, "b": {"model": "far"}, "c": {"model": "too"}},
                "models": {"main": {}, "far": {"remote": REMOTE}, "too": {"remote": REMOTE}},
            },
            "drmas.models: two models have the same remote.store and remote.role; ",
        ),
        ({"store": {"url": "sqlite:///x"}}, "drmas.store.role: missing"),
        ({"store": {"url": "sqlite:///x", "role": "a", "lease": 0}}, "drmas.store.lease: 0 is not valid: "),
        (
            {"store": {"url": "sqlite:///x", "role": "a", "max_attempts": 0}},
            "drmas.store.max_attempts: 0 is not valid: ",
        ),
        ({"gateway": {"port": 65536}}, "port is 65536; the highest is 65535"),
        ({"gateway": {"tls_cert": "x"}}, "tls_cert and tls_key belong together; set both or neither"),
    ],
)
def test_what_is_wrong_with_a_pair_is_one_line(section, line):
    found = refusal(section)
    assert found.startswith("drmas") and line in found


def test_two_models_may_meet_their_jobs_in_one_store():
    models = {"main": {}, "far": {"remote": REMOTE}, "too": {"remote": {**REMOTE, "role": "other"}}}
    agents = {"a": {"model": "main"}, "b": {"model": "far"}, "c": {"model": "too"}}
    assert list(parse({"agents": agents, "models": models}).remote) == ["far", "too"]


def test_stages_follow_each_other():
    stages = [
        {"name": "format", "files": ["a"], "until_step": 20},
        {"name": "easy", "files": ["b"], "until_metric": "m", "above": 0.9},
        {"name": "hard", "files": ["c", "d"]},
    ]
    curriculum = parse({"curriculum": stages}).curriculum
    assert [stage.ends for stage in curriculum] == [True, True, False]
    assert curriculum[1] == StageConfig("easy", ["b"], None, "m", 0.9, 5)
    assert parse(asdict(parse({"curriculum": stages}))).curriculum == curriculum
