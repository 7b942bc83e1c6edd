"""The checks themselves: all hold on i.i.d. outputs, and a wrong formula fails them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from simulator.bootstrap import RatioEstimate
from simulator.check import (
    Check,
    _Replays,
    checked,
    dsi_latency,
    pearl_cycles,
    run_checks,
    truncated_rounds,
)
from simulator.formulas import batching, leviathan
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Request, Trace
from traces.latency.table import LatencyTable


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return run_checks(tokens=4000, seed=1)


@pytest.mark.invariant(7)
def test_every_closed_form_agrees_with_simulation(frame: pd.DataFrame) -> None:
    assert tuple(frame.columns) == Check._fields
    assert frame["ok"].all(), frame[~frame["ok"]].to_string()


@pytest.mark.invariant(7)
@pytest.mark.parametrize(
    "formula",
    ["Leviathan eq. 1", "Leviathan Thm 3.8", "Leviathan Thm 3.11", "Leviathan optimal gamma",
     "GammaTune eq. 6", "SpecBound eq. 5 physical", "SpecBound eq. 5 literal", "SpecBound App. E",
     "PEARL", "DSI distributed", "DSI sequential", "MagicDec", "batch truncated", "goodput",
     "break-even Leviathan", "break-even T_verify", "break-even GammaTune",
     "break-even SpecBound"],
)  # fmt: skip
def test_every_formula_is_checked_with_power(frame: pd.DataFrame, formula: str) -> None:
    rows = frame[frame["formula"].str.startswith(formula)]
    assert len(rows)
    relative = rows["standard_error"] / rows["closed_form"].abs().clip(lower=1e-9)
    assert (relative < 0.05).all()  # else anything would agree


@pytest.mark.parametrize(
    ("formula", "module", "name", "wrong"),
    [
        ("Leviathan optimal gamma", leviathan, "optimal_gamma", lambda f, *args: f(*args) + 1),
        ("Leviathan optimal gamma", leviathan, "optimal_gamma", lambda f, *args: f(*args) - 1),
        ("goodput", batching, "goodput", lambda f, a, g, _, n, step_s: f(a, g, n, n, step_s)),
        ("MagicDec", batching, "time_ratio", lambda f, *args: f(*args[:5])),
    ],
    ids=["a token more", "a token fewer", "only what speculates", "selection for free"],
)
def test_a_wrong_formula_fails(
    formula: str, module: ModuleType, name: str, wrong: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, name, partial(wrong, getattr(module, name)))
    frame = run_checks(tokens=4000, seed=1)
    assert set(frame["formula"][~frame["ok"]].str.startswith(formula)) == {True}


def test_mixing_the_two_alphas_is_caught() -> None:
    bench = _Replays(4000, 2)
    measured = bench.speedup(0.8, 5, 0.05)
    wrong = leviathan.speedup(leviathan.acceptance_proportion(0.8, 5), 5, 0.05)
    assert not checked("mixed", "", wrong, measured).ok
    assert checked("right", "", leviathan.speedup(0.8, 5, 0.05), measured).ok


def test_without_randomness_agreement_is_exact() -> None:
    assert checked("f", "", 2.0, RatioEstimate(2.0, 0.0)).ok
    assert not checked("f", "", 2.0, RatioEstimate(2.000001, 0.0)).ok
    assert not checked("f", "", 2.0, RatioEstimate(1.0, float("nan"))).ok


@pytest.mark.invariant(7)
def test_z_is_calibrated() -> None:
    """Over independent outputs z has mean 0 and sd 1, or 4 errors would not mean 4."""
    closed, repeats = leviathan.expected_tokens(0.5, 2), 80
    z = []
    for seed in range(repeats):
        value, error = _Replays(1500, seed).tokens_per_round(0.5, 2)
        z.append((value - closed) / error)
    assert abs(np.mean(z)) < 4 / np.sqrt(repeats) + 0.1
    assert np.std(z) == pytest.approx(1, abs=4 / np.sqrt(2 * repeats))


def test_pearl_walk_by_hand() -> None:
    # Matches 1 1 0 | 0 | 1 1 1 1 0: gamma 2.
    runs = [2, 1, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0]
    tokens, steps = pearl_cycles(runs, 2)
    # pre ok, post: 1 accepted then a rejection -> 3 tokens in 2 steps; pre rejected -> 1 in 1;
    # pre ok, post 2 of 2, post 1 of 2 rejected -> 5 in 3; then single rejections.
    assert tokens.tolist()[:3] == [3, 1, 5]
    assert steps.tolist()[:3] == [2, 1, 3]


def test_dsi_walk_by_hand() -> None:
    # Accept 2 of a block of 2, then 0 of the next: 2 blocks drafted, one target pass.
    assert dsi_latency([2, 1, 0, 0], 2, 0.1, 1.0) == pytest.approx((0.2 + 0.1 + 1.0) + 1.0)
    # Nothing accepted: plain decoding in parallel is never slower.
    assert dsi_latency([0, 0, 0], 4, 0.5, 1.0) == pytest.approx(3.0)


def test_truncated_batch_by_hand() -> None:
    runs = np.array([[3, 2, 1, 0, 2, 1, 0, 0], [1, 0, 1, 0, 3, 2, 1, 0]])
    assert truncated_rounds(runs, 2).tolist() == [2, 2, 3]


def bursty_trace(requests: int = 20, tokens: int = 150) -> Trace:
    """Matches that come in bursts: the same mean acceptance, another run-length law."""
    rng = np.random.default_rng(0)
    match = np.empty((requests, tokens), dtype=np.int8)
    for row in match:
        state = True
        for t in range(tokens):
            state = state if rng.random() < 0.85 else bool(rng.random() < 0.6)
            row[t] = state
    columns = {
        "request": np.repeat(np.arange(requests, dtype=np.int32), tokens),
        "position": np.tile(np.arange(tokens, dtype=np.int32), requests),
        "offset": np.zeros(requests * tokens, dtype=np.int16),
        "match": match.ravel(),
    }
    return Trace(
        columns, [Request(f"r{i}", "c", 9, tokens, tokens, "length") for i in range(requests)]
    )


def test_recorded_rows_end_at_the_replay() -> None:
    latency = LatencyTable.constant(1.0, 0.2, 1.4, host_round=0.05)
    frame = run_checks(bursty_trace(), latency, tokens=400)
    recorded = frame[frame["formula"].str.startswith("recorded")]
    steps = recorded.groupby("formula")
    for exact in ("tokens per round, actual round starts", "speedup, host and signals"):
        rows = steps.get_group(f"recorded: {exact}")
        np.testing.assert_allclose(rows["closed_form"], rows["simulated"], rtol=1e-9)
        assert rows["ok"].all()
    # Each assumption given up: a costlier verification and the host only slow things down.
    order = [
        steps.get_group(f"recorded: speedup, {s}")["closed_form"].to_numpy()
        for s in ("actual rounds", "T_verify", "catch-up and context", "host and signals")
    ]
    assert (order[1] < order[0]).all()
    # Bursts of rejections make one mean alpha far too optimistic about round starts.
    iid = steps.get_group("recorded: tokens per round, i.i.d.")
    assert not iid["ok"].all()


def test_iid_outputs_leave_the_iid_formula_right() -> None:
    trace = synthetic_trace(0.7, tokens=300, requests=60, seed=4)
    frame = run_checks(trace, tokens=400)
    rows = frame[frame["formula"] == "recorded: tokens per round, i.i.d."]
    # The ends of the outputs cut drafts short: at most gamma tokens in 300.
    gap = (rows["simulated"] - rows["closed_form"]).abs()
    gammas = rows["parameters"].str.extract(r"gamma=(\d+)")[0].astype(int).to_numpy()
    allowed = 4 * rows["standard_error"] + rows["closed_form"] * gammas / 300
    assert (gap < allowed).all()
