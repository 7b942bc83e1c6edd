"""Renders the page: one HTML file with its style, script and data inside."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from simulator.palette import COLOURS
from simulator.report.data import report_data
from traces.acceptance.trace import Trace
from traces.digits import three_digits
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.store.measured import MeasuredRuns
from traces.store.writing import write_atomically


def build_report(
    trace: Trace,
    latency: LatencyTable,
    logs: Sequence[RoundLog],
    *,
    notes: Mapping[str, str] | None = None,
    measured: MeasuredRuns | None = None,
    title: str = "run",
    pair: Mapping[str, str] | None = None,
    serve: bool = True,
    resamples: int = 2000,
    progress: Callable[[str], None] = lambda _: None,
) -> str:
    """Return the page about a recording, as HTML that needs nothing else.

    Parameters
    ----------
    trace, latency:
        The recording and its costs.
    logs:
        Replays of `trace` to rank, one per policy and source; the best fixed draft length is
        added.
    notes:
        Remarks by policy (`simulator.whatif.ranking`).
    measured:
        Real runs to compare predictions with.
    title:
        Name of the run.
    pair:
        Names of the ``target`` and the ``draft``, if the trace does not name them in full.
    serve:
        True to serve batches in simulated time, where the table has measured some.
    resamples:
        Bootstrap resamples over prompts.
    progress:
        Called with what is being computed, part after part.

    Raises
    ------
    DraftsimError
        If there is no log, or as in the computations for the page.
    """
    data = report_data(
        trace, latency, logs, notes=notes, measured=measured, pair=pair, serve=serve,
        resamples=resamples, progress=progress,
    )  # fmt: skip
    return render(data, title)


def render(data: dict[str, Any], title: str) -> str:
    """Return the HTML of `simulator.report.data.report_data`."""
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


def write_report(page: str, path: str | os.PathLike[str]) -> None:
    """Write the page: whole, or not at all; `FileError` says why not."""
    write_atomically(path, page.encode())


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
