"""The page's maps in a real Chromium: break-even lines, arrows, cells, tilted recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.registry import parse_policy
from simulator.ratios import RatioSums, own_ratios
from simulator.report.data import carried
from simulator.whatif.tilt import Tilter
from tests.break_even import break_even_ratio
from tests.browser import Browser
from tests.report_pages import build_report, data, latency, move, recording, value
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay

pytest_plugins = ("tests.report_browser",)


def sums(trace: Trace, log: RoundLog) -> RatioSums:
    """Return the sums that the page computes with: the rounds' costs, carried to other ratios."""
    own = own_ratios(recording(), latency(), data()["about"]["best_fixed"])
    return RatioSums(*carried(trace, latency(), own)(log))


def rows_of(browser: Browser, name: str) -> dict[float, list[float]]:
    """Break-even c with its bounds, by the row of a map."""
    found = browser.run(
        "return [...document.querySelectorAll(arguments[0] + ' [data-row]')]"
        ".map(p => ['row', 'even', 'low', 'high'].map(k => Number(p.dataset[k])))",
        f"#{name}",
    )
    return {row: bounds for row, *bounds in found}


def test_the_maps_draw_the_break_even_that_python_finds(opened: Browser) -> None:
    before = opened.run("return document.getElementById('map-alpha').innerHTML")
    move(opened, "v", "ArrowRight", 6)
    move(opened, "gamma", "ArrowRight", 2)
    assert opened.run("return document.getElementById('map-alpha').innerHTML") != before
    v, gamma = value("v", 6), value("gamma", 2)
    by_length = rows_of(opened, "map-recorded")
    assert len(by_length) >= 8
    for length, drawn in by_length.items():
        log = replay(recording(), parse_policy(f"fixed:gamma={int(length)}"))
        assert drawn == pytest.approx(list(break_even_ratio(sums(recording(), log), v)), rel=1e-9)
    by_rate = rows_of(opened, "map-alpha")
    assert len(by_rate) >= 10
    tilter = Tilter(recording())
    for alpha in (0.5, 0.8):
        other = tilter.to(alpha)
        log = replay(other, parse_policy(f"fixed:gamma={gamma}"))
        assert by_rate[alpha] == pytest.approx(
            list(break_even_ratio(sums(other, log), v)), rel=1e-9
        )
    # The textbook formula is drawn with it, dashed.
    assert opened.run("return document.querySelectorAll('[data-dashed=textbook]').length") == 1
    # Rows whose break-even lies outside the map say so at its edge.
    move(opened, "v", "End", 1)
    cs, most = data()["sliders"]["c"]["values"], data()["sliders"]["v"]["values"][-1]
    fixed = {g: replay(recording(), parse_policy(f"fixed:gamma={g}")) for g in range(1, 13)}
    evens = {g: break_even_ratio(sums(recording(), log), most).ratio for g, log in fixed.items()}
    below = [[g, "left"] for g, ratio in evens.items() if ratio <= cs[0]]
    assert 0 < len(below) < 12
    assert below == opened.run(
        "return [...document.querySelectorAll('#map-recorded [data-beyond]')]"
        ".map(p => [Number(p.dataset.beyond), p.dataset.side])"
    )
    assert opened.console() == []


def test_the_maps_of_batches_are_the_tables(opened: Browser) -> None:
    for name, ys in (("batches", "lengths"), ("contexts", "contexts")):
        drawn = opened.run(
            "return [...document.querySelectorAll(arguments[0] + ' text[data-value]')]"
            ".map(t => [Number(t.dataset.x), Number(t.dataset.y), Number(t.dataset.value), "
            "t.textContent])",
            f"#map-{name}",
        )
        cells = data()[name]
        assert len(drawn) == len(cells["batches"]) * len(cells[ys])
        for batch, y, speedup, text in drawn:
            i, j = cells["batches"].index(batch), cells[ys].index(y)
            assert speedup == cells["speedup"][i][j]
            doubt = cells["low"][i][j] <= 1 <= cells["high"][i][j]
            assert text == f"{speedup:.2f}" + (" ?" if doubt else "")
        hatched = opened.run(
            "return [...document.querySelectorAll(arguments[0] + ' rect')]"
            ".filter(r => (r.getAttribute('fill') || '').startsWith('url(#hatch')).length",
            f"#map-{name}",
        )
        assert hatched == sum(s < 1 for row in cells["speedup"] for s in row)


def page(path: Path, draft_s: float) -> Path:
    """The report of a trace without signals, by the seconds of a draft pass."""
    trace = synthetic_trace(0.7, requests=12, tokens=60)
    log = replay(trace, parse_policy("fixed:gamma=2"), name="fixed:gamma=2")
    latency = LatencyTable.constant(1.0, draft_s)
    path.write_text(build_report(trace, latency, [log], resamples=20), encoding="utf-8")
    return path


def test_without_signals_alpha_is_tilted_all_the_same(browser: Browser, tmp_path: Path) -> None:
    browser.console()
    browser.open(page(tmp_path / "plain.html", 0.1), 400, 800)
    move(browser, "alpha", "ArrowLeft", 4)
    assert browser.text("#out-tilted").endswith("×")
    assert rows_of(browser, "map-alpha")
    assert browser.console() == []


def test_free_drafts_are_left_of_the_maps(browser: Browser, tmp_path: Path) -> None:
    browser.console()
    browser.open(page(tmp_path / "free.html", 0.0))
    assert browser.text("#out-even-alpha") == "any"
    for name in ("map-recorded", "map-alpha"):
        drawn = browser.run("return document.getElementById(arguments[0]).innerHTML", name)
        assert "NaN" not in drawn
        assert "c = 0 is left of the map" in drawn
    start = browser.text("#out-recorded")
    move(browser, "c", "End", 1)
    assert browser.text("#out-recorded") != start
    assert browser.console() == []
