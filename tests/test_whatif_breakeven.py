"""Break-even, regret, the ladder and tuning, against closed forms and single runs."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Fixed, HFHeuristic, Oracle
from policies.registry import parse_policy, policy_names
from simulator.executors import Local
from simulator.formulas.leviathan import break_even_alpha, expected_tokens
from simulator.plots.whatif import (
    figures,
    plot_adapting,
    plot_break_even,
    plot_ladder,
    plot_maps,
)
from simulator.pricing import price
from simulator.whatif.axes import expand
from simulator.whatif.breakeven import (
    break_even,
    crossing,
    overview,
    surface,
)
from simulator.whatif.cells import Prices, with_regrets
from simulator.whatif.ladder import NO_RUNG, PARTS, best_fixed, ladder, split_prompts
from simulator.whatif.sweep import Sweep
from simulator.whatif.tuning import tune
from tests.serving import table_of
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import can_replay, replay

TABLE = LatencyTable.constant(1.0, 0.1)
RATIOS = tuple(float(c) for c in np.geomspace(0.02, 1.2, 25))
ALPHAS = (0.3, 0.45, 0.6, 0.75, 0.9)


@cache
def iid_grid() -> pd.DataFrame:
    """Fixed lengths and the oracle on i.i.d. matches, where closed forms hold."""
    trace = synthetic_trace(0.7, requests=40, tokens=400, seed=3)
    policies = {f"fixed:gamma={g}": Fixed(g) for g in (1, 2, 4, 8)} | {"oracle": Oracle()}
    return Sweep(trace, policies, Prices(RATIOS), ALPHAS, method="iid", resamples=200).run(Local(1))


@cache
def easy_and_hard() -> Trace:
    return synthetic_trace(Bursty(), requests=24, tokens=100, concentration=8.0, seed=9)


@given(st.floats(0.1, 10), st.floats(-0.9, -0.01), st.integers(3, 30))
def test_crossing_of_a_line_is_where_it_is(root: float, slope: float, count: int) -> None:
    x = np.linspace(0.0, 2 * root + 1, count)
    assert crossing(x, 1 + slope * (x - root), falling=True) == pytest.approx(root)
    assert crossing(x, 1 - slope * (x - root), falling=False) == pytest.approx(root)


def test_crossing_at_the_ends() -> None:
    x = [1.0, 2.0, 4.0]
    assert crossing(x, [1.5, 1.2, 1.1], falling=True) == np.inf
    assert np.isnan(crossing(x, [0.9, 0.8, 0.7], falling=True))
    assert crossing(x, [1.1, 1.2, 1.3], falling=False) == -np.inf
    assert np.isnan(crossing(x, [1.1, 1.2, 0.9], falling=False))
    assert crossing(x, [1.1, 1.1, 0.9], falling=True, scale="log") == pytest.approx(2 * 2**0.5)
    for few in ([], [1.1, 0.9]):
        with pytest.raises(DraftsimError, match=f"3 points and {len(few)} speedups"):
            crossing(x, few, falling=True)


def test_break_even_ratio_is_the_closed_form() -> None:
    # c* = (E[Y] - 1) / gamma, where the round's tokens pay exactly for its passes.
    found = break_even(iid_grid())
    for row in found[found["policy"] != "oracle"].itertuples():
        gamma = int(str(row.policy).partition("=")[2])
        exact = (expected_tokens(float(row.alpha_asked), gamma) - 1) / gamma
        if np.isfinite(row.break_even_lo) and np.isfinite(row.break_even_hi):
            # Bootstrap bounds, widened to four standard errors on either side.
            half = 4 / 1.96 * (row.break_even_hi - row.break_even_lo) / 2
            assert abs(row.break_even - exact) < half + 0.01
            assert row.break_even_lo <= row.break_even <= row.break_even_hi


def test_break_even_alpha_is_the_closed_form() -> None:
    found = break_even(iid_grid(), "alpha")
    checked = 0
    for row in found[found["policy"] == "fixed:gamma=2"].itertuples():
        if not np.isfinite(row.break_even):
            continue
        exact = break_even_alpha(2, float(row.c))
        assert row.break_even == pytest.approx(exact, abs=0.02)
        checked += 1
    assert checked > 3


def test_regret_and_the_worth_of_adapting() -> None:
    rows = with_regrets(iid_grid())  # against the lengths of these rows alone
    for (alpha, c), part in rows.groupby(["alpha_asked", "c"]):
        fixed = part[part["family"] == "fixed"]
        best = max(1.0, fixed["speedup"].max())
        oracle = float(part.loc[part["family"] == "oracle", "speedup"].iloc[0])
        assert (part["best_fixed"] == best).all(), (alpha, c)
        assert part["adapting"].iloc[0] == pytest.approx(oracle - best)
        np.testing.assert_allclose(part["regret_fixed"], 1 - part["speedup"] / best)
        gamma = part["best_gamma"].iloc[0]
        winner = fixed.loc[fixed["speedup"].idxmax(), "gamma"] if best > 1 else 0
        assert gamma == winner
        # The oracle drafts what will be accepted and no more; below c = 1 nothing beats it.
        assert c >= 1 or (part["regret_oracle"] >= -1e-12).all()


def test_surfaces_hold_the_grid() -> None:
    rows = iid_grid().query("policy == 'fixed:gamma=4'")
    found = surface(rows, "c", "alpha")
    assert found.values.shape == (len(ALPHAS), len(RATIOS))
    np.testing.assert_allclose(found.x, RATIOS)
    np.testing.assert_allclose(found.y, ALPHAS)
    assert (np.diff(found.values, axis=1) < 0).all()
    assert (found.low <= found.values).all()
    assert (found.values <= found.high).all()
    with pytest.raises(DraftsimError, match="several rows share a point"):
        surface(iid_grid(), "c", "alpha")
    with pytest.raises(DraftsimError, match="has holes"):
        surface(rows.iloc[1:], "c", "alpha")
    with pytest.raises(DraftsimError, match="no axis 'context'"):
        break_even(iid_grid(), "context")


def test_no_share_of_intervals_without_intervals() -> None:
    frame = iid_grid()
    assert overview(frame)["interval_above_1"].notna().all()
    table = overview(frame.assign(speedup_lo=np.nan, speedup_hi=np.nan))
    assert table[["interval_above_1", "interval_below_1"]].isna().all(axis=None)


def test_overview_counts_where_it_pays() -> None:
    frame = iid_grid()
    table = overview(frame).set_index("policy")
    part = frame[frame["policy"] == "fixed:gamma=8"]
    assert table.loc["fixed:gamma=8", "speedup_above_1"] == (part["speedup"] > 1).mean()
    assert table.loc["fixed:gamma=8", "adapting"] == part["adapting"].mean()
    assert table["mean_speedup"].is_monotonic_decreasing


def batch_table(contexts: bool) -> LatencyTable:
    """A device whose verification grows with the batch, and with the context if asked."""

    rows = []
    for b in (1, 8, 32):
        for n in (1, 2, 9):
            for k in (0, 4000):
                held = 1e-4 * b * k if contexts else 0.0
                rows.append(("target", "forward", b, n, k, 1 + 0.02 * b * (n - 1) + held, 0.0, 5))
        rows += [("draft", "forward", b, n, k, 0.08 + 0.002 * b, 0.0, 5)
                 for n in (1, 2) for k in (0, 4000)]  # fmt: skip
    return table_of(rows)


def test_larger_batches_stop_paying_and_longer_contexts_pay_again() -> None:
    trace = synthetic_trace(0.7, requests=16, tokens=80, seed=1)
    policies = {f"fixed:gamma={g}": Fixed(g) for g in (1, 3, 6)}
    prices = Prices((), {"device": batch_table(True)}, (64, 3900))
    frame = Sweep(trace, policies, prices, (), (1, 8, 32), resamples=20).run(Local(1))
    found = break_even(frame, "batch").set_index(["policy", "context"])["break_even"]
    for policy in ("fixed:gamma=3", "fixed:gamma=6"):
        assert 1 < found[policy, 64] < 32
        assert found[policy, 3900] > found[policy, 64]  # reading the cache is shared
    # Longer drafts stop giving a speedup at smaller batches.
    assert found["fixed:gamma=6", 64] < found["fixed:gamma=3", 64]
    figure = plot_maps(frame[frame["context"] == 64], "batch", "gamma")
    assert len(figure.axes) == 2  # the family's map and the colour bar
    assert len(plot_maps(frame, "context", "batch").axes) == 4


def test_maps_over_gamma_tell_other_parameters_apart() -> None:
    policies = {
        text: parse_policy(text)
        for text in expand(["gammatune:gamma={2,4},eta={0.1,0.5}", "gammatune:gamma={2,4}"])
    }
    prices = Prices((), {"device": batch_table(True)})
    trace = synthetic_trace(0.7, requests=4, tokens=40, seed=1)
    frame = Sweep(trace, policies, prices, (), (1, 8), resamples=0).run(Local(1))
    titles = [axes.get_title() for axes in figures(frame)["map_batch_gamma"].axes]
    assert titles[:3] == ["gammatune:eta=0.1", "gammatune:eta=0.5", "gammatune"]


# The ladder and tuning


def test_ladder_adds_up_and_holds_prompts_out() -> None:
    trace = easy_and_hard()
    train, held_out = split_prompts(trace, 1)
    assert sorted(train + held_out) == list(range(24))
    told: list[str] = []
    rungs = ladder(trace, TABLE, seed=1, resamples=100, progress=told.append)
    assert [line.partition(" ")[0] for line in told] == [
        "finding",
        "fitting",
        "replaying",
        "pricing",
    ]
    times = rungs[[f"time_{part}" for part in PARTS]].sum(axis=1)
    np.testing.assert_allclose(times, 1 / rungs["speedup"])
    by = rungs.set_index("rung")
    assert by.loc["autoregressive", "speedup"] == 1
    assert by.loc["autoregressive", "share"] == 0
    assert by.loc["oracle", "share"] == 1
    lost = rungs[["lost_draft", "lost_verify", "lost_signal", "lost_host"]].sum(axis=1)
    np.testing.assert_allclose(lost, 1 / rungs["speedup"] - 1 / by.loc["oracle", "speedup"])
    assert rungs["speedup"].is_monotonic_increasing
    # Held-out rows are those of the held-out prompts alone.
    tested = trace.select(held_out)
    log = replay(tested, HFHeuristic(gamma_max=24))
    plain = sum(r.tokens - 1 for r in tested.requests)
    own = rungs[rungs["policy"] == "hf-heuristic"].iloc[0]
    assert own["speedup"] == pytest.approx(plain / price(log, TABLE).total_s)
    gamma = best_fixed(trace.select(train), TABLE)
    assert by.loc["best-fixed", "policy"] == f"fixed:gamma={gamma}"
    able = {n for n in policy_names("single") if can_replay(trace, parse_policy(n, max_gamma=24))}
    assert able - {*NO_RUNG} <= set(rungs["policy"])


def test_a_policy_that_loses_has_no_share_of_the_oracles_gain() -> None:
    rungs = ladder(easy_and_hard(), LatencyTable.constant(1.0, 0.5), resamples=1)
    loses = rungs["speedup"] < 1 - 1e-12
    assert loses.any()
    assert rungs.set_index("rung").loc["oracle", "share"] == 1
    assert (rungs["share"].isna() == loses).all()
    assert rungs["share"].min() >= 0


def test_nothing_is_best_where_drafts_are_dear() -> None:
    trace = easy_and_hard()
    dear = LatencyTable.constant(1.0, 2.0)
    assert best_fixed(trace, dear) == 0
    rungs = ladder(trace, dear, policies={"hf-heuristic": HFHeuristic(gamma_max=24)}, resamples=10)
    rate = rungs[rungs["rung"] == "rate-optimal"].iloc[0]
    assert rate["speedup"] == 1.0
    assert set(rungs["rung"]) >= {"autoregressive", "policy", "oracle"}


def test_splits_halve_every_category() -> None:
    trace = easy_and_hard()
    train, held_out = split_prompts(trace)
    assert not set(train) & set(held_out)
    counts = [Counter(trace.requests[i].category for i in half) for half in (train, held_out)]
    assert counts[0] == counts[1]
    with pytest.raises(DraftsimError, match="one prompt cannot be split"):
        split_prompts(trace.select([0]))


def test_tuning_finds_the_best_of_the_grid_and_judges_it_elsewhere() -> None:
    trace = easy_and_hard()
    train, held_out = split_prompts(trace)
    found = tune(trace, TABLE, "fixed", {"gamma": range(1, 9)})
    best = found[-1]
    assert best["policy"] == f"fixed:gamma={best_fixed(trace.select(train), TABLE, range(1, 9))}"
    assert best["tried"] == 9  # the default among them
    assert best["train_speedup"] > 1
    assert found[0]["policy"] == "autoregressive"
    assert found[0]["tokens"] == sum(trace.requests[i].tokens - 1 for i in held_out)


def test_tuning_errors() -> None:
    trace = easy_and_hard()
    for space, message in (
        ({}, "space to search is empty"),
        ({"gamma": []}, "space to search is empty"),
        ({"gamma": [-1, -2]}, "no combination .* gamma is -1|no combination .* gamma is -2"),
        ({"colour": [1]}, "no combination .* 'colour'"),
    ):
        given_space: Any = space
        with pytest.raises(DraftsimError, match=message):
            tune(trace, TABLE, "fixed", given_space)


# Figures


def test_figures_draw_what_the_grid_holds() -> None:
    frame = iid_grid()
    maps = plot_maps(frame)
    assert [axes.get_title() for axes in maps.axes][:2] == ["fixed:gamma=1", "fixed:gamma=2"]
    lines = plot_break_even(frame)
    labels = [text.get_text() for text in lines.legends[0].get_texts()]
    assert labels[:2] == ["fixed:gamma=1", "fixed:gamma=2"]
    drawn = {line.get_label(): line.get_ydata() for line in lines.axes[0].get_lines()}
    expected = break_even(frame)
    own = expected[expected["policy"] == "fixed:gamma=4"]["break_even"].to_numpy(float)
    np.testing.assert_allclose(
        np.asarray(drawn["fixed:gamma=4"], float), np.where(np.isfinite(own), own, np.nan)
    )
    assert len(plot_adapting(frame).axes) == 4
    rungs = ladder(easy_and_hard(), TABLE, policies={}, resamples=20)
    bars = plot_ladder(rungs).axes[0]
    assert [t.get_text() for t in bars.get_yticklabels()][-1] == "oracle"


def test_figures_without_data_say_what_is_missing() -> None:
    frame = iid_grid()
    with pytest.raises(DraftsimError, match="allows no oracle"):
        plot_adapting(frame.assign(oracle=np.nan))
    with pytest.raises(DraftsimError, match="allows no fixed length"):
        plot_adapting(frame.assign(best_fixed=np.nan))
    with pytest.raises(DraftsimError, match="two values or more"):
        plot_maps(frame[frame["alpha_asked"] == 0.3])
