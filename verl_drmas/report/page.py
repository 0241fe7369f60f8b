"""Writes a report as one HTML file that opens anywhere: styles and pictures are in it, and there is no script."""

from __future__ import annotations

import base64

from jinja2 import Environment, PackageLoader, StrictUndefined

from verl_drmas.report.blocks import Picture, Report, clean


def to_html(report: Report) -> str:
    """Returns the page; every text in it is escaped by the template."""
    environment = Environment(
        loader=PackageLoader("verl_drmas.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    return environment.get_template("page.html").render(
        report=report,
        kinds=[type(block).__name__ for block in report.blocks],
        picture=_data,
    )


def _data(picture: Picture) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.path.read_bytes()).decode("ascii")
