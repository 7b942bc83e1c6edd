"""Figures of the serving simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.lengths.basic import Autoregressive, Fixed
from simulator.plots import serving as plots
from simulator.serving import (
    Limits,
    Poisson,
    Scenario,
    over_batches,
    over_rates,
    serve,
    sweep,
)
from tests.serving import GRID, SMALL
from traces.errors import DraftsimError


def test_replications_are_drawn_with_their_intervals_and_break_even_names_its_policy():
    scenario = Scenario(Poisson(1), Limits(4), requests=40, replications=3)
    policies = {"plain": Autoregressive(), "fast": Fixed(3)}
    rows = [
        row for rate in (0.05, 0.2, 5)
        for row in serve(SMALL, GRID, policies, replace(scenario, arrivals=Poisson(rate))).rows()
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
