"""Figures show the numbers they are given, with units, and can be written."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from policies.lengths.basic import Autoregressive, Fixed, Oracle
from policies.lengths.gammatune import GammaTune
from policies.lengths.huggingface import HFHeuristic
from simulator.palette import COLOURS, PolicyPlaces
from simulator.plots import serving as plots
from simulator.plots.look import SHADES, draw_map, log_ticks, save, series, shading
from simulator.plots.recording import (
    plot_categories,
    plot_cost_ratio,
    plot_robustness,
    plot_speedup,
    plot_survival,
    plot_validation,
    save_all,
)
from simulator.plots.whatif import MOST_LINES, figures, plot_batches, plot_break_even, plot_maps
from simulator.pricing import autoregressive, price
from simulator.ratios import own_ratios
from simulator.robustness import speedup_by_gamma
from simulator.serving import Limits, Poisson, Scenario, over_batches, over_rates, sweep
from simulator.summary import summarize
from simulator.validation import compare, predictions
from tests.serving import GRID, SMALL
from tests.test_whatif_breakeven import iid_grid
from traces.acceptance.synthetic import synthetic_trace, trace_by_position
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import in_one_pass
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.engine_runs import MEASURED_COLUMNS

LATENCY = LatencyTable.constant(0.01, 0.001, 0.012)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(0.7, tokens=60, requests=8)


@pytest.fixture(scope="module")
def logs(trace: Trace) -> list[RoundLog]:
    return [replay(trace, p, name=n) for n, p in (("fixed", Fixed(4)), ("oracle", Oracle()))]


def points(figure: Figure) -> list[np.ndarray]:
    return [np.asarray(line.get_xydata()) for axes in figure.axes for line in axes.get_lines()]


def holds(figure: Figure, x: object, y: object | None = None) -> bool:
    wanted = np.asarray(x, dtype=float)
    for data in points(figure):
        if len(data) != len(wanted) or not np.allclose(data[:, 0], wanted):
            continue
        if y is None or np.allclose(data[:, 1], np.asarray(y, dtype=float)):
            return True
    return False


def test_speedups_are_drawn_where_they_are(logs: list[RoundLog]) -> None:
    frame = summarize(logs, LATENCY, resamples=50)
    figure = plot_speedup(frame)
    for kind in ("oracle", "fixed"):
        assert holds(figure, frame.loc[frame["policy"].str.startswith(kind), "speedup"])
    assert "×" in figure.axes[0].get_xlabel()
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["oracle", "fixed"]


def test_many_categories_take_several_rows() -> None:
    rows = pd.DataFrame([
        {"policy": "fixed", "verify": "exact", "category": f"c{i}", "speedup": 1.1,
         "speedup_lo": 1.0, "speedup_hi": 1.2, "fidelity": "exact"}
        for i in range(13)
    ])  # fmt: skip
    figure = plot_categories(rows)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [f"c{i}" for i in range(13)]
    assert figure.get_figwidth() < 12
    spec = shown[-1].get_subplotspec()
    assert spec is not None
    assert spec.rowspan.start == 2


def test_categories_have_a_panel_each(logs: list[RoundLog]) -> None:
    frame = summarize(logs, LATENCY, resamples=50, by_category=True)
    two = pd.concat([frame, frame.assign(category="other")])
    figure = plot_categories(two)
    assert [a.get_title() for a in figure.axes] == ["synthetic", "other"]


def test_validation_shows_error_in_percent(logs: list[RoundLog]) -> None:
    runs = [price(log, LATENCY) for log in (autoregressive(logs[0]), *logs)]
    rows = [
        (r.policy, r.verify, 1, False, k, r.request, r.predicted_s * 1.1, r.rounds)
        for r in predictions(runs).itertuples()
        for k in range(3)
    ]
    frame = compare(runs, pd.DataFrame(rows, columns=list(MEASURED_COLUMNS)))
    figure = plot_validation(frame)
    assert holds(figure, 100 * frame["error"])
    assert holds(figure, frame["predicted_s"])
    assert [a.get_xlabel()[-3:] for a in figure.axes] == ["(s)", "(%)"]


def test_one_repeat_hides_no_error(logs: list[RoundLog]) -> None:
    runs = [price(log, LATENCY) for log in (autoregressive(logs[0]), *logs)]
    rows = [
        (r.policy, r.verify, 1, False, 0, r.request, r.predicted_s * 1.25, r.rounds)
        for r in predictions(runs).itertuples()
    ]
    frame = compare(runs, pd.DataFrame(rows, columns=list(MEASURED_COLUMNS)))
    assert frame["spread"].isna().all()
    low, high = plot_validation(frame).axes[1].get_xlim()
    assert low < -20 < 20 < high


def test_cost_ratio_curves_go_through_the_tables_speedups(
    trace: Trace, logs: list[RoundLog]
) -> None:
    latency = LatencyTable.constant(0.01, 0.001, 0.012, host_round=0.002, host_draft=0.0005)
    own = own_ratios(trace, latency)
    figure = plot_cost_ratio(logs, latency, own)
    table = summarize(logs, latency, resamples=5).set_index("policy")["speedup"]
    axes = figure.axes[0]
    for line in axes.get_lines():
        name = str(line.get_label()).partition("  ")[0].partition(" (")[0]
        if name in table.index:
            c, speedup = (np.asarray(v, dtype=float) for v in line.get_data())
            assert speedup[c == own.ratio] == pytest.approx(table[name], rel=1e-6)
            table = table.drop(name)
    assert list(table.index) == ["autoregressive"]


@pytest.mark.parametrize("ratio", [0.0, 2.0])
def test_cost_ratio_reaches_from_the_usual_ratios_to_the_pairs(
    trace: Trace, logs: list[RoundLog], ratio: float
) -> None:
    latency = LatencyTable.constant(0.01, 0.01 * ratio)
    figure = plot_cost_ratio(logs, latency, own_ratios(trace, latency))
    curve = points(figure)[0]
    steps = np.diff(np.log(curve[:, 0]))
    assert steps.max() < 2 * np.median(steps)
    assert curve[0, 1] > curve[-1, 1]
    assert figure.axes[0].texts[0].get_position()[0] > 0
    figure.draw_without_rendering()
    assert figure.get_tightbbox().width < 10


def test_the_speedup_plot_is_sorted(logs: list[RoundLog]) -> None:
    rows = summarize(logs, LATENCY, resamples=5)
    labels = [t.get_text() for t in plot_speedup(rows).axes[0].get_yticklabels()]
    order = rows[1:].sort_values("speedup", ascending=False)["policy"]
    assert labels == list(order)


def test_survival_of_iid_outputs_follows_the_iid_curve() -> None:
    trace = synthetic_trace(0.7, tokens=400, requests=30, seed=2)
    figure = plot_survival(trace, gamma=5)
    recorded, iid = points(figure)[:2]
    # 12,000 positions in overlapping runs: about 12,000 / 5 independent ones.
    error = np.sqrt(iid[:, 1] * (1 - iid[:, 1]) / 2400)
    assert (np.abs(recorded[:, 1] - iid[:, 1]) < 4 * error).all()


def test_survival_goes_as_far_as_the_longest_output() -> None:
    trace = synthetic_trace(0.7, tokens=8, requests=3, seed=2)
    recorded, iid = points(plot_survival(trace))
    assert len(recorded) == 7
    # One draft is accepted with the chance alpha, in short outputs as well.
    assert recorded[0, 1] == iid[0, 1]
    with pytest.raises(DraftsimError, match="no output is longer than one token"):
        plot_survival(synthetic_trace(0.7, tokens=1, requests=3, seed=2))


def test_survival_ends_where_drafts_by_position_do() -> None:
    told = trace_by_position((0.76, 0.60, 0.43))
    assert len(points(plot_survival(told))[0]) == 3


def batches(policy: str, speedups: tuple[float, float]) -> list[dict[str, object]]:
    return [
        {"latency": "t", "gpu": None, "policy": policy, "family": policy, "batch": batch,
         "speedup": speedup, "speedup_lo": speedup, "speedup_hi": speedup}
        for batch, speedup in zip((1, 4), speedups, strict=True)
    ]  # fmt: skip


def test_the_fastest_of_many_policies_are_drawn_and_the_others_counted() -> None:
    rows = [row for i in range(9) for row in batches(f"p{i}", (1 + i / 10, 1.0))]
    figure = plot_batches(pd.DataFrame(rows), "α = 0.5")
    legend = figure.legends[0]
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [f"p{i}" for i in range(3, 9)] + ["(3 slower, not drawn)"]
    assert legend.get_title().get_text() == "α = 0.5"


def test_robustness_is_relative_to_the_reference(trace: Trace) -> None:
    speedups = speedup_by_gamma(trace, {"fixed": Fixed}, LATENCY, (1, 2, 4))
    figure = plot_robustness(speedups)
    value = speedups["speedup"] / speedups["speedup"].mean()
    assert holds(figure, [1, 2, 4], value)
    # A policy that hardly depends on the draft length has a small spread, not none.
    steady = speedups.assign(policy="steady", speedup=[1.0, 1.003, 1.006])
    labels = plot_robustness(pd.concat([speedups, steady])).axes[0].get_legend_handles_labels()[1]
    spread = 0.003 / speedups["speedup"].mean()
    assert labels[1].endswith(f"± {spread:.2g}")
    assert not labels[1].endswith("± 0.00")


def test_saved_picture_can_be_read(trace: Trace, logs: list[RoundLog], tmp_path: Path) -> None:
    figure = plot_cost_ratio(logs, LATENCY, own_ratios(trace, LATENCY))
    path = save(figure, tmp_path / "new" / "c.png", dpi=60)
    picture = matplotlib.image.imread(path)
    assert picture[..., :3].min() < 0.5 < picture[0, 0, :3].min()


def test_no_two_curves_look_alike() -> None:
    looks = [tuple(map(str, series(i, 1).values())) for i in range(24)]
    assert len(set(looks)) == len(looks)


def colours(figure: Figure) -> dict[str, Any]:
    """Colours of the curves by policy: the first word of a label is its name."""
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    named = [line for line in lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()).split()[0]: line.get_color() for line in named}


def test_a_policy_has_one_place_and_a_figure_no_colour_twice() -> None:
    places = PolicyPlaces()
    first = places.of(["fixed:gamma=2", "oracle", "gammatune", "fixed:gamma=5"])
    assert first == {"fixed:gamma=2": 0, "gammatune": 1, "fixed:gamma=5": 2}
    # The family has the place of its first, a setting of its own another than that without.
    second = places.of(["gammatune", "fixed", "gammatune:eta=0.2", "svip"])
    assert second == {"gammatune": 1, "fixed": 0, "gammatune:eta=0.2": 3, "svip": 4}
    many = PolicyPlaces()
    many.of([f"p{i}" for i in range(6)])
    drawn = many.of([f"p{i}" for i in (0, 1)] + [f"q{i}" for i in range(6)])
    assert len({place % len(COLOURS) for place in drawn.values()}) == len(COLOURS)
    assert many.of(["p5", "q5"]) == {"p5": 5, "q5": drawn["q5"]}
    assert len({*many.of(f"r{i}" for i in range(20)).values()}) == 20


def test_a_policy_has_one_colour_in_all_figures_of_a_recording(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: dict[str, Figure] = {}

    def kept(figure: Figure, path: Path, *_: str) -> Path:
        drawn[path.stem] = figure
        return path

    monkeypatch.setattr("simulator.plots.look.save_all_kinds", kept)
    policies = {"hf-heuristic": HFHeuristic(), "gammatune": GammaTune(), "fixed:gamma=4": Fixed(4)}
    logs = [replay(trace, policy, name=name) for name, policy in policies.items()]
    save_all(trace, LATENCY, logs, tmp_path, texts=[*policies], resamples=10)
    by_ratio, by_length = colours(drawn["cost_ratio"]), colours(drawn["robustness"])
    assert len({*by_ratio.values()}) == len(policies)
    for name in ("hf-heuristic", "gammatune"):
        assert by_length[name] == by_ratio[name]
    assert by_length["fixed"] == by_ratio["fixed:gamma=4"]


def test_a_policy_has_one_colour_in_all_figures_of_serving() -> None:
    base = Scenario(Poisson(1), Limits(max_batch=4), requests=20)
    policies = {
        "autoregressive": Autoregressive(),
        "fixed": Fixed(3),
        "oracle": Oracle(gamma_max=4),
    }
    rows = sweep(SMALL, GRID, policies, over_rates(base, [0.2, 1.0]))
    places = PolicyPlaces()
    load = colours(plots.plot_latency_load(rows, places=places))
    # A policy whose requests were all refused at the last load is not drawn over time.
    left = [row for row in rows if row["policy"] != "autoregressive"]
    over_time = colours(plots.plot_over_time(left, places))
    assert over_time == {name: load[name] for name in ("fixed", "oracle")}
    pareto = colours(plots.plot_pareto(left, places))
    assert pareto["fixed"] == load["fixed"]


def test_a_policy_has_one_colour_in_all_figures_of_a_sweep() -> None:
    rows = [row for i in range(4) for row in batches(f"fixed:gamma={2**i}", (1 + i / 10, 1.0))]
    places = PolicyPlaces()
    lines = colours(plot_break_even(iid_grid(), places=places))
    found = colours(plot_batches(pd.DataFrame(rows), places=places))
    for name in ("fixed:gamma=1", "fixed:gamma=8"):
        assert found[name] == lines[name]


def test_replications_are_drawn_with_their_intervals_and_break_even_names_its_policy():
    scenario = Scenario(Poisson(1), Limits(4), requests=40, replications=3)
    policies = {"plain": Autoregressive(), "fast": Fixed(3)}
    rows = [
        row for rate in (0.05, 0.2, 5)
        for row in sweep(SMALL, GRID, policies, [replace(scenario, arrivals=Poisson(rate))])
    ]  # fmt: skip
    axes = plots.plot_latency_load(rows, "ttft_s").axes[0]
    bars = [c for c in axes.collections if len(c.get_paths()) == 3]
    assert len(bars) == len(policies)
    assert "bars: 95%" in axes.get_ylabel()
    assert all(t.get_text().startswith("fast: ") for t in axes.texts)
    single = [{k: v for k, v in row.items() if not k.endswith(("_lo", "_hi"))} for row in rows]
    axes = plots.plot_latency_load(single).axes[0]
    assert not axes.collections
    assert "95%" not in axes.get_ylabel()


def test_speedups_have_a_panel_per_policy_and_their_values_in_it():
    grids = {f"fixed:gamma={k}": [[0.5, 1.2, 1.0], [np.nan, 0.9, 2.0]] for k in range(4)}
    figure = plots.plot_speedups(grids, [1, 16], ["as recorded", "40", "658"])
    *panels, bar = figure.axes
    shown = [axes for axes in panels if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == list(grids)
    for axes in shown:
        assert [t.get_text() for t in axes.texts] == ["0.50", "1.20", "1.00", "–", "0.90", "2.00"]
        assert list(axes.get_xticks()) == [0, 1, 2]
    assert [t.get_text() for t in shown[0].get_yticklabels()] == ["1", "16"]
    # As far below 1 as above, so that no colour is on the scale that no cell has.
    low, high = bar.get_ylim()
    assert (low, high) == pytest.approx((0.5, 2.0))
    width, _ = figure.get_size_inches()
    assert width < 8
    with pytest.raises(DraftsimError, match=r"shapes \(1,\), expected \(2, 1\)"):
        plots.plot_speedups({"a": [1.0]}, [1, 2], ["40"])


def test_figures_show_every_policy():
    base = Scenario(Poisson(1), Limits(max_batch=4), requests=30)
    policies = {"autoregressive": Autoregressive(), "fixed": Fixed(3)}
    by_batch = sweep(SMALL, GRID, policies, over_batches(base, [1, 2, 4]))
    axes = plots.plot_latency_throughput(by_batch).axes[0]
    for line, name in zip(axes.lines, policies, strict=True):
        mine = [r for r in by_batch if r["policy"] == name]
        assert line.get_label() == name
        assert list(line.get_xdata()) == [r["throughput_tok_s"] for r in mine]
        np.testing.assert_allclose(line.get_ydata(), [1e3 * r["tpot_s"]["mean"] for r in mine])
    # Policies next to each other at a load share its label.
    twins = [
        {**row, "policy": f"{row['policy']} again",
         "throughput_tok_s": 0.999 * row["throughput_tok_s"],
         "tpot_s": {**row["tpot_s"], "mean": 0.999 * row["tpot_s"]["mean"]}}
        for row in by_batch
    ]  # fmt: skip
    labels = [t.get_text() for t in plots.plot_pareto([*by_batch, *twins]).axes[0].texts]
    assert sorted(labels) == sorted({*labels})
    by_rate = sweep(SMALL, GRID, policies, over_rates(base, [0.2, 1.0]))
    assert len(plots.plot_latency_load(by_rate).axes[0].lines) >= 2
    with pytest.raises(DraftsimError, match="rate"):
        plots.plot_latency_load(by_batch)


def test_replicas_share_the_requests_that_a_figure_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = Scenario(Poisson(1), Limits(max_batch=4), requests=30, replicas=2)
    scenarios = over_batches(base, [4, 2])
    policies = {"autoregressive": Autoregressive(), "fixed": Fixed(3)}
    rows = sweep(SMALL, GRID, policies, scenarios)
    labels = {t.get_text() for t in plots.plot_pareto(rows).axes[0].texts}
    assert labels <= {"4", "8"}
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(
        "simulator.plots.look.save_all_kinds",
        lambda figure, path, *_: drawn.setdefault(path.stem, figure),
    )
    plots.draw(tmp_path, rows, SMALL, GRID, policies, scenarios)
    axes = drawn["over_time"].axes
    assert axes[0].get_ylabel() == "requests running\nper replica"
    assert axes[-1].get_xlabel().endswith("at batch 4")  # the largest, not the last


GREY = np.array([0.299, 0.587, 0.114])


def pixels(figure: Figure, dpi: int = 100) -> npt.NDArray[Any]:
    out = io.BytesIO()
    figure.savefig(out, dpi=dpi)
    out.seek(0)
    return np.asarray(matplotlib.image.imread(out)[..., :3] @ GREY)


def test_shades_only_darken_in_grey() -> None:
    grey = SHADES(np.linspace(0, 1, 50))[:, :3] @ GREY
    assert (np.diff(grey) < 0).all()
    assert grey[0] > 0.9
    assert grey[-1] < 0.3


def test_faster_and_slower_are_not_the_same_grey() -> None:
    # 1.25 and 0.8 lie as far from 1 as each other.
    figure = Figure(figsize=(4, 2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    draw_map(axes, [1, 2], [1], [[1.25, 0.8]], shading([1.25]))
    grey = pixels(figure)
    fast, slow = grey[20:-20, 20:180], grey[20:-20, 220:380]
    assert fast.std() < 0.01
    assert slow.mean() > fast.mean() + 0.3
    assert slow.min() < 0.75  # hatched, not blank
    # The line between them is ink.
    assert grey[20:-20, 196:204].min() < 0.2


def test_plots_count_prefill_as_the_table_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = synthetic_trace(0.7, requests=8, tokens=40, prompt_length=90)
    logs = [replay(trace, Fixed(g), name=f"fixed:gamma={g}") for g in (1, 4)]
    drawn: dict[str, tuple[Figure, str]] = {}

    def kept(figure: Figure, path: Path, label: str = "", title: str = "") -> Path:
        drawn[path.stem] = figure, label
        return path

    monkeypatch.setattr("simulator.plots.look.save_all_kinds", kept)
    for prefill, more in ((True, set[str]()), (False, {"cost_ratio", "robustness"})):
        drawn.clear()
        found = save_all(
            trace, GRID, logs, tmp_path, texts=["fixed"], resamples=20, prefill=prefill
        )
        assert drawn.keys() == {"speedup", "categories", "survival"} | more
        assert any("of decoding alone" in line for line in found[1]) == prefill
        assert any("robustness.png" in line for line in found[1]) == prefill
        labels = {name: label for name, (_, label) in drawn.items()}
        assert ("prefill counted" in labels["speedup"]) == prefill
        assert "prefill" not in labels["survival"]
        table = summarize(logs, GRID, resamples=20, prefill=prefill)
        texts = {text.get_text() for text in drawn["speedup"][0].axes[0].texts}
        assert texts >= {f"{value:.2f}" for value in table["speedup"][1:]}


def test_plots_that_do_not_apply_are_left_out_with_a_line(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("simulator.plots.look.save_all_kinds", lambda _, path, *__: path)

    def drawn(latency: LatencyTable, log: RoundLog) -> tuple[set[str], str]:
        paths, said = save_all(trace, latency, [log], tmp_path, texts=["fixed"], resamples=5)
        return {path.stem for path in paths}, " ".join(said)

    exact = replay(trace, Fixed(4), name="fixed")
    names, said = drawn(in_one_pass(LATENCY), exact)
    assert names == {"speedup", "categories", "survival", "robustness"}
    assert "cost_ratio.png is not drawn" in said
    names, said = drawn(LATENCY, replace(exact, verify="typical"))
    assert names == {"speedup", "categories", "cost_ratio"}
    assert "survival.png and robustness.png are of lossless verification" in said


def test_every_map_is_drawn_so() -> None:
    axes = plot_maps(iid_grid()).axes[0]
    assert axes.collections[0].get_cmap() == SHADES
    assert [p.get_hatch() for p in axes.patches] == ["////"]


def test_logarithmic_axes_have_few_labels_of_one_size() -> None:
    for points in (np.geomspace(0.01, 0.5, 30), [0.01, 0.1, 1.0], np.geomspace(1e-4, 1, 40)):
        figure = Figure()
        axes = figure.subplots()
        axes.plot(points, points)
        axes.set_xscale("log")
        log_ticks(axes.xaxis, points)
        figure.canvas.draw()
        inside = [t for t in axes.get_xticks() if points[0] <= t <= points[-1] * 1.01]
        assert 3 <= len(inside) <= 8
        assert not list(axes.get_xticks(minor=True))


def test_labels_of_near_points_do_not_touch() -> None:
    axes = Figure().subplots()
    axes.set_xscale("log")
    log_ticks(axes.xaxis, [0.05, 0.14, 0.23, 0.32, 0.41, 0.5])
    assert list(axes.get_xticks()) == [0.05, 0.14, 0.23, 0.32, 0.5]
    log_ticks(axes.xaxis, [1, 2, 4, 8, 16, 32])
    assert list(axes.get_xticks()) == [1, 2, 4, 8, 16, 32]


def test_lines_of_break_even_are_all_told_apart() -> None:
    frame = iid_grid()
    many = [frame]
    for i in range(2, 12):  # more policies than there are marks, each a little worse
        other = frame[frame["policy"] == "fixed:gamma=8"]
        columns = {k: other[k] / (1 + 0.01 * i) for k in ("speedup", "speedup_lo", "speedup_hi")}
        many.append(other.assign(policy=f"other-{i}", **columns))
    axes = plot_break_even(pd.concat(many).astype({"policy": str})).axes[0]
    lines = axes.get_lines()
    assert all(line.get_marker() != "None" for line in lines)
    named = [line for line in lines if line.get_color() != "#B8B8B8"]
    looks = {(line.get_color(), line.get_marker()) for line in named}
    assert len(looks) == len(named) == MOST_LINES
    assert {"fixed:gamma=1", "fixed:gamma=2", "fixed:gamma=4"} <= {
        str(line.get_label()).partition(" ")[0] for line in named
    }
    assert lines[-1].get_label() == f"{15 - MOST_LINES} others"
    assert len([line for line in lines if line.get_color() == "#B8B8B8"]) == 15 - MOST_LINES + 1


def test_a_break_even_that_no_policy_has_is_not_drawn() -> None:
    frame = iid_grid()
    assert "break_even_c" in figures(frame)
    faster = frame.assign(**{k: 9 * frame[k] for k in ("speedup", "speedup_lo", "speedup_hi")})
    assert "break_even_c" not in figures(faster)
    assert "map_c_alpha" in figures(faster)


def test_a_break_even_beyond_the_grid_is_an_arrow_at_its_edge() -> None:
    frame = iid_grid()
    most = frame["alpha_asked"].max()
    better = frame["alpha_asked"] == most
    faster = {k: frame[k].where(~better, 9 * frame[k]) for k in frame if k.startswith("speedup")}
    axes = plot_break_even(frame.assign(**faster)).axes[0]
    arrows = [c for c in axes.collections if isinstance(c, PathCollection)]
    drawn = np.concatenate([np.asarray(c.get_offsets()) for c in arrows])
    assert (drawn[:, 1] == frame["c"].max()).all()
    assert np.sum(np.abs(drawn[:, 0] - most) < 0.05) >= frame["policy"].nunique()
    assert axes.get_xlim()[1] > most
    labels = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert f"a speedup at every c, up to {frame['c'].max():g}" in labels


def test_a_grid_from_nothing_is_linear() -> None:
    frame = iid_grid()
    free = frame.assign(c=frame["c"] - frame["c"].min())
    assert plot_maps(free).axes[0].get_xscale() == "linear"
    assert plot_break_even(free).axes
