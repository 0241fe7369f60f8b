"""What a page says, as plain text."""

from __future__ import annotations

import codecs
import re
from html.parser import HTMLParser

_SILENT = frozenset({"script", "style", "noscript", "template", "svg", "iframe", "object", "nav", "footer", "aside"})
_BLOCKS = frozenset(
    {
        "address", "article", "blockquote", "body", "br", "dd", "div", "dl", "dt", "fieldset", "figcaption", "figure",
        "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "li", "main", "ol", "option", "p", "pre",
        "section", "table", "tbody", "td", "tfoot", "th", "thead", "title", "tr", "ul",
    }
)  # fmt: skip
_APART = frozenset({"h1", "h2", "h3", "h4", "h5", "h6", "p", "pre", "table", "ul", "ol", "blockquote", "section"})
_CELLS = frozenset({"td", "th"})
_META = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.IGNORECASE)
# Text in Python's own escapes, or slow to read: no page is written in them.
_NO_CHARSETS = frozenset({"idna", "punycode", "raw_unicode_escape", "undefined", "unicode_escape", "utf_7"})


def page_text(body: bytes, content_type: str, charset: str | None) -> tuple[str, str]:
    """Title and text of a page.

    Args:
        body: As it was sent.
        content_type: `text/html` (or `application/xhtml+xml`); anything else is taken as it is.
        charset: As the server names it; None: as the page does, or UTF-8.

    Returns:
        The title, empty where there is none, and the text.
    """
    html = content_type in ("text/html", "application/xhtml+xml")
    if charset is None and html and (match := _META.search(body[:4096])):
        charset = match[1].decode("ascii", "replace")
    text = _decoded(body, charset).replace("\x00", "")
    if not html:
        return "", text.strip()
    page = _Page()
    # Not closed: an element that is begun and never ended hides the rest, as in a browser; closing would look through
    # the rest once for every such beginning.
    page.feed(text)
    return _tidy("".join(page.title)).replace("\n", " "), _tidy("".join(page.pieces))


def _decoded(body: bytes, charset: str | None) -> str:
    try:
        known = codecs.lookup(charset or "utf-8-sig").name
        if known.replace("-", "_") not in _NO_CHARSETS:
            return body.decode(known if charset is None or known != "utf-8" else "utf-8-sig", "replace")
    except (LookupError, ValueError):
        pass
    return body.decode("utf-8-sig", "replace")


def _tidy(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class _Page(HTMLParser):
    """Gathers what is read: no scripts, no navigation; blocks on lines of their own."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.pieces: list[str] = []
        self._silent = 0
        self._titled = False  # inside the title
        self._breaks = 2  # line breaks that the text ends with

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT:
            self._silent += 1
        elif tag == "title" and not self._silent:
            self._titled = True
        self._space(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _SILENT:
            self._silent = max(self._silent - 1, 0)
        elif tag == "title":
            self._titled = False
        if tag != "li" and tag not in _CELLS:
            self._space(tag)

    def handle_data(self, data: str) -> None:
        if self._silent or (self._breaks and not data.strip()):
            return
        if self._titled:
            self.title.append(data)
        else:
            self.pieces.append(re.sub(r"\s+", " ", data))
            self._breaks = 0

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """`<![` is no HTML; the standard library raises where it can't read one."""
        return self.parse_bogus_comment(i)

    def _space(self, tag: str) -> None:
        if self._silent or tag not in _BLOCKS:
            return
        if tag in _CELLS:
            if not self._breaks:
                self.pieces.append(" | ")
            return
        wanted = 2 if tag in _APART else 1
        self.pieces.append("\n" * max(wanted - self._breaks, 0))
        self._breaks = max(wanted, self._breaks)
        if tag == "li":
            self.pieces.append("- ")
