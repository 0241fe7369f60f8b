import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_drmas.workflows.toolbox.pages import page_text

PAGE = """<!DOCTYPE html><html><head><meta charset="utf-8"><title> The
 Rhine </title><style>p {color: red}</style><script>if (1 < 2) { alert("<p>no</p>") }</script></head>
<body><nav>Home | About</nav><h1>Rhine</h1><p>The <b>Rhine</b> flows&nbsp;&amp; flows.</p><ul><li>one</li><li>two
</li></ul><table><tr><th>City<th>Bank</tr><tr><td>Cologne</td><td>left</td></tr></table>
<!-- hidden <p>x</p> --><svg><title>logo</title></svg><br>Last &#233;<footer>Imprint</footer></body></html>"""


def test_a_page_is_read_as_a_person_reads_it():
    title, text = page_text(PAGE.encode(), "text/html", None)
    assert title == "The Rhine"
    assert text.split("\n") == [
        "Rhine", "", "The Rhine flows & flows.", "", "- one", "- two", "", "City | Bank", "Cologne | left", "",
        "Last é",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body, charset, text",
    [
        ("é".encode("latin-1"), "latin-1", "é"),
        (b'<meta charset="iso-8859-1"><p>' + "é".encode("latin-1"), None, "é"),
        ('<meta http-equiv=x content="text/html; charset=windows-1252"><p>€'.encode("cp1252"), None, "€"),
        ("é".encode(), "nonsense", "é"),
        (b"\xff\xfea", "utf-8", "��a"),
        ("\ufeffé".encode(), "utf-8", "é"),
        (b"\\u0041", "unicode_escape", "\\u0041"),
        (b"abc", "punycode", "abc"),
        (b"abc", "zip", "abc"),
        (b"a\x00b", None, "ab"),
    ],
)
def test_the_charset_is_found_or_borne(body, charset, text):
    assert page_text(body, "text/html", charset)[1] == text


def test_what_is_no_html_is_left_as_it_is():
    assert page_text(b' {"a": "<p>"}\n', "application/json", None) == ("", '{"a": "<p>"}')
    assert page_text(b"a\n  b <b>", "text/plain", None) == ("", "a\n  b <b>")


BEGINNINGS = [
    "<a ", '<a"', "<!--", '<a b="', "&", "<![", "</", "<script>", "<a/", "<!", "<?", "<a b>", "</a ", "&#", "<svg>",
    "<![CDATA[", "<!DOCTYPE ", "<title>", "<li>", "<td>", "</svg>", "<a b='", "<![x[", "<!x<",
]  # fmt: skip


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_no_page_takes_long(beginning):
    start = time.process_time()
    page_text((beginning * 2**16)[: 2**17].encode(), "text/html", None)
    assert time.process_time() - start < 2  # quadratic: minutes


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([*BEGINNINGS, "x", ">", '"', "'", "=", "-->", "]]>", " ", "\n", "/"]) | st.text(max_size=3),
        max_size=25,
    )
)
def test_any_page_can_be_read(parts):
    title, text = page_text("".join(parts).encode("utf-8", "replace"), "text/html", None)
    assert (title + text).encode() is not None and "\n" not in title
