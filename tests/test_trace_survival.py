"""Survival of runs against scipy's Kaplan-Meier, and imputation from it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from policies.lengths.basic import Fixed
from traces.acceptance.survival import impute, runs, survival
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN, Request, Trace
from traces.errors import DraftsimError
from traces.importers.rows import LoggedRound, matches
from traces.replay.run import replay


def logged(rounds: list[tuple[int, int]]) -> Trace:
    """One request whose rounds accepted and drafted these numbers."""
    tokens = sum(a + 1 for a, _ in rounds)
    match = matches([LoggedRound(a, max(a, n)) for a, n in rounds], tokens)
    requests = [Request("r", "", 0, tokens, tokens, "length")]
    return Trace.without_tails(requests, None, {"first": 0}, match=match)


ROUNDS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), min_size=1, max_size=60)


@given(ROUNDS)
@settings(deadline=None)
def test_runs_are_the_rounds(rounds: list[tuple[int, int]]) -> None:
    lengths, rejected, ends = runs(logged(rounds))
    assert lengths.tolist() == [a for a, _ in rounds]
    assert rejected.tolist() == [n > a for a, n in rounds]
    assert ends.tolist() == (np.cumsum([a + 1 for a, _ in rounds]) - 1).tolist()


@pytest.mark.parametrize("interval", ["linear", "log-log"])
@given(ROUNDS)
@settings(deadline=None, max_examples=50)
def test_survival_is_scipys(interval: str, rounds: list[tuple[int, int]]) -> None:
    ended = [a for a, n in rounds if n > a]
    # A run seen to last k says it is longer than k - 1, which is scipy's censoring at k - 1.
    beyond = [a - 1 for a, n in rounds if n <= a and a > 0]
    if not ended and not beyond:
        with pytest.raises(DraftsimError, match="holds none"):
            survival(logged(rounds))
        return
    ours = survival(logged(rounds), 0.9, interval)  # type: ignore[arg-type]
    ks = np.arange(len(ours.at_risk))
    if not ended:
        assert (ours.survival == 1).all()
        return
    theirs = stats.ecdf(stats.CensoredData(uncensored=ended, right=beyond)).sf
    assert ours.survival[0] == 1
    assert ours.survival[1:] == pytest.approx(theirs.evaluate(ks))
    with warnings.catch_warnings():  # scipy's bounds are undefined where nothing survives
        warnings.simplefilter("ignore", RuntimeWarning)
        bounds = theirs.confidence_interval(0.9, method=interval)
    inside = (ours.survival[1:] > 0) & (ours.survival[1:] < 1)
    lo, hi = bounds.low.evaluate(ks)[inside], bounds.high.evaluate(ks)[inside]
    assert ours.lo[1:][inside] == pytest.approx(np.clip(lo, 0, 1))
    assert ours.hi[1:][inside] == pytest.approx(np.clip(hi, 0, 1))


def censored(trace: Trace, gamma: int) -> Trace:
    """Return what a log of fixed-length drafting would have told of a full trace."""
    log = replay(trace, Fixed(gamma), first=0).rounds
    match = []
    for i, r in enumerate(trace.requests):
        mine = log[log["request"] == i]
        rounds = [LoggedRound(int(x["accepted"]), int(x["drafted"])) for x in mine]
        match.append(matches(rounds, r.tokens))
    return Trace.without_tails(trace.requests, None, {"first": 0}, match=np.concatenate(match))


@pytest.mark.parametrize(("alpha", "gamma"), [(0.8, 4), (0.5, 2)])
def test_survival_sees_through_censoring(alpha: float, gamma: int) -> None:
    trace = censored(synthetic_trace(alpha, requests=10, tokens=1500, seed=2), gamma)
    estimate = survival(trace, confidence=0.99994)  # four standard errors
    for k in range(1, gamma + 1):
        assert estimate.lo[k] <= alpha**k <= estimate.hi[k]
    assert (np.diff(estimate.survival) <= 0).all()


def test_imputation_fills_the_unknown_alone_and_keeps_the_rate() -> None:
    alpha = 0.8
    log = censored(synthetic_trace(alpha, requests=20, tokens=1500, seed=4), 3)
    unknown = log.columns["match"] == UNKNOWN
    full = impute(log, seed=1)
    match = full.columns["match"]
    assert np.array_equal(match[~unknown], log.columns["match"][~unknown])
    assert set(match[unknown].tolist()) == {MATCH, MISMATCH}
    filled = match[unknown] == MATCH
    assert abs(filled.mean() - alpha) < 4 * np.sqrt(alpha * (1 - alpha) / len(filled)) + 0.01
    assert full.meta["imputed"] == {
        "method": "hazard", "seed": 1, "positions": int(unknown.sum()), "longest_seen": 3,
    }  # fmt: skip
    assert replay(full, Fixed(5)).fidelity == "approximate"
    assert not np.array_equal(match, impute(log, seed=2).columns["match"])
    assert np.array_equal(match, impute(log, seed=1).columns["match"])


def test_imputation_conditions_on_the_run_so_far() -> None:
    # Rejected at once or never: after a run of three nothing was ever rejected.
    rounds = [(0, 3), (3, 3)] * 200
    full = impute(logged(rounds))
    match = full.columns["match"]
    bonus = np.arange(4, len(match), 5)
    assert (match[bonus] == MATCH).all()


@given(ROUNDS)
@settings(deadline=None, max_examples=40)
def test_taking_the_unknown_as_rejected_is_a_lower_bound(rounds: list[tuple[int, int]]) -> None:
    trace = logged([*rounds, (0, 1)])
    low = impute(trace, method="rejected")
    assert not (low.columns["match"] == UNKNOWN).any()
    assert (low.run_lengths <= impute(trace, method="hazard").run_lengths).all()


def test_what_cannot_be_estimated_is_refused() -> None:
    hidden = Trace(logged([(1, 1), (0, 1)]).columns, logged([(1, 1), (0, 1)]).requests, None,
                   {"draft_lengths_known": False})  # fmt: skip
    for call in (lambda: impute(hidden), lambda: survival(hidden)):
        with pytest.raises(DraftsimError, match="does not know the draft lengths"):
            call()
    assert replay(impute(hidden, method="rejected"), Fixed(2)).fidelity == "lower bound"
    with pytest.raises(DraftsimError, match="imputation method is 'x'"):
        impute(hidden, method="x")  # type: ignore[arg-type]
    with pytest.raises(DraftsimError, match="confidence is 2"):
        survival(logged([(1, 1)]), confidence=2)
