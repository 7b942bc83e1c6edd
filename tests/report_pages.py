"""A page about a made-up recording, and what its tests read out of one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from html.parser import HTMLParser
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from policies.registry import parse_policy
from simulator.pricing import autoregressive, price
from simulator.ratios import OwnRatios
from simulator.report.data import render, report_data, tilted
from tests.browser import Browser
from tests.serving import table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.engine_runs import MEASURED_COLUMNS, MeasuredRuns

POLICIES = ("fixed:gamma=4", "svip", "hf-heuristic:gamma=5", "oracle")


@cache
def recording() -> Trace:
    parts = synthetic_trace(
        0.7, requests=20, tokens=60, max_gamma=24, concentration=3.0, seed=2
    )  # fmt: skip
    requests = [
        r if i % 2 else type(r)(**{**vars(r), "category": "<code> & more"})
        for i, r in enumerate(parts.requests)
    ]
    meta = {**parts.meta, "device": "a made-up device", "target": {"name": "</script><b>big"}}
    return Trace(parts.columns, requests, parts.max_gamma, meta)


@cache
def latency(batches: tuple[int, ...] = (1, 8)) -> LatencyTable:
    cells: list[tuple[Any, ...]] = []
    for batch, context in product(batches, (8, 400)):
        for width in (1, 2, 5, 9, 25):
            target = 1e-2 + 1e-4 * batch * width
            cells.append(("target", "forward", batch, width, context, target, 0.0, 9))
        for width in (1, 2):
            cells.append(("draft", "forward", batch, width, context, 1.2e-3, 0.0, 9))
    # What no ratio tells of: the host and the signals that some policies read.
    for phase, seconds in (("host_round", 6e-4), ("host_draft", 1e-4), ("signal", 2e-4)):
        cells.append(("target", phase, 1, 1, 0, seconds, 0.0, 9))
    return table_of(cells)


@cache
def logs() -> tuple[RoundLog, ...]:
    return tuple(replay(recording(), parse_policy(p, max_gamma=24), name=p) for p in POLICIES)


@cache
def measured() -> MeasuredRuns:
    """Times of "real" runs: the predicted ones, all 10% slower, give or take."""
    rng = np.random.default_rng(0)
    rows = []
    for log in (autoregressive(logs()[0]), *logs()[:3]):
        rounds = log.per_request(np.ones(len(log)))
        for repeat in range(3):
            for request, s, n in zip(
                log.requests, price(log, latency()).decode_s, rounds, strict=True
            ):
                wall = s * 1.1 * rng.normal(1, 0.01)
                rows.append((log.policy, "exact", 1, False, repeat, request.id, wall, int(n)))
    return MeasuredRuns(pd.DataFrame(rows, columns=list(MEASURED_COLUMNS)))


def build_report(
    trace: Trace, latency: LatencyTable, logs: Sequence[RoundLog], title: str = "run",
    **options: Any,
) -> str:  # fmt: skip
    """Return the page about a recording."""
    return render(report_data(trace, latency, logs, **options), title)


@cache
def page() -> str:
    return build_report(
        recording(), latency(), logs(), measured=measured(), title="pair <1>", resamples=200
    )


@cache
def data() -> dict[str, Any]:
    return data_of(page())


def data_of(text: str) -> dict[str, Any]:
    """The data that a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


_tilted = cache(tilted)


def tilted_once(
    trace: Trace, latency: LatencyTable, own: OwnRatios, stops: list[float], gammas: list[int]
) -> dict[str, Any] | str:
    """Return the result of `tilted` for a recording, computed once."""
    return _tilted(trace, latency, own, tuple(stops), tuple(gammas))


class _Reader(HTMLParser):
    """Collects what the page refers to, its ids, and the tags left open."""

    VOID = ("meta", "link", "input", "br", "wbr", "hr", "img")

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [v for k, v in attrs if k in ("src", "href", "action", "data") and v]
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def reader(text: str | None = None) -> _Reader:
    found = _Reader()
    found.feed(page() if text is None else text)
    return found


def fixed_two(trace: Trace) -> RoundLog:
    return replay(trace, parse_policy("fixed:gamma=2"), name="fixed:gamma=2")


def lead(text: str) -> str:
    """The first sentence of a page, on one line."""
    return " ".join(text.partition('id="headline">')[2].partition("</p>")[0].split())


def value(key: str, steps: int = 0) -> Any:
    slider = data()["sliders"][key]
    return slider["values"][slider["start"] + steps]


def move(browser: Browser, key: str, arrow: str, times: int) -> None:
    browser.run("document.getElementById(arguments[0]).focus()", f"slider-{key}")
    browser.press(*[arrow] * times)
