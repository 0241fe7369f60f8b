"""Markdown and HTML: names stay names, tables stay tables, and the page asks for nothing from outside."""

import base64
import re
from html.parser import HTMLParser

import pytest

from verl_drmas.report.blocks import Bullets, Heading, Paragraph, Picture, Report, Table, clean
from verl_drmas.report.markdown import escape, to_markdown
from verl_drmas.report.page import to_html

EVIL = "<script>alert(1)</script>\"'&|`*_x_ [a](javascript:b) \x1b[31m\u202e\x00 {{ 7*7 }}"


class Seen(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def report(tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG fake")
    return Report(
        EVIL,
        (
            Heading(EVIL),
            Heading("part", 3),
            Paragraph(EVIL),
            Bullets((EVIL, "- b", "1. c")),
            Table((EVIL, "n"), ((EVIL, "1"), ("x", "not run")), title=EVIL, spans=(("", 1), (EVIL, 1))),
            Picture(picture, EVIL, EVIL),
        ),
    )


def test_the_page_shows_every_text_as_it_is_and_runs_nothing(report):
    page = to_html(report)
    seen = Seen(page)
    assert not {"script", "iframe", "object", "link", "base", "form"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert seen.tags.count("h2") == 1 and seen.tags.count("table") == 1 and seen.tags.count("img") == 1
    shown = clean(EVIL)
    assert seen.texts.count(shown) >= 9  # title twice, contents, headings, cells, captions
    assert dict(seen.attributes)["alt"] == shown
    assert not set(page) & {"\x1b", "\x00", "\u202e"}


def test_the_page_is_one_file(report):
    seen = Seen(to_html(report))
    sources = [value for name, value in seen.attributes if name in ("src", "href")]
    assert all(value.startswith(("data:image/png;base64,", "#section-")) for value in sources)
    (image,) = [value for name, value in seen.attributes if name == "src"]
    assert base64.b64decode(image.split(",")[1]) == b"\x89PNG fake"
    assert "url(" not in to_html(report) and "@import" not in to_html(report)
    assert ("content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in seen.attributes


def test_markdown_tables_keep_their_columns_whatever_the_names(report, tmp_path):
    lines = to_markdown(report, tmp_path).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {3}
    assert "![" in lines[-3] and "](a.png)" in lines[-3]
    assert not [line for line in lines if "<" in line]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("drmas_mean", "drmas_mean"),
        ("_x_", r"\_x\_"),
        ("a*b", r"a\*b"),
        ("1. x", r"1\. x"),
        ("38.8", "38.8"),
        ("-5", "-5"),
        ("- x", r"\- x"),
        ("# x", r"\# x"),
        ("a|b", r"a\|b"),
        ("a\nb", "a b"),
        ("<b>", "&lt;b&gt;"),
        ("\\", "\\\\"),
    ],
)
def test_markdown_escapes_what_would_be_read_and_nothing_else(text, shown):
    assert escape(text) == shown


def test_a_tables_rows_must_fit_its_head():
    with pytest.raises(ValueError, match="columns"):
        Table(("a", "b"), (("1",),))
    with pytest.raises(ValueError, match="columns"):
        Table(("a", "b"), (), spans=(("x", 1),))
