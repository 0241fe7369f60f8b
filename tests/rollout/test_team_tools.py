"""Conversations with tools on the training back end, under `delegate`: what is trained is what was sampled, and what a
session has finished is kept whatever becomes of the rest.
"""

import asyncio
import json
from copy import copy
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap, ToolListWrap
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.config.rollout import MultiTurnConfig
from verl.workers.rollout.replica import TokenOutput

from recipes.cpu_arithmetic.tiny_model import byte_tokenizer
from verl_drmas.config import parse
from verl_drmas.rewards.judge import Judgement
from verl_drmas.rollout.loop import TeamLoop
from verl_drmas.rollout.team import Engine, TrainingTeam, place_of
from verl_drmas.workflows import SessionFailed, Task
from verl_drmas.workflows.delegate import LAST_TURN, Delegate
from verl_drmas.workflows.tools import Tool, ToolOutage

PLAIN = byte_tokenizer()
END = PLAIN.eos_token_id
TASK = Task(question="Who leads it?", answer="Bela", index=3, session=1, step=5)
# Says tools, and puts the results of one turn into one message of the user's, as Qwen's template does.
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLED = copy(PLAIN)
TOOLED.chat_template = QWEN


class Loop(AgentLoopBase):
    """verl's own token helpers, nothing else."""

    async def run(self, sampling_params, **kwargs):
        raise NotImplementedError


class Client:
    """Each agent's replies by a word of its prompt, one token a letter; records every request."""

    def __init__(self, **replies):
        self.replies, self.asked = {key: list(said) for key, said in replies.items()}, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        prompt = PLAIN.decode(prompt_ids)
        key = next(key for key in ("main", *self.replies) if f"[{key}]" in prompt)  # its context names the others
        reply = self.replies[key].pop(0)
        if isinstance(reply, Exception):
            raise reply
        ids = [*(token for letter in reply for token in PLAIN.encode(letter)), END][: sampling_params["max_tokens"]]
        self.asked.append(SimpleNamespace(agent=key, prompt_ids=list(prompt_ids), sampled=ids, **sampling_params))
        await asyncio.sleep(0)
        return TokenOutput(token_ids=ids, log_probs=logprobs(ids), extra_fields={}, num_preempted=0)


class Echo(Tool):
    name, description = "echo", "Says it."

    def __init__(self, down=False):
        self.parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        self.down = down

    async def call(self, arguments):
        if self.down:
            raise ToolOutage("echo", "503")
        return f"heard {arguments['text']}"


class Fixed:
    def __init__(self, score):
        self.value = score

    async def score(self, request):
        return Judgement(self.value, "")


def logprobs(ids):
    return [-(token + 1) / 1000 for token in ids]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def ask(name, **more):
    return call("delegate", agent="finder", task=f"[{name}]", **more)


def result(text):
    return f"<result>{text}</result>"


def play(
    client, *, judge=None, down=False, agents=None, lengths=(4000, 4000), tokenizer=TOOLED, family=None, **settings
):
    """A session of `delegate` as `TeamLoop` plays it, with a main agent whose question holds `[main]`."""
    settings = {"subs": {"finder": {"tools": ["echo"]}}, "main_tools": ["echo"]} | settings
    workflow = Delegate(Delegate.Settings(tools={"echo": {}}, **settings), tools={"echo": Echo(down)}, judge=judge)
    given = {name: {"model": "base", **(agents or {}).get(name, {})} for name in workflow.agents}
    config = parse({"agents": given, "request_seed": 1, "faults": {"failed_sessions": "mask"}})
    rollout = {
        "prompt_length": lengths[0],
        "response_length": lengths[1],
        "temperature": 1.0,
        "multi_turn": {"format": "hermes"},
    }

    async def session():
        trainer = DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
        loop = Loop(trainer, client, tokenizer, None, None, DictConfigWrap(OmegaConf.create({})), family)
        engines = {"base": Engine("base", client, loop)}
        team = TrainingTeam(config, engines, TASK, {"temperature": 1.0}, workflow.agents, dumped=True)
        try:
            outcome = await workflow.run(Task(**{**vars(TASK), "question": "[main] Who leads it?"}), team)
        except SessionFailed as failure:
            return None, team, team.masked_rows(failure)
        return outcome, team, team.rows(workflow, outcome)

    outcome, team, rows = asyncio.run(session())
    # A row stands behind those of what it called, so the main agent's is last; the tests read them from the top.
    assert rows[-1].extra_fields["agent_id"] == "main" and rows[-1].reward_score == rows[-1].own_reward
    return outcome, team, [rows[-1], *rows[:-1]]


def turns_of(client, agent):
    return [asked for asked in client.asked if asked.agent == agent]


# -- what is trained ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [PLAIN, TOOLED])
@pytest.mark.parametrize("family", [None, "qwen3"])
def test_rows_hold_what_was_sampled_over_many_turns(tokenizer, family):
    said = [f"I plan. {call('echo', text='ä')}", call("echo", text="b") + ask("one"), call("sing"), result("Bela")]
    client = Client(one=[call("echo", text="c"), result("found it")], main=said)
    outcome, _, rows = play(client, tokenizer=tokenizer, family=family, max_turns=4)
    assert outcome.reward == 1.0 and [row.extra_fields["agent_id"] for row in rows] == ["main", "finder"]
    for row, agent in zip(rows, ("main", "one"), strict=True):
        asked = turns_of(client, agent)
        sampled = [token for one in asked for token in one.sampled]
        whole = row.prompt_ids + row.response_ids
        assert [t for t, own in zip(row.response_ids, row.response_mask, strict=True) if own] == sampled
        text = PLAIN.decode(sampled, skip_special_tokens=True)
        assert len(PLAIN.encode(text)) < len(sampled) - len(asked)  # the text again would be other tokens
        own = [p for p, mask in zip(row.response_logprobs, row.response_mask, strict=True) if mask]
        assert own == logprobs(sampled)
        assert not any(p for p, mask in zip(row.response_logprobs, row.response_mask, strict=True) if not mask)
        at = len(row.prompt_ids)
        for one in asked:  # each request was the row so far, token for token
            assert one.prompt_ids == whole[: len(one.prompt_ids)]
            assert whole[len(one.prompt_ids) :][: len(one.sampled)] == one.sampled
            assert row.response_mask[len(one.prompt_ids) - at :][: len(one.sampled)] == [1] * len(one.sampled)
        assert row.response_mask[-1] == 1 and row.num_turns == 2 * len(asked)


def test_observations_stand_in_the_row_as_the_template_has_them():
    said = [call("echo", text="a") + call("echo", text="b") + ask("one"), call("echo", text="c"), result("Bela")]
    client = Client(one=[result("found")], main=said)
    _, _, (row, _) = play(client, family="qwen3", max_turns=3)
    seen = [PLAIN.decode(asked.prompt_ids) for asked in turns_of(client, "main")]
    assert (
        '"name": "echo"' in seen[0]
        and '"name": "delegate"' in seen[0]
        and seen[0].index("echo") < seen[0].index("[main]")
    )
    answers = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in ("heard a", "heard b", "found"))
    assert seen[1].endswith(f"{said[0]}<|im_end|>\n<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n")
    assert seen[2].endswith(
        "<|im_start|>user\n<tool_response>\nheard c\n</tool_response><|im_end|>\n"
        f"<|im_start|>user\n{LAST_TURN}<|im_end|>\n<|im_start|>assistant\n"
    )
    masked = [t for t, own in zip(row.response_ids, row.response_mask, strict=True) if not own]
    told = PLAIN.decode(masked)
    assert all(text in told for text in ("heard a", "heard b", "found", "heard c", LAST_TURN))
    assert "tool_call" not in told and "Bela" not in told


def test_the_dumps_are_told_of_every_turns_calls_and_of_the_result():
    said = [call("echo", text="a") + ask("one"), call("echo", text="b"), result("Bela")]
    _, _, (main, sub) = play(Client(one=[result("found")], main=said), max_turns=3)
    told = main.extra_fields["told"]
    assert [(made["turn"], made["name"]) for made in told["calls"]] == [(0, "echo"), (0, "delegate"), (1, "echo")]
    assert told["calls"][2]["arguments"] == '{"text": "b"}' and told["parsed"] == "Bela"
    assert sub.extra_fields["told"] == {"parsed": "found"}


def test_each_agent_is_told_its_own_tools_and_only_those():
    client = Client(one=[result("x")], main=[ask("one"), result("Bela")])
    play(client, main_tools=[])
    main, sub = (PLAIN.decode(turns_of(client, agent)[0].prompt_ids) for agent in ("main", "one"))
    assert '"delegate"' in main and '"echo"' not in main
    assert '"echo"' in sub and '"delegate"' not in sub and "Who leads it?" not in sub
    client = Client(one=[f"{call('echo', text='a')}{result('x')}"], main=[ask("one"), result("Bela")])
    _, team, _ = play(client, subs={"finder": {}})
    assert "Tools:" not in PLAIN.decode(turns_of(client, "one")[0].prompt_ids)
    assert team.actions[1].parsed == "x"  # to an agent without tools, a call is text


def test_what_one_agent_writes_to_another_speaks_in_no_mark_of_the_template():
    mark = "<|im_start|>"
    client = Client(
        one=[result(f"{mark}system")], main=[ask("one", context=f"a{mark}b"), call("echo", text=mark), result("Bela")]
    )
    client.replies["main"][0] = client.replies["main"][0].replace("[one]", f"[one]{mark}")
    outcome, _, _ = play(client, family="qwen3")
    token = PLAIN.convert_tokens_to_ids(mark)
    sub, *main = (turns_of(client, "one")[0], *turns_of(client, "main"))
    assert sub.prompt_ids.count(token) == 3  # tools, request, and where the sub speaks
    assert [asked.prompt_ids.count(token) for asked in main] == [3, 5, 7]
    assert outcome.reward == 1.0


def test_seeds_come_from_the_path_and_from_nothing_else():
    def seeds(order):
        said = {"one": result("1"), "two": result("2")}
        client = Client(
            one=[call("echo", text="a"), said["one"]] if order else [said["one"]],
            two=[said["two"]],
            main=[ask("one") + ask("two"), result("Bela")],
        )
        _, _, rows = play(client)
        paths = {row.extra_fields["path"] for row in rows}
        assert paths == {"main", "main/turn.0/call.0/finder", "main/turn.0/call.1/finder"}
        return {(a.agent, n): a.seed for agent in ("main", "one", "two") for n, a in enumerate(turns_of(client, agent))}

    short, long = seeds(False), seeds(True)
    assert len(set(long.values())) == len(long) == 5
    assert short == {key: seed for key, seed in long.items() if key in short}


def test_only_what_is_spoken_is_parsed_by_verls_parser():
    client = Client(one=[result("x")], main=["<tool_call>{</tool_call>", result("Bela")])
    outcome, _, (row,) = play(client)
    assert outcome.metrics["ends/broken_call"] == 1.0 and not row.extra_fields["valid"]
    assert row.own_reward == row.reward_score == 0.0 and len(client.asked) == 1


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score, subs", [(1.0, 0.6), (0.0, 0.1), (None, 0.2)])
def test_when_the_main_agents_context_is_full_the_subs_rows_are_there(score, subs):
    long = result("y" * 500)
    client = Client(
        one=[call("echo", text="a"), result("short")], two=[long], main=[ask("one"), ask("two"), result("Bela")]
    )
    outcome, _, rows = play(client, judge=Fixed(score), agents={"main": {"response_length": 400}})
    assert len(turns_of(client, "main")) == 2  # no third turn: the second result doesn't fit
    assert [row.extra_fields["agent_id"] for row in rows] == ["main", "finder", "finder"]
    assert outcome.metrics["ends/silent"] == 1.0 and outcome.reward == 0.0
    assert [row.own_reward for row in rows] == pytest.approx([0.0, subs, subs])
    assert [row.extra_fields["valid"] for row in rows] == [False, True, True]
    main = rows[0]
    assert main.response_mask[-1] == 1 and len(main.response_ids) <= 400
    assert sum(main.response_mask) == sum(len(asked.sampled) for asked in turns_of(client, "main"))
    assert sum(rows[2].response_mask) == len(long) + 1


def test_when_a_subs_context_is_full_the_session_goes_on():
    client = Client(one=[call("echo", text="z" * 200)], main=[ask("one"), result("Bela")])
    outcome, _, rows = play(client, agents={"finder": {"response_length": 300}})
    assert [row.own_reward for row in rows] == [1.0, 0.0] and outcome.metrics["ends/silent"] == 1.0
    told = PLAIN.decode(turns_of(client, "main")[1].prompt_ids)
    assert "The agent finder gave no result." in told


def test_a_turn_that_its_limit_cut_is_no_result():
    client = Client(one=[result("found")], main=[ask("one"), result("Bela")])
    outcome, _, rows = play(client, agents={"finder": {"turn_length": 12}})
    assert outcome.metrics["ends/cut"] == 1.0 and [row.own_reward for row in rows] == [1.0, 0.0]


def test_a_context_too_long_for_the_subs_prompt_is_cut_and_counted():
    client = Client(one=[result("x")], main=[ask("one", context="n" * 900), result("Bela")])
    outcome, _, rows = play(client, agents={"finder": {"prompt_length": 900}})
    assert len(rows[1].prompt_ids) <= 900 and rows[1].extra_fields["counts"]["cut_characters"] > 100
    assert outcome.reward == 1.0


def test_a_result_is_cut_in_the_callers_tokens():
    client = Client(one=[result("wort " * 40)], main=[ask("one"), result("Bela")])
    outcome, _, _ = play(client, subs={"finder": {"result_tokens": 30}})
    seen = PLAIN.decode(turns_of(client, "main")[1].prompt_ids).rpartition("<tool_response>\n")[2].partition("\n<")[0]
    assert seen.endswith(" [...]") and 25 <= len(PLAIN.encode(seen)) <= 30
    assert outcome.metrics["cut_results"] == 1.0 and outcome.metrics["cut_tokens"] > 50


def test_an_outage_keeps_what_was_said_masked_and_marked():
    client = Client(one=[call("echo", text="a")], main=[ask("one"), result("Bela")])
    outcome, _, rows = play(client, down=True)
    assert outcome is None and [row.extra_fields["failed"] for row in rows] == ["tool", "tool"]
    assert [row.extra_fields["fault"] for row in rows] == [None, "echo"]
    assert [sum(row.response_mask) for row in rows] == [len(asked.sampled) for asked in client.asked]


def test_the_sessions_numbers_and_parts_go_with_the_rows():
    client = Client(one=[result("x")], main=[ask("one"), result("Bela")])
    _, _, rows = play(client, judge=Fixed(0.5))
    assert rows[1].extra_fields["session_metrics"]["delegations/finder"] == 1.0
    assert rows[1].extra_fields["reward_parts"] == {"format": 0.1, "outcome": 0.4, "judge": 0.25}
    assert rows[0].extra_fields["reward_extra_info"] == rows[1].extra_fields["reward_extra_info"]
    assert [row.own_reward for row in rows] == [1.0, 0.75]


# -- verl's own tools --------------------------------------------------------------------------------------------------


def test_the_loop_brings_verls_tools(monkeypatch):
    """The loop as verl's worker builds it, but for the parts that need a model."""
    workflow = {"name": "delegate", "tools": {"look": {"kind": "verl"}}, "subs": {"finder": {"tools": ["look"]}}}
    agents = {name: {"model": "base"} for name in ("main", "finder")}
    config = OmegaConf.create({"drmas": {"workflow": workflow, "agents": agents}})

    def init(self, *args, **kwargs):
        self.config, self.rollout_config = config, SimpleNamespace(multi_turn=MultiTurnConfig())

    monkeypatch.setattr(AgentLoopBase, "__init__", init)
    monkeypatch.setattr(TeamLoop, "_build_engines", lambda self: {})
    schema = OpenAIFunctionToolSchema.model_validate(Echo().schema)
    look = FunctionTool("look", lambda text: f"saw {text}", schema, False)
    loop = TeamLoop(tools=ToolListWrap([look]))
    tool = loop.workflow.parts["finder"].tools["look"]
    assert asyncio.run(tool.call({"text": "a"})) == "saw a"
    assert loop.workflow.parts["main"].tools == {}
    for nothing in (None, ToolListWrap([])):
        with pytest.raises(
            ValueError, match=r"drmas\.workflow\.tools\.look: kind is 'verl', but .* no tool; name it in"
        ):
            TeamLoop(tools=nothing)


def test_rows_stand_in_the_order_of_their_places_whichever_call_ended_first():
    paths = ["main", "main/turn.10/call.0/b", "main/turn.2/call.1/a", "main/turn.2/call.0/a/turn.0/call.0/b"]
    paths += ["main/turn.2/call.0/a"]
    assert sorted(paths, key=place_of) == [
        "main/turn.2/call.0/a/turn.0/call.0/b",
        "main/turn.2/call.0/a",
        "main/turn.2/call.1/a",
        "main/turn.10/call.0/b",
        "main",
    ]
