"""The CPU job's mappings: each composes and passes the check, and its warm starts are the models of its file."""

from concurrent.futures import Future
from itertools import pairwise

import pytest
from omegaconf import OmegaConf

from recipes.cpu_arithmetic import mappings
from recipes.cpu_arithmetic.mappings import MAPPINGS, Name, prepare
from recipes.cpu_arithmetic.tiny_model import SHAPES
from recipes.cpu_arithmetic.warm_start import Settings, WarmStart, WarmStartError
from verl_drmas import check
from verl_drmas.check_command import compose_as_verl
from verl_drmas.data.arithmetic import arithmetic_rows
from verl_drmas.data.parquet import write_rows
from verl_drmas.workflows.arithmetic import Arithmetic, ArithmeticRival

pytestmark = pytest.mark.long

TEAMS = pytest.mark.parametrize("name", list(Name))


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Makes warm starts without training: data, and a model folder each that passes for one."""
    folder = tmp_path_factory.mktemp("starts")
    rows = dict(zip(("train", "val"), arithmetic_rows(), strict=True))
    train, val = (write_rows(rows[split], folder / f"{split}.parquet") for split in rows)

    def make(name):
        made = {}
        for model_id in MAPPINGS[name].models:
            model = folder / model_id
            model.mkdir(exist_ok=True)
            (model / "config.json").write_text("{}")
            made[model_id] = WarmStart(model, train, val, folder / "warm_start.json", {})
        return made

    return make


@pytest.fixture(scope="module")
def composed(starts):
    """Each mapping's configuration as its command line gives it to verl, composed once."""
    return {
        name: compose_as_verl(["--config-name", team.config, *team.overrides(starts(name))])
        for name, team in MAPPINGS.items()
    }


@pytest.fixture(scope="module")
def prepared(composed):
    """What the check makes of each mapping."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        return {name: check.prepare(config.copy()) for name, config in composed.items()}


@TEAMS
def test_a_mapping_passes_the_check_with_a_warm_start_for_each_model(prepared, starts, name):
    seen = prepared[name]
    assert list(seen.section.models) == list(MAPPINGS[name].models)
    paths = {model_id: policy.actor_rollout_ref.model.path for model_id, policy in seen.policies.items()}
    assert paths == {model_id: str(start.model) for model_id, start in starts(name).items()}
    assert [pool.models for pool in seen.pools.values()] == [tuple(MAPPINGS[name].models)]  # one logical GPU


@TEAMS
def test_a_model_was_taught_what_its_agents_do(prepared, name):
    section = prepared[name].section
    for model_id, settings in MAPPINGS[name].models.items():
        played = {"solver" if agent == "rival" else agent for agent in section.agents_of(model_id)}
        assert played == set(settings.roles)


def test_who_is_trained(prepared):
    trained = {name: {a: s.trained(a) for a in s.agents} for name in Name for s in [prepared[name].section]}
    both = {"solver": True, "verifier": True}
    assert trained == {Name.SHARED: both, Name.SEPARATE: both, Name.HETEROGENEOUS: {**both, "rival": False}}


def test_only_the_rival_changes_the_workflow(prepared):
    flows = {name: prepared[name].workflow for name in Name}
    assert flows == {Name.SHARED: Arithmetic, Name.SEPARATE: Arithmetic, Name.HETEROGENEOUS: ArithmeticRival}
    assert ArithmeticRival.run is Arithmetic.run


def test_the_mappings_differ_in_team_and_models_alone(composed):
    def rest(name):
        config = OmegaConf.to_container(composed[name])
        for key in ("workflow", "agents", "models"):
            del config["drmas"][key]
        del config["trainer"]["experiment_name"], config["actor_rollout_ref"]["model"]["path"]
        return config

    for one, other in pairwise(Name):
        assert rest(one) == rest(other)


def test_families_and_sizes():
    separate, unequal = MAPPINGS[Name.SEPARATE].models, MAPPINGS[Name.HETEROGENEOUS].models
    assert {settings.style for settings in separate.values()} == {"llama", "qwen3"}
    hidden = {model_id: SHAPES[settings.size]["hidden_size"] for model_id, settings in unequal.items()}
    assert hidden["small"] < hidden["frozen"] < hidden["large"]


def test_a_rival_on_the_shared_model_is_one_setting_away(composed, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = composed[Name.SHARED].copy()
    OmegaConf.set_struct(config, False)
    config.drmas.workflow.name = "arithmetic_rival"
    config.drmas.agents.rival = {"model": "base", "trainable": False}
    seen = check.prepare(config)
    assert seen.section.agents_of("base") == ["solver", "verifier", "rival"] and not seen.section.trained("rival")


# -- warm starts -------------------------------------------------------------------------------------------------------


class Pool:
    """A process pool that works here and now."""

    def __init__(self, **settings):
        self.settings = settings

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except WarmStartError as error:
            future.set_exception(error)
        return future


@pytest.fixture
def asked(monkeypatch):
    """Settings of the warm starts that were asked for; none is made."""
    asked = []
    monkeypatch.setattr(mappings, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(mappings, "warm_start", lambda folder, settings: asked.append((folder, settings)) or settings)
    return asked


@TEAMS
def test_every_model_is_made_with_the_runs_seed(asked, tmp_path, name):
    made = prepare(tmp_path, MAPPINGS[name].models, seed=7)
    assert list(made) == list(MAPPINGS[name].models)
    assert [settings for _, settings in asked] == list(made.values())
    assert {settings.seed for settings in made.values()} == {7}
    assert len({settings.held_out for settings in made.values()}) == 1  # the same problems are held out


def test_one_model_needs_no_other_process(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(mappings, "ProcessPoolExecutor", None)
    assert prepare(tmp_path, {"base": Settings()}, seed=1) == {"base": Settings(seed=1)}


def test_a_warm_start_that_fails_says_so(asked, monkeypatch, tmp_path):
    def fail(folder, settings):
        raise WarmStartError("seed 3: after 2 clean steps")

    monkeypatch.setattr(mappings, "warm_start", fail)
    with pytest.raises(WarmStartError, match="after 2 clean steps"):
        prepare(tmp_path, MAPPINGS[Name.SEPARATE].models, seed=3)
