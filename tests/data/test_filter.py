"""`verl-drmas data filter`: rates measured against a server, and taken from a run's dumps."""

import asyncio
import collections
import json
import re
import sys
import threading

import pyarrow.parquet as pq
import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner

from verl_drmas.data.filter import Band, Played, Tally, tallies_of_run, write_band
from verl_drmas.data.filter_command import filter_command
from verl_drmas.data.parquet import check_indices, check_prompts, prompt_row, write_rows
from verl_drmas.data.search import SEARCH_SCHEMA, question_row
from verl_drmas.evaluation.sessions import WorkflowBug
from verl_drmas.evaluation.workflow import build_workflow, task_of
from verl_drmas.serving import look

runner = CliRunner()
app = typer.Typer()
app.command("filter")(filter_command)
app.command("other")(lambda: None)

# How often the solver is right, by question: of 4 sessions 0, 1, 2 and 4.
RIGHT = {"1+1": 0, "1+2": 1, "1+3": 2, "1+4": 4}
INDICES = [30, 10, 20, 40]


@pytest.fixture
def prompts(tmp_path):
    rows = [
        prompt_row(question, str(eval(question)), data_source="s", split="train", index=index)
        for question, index in zip(RIGHT, INDICES, strict=True)
    ]
    return write_rows(rows, tmp_path / "prompts.parquet")


class Server:
    """Solves `RIGHT` of a question's sessions, in the order in which they come."""

    def __init__(self):
        self.solved = collections.Counter()
        self.asked = []
        self.broken = lambda question: False

    async def complete(self, request):
        body = await request.json()
        said = body["messages"][-1]["content"]
        if said.startswith("V:"):
            return self.says("y")
        question = said.removeprefix("S:").removesuffix("=")
        if self.broken(question):
            return web.Response(status=400, text="broken")
        self.asked.append((question, body))
        self.solved[question] += 1
        right = self.solved[question] <= RIGHT[question]
        return self.says(str(eval(question)) if right else "0")

    @staticmethod
    def says(text):
        return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    async def list_models(self, request):
        return web.json_response({"data": [{"id": "tiny"}]})


@pytest.fixture
def server():
    """A server in a thread of its own: the command has its own event loop."""
    served, ready, loop = Server(), threading.Event(), asyncio.new_event_loop()

    def run():
        asyncio.set_event_loop(loop)
        application = web.Application()
        application.router.add_post("/v1/chat/completions", served.complete)
        application.router.add_get("/v1/models", served.list_models)
        site = web.AppRunner(application)
        loop.run_until_complete(site.setup())
        place = web.TCPSite(site, "127.0.0.1", 0)
        loop.run_until_complete(place.start())
        served.url = f"http://127.0.0.1:{site.addresses[0][1]}/v1"
        ready.set()
        loop.run_forever()
        loop.run_until_complete(site.cleanup())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    yield served
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def command(prompts, output, *more):
    result = runner.invoke(app, ["filter", str(prompts), "-o", str(output), *map(str, more)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def measure(prompts, output, server, *more):
    team = ("--workflow", "arithmetic", "--url", server.url, "--model", "tiny", "--samples", 4)
    return command(prompts, output, *team, *more)


def rates(path):
    return {r["extra_info"]["index"]: r["extra_info"]["success_rate"] for r in pq.read_table(path).to_pylist()}


def test_a_band_is_measured_and_kept(prompts, server, tmp_path):
    output = tmp_path / "hard.parquet"
    code, told = measure(prompts, output, server)
    assert code == 0, told
    assert rates(output) == {30: 0.0, 10: 0.25, 20: 0.5}
    assert "wrote 3 of 4 prompts with a success rate from 0 to 0.5" in told and "(0 below, 1 above)" in told
    assert collections.Counter(question for question, _ in server.asked) == dict.fromkeys(RIGHT, 4)
    before, after = (pq.read_table(path).to_pylist() for path in (prompts, output))
    for old, new in zip(before[:3], after, strict=True):  # rows are what they were, but for the two numbers
        assert new["extra_info"].pop("sessions") == 4
        new["extra_info"].pop("success_rate")
        assert new == old
    assert check_prompts(output) == 3
    check_indices([output])


def test_another_band_plays_nothing_again(prompts, server, tmp_path):
    output = tmp_path / "hard.parquet"
    measure(prompts, output, server)
    code, told = measure(prompts, output, server, "--low", 0.5, "--high", 1.0)
    assert code == 0, told
    assert rates(output) == {20: 0.5, 40: 1.0}
    assert len(server.asked) == 16
    assert measure(prompts, output, server, "--samples", 5)[0] == 0
    assert len(server.asked) == 20  # one more of each


def test_a_stopped_measurement_goes_on(prompts, server, tmp_path):
    output = tmp_path / "hard.parquet"
    measure(prompts, output, server)
    journal = tmp_path / "hard.partial.jsonl"
    lines = journal.read_text().splitlines()
    assert len(lines) == 17
    journal.write_text("\n".join(lines[:8]) + "\n" + lines[8][:9])  # killed while it wrote the eighth session
    server.asked.clear()
    output.unlink()
    assert measure(prompts, output, server)[0] == 0
    assert len(server.asked) == 9
    assert len(journal.read_text().splitlines()) == 17
    assert {json.loads(line)["session"] for line in journal.read_text().splitlines()[1:]} == {0, 1, 2, 3}


def test_failed_sessions_are_neither_right_nor_wrong(prompts, server, tmp_path):
    output = tmp_path / "hard.parquet"
    calls = collections.Counter()

    def broken(question):
        calls[question] += 1
        return question == "1+1" or (question == "1+2" and calls[question] == 1)

    server.broken = broken
    code, told = measure(prompts, output, server, "--concurrency", 1)
    assert code == 0, told
    assert rates(output) == {20: 0.5}
    assert "5 sessions failed; they count as neither right nor wrong" in told
    assert re.search(r"2 prompts with fewer than 4 ended sessions are left out .*: 30, 10", told)
    server.broken = lambda question: question == "1+1"
    code, told = measure(prompts, output, server, "--keep-unmeasured")  # failed ones are played again
    assert code == 0, told
    rows = {r["extra_info"]["index"]: r["extra_info"] for r in pq.read_table(output).to_pylist()}
    assert (rows[30]["success_rate"], rows[30]["sessions"]) == (None, 0)
    assert (rows[10]["success_rate"], rows[10]["sessions"]) == (0.25, 4)
    assert "1 prompts with fewer than 4 ended sessions are kept: 30" in told


def test_a_server_that_dies_ends_it_and_keeps_what_ended(prompts, server, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_drmas.evaluation.sessions.play_sessions.__kwdefaults__", {"timeout": None, "give_up": 3})
    server.broken = lambda question: len(server.asked) >= 6
    output = tmp_path / "hard.parquet"
    code, told = measure(prompts, output, server, "--concurrency", 1)
    assert code == 1
    assert "3 sessions in a row failed; the last: server: " in told and "goes on from there" in told
    assert not output.exists()
    server.broken = lambda question: False
    assert measure(prompts, output, server)[0] == 0
    assert len(server.asked) == 16


def test_sessions_of_another_team_are_not_mixed_in(prompts, server, tmp_path):
    output = tmp_path / "hard.parquet"
    measure(prompts, output, server)
    for more, what in (
        (("--temperature", 0.5), "sampling"),
        (("--setting", "balanced=false"), "setting"),
        (("--workflow", "arithmetic_rival"), "workflow"),
    ):
        code, told = measure(prompts, output, server, *more)
        assert code == 1 and f"holds sessions of another {what}" in told
    rows = pq.read_table(prompts).to_pylist()
    write_rows(rows[:3], prompts)
    assert "holds sessions of another file of prompts" in measure(prompts, output, server)[1]
    assert len(server.asked) == 16


def test_requests_carry_what_was_asked_for(prompts, server, tmp_path):
    more = ("--temperature", 0.3, "--top-p", 0.8, "--max-tokens", 7, "--seed", 1)
    measure(prompts, tmp_path / "a.parquet", server, *more)
    bodies = [body for _, body in server.asked]
    assert {(b["model"], b["temperature"], b["top_p"], b["max_tokens"]) for b in bodies} == {("tiny", 0.3, 0.8, 7)}
    assert len({b["seed"] for b in bodies}) == 16


def test_a_task_is_the_rows():
    row = question_row("who", ["Ada", "A"], data_source="s", split="train", index=4)
    task = task_of(row, 2)
    assert (task.question, task.answer, task.index, task.session) == ("who", ["Ada", "A"], 4, 2)
    assert task.messages == ({"role": "user", "content": "who"},) and task.extra["index"] == 4


@pytest.mark.parametrize(
    "more, says",
    [
        ((), "--workflow is missing"),
        (("--workflow", "arithmetic"), "--model is missing"),
        (("--workflow", "arithmetic", "--model", "m"), "urls is empty"),
        (("--workflow", "arithmetik", "--model", "m", "--url", "http://h/v1"), "did you mean 'arithmetic'?"),
        (("--run", ".", "--model", "m"), "--model: rates come from --run"),
        (("--until-step", "3"), "--until-step: is for --run"),
        (("--low", "0.6"), "--low 0.6 is above --high 0.5"),
        (("--samples", "0"), "--samples is 0"),
    ],
)
def test_wrong_options_are_one_line(prompts, tmp_path, more, says):
    code, told = command(prompts, tmp_path / "out.parquet", *more)
    assert code == 1
    assert says in told and told.count("\n") == 1


def test_wrong_files_are_one_line(prompts, tmp_path):
    assert "is the file of prompts" in command(prompts, prompts)[1]
    assert "ends in .parquet" in command(prompts, tmp_path / "x.jsonl")[1]
    assert "no such file" in command(tmp_path / "no.parquet", tmp_path / "x.parquet", "--run", tmp_path)[1]


def test_a_server_that_is_not_there_is_said_at_once(prompts, server, tmp_path, monkeypatch):
    monkeypatch.setattr(look, "CHECK_SECONDS", 2.0)
    code, told = measure(prompts, tmp_path / "a.parquet", server, "--model", "huge")
    assert code == 1 and "--url: " in told and "'huge' is asked for, it has tiny" in told
    assert measure(prompts, tmp_path / "a.parquet", server)[0] == 0  # no session was played: another may be measured


@pytest.fixture
def own_team(tmp_path, monkeypatch):
    """Writes a team of the user's into a folder that is on the path, as the working folder is behind the command;
    `ended` is a line that its sessions end with.
    """
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, ended="pass"):
        (tmp_path / f"{name}.py").write_text(
            "from verl_drmas.workflows.arithmetic import Arithmetic\n\nclosed = []\n\n\nclass Mine(Arithmetic):\n"
            "    async def run(self, task, team):\n        outcome = await super().run(task, team)\n"
            f"        {ended}\n        return outcome\n\n"
            "    async def close(self):\n        closed.append(True)\n"
        )
        return ("--workflow", f"{name}:Mine")

    return write


def test_a_users_own_workflow_is_closed(prompts, server, tmp_path, own_team):
    code, told = measure(prompts, tmp_path / "a.parquet", server, *own_team("filtered_team"))
    assert code == 0, told
    assert sys.modules["filtered_team"].closed == [True]


def test_a_bug_in_the_workflow_ends_it_with_the_traceback_and_closes_it(prompts, server, tmp_path, own_team):
    with pytest.raises(WorkflowBug, match="Mine raised ValueError in session 0") as raised:
        measure(prompts, tmp_path / "a.parquet", server, *own_team("broken_team", "int('x')"))
    assert isinstance(raised.value.__cause__, ValueError)
    assert sys.modules["broken_team"].closed == [True]


def test_settings_are_typed_and_nested():
    workflow = build_workflow("delegate", ["subs.helper.max_turns=3", "max_turns=4", "normalisation=wide"])
    assert workflow.settings.subs["helper"].max_turns == 3
    assert (workflow.settings.max_turns, workflow.agents) == (4, ("main", "helper"))
    with pytest.raises(ValueError, match=r"--setting max_turn: .*did you mean 'max_turns'\?"):
        build_workflow("delegate", ["max_turn=4"])
    with pytest.raises(ValueError, match=r"--setting.max_turns: 'many' is not valid"):
        build_workflow("delegate", ["max_turns=many"])
    with pytest.raises(ValueError, match="verl's registry"):
        build_workflow("delegate", ["tools.x.kind=verl", "main_tools=[x]"])


# -- bands


@pytest.mark.parametrize(
    "successes, band, kept",
    [
        ([0, 0], (0.0, 0.5, 2), True),
        ([1, 0], (0.0, 0.5, 2), True),
        ([1, 0], (0.5, 1.0, 2), True),
        ([1, 1, 0], (0.0, 0.666666666667, 3), True),
        ([1, 1], (0.0, 0.5, 2), False),
        ([0], (0.0, 0.5, 2), False),
    ],
)
def test_a_band_is_inclusive(successes, band, kept):
    tally = Tally(dict(enumerate(map(float, successes))))
    assert Band(*band).keeps(tally) is kept
    if len(successes) < band[2]:
        assert Band(*band, keep_unmeasured=True).keeps(tally)


def test_an_empty_band_writes_nothing(prompts, tmp_path):
    output = tmp_path / "out.parquet"
    with pytest.raises(ValueError, match=r"from 0.9 to 1 \(1 below, 0 above, 3 not measured\); nothing written"):
        write_band(pq.read_table(prompts), {10: Tally({0: 0.0})}, Band(0.9, 1.0, 1), output)
    assert not output.exists()


def test_a_filtered_file_may_be_filtered_again(prompts, tmp_path):
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write_band(pq.read_table(prompts), {10: Tally({0: 0.5}), 20: Tally({0: 0.25})}, Band(0, 1, 1), first)
    write_band(pq.read_table(first), {10: Tally({0: 0.75}), 20: Tally({0: 1.0})}, Band(0, 0.8, 1), second)
    assert rates(second) == {10: 0.75}


def test_other_columns_and_types_stay(tmp_path):
    rows = [question_row("who", ["Ada"], data_source="s", split="train", index=i) for i in range(3)]
    path = write_rows(rows, tmp_path / "q.parquet", schema=SEARCH_SCHEMA)
    write_band(pq.read_table(path), {1: Tally({0: 0.0})}, Band(0, 0, 1), tmp_path / "out.parquet")
    before, after = pq.read_schema(path), pq.read_schema(tmp_path / "out.parquet")
    assert [f for f in after if f.name != "extra_info"] == [f for f in before if f.name != "extra_info"]
    extra = after.field("extra_info").type
    assert [f.name for f in extra] == [*(f.name for f in before.field("extra_info").type), "success_rate", "sessions"]


def test_a_journal_without_sessions_binds_nobody(tmp_path):
    path = tmp_path / "j.jsonl"
    Played(path, {"workflow": "a"}).close()
    with Played(path, {"workflow": "b"}) as journal:
        journal.add(1, 0, 1.0)
    with pytest.raises(ValueError, match="another workflow"):
        Played(path, {"workflow": "a"})


# -- rates of a run


def dump(folder, step, sessions, **more):
    """`sessions`: (uid, index, session, acc, failed) each with two rows, as a team's dump has them."""
    lines = [
        {
            "input": "i",
            "output": "o",
            "gts": str(gold),
            "score": 0.9 - 0.3 * row,  # an agent's own shaped reward: no success
            "step": step,
            "uid": f"{uid}_{session}_{row}",
            "agent_id": ["main", "sub"][row],
            "model_id": "base",
            "index": index,
            "acc": acc,
            "failed": failed,
            **more,
        }
        for uid, index, session, gold, acc, failed in sessions
        for row in (0, 1)
    ]
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    dump(folder, 1, [("u_1", 30, s, 2, acc, "") for s, acc in enumerate([0.0, 0.0])])
    dump(folder, 2, [("u2", 10, s, 3, acc, "") for s, acc in enumerate([1.0, 0.0])])
    dump(folder, 10, [("u3", 30, 0, 2, 1.0, ""), ("u3", 30, 1, 2, None, "server"), ("u4", 99, 0, 8, 1.0, "")])
    return folder


def test_rates_of_a_run_are_its_sessions_outcomes(prompts, run, tmp_path):
    output = tmp_path / "out.parquet"
    code, told = command(prompts, output, "--run", run, "--samples", 2)
    assert code == 0, told
    assert rates(output) == {30: pytest.approx(1 / 3), 10: 0.5}
    assert "1 sessions failed" in told and "2 prompts with fewer than 2 ended sessions are left out" in told
    command(prompts, output, "--run", run, "--samples", 2, "--until-step", 9)
    assert rates(output) == {30: 0.0, 10: 0.5}


def test_a_session_of_several_rows_counts_once(run):
    tallies = tallies_of_run(run, {30: "2", 10: "3"})
    assert {index: (len(t.successes), t.failed) for index, t in tallies.items()} == {30: (3, 1), 10: (2, 0)}


def test_dumps_of_another_kind_are_refused(prompts, run, tmp_path):
    golds = {30: "2", 10: "4"}
    with pytest.raises(ValueError, match=r'2.jsonl: line 1: prompt 10 has the gold "3", in the prompt file "4"'):
        tallies_of_run(run, golds)
    with pytest.raises(ValueError, match=r"no rollout dumps up to step 0 \(<step>.jsonl\)"):
        tallies_of_run(run, golds, 0)
    (run / "3.jsonl").write_text('{"uid": "u_0_0", "score": 1.0}\n')
    with pytest.raises(ValueError, match=r"3.jsonl: line 1 has no 'index': not a dump of a team's run"):
        tallies_of_run(run, {})
    (run / "3.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"3.jsonl: line 1 is not a JSON object"):
        tallies_of_run(run, {})
