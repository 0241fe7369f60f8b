"""On every page: links lead somewhere, files that are named are there, and commands are commands with such options."""

import re
import shlex

import pytest
import typer
from doc_pages import PAGES, ROOT, blocks, spans, text_of

from verl_drmas.cli import app
from verl_drmas.data.commands import data_app
from verl_drmas.evaluation.command import eval_app
from verl_drmas.evaluation.judge_command import judge_app
from verl_drmas.pair.command import pair_app
from verl_drmas.retrieval.commands import retriever_app
from verl_drmas.store.commands import store_app

OTHERS = {"CONTRIBUTING.md": ROOT / "CONTRIBUTING.md"}
# Commands that hand their arguments on to an app of their own, or to Hydra.
APPS = {
    "data": data_app,
    "eval": eval_app,
    "judge": judge_app,
    "pair": pair_app,
    "retriever": retriever_app,
    "store": store_app,
}
HYDRA = {"check": {"--config-name", "--config-dir"}, "plan": {"--config-name", "--config-dir", "--gpu-memory"}}


def anchors(path):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text):
    plain = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return re.findall(r"\[[^\]\[]*\]\(([^)\s]+)\)", plain)


@pytest.mark.parametrize("name", [*PAGES, *OTHERS])
def test_links_lead_somewhere(name):
    path = ROOT / name
    broken = []
    for target in links(text_of(name)):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def test_links_are_found_and_anchors_made_as_github_does():
    assert links("[a](b.md#c) and `[d](e)`\n```\n[f](g)\n```") == ["b.md#c", "e"]
    assert {"the-inflation-factor-f", "when-they-coincide"} <= anchors(PAGES["docs/estimators.md"])
    assert sum(len(links(text_of(name))) for name in PAGES) > 80


@pytest.mark.parametrize("name", PAGES)
def test_files_that_are_named_are_there(name):
    wrong = []
    for span in spans(text_of(name)):
        if re.fullmatch(r"(tests|recipes|configs|verl_drmas|docs)/[\w/.-]+", span) and not (ROOT / span).exists():
            wrong.append(span)
        if re.fullmatch(r"test_\w+\.py", span) and not (ROOT / "tests/end_to_end" / span).exists():
            wrong.append(span)
    assert wrong == []


def test_every_page_is_reached_from_the_readme():
    readme = {target.partition("#")[0] for target in links(text_of("README.md"))}
    assert {name for name in PAGES if name != "README.md"} <= readme


def commands(text):
    """Command lines of ours in a page: of blocks, whole; of spans, as far as they go."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *spans(text)]:
        found = re.search(r"(?:^|&& )verl-drmas (?!is\b)(.*)", line)
        if found:
            words = shlex.split(found[1].replace("...", "").replace("<", "").replace(">", ""), comments=True)
            if words:
                yield words


def problem(words):
    """What is wrong with a command line; empty if nothing is."""
    name, rest = words[0], words[1:]
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    if name not in known:
        return f"no command {name}"
    options = {word.split("=")[0] for word in rest if word.startswith("-")}
    if name in HYDRA:
        return str(options - HYDRA[name] or "")
    click = typer.main.get_command(APPS.get(name, app))
    if name not in APPS:
        click = click.commands[name]
    while hasattr(click, "commands"):
        words_left = [word for word in rest if not word.startswith("-")]
        if not words_left or words_left[0] in ("|", "..."):
            return ""
        if words_left[0] not in click.commands:
            return f"{name} has no command {words_left[0]}"
        click, rest = click.commands[words_left[0]], rest[rest.index(words_left[0]) + 1 :]
    own = {option for parameter in click.params for option in parameter.opts}
    return str(options - own or "")


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_commands(name):
    wrong = {" ".join(words): problem(words) for words in commands(text_of(name))}
    assert {line: what for line, what in wrong.items() if what} == {}


def test_a_wrong_command_is_found():
    assert problem(["nonsense"]) == "no command nonsense"
    assert problem(["eval", "x", "--sample", "3"]) == "{'--sample'}"
    assert problem(["store", "verify", "URL", "--all"]) == "{'--all'}"
    assert problem(["store", "mend"]) == "store has no command mend"
    assert problem(["data", "search", "paper-train", "-o", "x"]) == problem(["export", "x", "--out", "y"]) == ""
    assert sum(len(list(commands(text_of(name)))) for name in PAGES) > 40


@pytest.mark.parametrize("name", PAGES)
def test_make_targets_are_the_makefiles(name):
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    text = "\n".join([*spans(text_of(name)), *blocks(text_of(name), "bash")])
    assert set(re.findall(r"(?:^|\n)make ([\w-]+)", text)) <= set(phony.split())
