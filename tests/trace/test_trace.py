"""What a page shows, and of which sessions."""

import base64
import hashlib
import re
import subprocess
import sys
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_dumps import SETTINGS, activation, write_step
from typer.testing import CliRunner

from verl_drmas.cli import app
from verl_drmas.dumps import DumpError, read_step
from verl_drmas.trace.choose import choose
from verl_drmas.trace.page import to_html
from verl_drmas.trace.show import visible
from verl_drmas.trace.view import view_of


def sessions(prompts=6, each=4):
    return {(10 * p, s): [activation("a", "a.0", [(True, f"{p}{s}")])] for p in range(prompts) for s in range(each)}


@pytest.fixture
def step(tmp_path):
    return read_step(write_step(tmp_path / "rows", sessions()))


def chosen(step, **options):
    return {index: list(own) for (index, _), own in choose(step, **options).sessions.items()}


# -- which sessions ----------------------------------------------------------------------------------------------------


def test_prompts_are_taken_whole_and_the_same_every_time(step, tmp_path):
    made = chosen(step, most=13)
    assert len(made) == 3 and all(own == [0, 1, 2, 3] for own in made.values()) and list(made) == sorted(made)
    assert chosen(step, most=13) == made
    assert choose(step, most=13).how == "12 of 24 sessions, 3 of 6 prompts, chosen by seed 0"
    assert set(made) < set(chosen(step, most=17))  # a longer page keeps what the shorter one had
    assert {tuple(chosen(step, most=4, seed=seed)) for seed in range(20)} == {(10 * p,) for p in range(6)}
    again = {key: rows for key, rows in sessions().items() if key[0] != 0}
    assert set(made) - {0} <= set(chosen(read_step(write_step(tmp_path / "other", again)), most=13))


def test_a_prompt_longer_than_the_page_is_cut_and_a_short_step_is_whole(step):
    (own,) = chosen(step, most=3).values()
    assert own == [0, 1, 2] and choose(step, most=3).how.startswith("3 of 24 sessions, 1 of 6 prompts")
    assert choose(step, most=99).how == "all 24 sessions of 6 prompts"


def test_prompts_that_were_asked_for_are_whole(step):
    assert chosen(step, most=1, prompts=[50, 20]) == {20: [0, 1, 2, 3], 50: [0, 1, 2, 3]}
    with pytest.raises(DumpError, match=r"5\.jsonl: prompt 7 is not in it; --prompt takes a dataset index: 0, 10"):
        choose(step, most=1, prompts=[7])


# -- texts -------------------------------------------------------------------------------------------------------------


@given(st.text(st.characters()))  # lone surrogates too
def test_any_text_becomes_html_that_can_be_written_and_read_back(text):
    html = visible(text)
    html.encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", html)
    assert not re.search(r"<(?!/?span)", html)
    if text.isprintable():
        assert unescape(html) == text


def test_letters_of_every_script_stay_and_what_hides_is_named():
    kept = "naïve 数学 हिन्दी עברית 👩\u200d🚀\ttab\nline"
    assert visible(kept) == kept
    mark = '<span class="hidden-char">{}</span>'.format
    assert visible("\x00\x1b\u202e\u2028\ud800\u200b") == "".join(
        map(mark, ["[U+0000]", "[U+001B]", "[U+202E]", "[U+2028]", "[U+D800]", "[U+200B]"])
    )
    assert visible("a\r\nb") == "a\nb" and visible("\r") == mark("[U+000D]")


# -- cards -------------------------------------------------------------------------------------------------------------


def view(tmp_path, rows, **options):
    step = read_step(write_step(tmp_path / "rows", {(3, 0): rows}, **options))
    return view_of(step, choose(step, most=9))


def chips(made):
    return [text for text, _ in made.chips]


def test_an_activation_says_what_it_earned(tmp_path):
    rows = [
        activation("a", "a.0", [(True, "x")], reward=0.9, advantage=-1.25, valid=False, ours={"penalty": 0.1}),
        activation("a", "a.1", [(True, "x")], order=1, ours={"copies": 2.0, "updated": False, "weight": 1.5}),
        activation("a", "a.2", [(True, "x")], order=2, ours={"advantage": [0.5, 1.5]}, counts={"truncated": 1.0}),
        activation("a", "a.3", [(True, "x")], order=3, fault="retrieval", ours={"copies": 0.0, "reward": 0.75}),
        activation("a", "a.4", [(True, "x")], order=1_000_000, parts={"judge": 0.5}),
    ]  # fmt: skip
    shown = view(tmp_path, rows)
    (prompt,) = shown.prompts
    (session,) = prompt.sessions
    made = session.activations
    assert chips(made[0]) == ["reward 0.9", "A -1.25", "invalid -0.1"] and made[0].advantage == -1.25
    assert chips(made[1]) == ["reward 1", "A +0.5", "counts 2 times", "not trained here"]
    assert ("weight in the loss", "1.5") in made[1].numbers
    assert chips(made[2]) == ["reward 1", "A +1 (mean; differs by token)", "cut at its limit"]
    assert chips(made[3]) == ["reward 1", "A +0.5", "fault: retrieval", "dropped by alignment"]
    assert ("reward with its KL term", "0.75") in made[3].numbers
    assert "a copy" in chips(made[4]) and ("part judge", "0.5") in made[4].numbers
    assert session.count == 4 and shown.table[0][0] == "4" and shown.count == 4  # nobody acted in it
    assert prompt.gold == "42" and chips(session) == ["outcome 0.9"]


def test_a_failed_session_has_no_reward(tmp_path):
    rows = [activation("a", "a.0", [(True, "x")], reward=0.0, trained=False, failed="retrieval", outcome=None)]
    ended = activation("b", "b.0", [(True, "y")])
    step = read_step(write_step(tmp_path / "rows", {(3, 0): rows, (3, 1): [ended]}))
    made = view_of(step, choose(step, most=9))
    failed, other = made.prompts[0].sessions
    assert chips(failed) == ["failed: retrieval"] and failed.activations[0].reward is None
    assert chips(failed.activations[0]) == [] and chips(other) == ["outcome 1"]
    assert ("failed", "1 session of the step, whose rows nothing trained on") in made.facts
    assert made.table == [["1", "1", "none", "none", "0", "1"], ["1", "1", "1.000", "0.500", "0", "1"]]


@pytest.mark.parametrize(("value", "said"), [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), (None, "much")])
def test_what_is_no_number_is_shown_as_it_is(value, said, tmp_path):
    value, reward = ("much", 2.0) if value is None else [float(value)] * 2  # verl's rewards are numbers
    odd = {"outcome": value, "parts": {"judge": value}, "session": {"rounds": value}}
    made = view(tmp_path, [activation("a", "a.0", [(True, "x")], reward=reward, acc=1.0, **odd)])
    (session,) = made.prompts[0].sessions
    (card,) = session.activations
    assert chips(session) == [f"outcome {said}", "right 1"] and ("rounds", said) in session.numbers
    assert ("part judge", said) in card.numbers
    assert chips(card)[0] == ("reward 2" if said == "much" else f"reward {said}")
    assert f"outcome {said}" in to_html(made, "run")


def test_calls_stand_in_their_turn_at_any_depth(tmp_path):
    paths = ["main/turn.0/call.0/sub/turn.1/call.0/tool", "main/turn.0/call.0/sub", "main/turn.1/call.0/sub", "main"]
    rows = [
        activation(path.rpartition("/")[2], path, [(True, "one"), (False, "seen"), (True, "two")], order=i)
        for i, path in enumerate(paths)
    ]
    made = view(tmp_path, rows)
    (main,) = made.prompts[0].sessions[0].activations
    assert main.row.own["path"] == "main" and made.count == 4
    calls = [[called.row.own["path"] for called in piece.calls] for piece in main.pieces]
    assert calls == [[paths[1]], [], [paths[2]]]
    assert [piece.calls[0].row.agent for piece in main.pieces[0].calls[0].pieces if piece.calls] == ["tool"]


def test_calls_without_a_known_turn_stand_at_the_end_and_strays_at_the_top(tmp_path):
    rows = [
        activation("sub", "main/turn.7/call.0/sub", [(True, "x")]),
        activation("stray", "gone/turn.0/call.0/stray", [(True, "x")], order=1),
        activation("main", "main", [(True, "one"), (False, "seen"), (True, "two")], order=2),
    ]
    stray, main = view(tmp_path, rows).prompts[0].sessions[0].activations
    assert stray.row.agent == "stray" and [len(piece.calls) for piece in main.pieces] == [0, 0, 1]


def test_validation_has_no_advantages_and_says_so(tmp_path):
    made = view(tmp_path, [activation("a", "a.0", [(True, "x")], trained=False)], settings=None)
    assert ("advantages", "none: nothing was trained on these rows") in made.facts
    assert chips(made.prompts[0].sessions[0].activations[0]) == ["reward 1"]


def test_the_step_says_how_it_was_trained(tmp_path):
    alignment = {"target": {"finder": 3}, "mode": "sample"}
    settings = SETTINGS | {"estimator": "mgrpo", "alignment": alignment, "copies": "weights", "whole_team": False}
    facts = dict(view(tmp_path, [activation("finder", "f.0", [(True, "x")])], settings=settings).facts)
    assert facts["estimator"] == "mgrpo" and facts["alignment"] == "weights, sample, D = 3 for finder"
    assert "other job" in facts["job"]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_policy_allows_the_pages_own_script_and_nothing_else(step):
    html = to_html(view_of(step, choose(step, most=4)), "run")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src &#39;none&#39;; base-uri &#39;none&#39;; form-action &#39;none&#39;; ")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy
    assert "unsafe" not in policy and not re.search(r"\ssrc=|style=|https?:", html)


def run(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_one_page_a_step(tmp_path):
    for step in (1, 2, 10):
        write_step(tmp_path / "run" / "rows", sessions(), step=step)
    out = tmp_path / "out"
    done = run(tmp_path / "run", "--out", out)
    assert done.exit_code == 0 and [p.name for p in out.iterdir()] == ["step_10.html"]
    assert "step_10.html: all 24 sessions of 6 prompts; written last\n" in done.stdout
    assert run(tmp_path / "run", "--out", out, "--step", 1, "--step", 2, "--sessions", 4).exit_code == 0
    assert "<h1>Step 2 of " in (out / "step_2.html").read_text(encoding="utf-8")
    assert (out / "step_1.html").read_text(encoding="utf-8").count('class="session"') == 4
    assert run(tmp_path / "run", "--out", tmp_path / "all", "--all").exit_code == 0
    assert len(list((tmp_path / "all").iterdir())) == 3


def test_all_steps_but_those_that_cant_be_shown(tmp_path):
    rows = tmp_path / "rows"
    write_step(rows, sessions(), step=1)
    write_step(rows, {key: own for key, own in sessions().items() if key[0] == 10}, step=2)
    write_step(rows, sessions(), step=4)
    done = run(rows, "--out", tmp_path / "out", "--all", "--prompt", 20)
    assert done.exit_code == 0 and "step 2: left out" in done.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["step_1.html", "step_4.html"]
    (rows / "3.jsonl").write_text("{")
    done = run(rows, "--out", tmp_path / "more", "--all")
    assert done.exit_code == 1 and "3.jsonl: line 1 is not JSON" in done.stderr
    assert sorted(p.name for p in (tmp_path / "more").iterdir()) == ["step_1.html", "step_2.html", "step_4.html"]
    (rows / "3.jsonl").unlink()
    done = run(rows, "--out", tmp_path / "none", "--all", "--prompt", 5)
    assert done.exit_code == 1 and "prompt 5 is in none of its steps (1, 2, 4)" in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--step", 3], "step 3 was not dumped; there are 1"),
        (["--sessions", 0], "--sessions is 0; a page shows at least 1"),
        (["--all", "--step", 1], "--all and --step are both given"),
        (["--prompt", 5], "prompt 5 is not in it"),
    ],
)
def test_what_cannot_be_shown_is_refused_and_nothing_written(tmp_path, arguments, says):
    write_step(tmp_path / "rows", sessions(), step=1)
    done = run(tmp_path / "rows", "--out", tmp_path / "out", *arguments)
    assert done.exit_code == 1 and "refused:" in done.stderr and says in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.process
def test_pages_are_made_without_verl_and_ray():
    code = (
        "import sys, verl_drmas.trace.command, verl_drmas.trace.choose, verl_drmas.trace.page\n"
        "print(sorted({'ray', 'verl', 'vllm', 'transfer_queue'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
