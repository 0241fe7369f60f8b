"""The team of an evaluation: from options, from a file of endpoints, and from a training configuration."""

import pytest
from omegaconf import OmegaConf

from verl_drmas.check_command import compose_as_verl
from verl_drmas.evaluation.completions import ServedModel
from verl_drmas.evaluation.endpoint import Sampling
from verl_drmas.evaluation.team import Endpoints, build_team, read_endpoints
from verl_drmas.evaluation.training import read_training
from verl_drmas.workflows import load_workflow

ONE = ServedModel(("http://h/v1",), "m")
PAPER = Sampling(0.6, 0.95)


def build(workflow=None, settings=(), training=None, endpoints=None, one=ONE, sampling=PAPER):
    return build_team(
        workflow=workflow, settings=settings, training=training, endpoints=endpoints, one=one, sampling=sampling
    )


@pytest.fixture
def endpoints(tmp_path):
    def read(text):
        file = tmp_path / "endpoints.yaml"
        file.write_text(text)
        return read_endpoints(file)

    return read


def test_all_agents_on_one_model():
    team = build("solver_verifier", ["max_rounds=3"])
    assert type(team.workflow) is load_workflow("solver_verifier") and team.workflow.settings.max_rounds == 3
    assert team.agents == {"solver": "served", "verifier": "served"} and team.models == {"served": ONE}
    assert team.sampling == {"solver": PAPER, "verifier": PAPER}


# -- a training configuration


@pytest.fixture
def of_a_run(tmp_path):
    """The configuration that Hydra leaves in a run's folder."""

    def write(*arguments):
        file = tmp_path / "run" / ".hydra" / "config.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(compose_as_verl(arguments), file)
        return str(file)

    return write


def test_a_runs_team_is_the_one_that_was_trained(of_a_run):
    file = of_a_run(
        "--config-name", "drmas_math_separate", "drmas.workflow.max_rounds=4",
        "+drmas.agents.verifier.sampling={stop: ['</verdict>'], temperature: 0.9, presence_penalty: 0.5}",
        "+drmas.agents.verifier.turn_length=512",
    )  # fmt: skip
    training = read_training(file)
    models = {"solver": ONE, "verifier": ServedModel(("http://other/v1",), "n", extra_body={"seed": 1})}
    team = build(training=training, endpoints=Endpoints(models))
    assert team.workflow.settings.max_rounds == 4
    assert team.agents == {"solver": "solver", "verifier": "verifier"}
    assert team.sampling["solver"] == Sampling(0.6, 0.95, 4096)
    more = {"stop": ["</verdict>"], "presence_penalty": 0.5}  # temperature is training's alone
    assert team.sampling["verifier"] == Sampling(0.6, 0.95, 512, more=more)
    template = {"chat_template_kwargs": {"enable_thinking": False}}
    assert team.models["solver"].extra_body == template
    assert team.models["verifier"].extra_body == {"seed": 1, **template}


def test_one_of_ours_by_its_name():
    training = read_training("drmas_math")
    team = build(settings=["on_invalid=approve"], training=training, sampling=Sampling(0.6, 0.95, 77))
    assert (team.name, team.workflow.settings.on_invalid) == ("solver_verifier", "approve")
    assert team.models.keys() == {"base"} and team.sampling["solver"].max_tokens == 77


def test_a_users_own_file_is_composed(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [drmas_math, _self_]\ndrmas: {workflow: {max_rounds: 7}}\n")
    assert read_training(str(file)).settings["max_rounds"] == 7


@pytest.mark.parametrize(
    "text, says",
    [
        ("a: 1\n", "no drmas.workflow.name"),
        ("- 1\n", "no drmas.workflow.name"),
        ("drmas: {workflow: {max_rounds: 2}}\n", "no drmas.workflow.name"),
        ("drmas: {agentz: {}}\n", "drmas.agentz: unknown key; did you mean 'agents'?"),
        ("drmas: [", "while parsing"),
        ("drmas: {request_seed: '${nothing}'}\n", "Interpolation key 'nothing' not found"),
        ("defaults: [nothing_of_that_name]\n", "nothing_of_that_name"),
    ],
)
def test_wrong_configurations_are_one_line(tmp_path, text, says):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read_training(str(file))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_isnt_there():
    with pytest.raises(ValueError, match=r"--config no.yaml: no such file"):
        read_training("no.yaml")
    with pytest.raises(ValueError, match=r"neither a YAML file nor a configuration of ours; did you mean 'mgrpo'\?"):
        read_training("mgrp")


def test_another_workflow_than_the_configurations():
    with pytest.raises(ValueError, match="--workflow arithmetic: the configuration's is solver_verifier; drop one"):
        build("arithmetic", training=read_training("drmas_math"))


def test_one_url_for_several_models_is_refused():
    with pytest.raises(ValueError, match="has the models solver, verifier; name all with --endpoints"):
        build(training=read_training("drmas_math_separate"))


# -- a file of endpoints


def test_agents_of_a_file(endpoints):
    read = endpoints(
        "models:\n  a: {urls: [http://a/v1, http://b/v1], model: x, api_key_env: KEY, timeout: 5, concurrency: 3}\n"
        "  b: {urls: [http://b/v1], model: y}\n  unused: {urls: [http://c/v1], model: z}\n"
        "agents: {solver: a, verifier: {model: b, top_p: 1.0}}\n"
    )
    team = build("solver_verifier", endpoints=read, one=None)
    assert team.agents == {"solver": "a", "verifier": "b"} and list(team.models) == ["a", "b"]
    assert (team.models["a"].urls, team.models["a"].timeout) == (("http://a/v1", "http://b/v1"), 5)
    assert team.sampling == {"solver": PAPER, "verifier": Sampling(0.6, 1.0)}


def test_a_files_only_model_is_everyones(endpoints):
    team = build("solver_verifier", endpoints=endpoints("models: {a: {urls: [http://a/v1], model: x}}"), one=None)
    assert team.agents == {"solver": "a", "verifier": "a"}


@pytest.mark.parametrize(
    "text, says",
    [
        ("models: {}", "endpoints.yaml.models is empty"),
        ("models: {a: {urls: [h:80], model: x}}", "endpoints.yaml.models.a.urls: 'h:80' is no address"),
        ("models: {a: {url: [http://h], model: x}}", "endpoints.yaml.models.a.url: unknown key; did you mean 'urls'"),
        ("models: {a: {urls: http://h, model: x}}", "endpoints.yaml.models.a.urls: 'http://h' is not valid"),
        ("models: {a: {urls: [http://h], model: x, calls: hermes}}", "models.a.calls: 'hermes' is not valid"),
        ("models: {a: {urls: [http://h], model: x, extra_body: {messages: []}}}", "extra_body: 'messages' is set by"),
        ("models: {a: {urls: [http://h], model: x, api_key_env: sk-abc}}", "write the name, not the key"),
        ("models: {a: {urls: [http://h], model: x}}\nagents: {solver: {modle: a}}", "did you mean 'model'?"),
    ],
)  # fmt: skip
def test_wrong_endpoints_are_one_line(endpoints, text, says):
    with pytest.raises(ValueError) as error:
        endpoints(text)
    assert says in str(error.value) and "\n" not in str(error.value) and "sk-abc" not in str(error.value)


TWO = "models: {a: {urls: [http://a/v1], model: x}, b: {urls: [http://b/v1], model: y}}\n"


@pytest.mark.parametrize(
    "agents, says",
    [
        ("agents: {solver: a}", "agent verifier has no model; add `agents: {verifier: <one of a, b>}`"),
        ("agents: {solver: a, verifier: c}", "agent verifier is on 'c', which models lacks"),
        ("agents: {solver: a, verifer: b}", "agents.verifer: solver_verifier has no such agent; did you mean 'verifie"),
        ("agents: {solver: a, verifier: {model: b, top_p: 2}}", "--endpoints: agents.verifier.top_p is 2"),
    ],
)
def test_endpoints_and_team_must_fit(endpoints, agents, says):
    with pytest.raises(ValueError) as error:
        build("solver_verifier", endpoints=endpoints(TWO + agents), one=None)
    assert says in str(error.value)


def test_what_is_measured_has_no_address_and_no_key():
    served = ServedModel(("http://secret-host/v1",), "m", "SECRET_KEY", concurrency=3)
    told = str(build("delegate", ["subs.helper.max_turns=3"], one=served).measured())
    assert "secret" not in told.lower() and "max_turns': 3" in told


def test_a_workflow_without_its_library_is_refused(monkeypatch):
    monkeypatch.setattr(load_workflow("solver_verifier"), "requires", ("no_such_module",))
    with pytest.raises(ValueError, match=r"needs the module no_such_module; pip install 'verl-drmas\[math\]'"):
        build("solver_verifier")
