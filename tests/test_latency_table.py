"""Latency tables: exact on the grid, linear between, flagged outside."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED, non_negative
from traces.latency.table import LatencyTable

QUIET = settings(max_examples=60, deadline=None)
Cells = dict[tuple[int, int, int], float]


def table(cells: Cells, model: str = "target", phase: str = "forward") -> LatencyTable:
    return LatencyTable(
        pd.DataFrame(
            {
                "model": model, "phase": phase,
                "batch": [k[0] for k in cells], "new_tokens": [k[1] for k in cells],
                "context": [k[2] for k in cells], "median_s": list(cells.values()),
                "spread_s": 0.0, "repeats": 5,
            }
        )
    )  # fmt: skip


def read(t: LatencyTable, batch: float, width: float, context: float) -> tuple[float, int]:
    sizes = {"batch": batch, "new_tokens": width, "context": context}
    seconds, origin = t.estimate("target", "forward", **sizes)
    return float(seconds), int(origin)


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 400))
GRIDS = st.dictionaries(SIZES, st.floats(1e-4, 1.0), min_size=1, max_size=15)


@pytest.mark.invariant(5)
@given(GRIDS)
@QUIET
def test_exact_at_every_cell_of_a_ragged_grid(cells: Cells) -> None:
    t = table(cells)
    for key, seconds in cells.items():
        assert read(t, *key) == (seconds, MEASURED)


@pytest.mark.invariant(5)
@given(GRIDS, SIZES)
@QUIET
def test_between_cells_it_stays_within_them_and_outside_it_is_flagged(
    cells: Cells, at: tuple[int, int, int]
) -> None:
    t = table(cells)
    batches, widths = {k[0] for k in cells}, {k[1] for k in cells}
    if (batches != {at[0]} and len(batches) == 1) or (widths != {at[1]} and len(widths) == 1):
        # What was never varied is refused, and nothing in between or beyond is made up.
        with pytest.raises(DraftsimError, match="alone"):
            read(t, *at)
        return
    seconds, origin = read(t, *at)
    assert np.isfinite(seconds)
    assert seconds >= 0
    assert (origin == MEASURED) == (at in cells)
    if origin != EXTRAPOLATED:
        assert min(cells.values()) - 1e-12 <= seconds <= max(cells.values()) + 1e-12
    if not min(k[0] for k in cells) <= at[0] <= max(k[0] for k in cells):
        assert origin == EXTRAPOLATED


def roofline(b: float, n: float, c: float) -> float:
    return 5e-3 + 1e-4 * b * n + 1e-6 * b * c


GRID: Cells = {
    (b, n, c): roofline(b, n, c) for b in (1, 4, 8) for n in (1, 2, 8) for c in (0, 100, 1000)
}


@given(
    st.floats(1, 8), st.floats(1, 8), st.lists(st.floats(0, 3000), min_size=2, max_size=30)
)  # fmt: skip
@QUIET
def test_monotone_in_context_without_steps_at_the_edge(b: float, n: float, cs: list[float]) -> None:
    seconds, origin = table(GRID).estimate(
        "target", "forward", batch=b, new_tokens=n, context=sorted(cs)
    )
    assert (np.diff(seconds) >= -1e-15).all()
    assert ((origin == EXTRAPOLATED) == (np.array(sorted(cs)) > 1000)).all()
    edge, _ = table(GRID).estimate(
        "target", "forward", batch=b, new_tokens=n, context=[1000, 1000 + 1e-6]
    )
    assert edge[1] == pytest.approx(edge[0], rel=1e-6)


@pytest.mark.parametrize("at", [(16, 1, 100), (1, 32, 1000), (8, 8, 5000), (32, 16, 4000)])
def test_a_true_roofline_is_carried_on(at: tuple[int, int, int]) -> None:
    seconds, origin = read(table(GRID), *at)
    assert origin == EXTRAPOLATED
    assert seconds == pytest.approx(roofline(*at), rel=1e-6)


def test_linear_in_each_direction() -> None:
    t = table({(1, 1, 0): 1.0, (1, 1, 100): 3.0, (1, 5, 0): 2.0, (1, 5, 100): 6.0, (3, 1, 0): 9.0})
    assert read(t, 1, 1, 25) == (pytest.approx(1.5), INTERPOLATED)
    assert read(t, 1, 3, 0) == (pytest.approx(1.5), INTERPOLATED)
    assert read(t, 2, 1, 0) == (pytest.approx(5.0), INTERPOLATED)
    # The larger batch was measured at one width and one context alone.
    assert read(t, 2, 1, 50)[1] == EXTRAPOLATED
    assert read(t, 2, 3, 0)[1] == EXTRAPOLATED


@pytest.mark.parametrize(
    ("engine", "between"),
    [
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, 8.0), ({"eager": False}, 8.0),
        ({"cudagraph_mode": "FULL"}, 6.0), ({"cudagraph_mode": None}, 6.0), ({"eager": True}, 6.0),
    ],
)  # fmt: skip
def test_a_batch_that_is_not_all_full_graph_is_none(
    engine: dict[str, str | bool | None], between: float
) -> None:
    """On an H200 one token took 8 ms and nine, all requests' longest draft, 4."""
    cells = {(b, n, 0): 4.0 if n == 9 else 8.0 for b in (1, 4) for n in (1, 8, 9)}
    t = LatencyTable(table(cells).cells, {"engine": engine})
    assert [read(t, 4, n, 0)[0] for n in (1, 8, 9)] == [8.0, 8.0, 4.0]
    assert read(t, 4, 8.5, 0) == (pytest.approx(between), INTERPOLATED)
    assert read(t, 2, 9, 0)[0] == 4.0


@pytest.mark.invariant(5)
def test_a_table_of_batch_one_says_nothing_about_four() -> None:
    t = table({(1, n, c): 0.01 + 1e-5 * c for n in (1, 2) for c in (0, 100)})
    with pytest.raises(DraftsimError, match="at batch 1 alone, and batch 4 is asked"):
        read(t, 4, 1, 50)
    assert read(t.assumed_batch_free(), 4, 1, 50)[0] == read(t, 1, 1, 50)[0]
    assert read(t, 1, 1, 50)[1] == INTERPOLATED


def test_one_cell_is_taken_as_constant() -> None:
    seconds, origin = table({(1, 1, 128): 0.02}).estimate(
        "target", "forward", context=[0, 128, 4096]
    )
    assert seconds == pytest.approx([0.02] * 3)
    assert origin.tolist() == [EXTRAPOLATED, MEASURED, EXTRAPOLATED]


def test_sizes_broadcast() -> None:
    seconds, origin = table(GRID).estimate(
        "target", "forward", batch=[[1], [4]], new_tokens=2, context=[0, 100, 1000]
    )
    expected = [[roofline(b, 2, c) for c in (0, 100, 1000)] for b in (1, 4)]
    assert seconds == pytest.approx(np.array(expected))
    assert origin.shape == (2, 3)


def test_constant_tables() -> None:
    t = LatencyTable.constant(0.01, 0.002, verify=0.012, host_round=1e-4)
    assert t.is_constant
    widths = [1, 2, 3, 30]
    assert t.seconds("target", "forward", new_tokens=widths).tolist() == [0.01] + [0.012] * 3
    assert read(t, 64, 1, 9999) == (0.01, MEASURED)
    assert t.seconds("draft", "forward", new_tokens=2, context=5) == 0.002
    assert t.seconds("target", "host_round", context=[1, 2]).tolist() == [1e-4] * 2
    assert t.seconds("target", "rollback", context=[1, 2]).tolist() == [0.0, 0.0]
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DraftsimError, match="constant latency of draft"):
            LatencyTable.constant(1, bad)


def test_scaling_multiplies_and_says_so() -> None:
    t = table(GRID).scaled({"target": 0.5}, "half")
    assert read(t, 4, 2, 100) == (roofline(4, 2, 100) / 2, MEASURED)
    assert t.meta["scaled"] == "half"


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("median_s", -1.0, "'median_s' holds a negative"),
        ("median_s", np.nan, "'median_s' holds a negative or non-finite"),
        ("spread_s", np.inf, "'spread_s' holds"),
        ("batch", 0, "'batch' holds 0, not >= 1"),
        ("context", -5, "'context' holds -5"),
        ("phase", "nap", r"unknown phase\(s\) nap"),
        ("repeats", "many", "'repeats' is not of type int32"),
    ],
)
def test_impossible_cells_are_refused(column: str, value: object, message: str) -> None:
    cells = table(GRID).cells.astype({column: object})
    cells.loc[3, column] = value
    with pytest.raises(DraftsimError, match=message):
        LatencyTable(cells)


def test_missing_columns_models_and_repeats_are_named() -> None:
    cells = table(GRID).cells
    with pytest.raises(DraftsimError, match=r"lacks the column.* batch, context"):
        LatencyTable(cells.drop(columns=["batch", "context"]))
    with pytest.raises(DraftsimError, match=r"repeats the cell .target, forward, 1, 1, 0"):
        LatencyTable(pd.concat([cells, cells.iloc[:1]]))
    with pytest.raises(DraftsimError, match=r"no 'forward' cells of 'draft' .* of target"):
        table(GRID).seconds("draft", "forward")


@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("columns", [1, 3, 5])
def test_the_solution_is_scipys(columns, noise):
    rng = np.random.default_rng(columns)
    used = 0
    for rows in (columns, 7, 40, 150):
        features = rng.random((rows, columns)) ** rng.integers(1, 5)
        target = features @ np.maximum(rng.normal(size=columns), 0) + noise * rng.normal(size=rows)
        found = non_negative(features, target)
        np.testing.assert_allclose(found, nnls(features, target)[0], rtol=1e-6, atol=1e-6)
        used += int((found > 0).sum())
    assert used > 1


def test_of_columns_that_say_the_same_the_first_is_used():
    rng = np.random.default_rng(0)
    size = rng.random(30)
    features = np.stack([np.ones(30), np.full(30, 0.7), size, 3 * size], axis=1)
    found = non_negative(features, 2 + 5 * size + 1e-3 * rng.normal(size=30))
    np.testing.assert_allclose(found, [2, 0, 5, 0], atol=2e-3)
    assert found[1] == found[3] == 0


def test_nothing_that_helps_is_nothing():
    assert non_negative(np.ones((4, 2)), np.full(4, -1.0)).tolist() == [0, 0]
