"""The loop that plays a workflow on one model and on several, each with its own tokenizer, template and sampling."""

import asyncio
from copy import deepcopy
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from recipes.cpu_arithmetic.tiny_model import build_tiny_model, character_tokenizer
from verl_drmas.check import build_workflow, prepare_keys, read_section
from verl_drmas.check_command import compose_as_verl
from verl_drmas.rollout.client import RetryingClient, TeamClient
from verl_drmas.rollout.loop import VALIDATE, ModelLoop, TeamLoop, read_task, team_loop, tools_report
from verl_drmas.workflows import SessionFailed

STYLES = ("llama", "qwen3")
ROOT = "actor_rollout_ref"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
ROW = {
    "raw_prompt": [{"role": "user", "content": "3+4"}],
    "reward_model": {"ground_truth": "7"},
    "index": 2,
    "session_id": 0,
    "global_steps": 4,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model of each style."""
    out = tmp_path_factory.mktemp("models")
    return {style: build_tiny_model(out / style, style=style, size="small") for style in STYLES}


@pytest.fixture(scope="module")
def composed(folders):
    paths = [f"{ROOT}.model.path={folders['llama']}", "data.max_prompt_length=40", "data.max_response_length=12"]
    return compose_as_verl([*paths, "+drmas=arithmetic", "+drmas_runtime=cpu"])


class Client(RetryingClient):
    """A client whose servers say the solver's sum and the verifier's yes in the tokens of the model they serve."""

    def __init__(self, config, tokenizer):
        super().__init__(config, None)
        self.tokenizer, self.asked = tokenizer, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        prompt = self.tokenizer.decode(prompt_ids)
        self.asked.append(SimpleNamespace(prompt=prompt, ids=list(prompt_ids), **sampling_params))
        ids = [*self.tokenizer.encode("7" if prompt.startswith("S:") else "y"), self.tokenizer.eos_token_id]
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={})


@pytest.fixture(scope="module")
def make(composed, folders):
    """The run's configuration and the clients of its models: solver on the first, verifier on the last.

    A configuration is checked once and shared; nobody changes it.
    """
    checked = {}

    def check(models, agents, changes):
        config = deepcopy(composed)
        OmegaConf.set_struct(config, False)
        OmegaConf.update(config, "drmas.models", models, force_add=True)
        first, *_, last = list(models) * 2
        config.drmas.agents = {"solver": {"model": first}, "verifier": {"model": last}}
        for agent_id, own in (agents or {}).items():
            config.drmas.agents[agent_id] = OmegaConf.merge(config.drmas.agents[agent_id], own)
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
        return config, prepare_keys(config).policies

    def make(models, agents=None, **changes):
        key = repr((models, agents, changes))
        if key not in checked:
            checked[key] = check(models, agents, changes)
        config, policies = checked[key]
        by_path = {str(folder): style for style, folder in folders.items()}
        clients = {
            model_id: Client(policy, character_tokenizer(by_path[policy[ROOT].model.path]))
            for model_id, policy in policies.items()
        }
        return config, clients

    return make


@pytest.fixture(scope="module")
def two(folders):
    """The models of a team whose second is of another family."""

    def two(**own):
        return {"a": {}, "b": {ROOT: {"model": {"path": str(folders["qwen3"])}, **own}}}

    return two


def build(config, clients, cls=TeamLoop):
    """The loop as verl's worker builds it, with the run's tokenizer."""
    manager = next(iter(clients.values())) if len(clients) == 1 else TeamClient(clients)
    return cls(
        trainer_config=DictConfigWrap(config),
        server_manager=manager,
        tokenizer=character_tokenizer("llama"),
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type="llama",
    )


def play(config, clients, validate=False, workflow=None):
    async def session():
        loop = build(config, clients)
        if workflow is not None:
            loop.workflow = workflow
        token = VALIDATE.set(validate)
        try:
            return loop, await loop.run(dict(SAMPLING), **ROW)
        finally:
            VALIDATE.reset(token)

    return asyncio.run(session())


def engines(config, clients):
    async def built():
        return build(config, clients)

    loop = asyncio.run(built())
    return loop, loop.engines


@pytest.mark.parametrize("validate", [False, True])
def test_rows_bear_what_dumps_tell_only_where_there_are_dumps(validate, make):
    """In a pair they would go through its store as well."""
    for key in ("rollout_data_dir", "validation_data_dir"):
        _, rows = play(*make({"base": {}}, **{f"trainer.{key}": "out"}), validate=validate)
        assert {"told" in row.extra_fields for row in rows} == {key.startswith("validation") == validate}


# -- one engine a model ------------------------------------------------------------------------------------------------


def test_every_model_has_its_own_tokenizer_template_and_client(make, two):
    config, clients = make(two())
    loop, made = engines(config, clients)
    assert list(made) == ["a", "b"]
    for (model_id, engine), style in zip(made.items(), STYLES, strict=True):
        assert engine.client is clients[model_id]
        assert engine.tokenizer.get_vocab() == character_tokenizer(style).get_vocab()
        assert engine.loop.continuous_token_builder.build_initial_tokens(ROW["raw_prompt"]) == character_tokenizer(
            style
        ).encode("3+4")
        assert (engine.loop.rollout_config.prompt_length, engine.loop.rollout_config.response_length) == (40, 12)
        assert engine.loop.dataset_cls is loop.dataset_cls
        assert engine.loop.data_config == config.data


def test_a_models_own_chat_template_is_rendered(make, two, tmp_path):
    other = build_tiny_model(tmp_path / "chatml", style="chatml", size="small")
    config, clients = make(two())
    clients["b"].config = deepcopy(clients["b"].config)
    clients["b"].config[ROOT].model.path = str(other)
    _, made = engines(config, clients)
    build_initial = made["b"].loop.continuous_token_builder.build_initial_tokens
    text = made["b"].tokenizer.decode(build_initial(ROW["raw_prompt"]))
    assert text == "<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n"
    assert type(made["b"].loop.continuous_token_builder) is not type(made["a"].loop.continuous_token_builder)


def test_one_model_is_the_run_itself(make):
    config, clients = make({"base": {}})
    loop, made = engines(config, clients)
    assert list(made) == ["base"]
    assert made["base"].loop is loop and made["base"].client is clients["base"]
    assert made["base"].sampling == {}


def test_a_models_loop_plays_no_sessions(make, two):
    config, clients = make(two())
    _, made = engines(config, clients)
    assert isinstance(made["b"].loop, ModelLoop)
    with pytest.raises(NotImplementedError, match="agent_loop=drmas_team"):
        asyncio.run(made["b"].loop.run({}))


@pytest.mark.parametrize(
    ("own", "differs"),
    [
        ({}, {}),
        ({"temperature": 1.0}, {}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"top_p": 0.9, "top_k": 20}, {"top_p": 0.9, "top_k": 20}),
        ({"max_num_seqs": 8}, {}),
    ],
)
def test_an_engine_holds_only_what_it_samples_differently(make, two, own, differs):
    _, made = engines(*make(two(rollout=own)))
    assert made["a"].sampling == {}
    assert made["b"].sampling == differs


def test_a_model_samples_as_it_says_in_training_and_as_the_run_in_validation(make, two):
    config, clients = make(two(rollout={"temperature": 0.6}))
    play(config, clients)
    play(config, clients, validate=True)
    assert [asked.temperature for asked in clients["a"].asked] == [1.0, 1.0]
    assert [asked.temperature for asked in clients["b"].asked] == [0.6, 1.0]


# -- temperatures ------------------------------------------------------------------------------------------------------

COOL = {"sampling": {"temperature": 0.6}}


@pytest.mark.parametrize(
    ("rollout", "agents", "mixed"),
    [
        ({}, {}, False),
        ({"temperature": 0.6}, {}, False),  # each policy trains at its own model's
        ({"temperature": 0.6}, {"verifier": COOL}, False),  # says what its model says
        ({}, {"verifier": COOL}, True),
        ({}, {"solver": COOL}, True),
        ({"temperature": 0.6}, {"verifier": {"sampling": {"temperature": 1.0}}}, True),  # the run's, not its model's
    ],
)
def test_rows_carry_a_temperature_where_an_agent_samples_at_another_than_its_models(make, two, rollout, agents, mixed):
    config, clients = make(two(rollout=rollout), agents)
    _, rows = play(config, clients)
    asked = [clients["a"].asked[0].temperature, clients["b"].asked[0].temperature]
    assert [row.row_temperature for row in rows] == (asked if mixed else [None, None])
    # verl stores a session's rows together, with the fields that the first one has.
    first, second = (set(row.as_dict()) for row in rows)
    assert first == second


def test_a_frozen_model_samples_as_it_likes(make, two):
    models = two(rollout={"temperature": 0.6})
    models["b"]["trainable"] = False
    _, rows = play(*make(models, {"verifier": {"sampling": {"temperature": 0.3}}}))
    assert [row.row_temperature for row in rows] == [None, None]


@pytest.mark.parametrize(
    ("agents", "temperatures"),
    [
        ({}, [None, None]),
        ({"verifier": COOL}, [1.0, 0.6]),
        ({"verifier": {**COOL, "trainable": False}}, [None, None]),  # nobody trains on its rows
    ],
)
def test_on_one_model_the_runs_temperature_is_the_measure(make, agents, temperatures):
    _, rows = play(*make({"base": {}}, agents))
    assert [row.row_temperature for row in rows] == temperatures


# -- playing -----------------------------------------------------------------------------------------------------------


def story(rows):
    """What a session was, whatever the models' ids mean."""
    return [
        (row.extra_fields["agent_id"], row.extra_fields["path"], row.own_reward, row.extra_fields["session_metrics"])
        for row in rows
    ]


def test_the_same_workflow_object_plays_on_one_model_and_on_several(make, two):
    one, several, frozen = make({"base": {}}), make(two()), make({**two(), "b": {**two()["b"], "trainable": False}})
    loop, shared = play(*one)
    workflow = loop.workflow
    _, separate = play(*several, workflow=workflow)
    _, served = play(*frozen, workflow=workflow)
    assert story(shared) == story(separate) == story(served)
    assert [agent for agent, *_ in story(shared)] == ["solver", "verifier"]
    assert [row.extra_fields["model_id"] for row in shared] == ["base", "base"]
    assert [row.extra_fields["model_id"] for row in separate] == ["a", "b"]
    llama, qwen3 = (character_tokenizer(style) for style in STYLES)
    assert shared[0].prompt_ids == separate[0].prompt_ids == llama.encode("S:3+4=")
    assert llama.decode(shared[1].prompt_ids) == qwen3.decode(separate[1].prompt_ids) == "V:3+4=7?"
    assert shared[1].prompt_ids != separate[1].prompt_ids
    seeds = [[asked.seed for client in case[1].values() for asked in client.asked] for case in (one, several, frozen)]
    assert seeds[0] == seeds[1] == seeds[2]


def test_a_workers_loop_is_built_once_and_again_for_other_servers(make, two):
    config, clients = make(two())
    _, others = make(two())

    async def sessions():
        wrapped = DictConfigWrap(config)
        rest = {
            "tokenizer": character_tokenizer("llama"),
            "processor": None,
            "dataset_cls": RLHFDataset,
            "data_config": DictConfigWrap(config.data),
        }
        team, other = TeamClient(clients), TeamClient(others)
        first = team_loop(wrapped, server_manager=team, **rest)
        return first, team_loop(wrapped, server_manager=team, **rest), team_loop(wrapped, server_manager=other, **rest)

    first, again, third = asyncio.run(sessions())
    assert first is again
    assert third is not first and third.engines["b"].client is others["b"]


class Fails:
    """A workflow that fails after its solver has spoken, or before."""

    agents = ("solver", "verifier")

    def __init__(self, speaks=True):
        self.speaks = speaks

    async def run(self, task, team):
        if self.speaks:
            await team["solver"].act([{"role": "user", "content": "S:3+4="}])
        raise SessionFailed("retrieval", "503")

    def report(self):
        return {"calls": 2}


@pytest.mark.parametrize(
    ("policy", "validate", "speaks", "kept"),
    [("mask", False, True, 1), ("mask", True, True, 0), ("mask", False, False, 0), ("drop", False, True, 0)],
)
def test_a_failed_session_is_dropped_or_masked_as_configured(make, policy, validate, speaks, kept):
    config, clients = make({"base": {}}, **{"drmas.faults.failed_sessions": policy})

    async def session():
        loop = build(config, clients)
        loop.workflow = Fails(speaks)
        token = VALIDATE.set(validate)
        try:
            return await loop.run(SAMPLING, **ROW)
        finally:
            VALIDATE.reset(token)

    if kept:
        rows = asyncio.run(session())
        assert [row.extra_fields["failed"] for row in rows] == ["retrieval"]
    else:
        with pytest.raises(SessionFailed, match="503"):
            asyncio.run(session())


def test_the_counts_of_a_workers_workflows_are_summed(monkeypatch):
    loops = {n: (None, SimpleNamespace(workflow=Fails())) for n in range(2)}
    monkeypatch.setattr("verl_drmas.rollout.loop._LOOPS", loops)
    assert tools_report() == {"calls": 4}


def test_a_task_is_read_from_a_data_row(composed):
    task = read_task({**ROW, "data_source": "sums", "extra_info": {"split": "train"}}, True)
    assert (task.question, task.answer, task.data_source) == ("3+4", "7", "sums")
    assert (task.index, task.session, task.step, task.validate) == (2, 0, 4, True)
    assert task.extra == {"split": "train"}


def test_the_workflow_is_built_with_its_settings(make):
    config, _ = make({"base": {}}, **{"drmas.workflow.balanced": False})
    workflow = build_workflow(read_section(config))
    assert (type(workflow).__name__, workflow.settings.balanced) == ("Arithmetic", False)
