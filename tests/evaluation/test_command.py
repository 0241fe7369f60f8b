"""`verl-drmas eval` against a server: what is asked, kept, counted and shown, and what ends it."""

import asyncio
import collections
import json
import re
import sys
import threading

import pytest
from aiohttp import web
from typer.testing import CliRunner

from verl_drmas.data.parquet import prompt_row, write_rows
from verl_drmas.evaluation import run as run_module
from verl_drmas.evaluation.command import eval_app
from verl_drmas.evaluation.completions import MARGIN
from verl_drmas.evaluation.sessions import WorkflowBug
from verl_drmas.rollout.seeds import call_seed
from verl_drmas.workflows.delegate import Delegate

# How often the solver is right in 4 sessions, by question.
RIGHT = {"1+1": 0, "1+2": 1, "1+3": 2, "1+4": 4}


class Arithmetic:
    """Replies for the workflow `arithmetic`: each question is solved in `RIGHT` of its sessions, as they come."""

    def __init__(self):
        self.solved, self.questions = collections.Counter(), []
        self.broken = lambda question: False

    def __call__(self, body):
        said = body["messages"][-1]["content"]
        if said.startswith("V:"):
            return "y"
        question = said.removeprefix("S:").removesuffix("=")
        if self.broken(question):
            return web.Response(status=400, text="broken")
        self.questions.append(question)
        self.solved[question] += 1
        return str(eval(question)) if self.solved[question] <= RIGHT[question] else "0"


@pytest.fixture
def reply():
    return Arithmetic()


@pytest.fixture
def server(serve, reply):
    return serve(reply)


@pytest.fixture
def prompts(tmp_path):
    rows = [
        prompt_row(question, str(eval(question)), data_source="low" if i < 2 else "high", split="test", index=i + 5)
        for i, question in enumerate(RIGHT)
    ]
    return write_rows(rows, tmp_path / "prompts.parquet")


def command(*arguments):
    result = CliRunner().invoke(eval_app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def evaluate(prompts, server, tmp_path):
    """Runs the command over the prompts with 4 samples; returns status, what was said, and the summary."""

    def run(*more, output="results.jsonl", team=None):
        team = team or ("--workflow", "arithmetic", "--url", server.url, "--model", "tiny")
        numbers = tmp_path / "numbers.json"
        numbers.unlink(missing_ok=True)
        code, told = command(prompts, "-o", tmp_path / output, "-n", 4, "--json", numbers, *team, *more)
        return code, told, json.loads(numbers.read_text()) if numbers.exists() else None

    return run


def test_scores_tokens_and_calls(evaluate, server, tmp_path):
    code, told, found = evaluate()
    assert code == 0, told
    low, high, macro = (
        {name: score["value"] for name, score in scores.items()}
        for scores in (
            found["sources"]["low"]["scores"], found["sources"]["high"]["scores"], found["macro_average"]
        )
    )  # fmt: skip
    assert low == pytest.approx({"avg@4": 0.125, "pass@2": 0.25, "pass@4": 0.5})
    assert high == pytest.approx({"avg@4": 0.75, "pass@2": (1 - 1 / 6 + 1) / 2, "pass@4": 1.0})
    assert macro == pytest.approx({name: (low[name] + high[name]) / 2 for name in low})
    assert found["sessions"] == {"asked": 16, "ended": 16, "failed": {}} and found["complete"]
    assert len(server.asked) == 32
    solver = found["agents"]["solver"]
    assert (solver["calls"], solver["prompt_tokens"], solver["response_tokens"]) == (16, 16 * 11, 16 * 3)
    assert (solver["activations"], solver["valid"], solver["sessions"]) == (16, 16, 16)
    assert (solver["cost"], found["cost"]) == (None, None)
    assert 0 < solver["latency"]["p50"] <= solver["latency"]["p95"] < found["session_seconds"]["p95"]
    assert found["workflow_metrics"]["solver_success"] == pytest.approx(7 / 16)
    assert re.search(r"low +│ +2 │ +12.5 ± 12.5 │ +25.0 ± 25.0 │ +50.0 ± 50.0 │ +0 │", told)
    assert re.search(r"macro average +│ +4 │ +43.8", told) and "cost" not in told
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1 + 1 + 16


def test_requests_are_the_papers_evaluation(evaluate, server):
    evaluate("--seed", 3, "--max-tokens", 9)
    assert {(b["model"], b["temperature"], b["top_p"], b["max_tokens"]) for b in server.asked} == {
        ("tiny", 0.6, 0.95, 9)
    }
    first = call_seed(3, index=5, session=0, step=0, path="solver.0/turn.0", validate=True)
    assert len({b["seed"] for b in server.asked}) == 32 and first in {b["seed"] for b in server.asked}


def test_nothing_that_ended_is_played_again(evaluate, server):
    first = evaluate()[2]
    server.stop()  # and no server is needed to look at the numbers again
    code, told, again = evaluate()
    assert code == 0, told
    assert again == first and len(server.asked) == 32


def test_more_of_it_goes_on_from_there(evaluate, server):
    evaluate("--limit", 2, "-n", 2)
    assert len(server.asked) == 8
    found = evaluate("-n", 2)[2]
    assert len(server.asked) == 16 and found["sessions"]["ended"] == 8
    found = evaluate("--runs", 2)[2]
    assert len(server.asked) == 64 and found["sessions"]["ended"] == 32
    narrowed = evaluate("--limit", 1, "-n", 2)[2]  # and less of it plays nothing and leaves nothing out
    assert len(server.asked) == 64 and narrowed["sessions"]["asked"] == 2 and narrowed["sources"].keys() == {"low"}


def test_runs_are_reported_each_and_seeded_apart(evaluate, server):
    code, told, found = evaluate("--runs", 3, "--seed", 1)
    assert code == 0, told
    score = found["sources"]["low"]["scores"]["avg@4"]
    assert score["runs"] == [0.125, 0.0, 0.0] and score["value"] == pytest.approx(0.125 / 3)
    assert score["runs_error"] == pytest.approx(0.125 / 3)
    assert re.search(r"low +│ avg@4 +│ +12.5 │ +0.0 │ +0.0 │ +4.2 ± 4.2 │", told)
    assert "mean of 3 runs" in told
    assert len({b["seed"] for b in server.asked}) == 96


def test_failed_sessions_are_counted_apart_and_played_again(evaluate, server, reply):
    calls = collections.Counter()

    def broken(question):
        calls[question] += 1
        return question == "1+1" or (question == "1+4" and calls[question] == 1)

    reply.broken = broken
    code, told, found = evaluate("--concurrency", 1)
    assert code == 0, told
    assert found["sessions"] == {"asked": 16, "ended": 11, "failed": {"server": 5}} and not found["complete"]
    assert found["sources"]["low"]["scores"]["avg@4"]["value"] == 0.25  # of the one prompt that could be asked
    assert found["sources"]["high"]["scores"]["avg@4"]["value"] == 0.75
    assert re.search(r"low +│ +1 of 2 │ +25.0 │ .* 4 │", told)
    assert "5 sessions failed (5 server) and count neither as right nor as wrong" in told
    assert re.search(r"the first of them \(run 0, row 0, session 0\): server: http://.*: status 400: broken", told)
    # Of row 3 one session failed: it is in the average, and not in pass@4.
    assert re.search(r"high +│ +2 │ +75.0 ± 25.0 │ .* │ +100.0\* \(1\) │ +1 │", told), told
    assert re.search(r"macro average +│ +4 │ [^*]+ │ [^*]+ │ +\d+\.\d\* │ +5 │", told), told
    assert "* over fewer prompts (in brackets): those with at least k sessions that ended" in told
    reply.broken = lambda question: False
    asked = len(server.asked)
    code, told, found = evaluate()
    assert found["sessions"] == {"asked": 16, "ended": 16, "failed": {}}
    assert len(server.asked) == asked + 10
    assert "the first of them" not in told and "over fewer prompts" not in told
    assert "5 failed attempts took 0 prompt and 0 response tokens, which the tables leave out" in told


def test_a_source_that_nobody_answered_for_has_no_score(evaluate, reply):
    reply.broken = lambda question: question in ("1+1", "1+2")
    code, told, found = evaluate("--concurrency", 1, "-n", 2)
    assert code == 0
    assert found["sources"]["low"] == {"rows": 2, "failed": 4, "scores": {}} and found["macro_average"] == {}
    assert re.search(r"low +│ +0 of 2 │ +- │ +- │ +4 │", told)


def test_prompts_that_are_too_long_are_no_dead_endpoint(evaluate, server):
    server.reply = lambda body: web.Response(status=400, text="maximum context length is 8 tokens")
    code, told, found = evaluate()
    assert code == 1 and found["sessions"] == {"asked": 16, "ended": 0, "failed": {"prompt_too_long": 16}}
    assert "16 sessions failed (16 prompt_too_long)" in told


# -- the workflow's own faults


@pytest.fixture
def mine(tmp_path, monkeypatch, server):
    """A team of the user's whose solver's answer is put through `body` of a method `ended(outcome)`."""

    def write(body):
        (tmp_path / "own_team.py").write_text(
            "import numpy as np\nfrom verl_drmas.workflows.arithmetic import Arithmetic\n\n\nclass Mine(Arithmetic):\n"
            "    async def run(self, task, team):\n        outcome = await super().run(task, team)\n"
            f"        {body}\n        return outcome\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "own_team", raising=False)
        return ("--workflow", "own_team:Mine", "--url", server.url, "--model", "tiny")

    return write


@pytest.mark.parametrize("bug, kind", [("int('x')", ValueError), ("open('/no')", OSError), ("1 / 0", ArithmeticError)])
def test_a_bug_in_the_workflow_ends_it_with_the_traceback(evaluate, mine, bug, kind):
    told = r"Mine raised \w+ in session 0 of the data row with index 5 \(low\)"
    with pytest.raises(WorkflowBug, match=told) as raised:
        evaluate("--concurrency", 1, team=mine(bug))
    assert isinstance(raised.value.__cause__, kind)
    assert raised.traceback[-1].path.name == "sessions.py"


def test_numbers_of_other_libraries_are_kept_as_plain_ones(evaluate, mine, tmp_path):
    body = (
        "outcome.metrics['big'] = np.float32(0.5); outcome.metrics['n'] = np.int64(3); outcome.reward = np.bool_(True)"
    )
    code, told, found = evaluate(team=mine(body))
    assert code == 0, told
    assert (found["workflow_metrics"]["big"], found["workflow_metrics"]["n"]) == (0.5, 3.0)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()[2:]]
    assert {(line["reward"], line["metrics"]["n"]) for line in lines} == {(1.0, 3.0)}
    with pytest.raises(WorkflowBug, match=r"metrics\['big'\] is 'much'; give a number"):
        evaluate(team=mine("outcome.metrics['big'] = 'much'"), output="b.jsonl")


# -- endpoints that are not there


def test_a_dead_endpoint_is_named_at_once(evaluate, server, tmp_path):
    server.stop()
    code, told, found = evaluate()
    assert code == 1 and found is None
    assert re.fullmatch(rf"error: model served: {server.url}: ClientConnectorError: .*\n", told)
    server_file = (tmp_path / "results.jsonl").read_text()
    assert server_file.count("\n") == 1


def test_an_endpoint_that_dies_ends_it_with_its_name(evaluate, server, reply, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "GIVE_UP", 3)
    listed = server.models

    def die(question):
        dead = len(reply.questions) >= 6
        server.models = ["another"] if dead else listed
        return dead

    reply.broken = die
    code, told, found = evaluate("--concurrency", 1)
    assert code == 1 and found is None
    (error,) = (line for line in told.splitlines() if line.startswith("error: "))
    assert error.startswith(f"error: model served: {server.url}: the model 'tiny' is asked for, it has another")
    assert "3 sessions in a row failed; the last: server: " in error
    assert f"6 of 16 sessions are kept in {tmp_path / 'results.jsonl'}, none of the others counts as wrong" in error
    assert "the same command goes on from there" in error
    reply.broken, server.models = lambda question: False, listed
    played = len(reply.questions)
    code, told, found = evaluate()
    assert code == 0 and found["complete"] and len(reply.questions) == played + 10
    assert "note: 6 sessions are in" in told


def test_a_server_that_is_up_and_refuses_is_told_as_it_is(evaluate, reply, monkeypatch):
    monkeypatch.setattr(run_module, "GIVE_UP", 3)
    reply.broken = lambda question: True
    code, told, _ = evaluate()
    assert code == 1 and re.search(
        r"error: [34] sessions in a row failed; the last: server: .*status 400: broken", told
    )


def test_a_few_failures_of_a_dead_endpoint_end_it_too(evaluate, server, reply):
    """Fewer than are given up after: an outage in the last sessions."""

    def die(question):
        if len(reply.questions) >= 6:
            server.models = ["another"]
            return True
        return False

    reply.broken = die
    code, told, found = evaluate("--concurrency", 1, "--limit", 2)
    assert code == 1 and found is None
    assert "model served: " in told and "2 sessions failed; the last: " in told


def test_a_session_over_its_time_failed_and_is_played_again(evaluate, server, reply):
    answer = threading.Event()

    async def never(body):
        await asyncio.to_thread(answer.wait)
        return "2"

    server.reply = never
    code, told, found = evaluate("--timeout", 0.2, "--limit", 1, "-n", 1)
    answer.set()
    assert (code, found["sessions"]) == (1, {"asked": 1, "ended": 0, "failed": {"timeout": 1}})
    assert "timeout: no outcome after 0.2 s" in told
    server.reply = reply
    code, told, found = evaluate()
    assert code == 0 and found["complete"], told


def test_timeout_and_concurrency_reach_the_client(evaluate, server, tmp_path, monkeypatch):
    opened, real = [], run_module.open_models

    def note(team):
        opened.append(team.models)
        return real(team)

    monkeypatch.setattr(run_module, "open_models", note)
    assert evaluate("--timeout", 77, "--concurrency", 5, "--limit", 1, "-n", 1)[0] == 0
    (tmp_path / "endpoints.yaml").write_text(
        f"models: {{a: {{urls: ['{server.url}'], model: tiny, timeout: 9, concurrency: 2}}}}\n"
    )
    team = ("--workflow", "arithmetic", "--endpoints", tmp_path / "endpoints.yaml")
    more = ("--timeout", 77, "--limit", 1, "-n", 1)
    assert evaluate(*more, team=team, output="b.jsonl")[0] == 0
    (one,), (own,) = (models.values() for models in opened)
    assert (one.concurrency, one.timeout, one.deadline) == (5, 77 + MARGIN, 77 + MARGIN)
    assert (own.concurrency, own.timeout, own.deadline) == (2, 9, 77 + MARGIN)  # what the file names comes first


# -- nothing is mixed


@pytest.mark.parametrize(
    "more, key",
    [
        (("--temperature", 1.0), r"agents.solver.temperature \(0.6, now 1.0\)"),
        (("--top-p", 0.5), r"agents.solver.top_p \(0.95, now 0.5\)"),
        (("--max-tokens", 5), r"agents.solver.max_tokens \(null, now 5\)"),
        (("--seed", 1), r"seed \(null, now 1\)"),
        (("--setting", "balanced=false"), r"setting.balanced \(true, now false\)"),
        (("--workflow", "arithmetic_rival"), r'workflow \("arithmetic", now "arithmetic_rival"\)'),
        (("--model", "huge"), r'models.served.model \("tiny", now "huge"\)'),
        (("--calls", "text"), r'models.served.calls \("server", now "text"\)'),
    ],
)
def test_another_evaluation_is_not_mixed_in(evaluate, server, tmp_path, more, key):
    evaluate("--limit", 1, "-n", 1)
    before = (tmp_path / "results.jsonl").read_bytes()
    code, told, _ = evaluate("--limit", 1, *more)
    assert code == 1 and re.search(rf"holds sessions of another {key}; delete it, or give another --output", told)
    assert (tmp_path / "results.jsonl").read_bytes() == before and len(server.asked) == 2


def test_the_same_files_in_another_order_are_not_mixed_in(evaluate, prompts, server, tmp_path):
    """Sessions are kept by the row's number over all files."""
    other = write_rows([prompt_row("1+1", "2", data_source="s", split="test", index=0)], tmp_path / "other.parquet")
    team = ("--workflow", "arithmetic", "--url", server.url, "--model", "tiny", "-n", 4)
    assert evaluate(other)[0] == 0
    code, told = command(other, prompts, "-o", tmp_path / "results.jsonl", *team)
    names = r'\["prompts.parquet", "other.parquet"\], now \["other.parquet", "prompts.parquet"\]'
    assert code == 1 and re.search(rf"sessions of another order of data \({names}\)", told)


def test_other_rows_and_other_code_are_not_mixed_in(evaluate, prompts, tmp_path, server, monkeypatch):
    team = tmp_path / "teams_of_mine.py"
    team.write_text("from verl_drmas.workflows.arithmetic import Arithmetic\n\n\nclass Mine(Arithmetic):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = ("--workflow", "teams_of_mine:Mine", "--url", server.url, "--model", "tiny")
    assert evaluate("--limit", 1, team=mine)[0] == 0
    team.write_text(team.read_text().replace("pass", "'''With another docstring.'''"))
    code, told, _ = evaluate(team=mine)
    assert code == 1 and "another workflow code.teams_of_mine" in told
    assert evaluate("--limit", 1, output="b.jsonl")[0] == 0
    rows = [prompt_row("1+1", "3", data_source="s", split="test", index=0)]
    write_rows(rows, prompts)
    code, told, _ = evaluate("--limit", 1, output="b.jsonl")
    assert code == 1 and "another data.prompts.parquet" in told


def test_another_checkpoint_under_the_same_name_is_not_mixed_in(evaluate, server):
    server.roots = {"tiny": "/runs/global_step_50"}
    assert evaluate("--limit", 1)[0] == 0
    server.roots = {"tiny": "/runs/global_step_100"}
    code, told, _ = evaluate()
    assert code == 1
    assert 'another origin of model served (["/runs/global_step_50"], now ["/runs/global_step_100"])' in told
    server.roots = {}  # a server that doesn't say is taken at its word
    assert evaluate()[0] == 0


# -- several models, prices


@pytest.fixture
def two(serve, reply, tmp_path):
    """A file of endpoints with a model for each agent, and their servers."""
    left, right = serve(reply), serve(reply)
    left.models, right.models, right.usage = ["big"], ["small"], (7, 1)
    (tmp_path / "endpoints.yaml").write_text(
        f"""
        models:
          large: {{urls: ["{left.url}"], model: big, extra_body: {{chat_template_kwargs: {{enable_thinking: false}}}}}}
          small: {{urls: ["{right.url}"], model: small}}
        agents:
          solver: large
          verifier: {{model: small, temperature: 0.0, max_tokens: 5}}
        """
    )
    return left, right


def test_each_agent_on_its_own_model_with_its_price(evaluate, two, tmp_path):
    (tmp_path / "prices.yaml").write_text(
        "models:\n  large: {prompt: 2.0, response: 10.0}\n  small: {prompt: 0.5, response: 1}\n"
    )
    left, right = two
    team = ("--workflow", "arithmetic", "--endpoints", tmp_path / "endpoints.yaml")
    code, told, found = evaluate("--prices", tmp_path / "prices.yaml", team=team)
    assert code == 0, told
    assert {b["messages"][0]["content"][0] for b in left.asked} == {"S"}
    assert {b["messages"][0]["content"][0] for b in right.asked} == {"V"}
    assert {b["temperature"] for b in left.asked} == {0.6} and {b["temperature"] for b in right.asked} == {0.0}
    assert {b.get("max_tokens") for b in left.asked} == {None} and {b["max_tokens"] for b in right.asked} == {5}
    assert left.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}
    solver, verifier = 16 * (11 * 2 + 3 * 10) / 1e6, 16 * (7 * 0.5 + 1) / 1e6
    assert found["agents"]["solver"]["cost"] == pytest.approx(solver)
    assert found["agents"]["verifier"]["cost"] == pytest.approx(verifier)
    assert found["cost"] == pytest.approx(solver + verifier) and "cost (USD)" in told
    assert found["models"] == {"large": "big", "small": "small"}


def test_a_server_that_counts_no_tokens_costs_an_unknown_sum(evaluate, two, tmp_path):
    two[1].usage = None
    (tmp_path / "prices.yaml").write_text("models: {big: {prompt: 2, response: 10}, small: {prompt: 1, response: 1}}\n")
    team = ("--workflow", "arithmetic", "--endpoints", tmp_path / "endpoints.yaml")
    code, told, found = evaluate("--prices", tmp_path / "prices.yaml", team=team)
    assert code == 0, told
    verifier = found["agents"]["verifier"]
    assert (verifier["prompt_tokens"], verifier["cost"], found["cost"]) == (None, None, None)
    assert found["agents"]["solver"]["cost"] > 0
    assert re.search(r"team .*│ +- │ +- │", told)


def test_the_dead_one_of_several_is_named(evaluate, two, tmp_path):
    two[1].stop()
    code, told, _ = evaluate(team=("--workflow", "arithmetic", "--endpoints", tmp_path / "endpoints.yaml"))
    assert code == 1 and f"error: model small: {two[1].url}: ClientConnectorError" in told and "large" not in told


# -- judges and texts


def test_a_workflows_own_judge_scores(serve, tmp_path, prompts, monkeypatch):
    connections, close = [], Delegate.close

    async def closing(self):
        connections.append(len(self.judge._client._open))
        await close(self)
        connections.append(len(self.judge._client._open))

    monkeypatch.setattr(Delegate, "close", closing)

    def main(body):
        said = body["messages"]
        if "You carry out one task" in said[0]["content"]:
            return "<result>it is 2</result>"
        if len(said) == 1:
            call = {"name": "delegate", "arguments": {"agent": "helper", "task": "add"}}
            return f"<tool_call>{json.dumps(call)}</tool_call>"
        return "<result>2</result>"

    team, judge = serve(main), serve(lambda body: "Backed.\n<score>7</score>")
    numbers = tmp_path / "numbers.json"
    settings = ["subs.helper.max_turns=2", "judge.kind=endpoint", f"judge.urls=[{judge.url}]", "judge.model=tiny"]
    code, told = command(
        prompts, "-o", tmp_path / "r.jsonl", "--workflow", "delegate", "--url", team.url, "--model", "tiny",
        *(part for setting in settings for part in ("--setting", setting)), "--calls", "text", "--json", numbers,
        "--texts",
    )  # fmt: skip
    assert code == 0, told
    assert "1 of 1 judge servers answer" in told and connections == [1, 0]
    found = json.loads(numbers.read_text())
    assert found["workflow_metrics"]["judge_score"] == pytest.approx(0.7)
    assert found["macro_average"]["avg@1"]["value"] == pytest.approx(0.25)
    assert (found["agents"]["main"]["calls"], found["agents"]["main"]["activations"]) == (8, 4)
    assert found["agents"]["main"]["prompt_tokens"] == 8 * 11  # every call reads its prompt anew
    assert len(judge.asked) == 4  # the golds differ
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()[2:]]
    assert {activation["text"] for activation in lines[0]["activations"]} == {
        "<result>2</result>",
        "<result>it is 2</result>",
    }


# -- wrong options


@pytest.mark.parametrize(
    "more, says",
    [
        ((), "--workflow is missing"),
        (("--workflow", "arithmetic"), "--url and --model are missing"),
        (("--workflow", "arithmetic", "--url", "http://h/v1"), "--model is missing"),
        (("--workflow", "arithmetic", "--model", "m"), "--url is missing"),
        (("--workflow", "arithmetic", "--model", "m", "--url", "h:80"), "urls: 'h:80' is no address"),
        (("--workflow", "arithmetik", "--model", "m", "--url", "http://h/v1"), "did you mean 'arithmetic'?"),
        (("--workflow", "arithmetic", "--model", "m", "--endpoints", "f"), "--model: the models are those of --endpo"),
        (("-n", "0"), "--samples is 0"),
        (("--k", "2"), "--k 2: pass@k needs 1 <= k <= --samples (1)"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--top-p", "0"), "top_p is 0"),
        (("--kind", "qa"), "--kind is 'qa'; choose auto, math or search"),
        (("--config", "drmas_maths"), "did you mean 'drmas_math'?"),
        (("--endpoints", "no.yaml", "--workflow", "arithmetic"), "--endpoints no.yaml: "),
        (("--limit", "0"), "--limit is 0"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(prompts, tmp_path, more, says):
    code, told = command(prompts, "-o", tmp_path / "r.jsonl", *more)
    assert code == 1 and says in told and told.count("\n") == 1, told
    assert not (tmp_path / "r.jsonl").exists()


def test_the_data_file_is_no_place_for_results(prompts, tmp_path):
    before = prompts.read_bytes()
    code, told = command(prompts, "-o", prompts, "--workflow", "arithmetic", "--url", "http://h/v1", "--model", "m")
    assert code == 1 and "is no file of sessions" in told and prompts.read_bytes() == before
