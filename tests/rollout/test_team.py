"""The training back end: an agent's messages become tokens for the engine, its activations rows as sampled."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from recipes.cpu_arithmetic.tiny_model import byte_tokenizer, character_tokenizer
from verl_drmas.config import parse
from verl_drmas.rollout.team import Engine, TrainingTeam
from verl_drmas.workflows import Outcome, SessionFailed, Task, Workflow

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
PROMPT = [{"role": "user", "content": "What is 2 + 2?"}]
TASK = Task(question="What is 2 + 2?", index=3, session=1, step=5)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


class Loop(AgentLoopBase):
    """verl's own token helpers, nothing else."""

    async def run(self, sampling_params, **kwargs):
        raise NotImplementedError


class Plain(Workflow):
    """The reward function of a workflow that defines none."""

    async def run(self, task, team):
        raise NotImplementedError


class Client:
    """Answers with scripted token ids, and log-probs made from them; records every request."""

    def __init__(self, replies, logprobs=True, steps=(4,), delays=()):
        self.replies, self.logprobs, self.steps, self.delays = list(replies), logprobs, list(steps), dict(delays)
        self.asked = []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        call = len(self.asked)
        self.asked.append(SimpleNamespace(prompt_ids=list(prompt_ids), **sampling_params))
        reply = self.replies[call % len(self.replies)]
        ids = reply(TOKENIZER.decode(prompt_ids)) if callable(reply) else reply
        ids = encode(ids) if isinstance(ids, str) else ids
        ids = ids[: sampling_params["max_tokens"]]
        await asyncio.sleep(self.delays.get(call, 0))
        step = self.steps[min(call, len(self.steps) - 1)]
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs(ids) if self.logprobs else None,
            extra_fields={"global_steps": step, "min_global_steps": step, "max_global_steps": step},
            num_preempted=1,
        )


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def render(messages):
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return encode(text)


def logprobs(ids):
    return [-(token + 1) / 1000 for token in ids]


def play(workflow, client, *, agents=None, task=TASK, sampling=SAMPLING, lengths=(200, 100), family=None, **section):
    """Run `workflow(task, team)` and return (team, rows)."""
    agents = {name: {"model": "base", **(settings or {})} for name, settings in (agents or {"solver": None}).items()}
    config = parse({"agents": agents, **section})
    rollout = {"prompt_length": lengths[0], "response_length": lengths[1], "temperature": 1.0}

    async def session():
        trainer = DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
        loop = Loop(trainer, client, TOKENIZER, None, None, DictConfigWrap(OmegaConf.create({})), family)
        engine = Engine("base", client, loop, row_temperature=config.mixes_temperature(1.0))
        team = TrainingTeam(config, {"base": engine}, task, sampling, list(agents))
        outcome = await workflow(task, team)
        return team, team.rows(Plain(), outcome)

    return asyncio.run(session())


async def one_call(task, team):
    await team["solver"].act(PROMPT)
    return Outcome(1.0)


async def two_turns(task, team):
    async with team["solver"].converse(PROMPT) as talk:
        await talk.turn()
        talk.observe("Are you sure?")
        await talk.turn()
    return Outcome(1.0)


def test_what_was_said_before_a_failure_is_kept_without_a_reward():
    client = Client(["first", "second"])
    failure = SessionFailed("retrieval", "503")

    async def fails(task, team):
        await team["solver"].act(PROMPT)
        action = await team["solver"].act(PROMPT)
        action.fault = "retrieval"
        team.masked = team.masked_rows(failure)
        return Outcome(1.0)

    team, rows = play(fails, client)
    assert [row.response_ids for row in team.masked] == [row.response_ids for row in rows]
    assert [row.own_reward for row in team.masked] == [0.0, 0.0]
    assert team.masked[-1].reward_score == 0.0  # so that verl's reward loop isn't asked
    for order, row in enumerate(team.masked):
        fields = row.extra_fields
        assert (fields["failed"], fields["activation"], fields["session_metrics"]) == ("retrieval", order, None)
    assert [row.extra_fields["fault"] for row in team.masked] == [None, "retrieval"]


def test_a_session_that_failed_before_anybody_spoke_has_no_rows():
    async def fails(task, team):
        team.masked = team.masked_rows(SessionFailed("prompt_too_long"))
        await team["solver"].act(PROMPT)
        return Outcome(1.0)

    team, _ = play(fails, Client(["first"]))
    assert team.masked == []


def test_texts_are_counted_in_the_agents_own_tokens():
    counted = {}

    async def count(task, team):
        counted["mine"] = team["solver"].count_tokens("The user asks 12 + 30?")
        await team["solver"].act(PROMPT)
        return Outcome(1.0)

    play(count, Client(["first"]))
    assert counted["mine"] == len(encode("The user asks 12 + 30?"))


# -- what a row holds --------------------------------------------------------------------------------------------------


def test_a_row_is_exactly_what_was_sampled():
    sampled = [*(token for letter in "the answer" for token in encode(letter)), END]
    assert encode(TOKENIZER.decode(sampled)) != sampled  # the text would be tokenised in fewer tokens
    client = Client([sampled])
    team, (row,) = play(one_call, client)
    assert row.prompt_ids == client.asked[0].prompt_ids == render(PROMPT)
    assert row.response_ids == sampled
    assert row.response_mask == [1] * 11
    assert row.response_logprobs == logprobs(sampled)
    assert row.num_turns == 2
    assert (team.actions[0].prompt_tokens, team.actions[0].response_tokens) == (len(render(PROMPT)), 11)
    assert row.extra_fields["agent_id"] == "solver"
    assert row.extra_fields["model_id"] == "base"


@pytest.mark.parametrize("family", [None, "qwen3"])
def test_two_turns_mask_what_was_observed(family):
    first, second = [*encode("four"), END], [*encode("yes"), END]
    client = Client([first, second])
    _, (row,) = play(two_turns, client, family=family)
    observed = row.response_ids[len(first) : -len(second)]
    assert row.response_ids == first + observed + second
    assert row.response_mask == [1] * len(first) + [0] * len(observed) + [1] * len(second)
    assert row.response_logprobs == logprobs(first) + [0.0] * len(observed) + logprobs(second)
    # The second request is the row so far, token for token, and reads as the chat template has it.
    assert client.asked[1].prompt_ids == row.prompt_ids + first + observed
    seen = TOKENIZER.decode(client.asked[1].prompt_ids)
    assert "Are you sure?<|im_end|>\n<|im_start|>assistant\n" in seen
    if family == "qwen3":  # its builder also closes the assistant's turn as the template does
        whole = [*PROMPT, {"role": "assistant", "content": "four"}, {"role": "user", "content": "Are you sure?"}]
        assert client.asked[1].prompt_ids == render(whole)


def test_an_unanswered_observation_is_no_part_of_the_row():
    async def workflow(task, team):
        async with team["solver"].converse(PROMPT) as talk:
            await talk.turn()
            talk.observe("Thank you.")
            await talk.turn()
        return Outcome(1.0)

    first = [*encode("four"), END]
    _, (row,) = play(workflow, Client([first, []]))
    assert row.response_ids == first
    assert row.response_mask == [1] * len(first)
    assert len(row.response_logprobs) == len(first)


def test_rows_without_log_probs_when_the_engine_gives_none():
    _, (row,) = play(two_turns, Client(["four", "yes"], logprobs=False))
    assert row.response_logprobs is None
    assert row.response_mask[-1] == 1


def test_an_empty_first_turn_keeps_masks_and_log_probs_aligned():
    second = encode("four")
    _, (row,) = play(two_turns, Client([[], second]))
    assert len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs)
    assert row.response_mask == [0] * (len(row.response_mask) - len(second)) + [1] * len(second)
    assert row.response_logprobs[-len(second) :] == logprobs(second)


def test_weight_versions_span_the_turns():
    _, (row,) = play(two_turns, Client(["four", "yes"], steps=(4, 6)))
    assert row.extra_fields["min_global_steps"] == 4
    assert row.extra_fields["max_global_steps"] == 6
    assert row.metrics.num_preempted == 2
    assert row.metrics.generate_sequences > 0


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_response_length_bounds_the_row_with_its_observations():
    client = Client(["a" * 10, "b" * 80])
    team, (row,) = play(two_turns, client, agents={"solver": {"response_length": 60}})
    assert client.asked[0].max_tokens == 60
    assert len(row.response_ids) == 60
    observed = row.response_mask.count(0)
    assert observed > 10
    assert client.asked[1].max_tokens == 60 - 10 - observed
    assert team.actions[0].truncated
    assert row.extra_fields["counts"]["truncated"] == 1.0


def test_an_observation_that_leaves_no_room_ends_the_row():
    client = Client(["a" * 50])
    team, (row,) = play(two_turns, client, agents={"solver": {"response_length": 60}})
    assert len(client.asked) == 1
    assert len(row.response_ids) == 50
    assert row.response_mask == [1] * 50
    assert team.actions[0].truncated
    assert team.actions[0].text == ""  # the last turn said nothing
    assert team.actions[0].turns == 1


def test_turn_length_bounds_one_call():
    client = Client(["a" * 30])
    _, (row,) = play(one_call, client, agents={"solver": {"turn_length": 8}})
    assert client.asked[0].max_tokens == 8
    assert len(row.response_ids) == 8


def test_the_run_decides_where_the_agent_does_not():
    client = Client(["a" * 500])
    _, (row,) = play(one_call, client, lengths=(200, 33))
    assert client.asked[0].max_tokens == len(row.response_ids) == 33


def test_an_over_long_prompt_loses_its_middle_but_not_the_question():
    messages = [{"role": "user", "content": f"Notes: {'x' * 400} end of notes. {TASK.question}"}]

    async def workflow(task, team):
        await team["solver"].act(messages)
        return Outcome(1.0)

    client = Client(["four"])
    _, (row,) = play(workflow, client, lengths=(80, 20))
    seen = TOKENIZER.decode(row.prompt_ids)
    assert len(row.prompt_ids) <= 80
    assert TASK.question in seen
    assert "Notes:" in seen
    assert seen.startswith("<|im_start|>user")  # the role isn't cut
    assert 300 < row.extra_fields["counts"]["cut_characters"] < 400
    assert messages[0]["content"].count("x") == 400  # the workflow's own messages are left alone


def test_a_prompt_that_fits_is_not_cut():
    _, (row,) = play(one_call, Client(["four"]))
    assert row.extra_fields["counts"]["cut_characters"] == 0.0


def test_a_question_that_does_not_fit_fails_the_session():
    with pytest.raises(SessionFailed) as failed:
        play(one_call, Client(["four"]), agents={"solver": {"prompt_length": 12}})
    assert failed.value.reason == "prompt_too_long"


# -- empty outputs -----------------------------------------------------------------------------------------------------


async def solve_and_verify(task, team):
    await team["solver"].act(PROMPT)
    await team["verifier"].act(PROMPT)
    return Outcome(0.5, correct=1.0, metrics={"rounds": 1.0})


PAIR = {"solver": None, "verifier": None}


def test_an_agent_that_sampled_nothing_leaves_no_row():
    team, (row,) = play(solve_and_verify, Client([[], "no"]), agents=PAIR)
    assert row.extra_fields["agent_id"] == "verifier"
    assert row.extra_fields["activation"] == 0
    assert row.extra_fields["session_metrics"]["empty_outputs"] == 1.0
    assert [a.empty for a in team.actions] == [True, False]


def test_a_session_without_any_token_fails():
    with pytest.raises(SessionFailed) as failed:
        play(solve_and_verify, Client([[]]), agents=PAIR)
    assert failed.value.reason == "empty"


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_each_agent_samples_its_own_way():
    client = Client(["four"])
    agents = {"solver": {"sampling": {"temperature": 0.7, "stop": ["\n\n"], "top_p": 0.9}}, "verifier": None}
    _, rows = play(solve_and_verify, client, agents=agents)
    solver, verifier = client.asked
    assert (solver.temperature, solver.top_p, solver.stop) == (0.7, 0.9, ["\n\n"])
    assert (verifier.temperature, verifier.top_p, hasattr(verifier, "stop")) == (1.0, 1.0, False)
    assert solver.logprobs is True
    assert [row.row_temperature for row in rows] == [0.7, 1.0]


def test_rows_carry_no_temperature_where_all_sample_alike():
    _, rows = play(solve_and_verify, Client(["four"]), agents=PAIR)
    assert [row.row_temperature for row in rows] == [None, None]
    assert "row_temperature" not in rows[0].as_dict()


def test_validation_keeps_the_runs_sampling():
    client = Client(["four"])
    task = Task(question="q", validate=True)
    greedy = {**SAMPLING, "temperature": 0.0, "top_p": 0.95, "top_k": 5}
    sampling = {"temperature": 0.7, "top_p": 0.5, "top_k": 9, "stop": ["."], "repetition_penalty": 1.2}
    play(one_call, client, agents={"solver": {"sampling": sampling}}, task=task, sampling=greedy)
    (asked,) = client.asked
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.0, 0.95, 5)
    assert (asked.stop, asked.repetition_penalty) == (["."], 1.2)


def test_the_runs_sampling_is_never_changed():
    sampling = dict(SAMPLING)
    play(one_call, Client(["four"]), agents={"solver": {"sampling": {"temperature": 0.7}}}, sampling=sampling)
    assert sampling == SAMPLING


# -- seeds -------------------------------------------------------------------------------------------------------------


async def three_calls(task, team):
    await team["solver"].act(PROMPT)
    await team["verifier"].act(PROMPT)
    await two_turns(task, team)
    return Outcome(1.0)


def seeds(client):
    return [asked.seed for asked in client.asked]


def test_every_call_has_a_seed_of_its_own_and_a_repeated_session_the_same():
    first, again, other = (Client(["four"]) for _ in range(3))
    play(three_calls, first, agents=PAIR, request_seed=1)
    play(three_calls, again, agents=PAIR, request_seed=1)
    play(three_calls, other, agents=PAIR, request_seed=1, task=Task(question="q", index=3, session=2, step=5))
    assert len(set(seeds(first))) == 4
    assert seeds(first) == seeds(again)
    assert not set(seeds(first)) & set(seeds(other))


def test_no_request_seed_no_seed():
    client = Client(["four"])
    play(one_call, client)
    assert not hasattr(client.asked[0], "seed")


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_parallel_agents_have_the_same_paths_whoever_ends_first(slow):
    questions = [[{"role": "user", "content": f"Say {i}."}] for i in range(3)]

    async def workflow(task, team):
        await asyncio.gather(
            *(team[a].act(q) for a, q in zip(("solver", "verifier", "solver"), questions, strict=True))
        )
        return Outcome(1.0)

    client = Client([lambda prompt: prompt[prompt.index("Say") :][:6]], delays={slow: 0.02})
    _, rows = play(workflow, client, agents=PAIR, request_seed=1)
    by_path = {r.extra_fields["path"]: TOKENIZER.decode(r.response_ids) for r in rows}
    assert by_path == {"solver.0": "Say 0.", "verifier.0": "Say 1.", "solver.1": "Say 2."}
    assert [r.extra_fields["path"] for r in rows] == ["solver.0", "verifier.0", "solver.1"]
    asked = {TOKENIZER.decode(a.prompt_ids)[17:25]: a.seed for a in client.asked}
    reference = Client([lambda prompt: prompt[prompt.index("Say") :][:6]])
    play(workflow, reference, agents=PAIR, request_seed=1)
    assert asked == {TOKENIZER.decode(a.prompt_ids)[17:25]: a.seed for a in reference.asked}


# -- rewards -----------------------------------------------------------------------------------------------------------


async def scored(task, team):
    first = await team["solver"].act(PROMPT)
    second = await team["verifier"].act(PROMPT)
    first.reward_parts["style"] = 0.25
    second.valid = False
    return Outcome(0.5, correct=1.0, metrics={"rounds": 1.0})


def test_each_row_has_the_workflows_reward():
    _, rows = play(scored, Client(["four"]), agents=PAIR)
    assert [row.own_reward for row in rows] == [0.75, 0.5]
    assert [row.extra_fields["valid"] for row in rows] == [True, False]
    assert rows[0].extra_fields["reward_parts"] == {"style": 0.25}
    assert [row.reward_score for row in rows] == [None, 0.5]  # so that verl's own reward loop isn't asked


def test_extra_info_has_the_same_keys_on_every_row():
    _, rows = play(scored, Client(["four"]), agents=PAIR)
    infos = [row.extra_fields["reward_extra_info"] for row in rows]
    assert infos[0] == infos[1]
    assert infos[0]["acc"] == 1.0
    assert infos[0]["outcome"] == 0.5
    assert infos[0]["session/rounds"] == 1.0


def test_only_the_first_row_carries_the_sessions_numbers():
    _, rows = play(scored, Client(["four"]), agents=PAIR)
    assert rows[0].extra_fields["session_metrics"] == {"rounds": 1.0, "outcome": 0.5, "empty_outputs": 0.0}
    assert rows[1].extra_fields["session_metrics"] is None


def test_the_reward_counts_as_correct_where_the_workflow_says_no_more():
    _, (row,) = play(one_call, Client(["four"]))
    assert row.extra_fields["reward_extra_info"]["acc"] == 1.0


def test_an_agent_the_workflow_does_not_declare_is_refused():
    async def workflow(task, team):
        await team["judge"].act(PROMPT)

    with pytest.raises(KeyError, match="judge"):
        play(workflow, Client(["four"]))


# -- several models ----------------------------------------------------------------------------------------------------

LLAMA, QWEN3 = character_tokenizer("llama"), character_tokenizer("qwen3")  # the same letters under other ids
SUM = [{"role": "user", "content": "S:3+4="}]
PAIR_ON_TWO = {"solver": {"model": "a"}, "verifier": {"model": "b"}}


def play_on(clients, tokenizers, agents, *, differs=None, task=TASK):
    """Solver and verifier on models of their own; `differs` is what a model samples differently. Returns the rows."""
    config = parse({"agents": agents, "models": {m: {} for m in clients}, "request_seed": 1})
    rollout = {"prompt_length": 50, "response_length": 20, "temperature": 1.0}

    async def workflow(team):
        await team["solver"].act(SUM)
        await team["verifier"].act(SUM)
        return Outcome(1.0)

    async def session():
        trainer = DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
        loops = {
            m: Loop(trainer, c, tokenizers[m], None, None, DictConfigWrap(OmegaConf.create({})))
            for m, c in clients.items()
        }
        engines = {m: Engine(m, c, loops[m], (differs or {}).get(m, {}), True) for m, c in clients.items()}
        team = TrainingTeam(config, engines, task, SAMPLING, list(agents))
        outcome = await workflow(team)
        return team, team.rows(Plain(), outcome)

    return asyncio.run(session())


def test_each_agent_asks_its_own_model_in_its_models_tokens():
    clients = {"a": Client([LLAMA.encode("7")]), "b": Client([QWEN3.encode("y")])}
    team, rows = play_on(clients, {"a": LLAMA, "b": QWEN3}, PAIR_ON_TWO)
    assert [row.extra_fields["model_id"] for row in rows] == ["a", "b"]
    assert [len(client.asked) for client in clients.values()] == [1, 1]
    assert rows[0].prompt_ids == clients["a"].asked[0].prompt_ids == LLAMA.encode("S:3+4=")
    assert rows[1].prompt_ids == clients["b"].asked[0].prompt_ids == QWEN3.encode("S:3+4=")
    assert rows[0].prompt_ids != rows[1].prompt_ids
    assert [action.text for action in team.actions] == ["7", "y"]


@pytest.mark.parametrize("tokenizers", [{"a": LLAMA, "b": QWEN3}, {"a": QWEN3, "b": LLAMA}])
def test_the_end_token_is_the_models_own(tokenizers):
    full = [12] * 19  # the end token fills the row up to its limit of 20
    clients = {m: Client([[*full, t.eos_token_id]]) for m, t in tokenizers.items()}
    team, _ = play_on(clients, tokenizers, PAIR_ON_TWO)
    assert [action.truncated for action in team.actions] == [False, False]
    other = {m: Client([[*full, t.eos_token_id]]) for m, t in zip("ba", tokenizers.values(), strict=True)}
    assert LLAMA.eos_token_id != QWEN3.eos_token_id
    team, _ = play_on(other, tokenizers, PAIR_ON_TWO)
    assert [action.truncated for action in team.actions] == [True, True]


def test_a_model_samples_its_own_way_and_an_agent_goes_before_it():
    clients = {"a": Client([[5]]), "b": Client([[5]])}
    agents = {**PAIR_ON_TWO, "verifier": {"model": "b", "sampling": {"top_p": 0.5}}}
    differs = {"b": {"temperature": 0.6, "top_p": 0.9}}
    _, rows = play_on(clients, {"a": LLAMA, "b": QWEN3}, agents, differs=differs)
    (solver,), (verifier,) = clients["a"].asked, clients["b"].asked
    assert (solver.temperature, solver.top_p) == (1.0, 1.0)
    assert (verifier.temperature, verifier.top_p) == (0.6, 0.5)
    assert [row.row_temperature for row in rows] == [1.0, 0.6]  # what training divides by


def test_validation_samples_all_models_alike():
    clients = {"a": Client([[5]]), "b": Client([[5]])}
    task = Task(question="q", validate=True)
    play_on(clients, {"a": LLAMA, "b": QWEN3}, PAIR_ON_TWO, differs={"b": {"temperature": 0.6}}, task=task)
    assert clients["a"].asked[0].temperature == clients["b"].asked[0].temperature == 1.0


def test_seeds_depend_on_the_agents_and_not_on_their_models():
    """So that a separate mapping with two copies of the weights samples what the shared one does."""
    shared = Client([[5]])
    play_on({"a": shared}, {"a": LLAMA}, {agent: {"model": "a"} for agent in PAIR_ON_TWO})
    clients = {"a": Client([[5]]), "b": Client([[5]])}
    play_on(clients, {"a": LLAMA, "b": LLAMA}, PAIR_ON_TWO)
    assert seeds(shared) == seeds(clients["a"]) + seeds(clients["b"])
    assert len(set(seeds(shared))) == 2
