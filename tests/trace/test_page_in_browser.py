"""The page in a real browser, with a team that tries everything: it renders, filters, and nothing of theirs runs."""

import base64
from io import BytesIO
from itertools import pairwise

import browser
import pytest
from made_dumps import SETTINGS, activation, write_step
from matplotlib import image

from verl_drmas.trace.command import main

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(browser.missing(), reason="needs chromium (Debian's package of that name)"),
]
RAN = "document.title='ran';window.ran=true"
EVIL = [
    f"<script>{RAN}</script>",
    f'"}}]</script><script>{RAN}</script>',
    f'<img src=x onerror="{RAN}">',
    f'<a href="javascript:{RAN}" autofocus onfocus="{RAN}">click</a>',
    f'</style><style>body {{ display: none }}</style><svg onload="{RAN}">',
    f'</div></article><iframe srcdoc="<script>parent.{RAN}</script>"></iframe>',
    f"' onmouseover='{RAN}' x=' \" onmouseover=\"{RAN}\" x=\"",
    "<!-- --><base href='https://evil.invalid/'><link rel=stylesheet href='https://evil.invalid/x.css'>",
    "{{ 7 * 7 }}{% raw %}${7*7}<%= 7*7 %>",
    "line\u2028separator\u2029paragraph",
    "nul\x00 esc\x1b[31m bell\x07 del\x7f c1\x9b",
    "user\u202egnp.exe\u2066\u2069\u200b\ufeff",
    "lone \ud800 and \udfff",
    "<plaintext><textarea><xmp><!--",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "<b onclick=alert(1)>a & b"
    sessions = {}
    for number, evil in enumerate(EVIL):
        told = {
            "parsed": evil,
            "calls": [{"turn": 0, "name": evil, "arguments": evil}, {"turn": 0, "name": "f", "arguments": None}],
            "passages": [{"title": evil, "text": evil}],
        }
        rows = [
            activation(evil, f"main/turn.0/call.0/{evil}", [(True, evil)], reward=-0.5, advantage=-0.25, valid=False),
            activation(
                "main", "main", [(True, f"I ask. {evil}"), (False, evil), (True, "<result>42</result>")],
                order=1, told=told, parts={evil: 1.0}, input=evil, gts=evil, model_id=evil, fault=evil, turns=2.0,
            ),
        ]  # fmt: skip
        rows[0]["drmas"]["session"] = {evil: 1.0}
        sessions[(number // 4, number % 4)] = rows
    failed = activation("main", "main.0", [(True, "half")], reward=0.0, trained=False, failed=EVIL[0], outcome=None)
    sessions[(9, 0)] = [failed]
    settings = SETTINGS | {"estimator": EVIL[0], "section": {"agents": {"main": {}}}}
    write_step(folder / "rows", sessions, settings=settings)
    assert main(folder, folder / "out") == 0
    return folder / "out" / "step_5.html"


@pytest.fixture(scope="module")
def tab(page, tmp_path_factory):
    with browser.opened(page, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(autouse=True)
def afresh(tab):
    tab.value("document.querySelector('form').reset()")
    tab.value("new Promise(done => setTimeout(done, 50))")


def choose(tab, name, value):
    tab.value(
        f"(() => {{ const e = document.querySelector('form').elements[{name!r}]; e.value = {value!r};"
        "e.dispatchEvent(new Event('input', {bubbles: true})) })()"
    )


def shown(tab):
    visible = "[...document.querySelectorAll('.activation')].filter(a => a.querySelector('.own').offsetParent)"
    return tab.value(f"{visible}.map(a => [Number(a.dataset.agent), Number(a.dataset.reward), a.dataset.valid])")


def test_nothing_of_theirs_runs(tab, page):
    assert tab.value("document.title") == "Step 5 of " + page.parents[1].parent.name + "/" + page.parents[1].name
    assert tab.value("window.ran") is None
    assert tab.said() == []  # nothing was tried that the page's policy had to stop, either
    assert tab.fetched() == [page.as_uri()]
    assert tab.value("[...document.scripts].length") == 1
    names = tab.value("[...new Set([...document.querySelectorAll('*')].map(e => e.localName))].sort().join(' ')")
    assert not set(names.split()) & {"img", "iframe", "svg", "base", "link", "textarea", "plaintext", "xmp"}
    handlers = "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
    assert not [name for name in tab.value(handlers) if name.startswith("on")]
    assert tab.value("[...document.links].every(a => a.getAttribute('href').startsWith('#prompt-'))")


def test_the_policy_would_stop_a_script_that_got_in(tab):
    """Which shows that the check above looks at something: the browser says so, and the script doesn't run."""
    before = len(tab.events)
    tab.value(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = true';"
        "document.body.append(s); const i = document.createElement('img'); i.setAttribute('onerror', 'window.ran = 2');"
        "i.src = 'data:,x'; document.body.append(i) })()"
    )
    tab.value("new Promise(done => setTimeout(done, 300))")
    assert tab.value("window.ran") is None
    assert len([text for text in tab.said() if "Content Security Policy" in text]) >= 2
    del tab.events[before:]
    tab.value("document.body.lastChild.remove(), document.body.lastChild.remove()")


def test_texts_read_as_they_were_written_but_for_what_is_hidden(tab):
    texts = tab.value("[...document.querySelectorAll('.activation .text:not(.masked)')].map(e => e.textContent)")
    for evil in EVIL[:9]:
        assert evil in texts and f"I ask. {evil}" in texts
    assert "line[U+2028]separator[U+2029]paragraph" in texts
    assert "nul[U+0000] esc[U+001B][31m bell[U+0007] del[U+007F] c1[U+009B]" in texts
    assert "user[U+202E]gnp.exe[U+2066][U+2069][U+200B][U+FEFF]" in texts
    assert "lone [U+D800] and [U+DFFF]" in texts
    assert tab.value("document.body.textContent.includes('49')") is False


def test_cards_stand_inside_the_turn_that_called_them(tab):
    assert tab.value("document.querySelectorAll('.activation .activation').length") == len(EVIL)
    order = "[...document.querySelector('.session .activation').children].map(e => e.className)"
    assert tab.value(order)[:5] == ["head own", "own masked", "text own", "calls", "text own masked"]
    grey = "getComputedStyle(document.querySelector('.text.own.masked')).color"
    assert tab.value(grey) != tab.value("getComputedStyle(document.querySelector('.text.own')).color")


def test_filters(tab):
    main_rows, subs = [0, 1, "valid"], len(EVIL)
    assert len(shown(tab)) == 2 * subs + 1
    choose(tab, "validity", "invalid")
    assert [row[2] for row in shown(tab)] == ["invalid"] * subs
    assert tab.value("document.querySelector('output').value") == f"{subs} of {2 * subs + 1} activations"
    choose(tab, "validity", "any")
    choose(tab, "low", "0.5")
    assert shown(tab) == [main_rows] * subs  # the failed session has no reward
    choose(tab, "low", "")
    choose(tab, "advantage", "down")
    assert {row[1] for row in shown(tab)} == {-0.5} and len(shown(tab)) == subs
    choose(tab, "advantage", "any")
    tab.value("document.querySelector('input[name=agent][value=\"0\"]').click()")
    assert all(row[0] > 0 for row in shown(tab)) and len(shown(tab)) == subs  # inside cards that are off
    assert tab.value("[...document.querySelectorAll('.prompt')].filter(p => !p.hidden).length") == 4
    choose(tab, "layout", "stacked")
    lefts = "new Set([...document.querySelectorAll('.session')].map(s => s.getBoundingClientRect().left)).size"
    assert tab.value(lefts) <= 2  # those of hidden prompts are at 0


def test_the_keyboard_is_enough(tab):
    tab.value("document.querySelector('form input').focus()")
    tab.press(" ", text=" ")
    assert all(row[0] > 0 for row in shown(tab))
    tab.press(" ", text=" ")
    tab.value("document.querySelector('.sessions').focus()")
    tab.press("ArrowRight")
    tab.value("new Promise(done => setTimeout(done, 500))")
    assert tab.value("document.querySelector('.sessions').scrollLeft") > 0
    tab.press("Tab")
    tab.press("Enter", text="\r")
    assert tab.value("document.activeElement.localName + document.activeElement.parentNode.open") == "summarytrue"


def test_sessions_stand_side_by_side_and_the_page_is_not_wider_than_its_window(tab):
    boxes = tab.value("[...document.querySelector('.sessions').children].map(s => s.getBoundingClientRect().toJSON())")
    assert len(boxes) == 4 and len({box["top"] for box in boxes}) == 1
    assert all(a["right"] < b["left"] for a, b in pairwise(boxes))
    assert tab.value("document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_drawn_in_both_schemes(tab, scheme):
    tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    shot = base64.b64decode(tab.ask("Page.captureScreenshot")["data"])
    grey = image.imread(BytesIO(shot))[..., :3].mean(axis=2)
    paper = (grey > 0.9) if scheme == "light" else (grey < 0.2)
    assert paper.mean() > 0.5 and (~paper)[:120].sum() > 2000  # ground, and the title on it
