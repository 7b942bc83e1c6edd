"""The page in a real Chromium: sliders, keyboard, narrow screens, console."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from policies.registry import parse_policy
from simulator.formulas import general, leviathan
from simulator.ratios import RatioSums, own_ratios, speedup_at
from simulator.report.data import carried
from simulator.whatif.ranking import FITTED
from tests.break_even import break_even_ratio
from tests.browser import Browser
from tests.report_pages import POLICIES, build_report, data, latency, logs, move, recording, value
from traces.digits import three_digits
from traces.replay.run import replay

pytest_plugins = ("tests.report_browser",)

HERE = "document.activeElement.id"


def expected(c: float, v: float, gamma: int, alpha: float) -> dict[str, str]:
    """Return Python's values for the sliders' settings, as the page shows them."""
    fixed = [fixed_sums(gamma) for gamma in range(1, 13)]
    curve = [float(speedup_at(sums, c, v)[0]) for sums in fixed]
    even = break_even_ratio(fixed[gamma - 1], v)
    textbook = general.speedup(leviathan.expected_tokens(alpha, gamma), gamma, 1.0, c, v)
    best = max(range(12), key=lambda i: curve[i])
    return {
        "out-gamma": str(gamma),
        "out-recorded": f"{three_digits(curve[gamma - 1])}×",
        "out-textbook": f"{three_digits(textbook)}×",
        "out-best": f"γ = {best + 1}: {three_digits(curve[best])}×",
        "out-even-c": three_digits(even.ratio),
        "out-even-span": f"{three_digits(even.low)} – {three_digits(even.high)}",
        "out-even-alpha": three_digits(leviathan.break_even_alpha(gamma, c, v)),
    }


def fixed_sums(gamma: int) -> RatioSums:
    """Return the sums that Python carries over of a fixed draft length's rounds."""
    own = own_ratios(recording(), latency(), data()["about"]["best_fixed"])
    log = replay(recording(), parse_policy(f"fixed:gamma={gamma}"))
    return RatioSums(*carried(recording(), latency(), own)(log))


def shown(browser: Browser, names: dict[str, str]) -> dict[str, str]:
    return {name: browser.text(f"#{name}") for name in names}


def test_it_opens_without_a_word_on_the_console(opened: Browser) -> None:
    assert opened.console() == []
    plots = opened.run(
        "return [...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll("
        "'svg *').length])"
    )
    assert len(plots) >= 7
    assert all(count > 10 for _, count in plots), plots
    # Nothing was asked of any network: the page is its only resource.
    assert opened.run("return performance.getEntriesByType('resource').length") == 0


def test_a_broken_page_would_be_noticed(browser: Browser, file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(file.read_text(encoding="utf-8").replace("drawAll();", "drawNothing();"))
    browser.console()
    browser.open(broken)
    assert any("drawNothing" in line["message"] for line in browser.console())


def test_it_starts_at_this_pairs_own_numbers(opened: Browser) -> None:
    wanted = expected(value("c"), value("v"), value("gamma"), value("alpha"))
    assert shown(opened, wanted) == wanted
    assert opened.text("#out-tilted") == wanted["out-recorded"]


def test_at_the_pairs_own_ratios_the_sliders_give_the_ranking(opened: Browser) -> None:
    """The page's own arithmetic, to nine digits, against the table that Python wrote."""
    drawn = opened.run(
        "return [...document.querySelectorAll('#table-ratio tbody tr')]"
        ".map(r => r.cells[1].textContent)"
    )
    assert drawn == [three_digits(row["speedup"]) for row in data()["policies"]]
    points = dict(
        opened.run(
            "return [...document.querySelectorAll('#plot-lengths [data-series=recorded]')]"
            ".map(p => [p.dataset.x, Number(p.dataset.y)])"
        )
    )
    rows = {row["policy"]: row["speedup"] for row in data()["policies"]}
    assert points["4"] == pytest.approx(rows["fixed:gamma=4"], rel=1e-9)


@pytest.mark.parametrize(
    ("key", "arrow", "times"),
    [("c", "ArrowRight", 4), ("c", "ArrowLeft", 6), ("v", "ArrowRight", 5),
     ("gamma", "ArrowRight", 3), ("alpha", "ArrowLeft", 2)],
)  # fmt: skip
def test_a_slider_moved_by_keyboard_gives_pythons_number(
    opened: Browser, key: str, arrow: str, times: int
) -> None:
    before = opened.run("return document.getElementById('plot-lengths').innerHTML")
    move(opened, key, arrow, times)
    steps = dict.fromkeys(("c", "v", "gamma", "alpha"), 0)
    steps[key] = times if arrow == "ArrowRight" else -times
    at = {k: value(k, n) for k, n in steps.items()}
    assert opened.text(f"#value-{key}") == f"{at[key]:.3g}"
    spoken = opened.run("return document.activeElement.getAttribute('aria-valuetext')")
    assert spoken == f"{at[key]:.3g}"
    wanted = expected(at["c"], at["v"], at["gamma"], at["alpha"])
    assert shown(opened, wanted) == wanted
    assert opened.run("return document.getElementById('plot-lengths').innerHTML") != before
    # The plotted points, and the table of policies, are the same numbers.
    points = opened.run(
        "return [...document.querySelectorAll('#plot-lengths [data-series=recorded]')]"
        ".map(p => [Number(p.dataset.x), Number(p.dataset.y)])"
    )
    for gamma, drawn in points:
        exact = float(speedup_at(fixed_sums(int(gamma)), at["c"], at["v"])[0])
        assert drawn == pytest.approx(exact, rel=1e-12)
    assert len(points) == 12
    cells = opened.run(
        "return [...document.querySelectorAll('#table-ratio tbody tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )
    curve = [float(speedup_at(fixed_sums(g), at["c"], at["v"])[0]) for g in range(1, 13)]
    best = 1 + curve.index(max(curve))
    own = {row["policy"]: RatioSums(*row["sums"]) for row in data()["policies"]}
    assert set(own) == set(POLICIES)
    # The best fixed length of these ratios is among them, and no other is called so.
    own[f"fixed:gamma={best}"] = fixed_sums(best)
    assert {row[0].removesuffix(" best fixed") for row in cells} == set(own)
    named = [row[0] for row in cells if row[0].endswith(" best fixed")]
    assert named == [f"fixed:gamma={best} best fixed"]
    order = [float(row[1]) for row in cells]
    assert order == sorted(order, reverse=True)
    for name, speedup, even, span in cells:
        sums = own[name.removesuffix(" best fixed")]
        assert speedup == three_digits(float(speedup_at(sums, at["c"], at["v"])[0]))
        found = break_even_ratio(sums, at["v"])
        low, middle, high = map(three_digits, (found.low, found.ratio, found.high))
        assert (even, span) == (middle, f"{low} – {high}")
    assert opened.console() == []


def test_away_from_the_pairs_costs_a_rule_fitted_to_them_is_left_out(
    browser: Browser, tmp_path: Path
) -> None:
    text = build_report(
        recording(), latency(), logs(), notes={"svip": FITTED}, resamples=20, serve=False
    )
    (tmp_path / "fitted.html").write_text(text, encoding="utf-8")
    browser.console()
    browser.open(tmp_path / "fitted.html")

    def shown_names() -> str:
        names = browser.run(
            "return [...document.querySelectorAll('#table-ratio tbody th, #plot-ratio svg text')]"
            ".map(e => e.textContent)"
        )
        return " | ".join(names)

    before = shown_names()
    assert before.count("svip") == 2
    assert browser.text("#ratio-note") == ""
    move(browser, "c", "ArrowRight", 3)
    assert "svip" not in shown_names()
    assert browser.text("#ratio-note").startswith("Left out: svip, fitted to this pair's own costs")
    move(browser, "c", "ArrowLeft", 3)
    assert shown_names() == before
    assert browser.console() == []


def test_alpha_moves_to_the_tilted_recording(opened: Browser) -> None:
    move(opened, "alpha", "ArrowLeft", 3)
    alpha, gamma = value("alpha", -3), value("gamma")
    i = data()["tilt"]["alphas"].index(alpha)
    sums = RatioSums(*data()["tilt"]["rounds"][i][gamma - 1])
    speedup = float(speedup_at(sums, value("c"), value("v"))[0])
    assert opened.text("#out-tilted") == f"{three_digits(speedup)}×"
    assert "expected error" in opened.text("#tilt-note") or "cannot be measured" in opened.text(
        "#tilt-note"
    )
    move(opened, "alpha", "Home", 1)
    assert opened.text("#out-tilted") == "–"
    assert opened.text("#out-alpha") == "0"


def test_where_nothing_pays_the_page_says_so(opened: Browser) -> None:
    move(opened, "c", "End", 1)
    move(opened, "v", "End", 1)
    assert opened.text("#out-best") == "none is faster"
    assert opened.text("#out-even-c") == "never" or float(opened.text("#out-even-c")) < 1
    move(opened, "gamma", "Home", 1)
    # One draft at c = 1 and v = 3 costs 4 passes for at most 2 tokens.
    assert opened.text("#out-even-alpha") == "never"


def test_every_control_is_reached_by_tab_alone_and_seen(opened: Browser) -> None:
    reached: list[str] = []
    outlined: list[str] = []
    opened.run("document.body.tabIndex = -1; document.body.focus()")
    for _ in range(120):
        opened.press("Tab")
        reached.append(opened.run(f"return {HERE}"))
        outlined.append(opened.run("return getComputedStyle(document.activeElement).outlineStyle"))
    controls = ["slider-c", "slider-v", "slider-gamma", "slider-alpha", "reset"]
    order = [reached.index(name) for name in controls]
    assert order == sorted(order)
    assert all(outlined[i] == "solid" for i in order)
    labels = opened.run("return [...document.querySelectorAll('input')].map(i => i.labels.length)")
    assert labels == [1, 1, 1, 1]


def test_reset_by_keyboard_returns_to_the_pair(opened: Browser) -> None:
    start = opened.text("#out-recorded")
    move(opened, "c", "ArrowRight", 9)
    assert opened.text("#out-recorded") != start
    opened.run("document.getElementById('reset').focus()")
    opened.press("Enter")
    assert opened.text("#out-recorded") == start


@pytest.mark.parametrize("width", [320, 400, 1100])
def test_it_is_readable_at_any_width(opened: Browser, file: Path, width: int) -> None:
    opened.open(file, width, 800)
    assert opened.run("return window.innerWidth") == width
    assert opened.run("return document.documentElement.scrollWidth") <= width
    # Wide tables scroll in their own region; nothing else sticks out of the page.
    outside = opened.run(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg') "
        "&& e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    small = opened.run(
        "return [...document.querySelectorAll('main *, svg text')].filter(e => e.textContent.trim()"
        " && parseFloat(getComputedStyle(e).fontSize) < 11).length"
    )
    assert small == 0
    # Text in a plot is drawn at its own size: the drawing is as wide as its place.
    scales = opened.run(
        "return [...document.querySelectorAll('.plot svg')].map(s => s.getBoundingClientRect()"
        ".width / s.viewBox.baseVal.width)"
    )
    assert all(abs(s - 1) < 0.03 for s in scales), scales
    crossing = opened.run(
        "return [...document.querySelectorAll('.plot svg')].flatMap(s => {"
        "const box = s.getBoundingClientRect();"
        "return [...s.querySelectorAll('text')].filter(t => {const r = t.getBoundingClientRect();"
        "return r.left < box.left - 4 || r.right > box.right + 12;}).map(t => t.textContent)})"
    )
    assert crossing == []
    assert opened.console() == []


def test_it_prints_without_controls(opened: Browser) -> None:
    opened.devtools("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        hidden = opened.run(
            "return [...document.querySelectorAll('nav, input, button')]"
            ".map(e => getComputedStyle(e).display)"
        )
        assert set(hidden) == {"none"}
    finally:
        opened.devtools("Emulation.setEmulatedMedia", {"media": ""})


def test_colours_differ_in_greyscale_or_by_shape(opened: Browser) -> None:
    # Cells that pay are shaded by value: the faster, the darker.
    cells = opened.run(
        "return [...document.querySelectorAll('#table-batches td')].map(td => ["
        "Number(td.dataset.value), getComputedStyle(td).backgroundColor])"
    )
    lightness = [
        (speed, sum(map(float, colour[4:-1].split(",")))) for speed, colour in cells if speed >= 1
    ]
    lightness.sort()
    assert len(lightness) > 4
    assert all(a[1] >= b[1] for a, b in pairwise(lightness))
    looks = opened.run(
        "return [...document.querySelectorAll('#plot-serving path[stroke-dasharray]')]"
        ".map(p => p.getAttribute('stroke-dasharray'))"
    )
    assert len(looks) == len(set(looks)) == 5


def test_a_page_without_optional_parts_works_too(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "small.html"
    path.write_text(
        build_report(recording(), latency((1,)), logs()[:1], resamples=20), encoding="utf-8"
    )
    browser.console()
    browser.open(path, 400, 800)
    move(browser, "c", "ArrowRight", 1)
    assert browser.console() == []
    assert browser.text("#out-recorded").endswith("×")
