"""What the page holds: the numbers of the Python API, in one file that needs nothing else."""

from __future__ import annotations

import json
import re
from functools import cache
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.registry import parse_policy
from simulator.pricing import autoregressive, price
from simulator.ratios import price_ratios
from simulator.report import build_report, write_report
from simulator.report.ratio_model import (
    fixed_histograms,
    measured_ratios,
    sliders,
    tilted,
)
from simulator.summary import summarize
from simulator.whatif.tilt import Tilter
from tests.conftest import Run
from traces.errors import DraftsimError, FileError
from traces.files import write_latency, write_trace
from traces.latency import CELL_COLUMNS, LatencyTable
from traces.measured import MEASURED_COLUMNS, MeasuredRuns, write_measured
from traces.replay import replay
from traces.rounds import RoundLog
from traces.synthetic import synthetic_trace
from traces.trace import Trace

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
    return LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS)))


@cache
def logs() -> tuple[RoundLog, ...]:
    return tuple(replay(recording(), parse_policy(p, max_gamma=24), name=p) for p in POLICIES)


@cache
def measured() -> MeasuredRuns:
    """Times of "real" runs: the predicted ones, all 10 % slower, give or take."""
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


@cache
def page() -> str:
    return build_report(
        recording(), latency(), logs(), measured=measured(), title="pair <1>", resamples=200
    )


@cache
def data() -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(), re.S)
    assert found is not None
    return dict(json.loads(found[1]))


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


def reader() -> _Reader:
    found = _Reader()
    found.feed(page())
    return found


def test_the_page_is_whole_and_refers_to_nothing_outside() -> None:
    found = reader()
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert all(link == "data:," or link[1:] in found.ids for link in found.links), found.links
    script = page().partition('id="data">')[2].partition("</script>")[2]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page())
    assert "@import" not in page()
    assert "fetch(" not in script


def test_names_cannot_break_out_of_the_page() -> None:
    assert "<code>" not in page()
    assert "</script><b>" not in page()
    assert "&lt;code&gt; &amp; more" in page()
    assert "pair &lt;1&gt;" in page()
    assert data()["categories"]["names"] == ["<code> & more", "synthetic"]


def test_the_ranking_is_that_of_the_summary() -> None:
    expected = summarize(logs(), latency(), resamples=200).set_index("policy")
    shown = data()["policies"]
    assert [p["policy"] for p in shown] == list(
        expected.drop("autoregressive")["speedup"].sort_values(ascending=False).index
    )
    cells = reader().cells
    for row in shown:
        for name in ("speedup", "speedup_lo", "speedup_hi", "block_efficiency"):
            assert row[name] == pytest.approx(expected.loc[row["policy"], name], rel=1e-12)
        assert f"{expected.loc[row['policy'], 'speedup']:.3f}" in cells
    assert "Fastest policy: <strong>oracle" not in page()


def test_predictions_stand_beside_what_was_measured() -> None:
    checked = data()["validation"]
    assert [r["policy"] for r in checked["rows"]] == ["autoregressive", *POLICIES[:3]]
    for row in checked["rows"]:
        # Three repeats of 20 requests, each with an error of 1 %.
        assert row["error"] == pytest.approx(1 / 1.1 - 1, abs=4 * 0.01)
        assert row["rounds_differ"] == 0
    without = build_report(recording(), latency(), logs()[:1], serve=False, resamples=20)
    assert 'id="validation"' not in without
    assert "Latency against throughput" not in without


def test_the_histograms_price_as_price_ratios_does() -> None:
    for row, log in ((r, dict(zip(POLICIES, logs(), strict=True))[r["policy"]])
                     for r in data()["policies"]):  # fmt: skip
        h = row["histogram"]
        for c, v in ((0.05, 1.0), (0.4, 1.3)):
            forwards = np.dot(h["count"], h["forwards"])
            passes = np.dot(h["count"], np.where(np.array(h["drafted"]) > 0, v, 1.0))
            expected = float(price_ratios(log, c, v).speedup[0])
            assert h["emitted"] / (forwards * c + passes) == pytest.approx(expected, rel=1e-12)


def test_sliders_begin_at_this_pair() -> None:
    c, v, known = measured_ratios(recording(), latency())
    assert known
    assert c == pytest.approx(1.2e-3 / 1.01e-2)
    assert v == pytest.approx(1.05e-2 / 1.01e-2)
    for key, own in (("c", c), ("v", v)):
        slider = data()["sliders"][key]
        assert slider["values"][slider["start"]] == pytest.approx(own, rel=5e-3)
        assert slider["values"] == sorted(set(slider["values"]))
    assert data()["sliders"]["gamma"]["values"] == list(range(1, 13))
    assert measured_ratios(recording(), _without_draft())[2] is False


def _without_draft() -> LatencyTable:
    cells = latency().cells
    return LatencyTable(cells[cells["model"] == "target"])


def test_tilted_rounds_are_those_of_the_tilted_recording() -> None:
    trace = recording()
    stops = sliders(trace, 0.1, 1.0, [2, 4])["alpha"]
    own = stops["values"][stops["start"]]
    found = tilted(trace, [0.5, own], [2, 4])
    assert found is not None
    assert found["alphas"] == [0.5, own]
    fixed = fixed_histograms(trace)
    for k, (emitted, forwards, plain, verified) in zip((2, 4), found["rounds"][1], strict=True):
        assert emitted == fixed[k]["emitted"]
        assert forwards == np.dot(fixed[k]["count"], fixed[k]["forwards"])
        assert plain + verified == sum(fixed[k]["count"])
    other = replay(Tilter(trace).to(0.5), parse_policy("fixed:gamma=4"))
    assert found["rounds"][0][1][0] == other.rounds["emitted"].sum()
    assert found["rounds"][0][1][1] == other.rounds["draft_forwards"].sum()
    assert tilted(synthetic_trace(0.7, requests=3, tokens=20), [0.5], [2]) is None


def test_batches_are_priced_only_where_they_were_measured() -> None:
    batches = data()["batches"]
    assert batches["batches"] == [1, 2, 4, 8]
    log = replay(recording(), parse_policy("fixed:gamma=3"))
    plain = price(autoregressive(log), latency(), batch=8).total_s
    expected = plain / price(log, latency(), batch=8).total_s
    assert batches["speedup"][3][2] == pytest.approx(expected)
    assert {r["policy"] for r in data()["serving"]["rows"]} == {
        "off", "K=1", "K=3", "K=5", "tuned"
    }  # fmt: skip
    single = build_report(recording(), latency((1,)), logs()[:1], resamples=20)
    assert "nothing can be said about batches" in single


def test_a_trace_without_signals_or_categories_has_a_page(tmp_path: Path) -> None:
    trace = synthetic_trace(0.6, requests=5, tokens=30)
    log = replay(trace, parse_policy("fixed"), name="fixed")
    plain = build_report(trace, LatencyTable.constant(1.0, 0.1), [log], resamples=20)
    assert "By prompt category" not in plain
    with pytest.raises(DraftsimError, match="no round log was given"):
        build_report(trace, latency(), [])
    with pytest.raises(FileError, match="cannot write"):
        write_report(plain, tmp_path / "absent" / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_the_page(run: Run, tmp_path: Path) -> None:
    write_trace(recording(), tmp_path / "trace.parquet")
    write_latency(latency((1,)), tmp_path / "latency.parquet")
    write_measured(measured(), tmp_path / "measured.parquet")
    out = tmp_path / "report.html"
    chosen = [part for p in POLICIES[:2] for part in ("--policy", p)]
    ran = run("report", "--run", tmp_path, "--out", out, "--resamples", "50", *chosen)
    assert ran.code == 0, ran.err
    text = out.read_text()
    assert tmp_path.name in text
    assert "Predicted against measured" in text
    assert "Measured, but not replayed for this page" in text
    missing = run("report", "--run", tmp_path / "nowhere", "--out", out)
    assert missing.code == 2
    assert missing.err.count("\n") == 1
