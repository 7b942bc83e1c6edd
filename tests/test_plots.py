"""Figures show the numbers they are given, with units, and can be written."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from policies.lengths.basic import Fixed, Oracle
from simulator import (
    autoregressive,
    compare,
    price,
    speedup_by_gamma,
    summarize,
    summarize_by_category,
)
from simulator.plots import (
    plot_categories,
    plot_cost_ratio,
    plot_robustness,
    plot_speedup,
    plot_survival,
    plot_validation,
    save,
)
from simulator.plots.look import series
from simulator.plots.whatif import plot_batches
from simulator.ratios import own_ratios
from simulator.validation import predictions
from traces.acceptance.synthetic import synthetic_trace, trace_by_position
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.measured import MEASURED_COLUMNS

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
    frame = summarize_by_category(logs, LATENCY, resamples=50)
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
        name = str(line.get_label()).partition("  ")[0].removesuffix(" (bound)")
        if name in table.index:
            c, speedup = (np.asarray(v, dtype=float) for v in line.get_data())
            assert speedup[c == own.ratio] == pytest.approx(table[name], rel=1e-6)
            table = table.drop(name)
    assert list(table.index) == ["autoregressive"]


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
    assert len(points(plot_survival(trace))[0]) == 7
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
    with pytest.raises(DraftsimError, match="'nobody' is not in the table"):
        plot_robustness(speedups, "nobody")


def test_saved_picture_can_be_read(trace: Trace, logs: list[RoundLog], tmp_path: Path) -> None:
    figure = plot_cost_ratio(logs, LATENCY, own_ratios(trace, LATENCY))
    path = save(figure, tmp_path / "new" / "c.png", dpi=60)
    picture = matplotlib.image.imread(path)
    assert picture[..., :3].min() < 0.5 < picture[0, 0, :3].min()


def test_no_two_curves_look_alike() -> None:
    looks = [tuple(map(str, series(i, 1).values())) for i in range(24)]
    assert len(set(looks)) == len(looks)
