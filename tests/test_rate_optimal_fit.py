"""The rate-optimal rule fitted to a recording: against other policies, tables and real runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies import DraftPolicy, Fixed, parse_policy, policy_names
from simulator.formulas.leviathan import optimal_gamma
from simulator.pricing import price
from simulator.whatif.rate import (
    LatencyCost,
    first_acceptance,
    fit_rate_optimal,
    tokens_per_second,
)
from tests.outputs import trace_of
from tests.random_traces import beginning
from tests.serving import table_of
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import replay

CONSTANT = LatencyTable.constant(1.0, 0.1)


def speedups(trace: Trace, policy: DraftPolicy) -> np.ndarray[Any, Any]:
    log = replay(trace, policy)
    return log.per_request(log.rounds["emitted"]) / price(log, CONSTANT).decode_s


@pytest.mark.parametrize(("alpha", "c"), [(0.8, 0.05), (0.6, 0.1), (0.5, 0.3), (0.3, 0.5)])
def test_fit_finds_the_best_fixed_length_on_iid(alpha: float, c: float) -> None:
    trace = synthetic_trace(alpha, requests=10, tokens=600, seed=5)
    latency = LatencyTable.constant(1.0, c)
    fit = fit_rate_optimal(trace, latency)
    log = replay(trace, fit.policy)
    whole = log.rounds[log.rounds["position"] < 500]  # the output's end cuts rounds short
    assert set(whole["drafted"].tolist()) == {optimal_gamma(fit.policy.acceptance, c)}
    assert fit.policy.rate == pytest.approx(fit.achieved, rel=1e-3)
    assert fit.achieved == pytest.approx(tokens_per_second(log, latency))


@pytest.mark.parametrize("alpha", [0.55, 0.8])
def test_no_causal_policy_is_faster_on_calibrated_signals(alpha: float) -> None:
    # Signals are drawn independently and say the chance of a match exactly: the monotone case.
    trace = synthetic_trace(alpha, requests=60, tokens=150, concentration=3.0, seed=11)
    train, held_out = list(range(0, 60, 3)), [i for i in range(60) if i % 3]
    fit = fit_rate_optimal(trace, CONSTANT, train)
    assert fit.estimates != "none"
    tested = trace.select(held_out)
    ours = speedups(tested, fit.policy)
    others = {n: parse_policy(n, max_gamma=24) for n in policy_names("single")
              if n not in ("oracle", "rate-optimal")}  # fmt: skip
    others |= {f"fixed:gamma={g}": Fixed(g) for g in range(1, 11)}
    for name, other in others.items():
        if set(other.reads) - trace.signals:
            continue
        gap = ours - speedups(tested, other)
        assert gap.mean() > -4 * gap.std(ddof=1) / np.sqrt(len(gap)), name


@pytest.mark.parametrize("estimates", ["isotonic", "logistic"])
def test_bursty_acceptance_gains_over_the_best_fixed_length(estimates: Any) -> None:
    trace = synthetic_trace(Bursty(), requests=80, tokens=250, concentration=10.0, seed=2)
    fit = fit_rate_optimal(trace, CONSTANT, range(40), estimates=estimates)
    tested = trace.select(range(40, 80))
    ours = speedups(tested, fit.policy)
    for gamma in range(1, 11):
        gap = ours - speedups(tested, Fixed(gamma))
        assert gap.mean() > 2 * gap.std(ddof=1) / np.sqrt(len(gap))


def test_signals_that_cost_more_than_they_tell_are_not_read() -> None:
    trace = synthetic_trace(0.7, requests=20, tokens=200, concentration=50.0)
    dear = LatencyTable.constant(1.0, 0.05, signal=0.5)
    free = LatencyTable.constant(1.0, 0.05)
    assert fit_rate_optimal(trace, dear).policy.reads == ()
    assert fit_rate_optimal(trace, free, estimates="logistic").policy.reads != ()


def test_fit_at_several_batches_prices_each() -> None:
    rows = [("target", "forward", b, n, 0, 1.0 + 0.05 * b * n, 0.0, 5)
            for b in (1, 16) for n in (1, 5, 25)]  # fmt: skip
    rows += [("draft", "forward", b, 1, 0, 0.1 + 0.01 * b, 0.0, 5) for b in (1, 16)]
    latency = table_of(rows)
    trace = synthetic_trace(0.8, requests=6, tokens=100)
    fit = fit_rate_optimal(trace, latency, batches=(1, 16))
    drafted = {b: int(replay(trace, fit.policy, batch=b).rounds["drafted"].max()) for b in (1, 16)}
    assert isinstance(fit.policy.rate, list)
    assert [row[0] for row in fit.policy.rate] == [1, 16]
    assert drafted[1] > drafted[16]  # verifying a draft costs sixteen times as much there


def test_cost_never_falls_with_the_width() -> None:
    rows = [("target", "forward", 1, n, 0, s, 0.0, 5) for n, s in
            ((1, 1.0), (2, 1.5), (3, 1.1), (4, 1.3))]  # fmt: skip
    rows.append(("draft", "forward", 1, 1, 0, 0.1, 0.0, 5))
    cost = LatencyCost(table_of(rows), longest=3)
    seconds = [cost(1, 0, n, 0.0) for n in (1, 2, 3, 4)]
    assert seconds == pytest.approx([1.0, 1.3, 1.3, 1.3])
    assert cost(1, 2, 1, 0.0) == pytest.approx(1.2)


def test_the_first_token_is_drafted_where_rounds_begin() -> None:
    """Not at the position that prefill emits, nor at a request's start as after a mismatch."""
    match = [1, 0, 1, 0], [0, 1, 0, 0], [1]
    trace = trace_of(match, 4, eos=(1,))
    trace = replace(trace, columns={**trace.columns, "match": np.concatenate(match)})
    # Decoding begins at position 1: 0, 1; 1, 0; none.  The estimate adds half a match of one.
    assert first_acceptance(trace) == (2 + 0.5) / (4 + 1)
    # At position 0: 1, 1; 0, 1, 0; 1.
    assert first_acceptance(beginning(trace, 0)) == (4 + 0.5) / (6 + 1)


def test_errors_name_the_remedy() -> None:
    trace = synthetic_trace(0.8, requests=2, tokens=20)
    with pytest.raises(DraftsimError, match="no prompt to train on"):
        fit_rate_optimal(trace, CONSTANT, [])
    bad: Any = "neural"
    with pytest.raises(DraftsimError, match="estimates is 'neural'"):
        fit_rate_optimal(trace, CONSTANT, estimates=bad)


def test_real_decoding_has_the_rounds_of_replay() -> None:
    pytest.importorskip("torch")
    from profiler.checks.spot_check import PlannedPolicy
    from tests import bundled
    from tests.replayed import assert_decoded_as_replayed

    trace = bundled.greedy_trace()
    latency = LatencyTable.constant(1.0, 0.1, 1.05)
    for estimates in ("isotonic", "logistic"):
        kind: Any = estimates
        policy = fit_rate_optimal(trace, latency, range(3), estimates=kind).policy
        assert_decoded_as_replayed(bundled.pair(), trace, [PlannedPolicy("own", policy)])
