"""Writes a view as one HTML file that opens anywhere. Nothing of it is fetched, and but for its own few lines of script
nothing runs: the page's policy names that script and its style by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.filters import do_mark_safe

from verl_drmas.trace.show import visible
from verl_drmas.trace.view import HUES, View


def to_html(view: View, run: str) -> str:
    """The page; every text in it goes through `visible` or the template's escaping.

    Args:
        view: What it shows.
        run: The run's name.
    """
    environment = Environment(
        loader=PackageLoader("verl_drmas.trace", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = lambda text: do_mark_safe(visible(text))  # which has escaped it
    environment.globals["hue"] = lambda agent: agent % HUES
    style, script = (_own(name) for name in ("page.css", "page.js"))
    return environment.get_template("page.html").render(
        view=view,
        run=run,
        style=do_mark_safe(style),  # files of this package
        script=do_mark_safe(script),
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}; "
        f"script-src {_hash(script)}",
    )


def _own(name: str) -> str:
    return resources.files("verl_drmas.trace").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
