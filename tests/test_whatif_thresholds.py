"""Break-even as numbers: read between the points of a grid, and said where it lies beyond."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from policies import Autoregressive, DraftPolicy, Fixed, HFHeuristic, Oracle
from simulator.bootstrap import expanded
from simulator.executors import Local
from simulator.whatif.breakeven import THRESHOLDS, some_points, thresholds
from simulator.whatif.cells import Prices
from simulator.whatif.sweep import Sweep, write_thresholds
from simulator.whatif.tilt import Tilter
from tests.break_even import priced_at
from tests.serving import table_of
from tests.studies import recorded
from traces.acceptance.synthetic import synthetic_trace
from traces.digits import three_digits
from traces.replay.run import replay

POLICIES: dict[str, DraftPolicy] = {
    "fixed:gamma=3": Fixed(3), "fixed:gamma=8": Fixed(8), "hf-heuristic": HFHeuristic(gamma_max=20),
}  # fmt: skip


def bisected(policy: DraftPolicy, alpha: float | None = None) -> float:
    """Where the speedup is 1, by bisection of single prices."""
    trace = recorded() if alpha is None else Tilter(recorded()).to(alpha)
    log = replay(trace, policy)
    low, high = 0.0, 5.0
    for _ in range(60):
        c = (low + high) / 2
        low, high = (c, high) if priced_at(log, c, 1.1)[1][0] > 1 else (low, c)
    return low


@pytest.mark.parametrize("ratios", [(0.0, 0.25, 0.5, 0.75, 2.0), (0.01, 0.04, 0.16, 0.64, 2.56)])
def test_break_even_is_what_bisection_finds(ratios: tuple[float, ...]) -> None:
    prices = Prices(ratios, verify=1.1)
    frame = Sweep(recorded(), POLICIES, prices, (0.5, 0.8), measure_tilt=False).run(Local(1))
    found = thresholds(frame)
    assert tuple(found.columns) == THRESHOLDS
    for row in found[found["along"] == "c"].itertuples():
        own = bisected(POLICIES[str(row.policy)], float(row.alpha))
        # However coarse the grid: a token's cost is linear in c.
        assert row.break_even == pytest.approx(own, rel=1e-9)
        assert row.break_even_lo < row.break_even < row.break_even_hi
        assert row.edge == ""
        assert str(row.says).startswith(f"{three_digits(own)} [")
        part = frame[(frame["policy"] == row.policy) & (frame["alpha_asked"] == row.alpha)]
        assert row.adapting == part["adapting"].mean()
        assert row.adapting_most == part["adapting"].max()
        assert row.share_below_1 == part["share_below_1"].mean()


def test_the_interval_is_the_bootstrap_of_the_break_even() -> None:
    fine = tuple(float(c) for c in np.linspace(0.0, 1.5, 601))
    sweep = Sweep(recorded(), {"fixed:gamma=3": Fixed(3)}, Prices(fine), resamples=300)
    row = thresholds(sweep.run(Local(1))).iloc[0]
    log = replay(recorded(), Fixed(3))
    weights = sweep.runner._weights
    assert weights is not None
    saved = weights @ (log.per_request(log.rounds["emitted"]) - log.per_request(np.ones(len(log))))
    drawn = saved / (weights @ log.per_request(log.rounds["draft_forwards"]))
    level = expanded(0.95, len(log.requests))
    low, high = np.percentile(drawn, [50 * (1 - level), 50 * (1 + level)])
    assert row["break_even_lo"] == pytest.approx(low, abs=2e-3)
    assert row["break_even_hi"] == pytest.approx(high, abs=2e-3)


def test_beyond_the_grid_is_said_and_not_read() -> None:
    trace = synthetic_trace(0.8, requests=6, tokens=60, seed=1)
    policies = {"fixed:gamma=2": Fixed(2), "oracle": Oracle(), "autoregressive": Autoregressive()}

    def c(*ratios: float) -> pd.DataFrame:
        return thresholds(Sweep(trace, policies, Prices(ratios), resamples=20).run(Local(1)))

    cheap = c(0.01, 0.1)
    assert list(cheap["policy"]) == [
        "fixed:gamma=2",
        "oracle",
    ]  # plain decoding neither pays nor not
    assert list(cheap["edge"]) == ["> 0.1"] * 2 == list(cheap["says"])
    dear = c(1.5, 2.0)
    assert list(dear["edge"]) == ["< 1.5"] * 2
    # A bound may lie beyond the grid where the break-even does not.
    low, high = (float(c(0.0, 4.0).loc[0, k]) for k in ("break_even", "break_even_hi"))
    between = c(0.0, (low + high) / 2).iloc[0]
    assert between["edge"] == ""
    assert str(between["says"]).endswith(f"> {(low + high) / 2:g}]")
    alone = Sweep(trace, policies, Prices((0.0, 4.0)), resamples=0).run(Local(1))
    assert "[" not in thresholds(alone)["says"].iloc[0]
    assert thresholds(Sweep(trace, policies, Prices((0.1,))).run(Local(1))).empty


def test_smallest_acceptance_batches_and_contexts(tmp_path: Path) -> None:
    rows = [("target", "forward", b, n, k, 1 + 0.02 * b * (n - 1) + 1e-4 * b * k, 0.0, 5)
            for b in (1, 8, 32) for n in (1, 2, 9) for k in (0, 4000)]  # fmt: skip
    rows += [("draft", "forward", b, n, k, 0.08 + 0.002 * b, 0.0, 5)
             for b in (1, 8, 32) for n in (1, 2) for k in (0, 4000)]  # fmt: skip
    table = table_of(rows)
    trace = synthetic_trace(0.7, requests=12, tokens=60, seed=1)
    policies = {f"fixed:gamma={g}": Fixed(g) for g in (1, 6)}
    prices = Prices((0.1, 0.45), {"device": table}, (64, 3900))
    frame = Sweep(
        trace, policies, prices, (0.3, 0.6, 0.9), (1, 8, 32), resamples=8, measure_tilt=False
    ).run(Local(1))  # fmt: skip
    found = thresholds(frame)
    assert set(found["along"]) == {"c", "alpha", "batch", "context"}
    for along, count in (("c", 2 * 9), ("alpha", 2 * 3 * 4), ("batch", 2 * 3 * 4), ("context", 18)):
        part = found[found["along"] == along]
        assert len(part) == count
        assert part[along].isna().all()
    alpha = found[(found["along"] == "alpha") & (found["c"] == 0.45) & (found["batch"] == 1)]
    by = alpha.set_index("policy")
    assert (by["side"] == "from").all()
    assert 0.3 < by.loc["fixed:gamma=1", "break_even"] < by.loc["fixed:gamma=6", "break_even"] < 0.9
    # In a large batch a wide pass pays for itself only where reading the cache is the cost.
    context = found[(found["along"] == "context") & (found["policy"] == "fixed:gamma=6")]
    at = context[(context["alpha"] == 0.6) & (context["batch"] == 32)].iloc[0]
    assert at["side"] == "from"
    assert 64 < at["break_even"] < 3900
    path = write_thresholds(found, tmp_path / "study.parquet", {"seed": 0})
    assert path.name == "study.breakeven.parquet"
    kept = pd.read_parquet(path)
    pd.testing.assert_frame_equal(kept, found, check_dtype=False)


def test_few_points_are_shown_of_many() -> None:
    ratios = tuple(float(c) for c in np.geomspace(0.01, 1, 20))
    alphas = tuple(float(a) for a in np.linspace(0.3, 0.9, 13))
    sweep = Sweep(recorded(), POLICIES, Prices(ratios), alphas, resamples=0, measure_tilt=False)
    found = thresholds(sweep.run(Local(1)))
    assert len(found) == 3 * (20 + 13)
    shown = some_points(found, most=9)
    assert dict(shown["along"].value_counts()) == {"c": 9, "alpha": 9}
    # All policies at each point shown, and the points spread over the axis.
    assert shown[shown["along"] == "c"].groupby("alpha").size().tolist() == [3, 3, 3]
    assert shown["alpha"].min() > 0.3
    assert some_points(found, most=10_000).shape == found.shape
