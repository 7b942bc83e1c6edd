"""Renders the page: one HTML file with its style, script and data inside."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from simulator.palette import COLOURS
from traces.digits import three_digits


def render(data: dict[str, Any], title: str) -> str:
    """Return `simulator.report.data.report_data` as HTML that needs nothing else."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    environment.filters.update(
        speedup=_speedup, percent=_percent, signed=_signed, figure=_figure, named=_named
    )
    return environment.from_string(_asset("page.html")).render(
        title=title,
        data=data,
        style=Markup(_asset("page.css")),
        script=Markup(
            _asset("charts.js")
            + "".join(_asset(n).replace('"use strict";\n', "", 1) for n in ("maps.js", "page.js"))
        ),
        # "</script>" inside a name must not end the element.
        json=Markup(
            json.dumps({**data, "colours": COLOURS}, allow_nan=False, separators=(",", ":"))
            .replace("<", "\\u003c")
        ),
    )  # fmt: skip


def _asset(name: str) -> str:
    return files("simulator.report").joinpath(name).read_text(encoding="utf-8")


def _speedup(value: float | None) -> str:
    return "–" if value is None else three_digits(value)


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f}%"


def _named(policy: str) -> Markup:
    """Return a policy's name that may break after its marks, and not within its words."""
    return Markup(re.sub(r"([:,=_])", r"\1<wbr>", str(escape(policy))))


def _figure(value: float) -> str:
    return f"{value:.3g}"
