"""The rate-optimal stopping rule against closed forms, dynamic programming and other rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import (
    ConstantAcceptance,
    DraftPolicy,
    Fixed,
    IsotonicAcceptance,
    RateOptimal,
    TextbookCost,
    check_policy,
    parse_policy,
    policy_names,
)
from policies.core import Load, Round, speculate
from simulator.formulas.leviathan import optimal_gamma
from simulator.formulas.leviathan import speedup as leviathan_speedup
from simulator.pricing import price
from simulator.whatif.cost import LatencyCost
from simulator.whatif.rate import InBatch, fit_rate_optimal, tokens_per_second
from traces.errors import DraftsimError
from traces.latency import LatencyTable
from traces.replay import replay
from traces.synthetic import Bursty, synthetic_trace
from traces.trace import Trace


class Token:
    """A drafted token with a probability alone."""

    def __init__(self, prob: float) -> None:
        self.prob = prob
        self.ends = False


def length(policy: DraftPolicy, probs: Sequence[float]) -> int:
    """Tokens that `policy` drafts and submits where the signals are `probs`."""
    policy.begin_round(Load(1, 0))
    draft: list[Any] = []
    while len(draft) < len(probs) and policy.keep_drafting(draft):
        draft.append(Token(probs[len(draft)]))
    return policy.submit(draft)


@pytest.mark.parametrize(
    "policy",
    [
        RateOptimal(),
        RateOptimal(recalibrate=0.2),
        RateOptimal(rate=[[1, 1.8], [8, 1.1]], trim=False, gamma_max=3),
        RateOptimal(estimator=ConstantAcceptance(0.8), acceptance=0.8),
        RateOptimal(cost=TextbookCost(per_token=0.05)),
        RateOptimal(following=IsotonicAcceptance("entropy", [0.0, 1.0], [0.9, 0.4])),
    ],
)
def test_keeps_the_contract(policy: RateOptimal) -> None:
    check_policy(policy)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rate": -1.0}, "rate is -1"),
        ({"rate": [[4, 1.0], [1, 2.0]]}, "rising batch"),
        ({"gamma_max": 0}, "gamma_max is 0, expected >= 1"),
        ({"acceptance": 1.5}, "acceptance is 1.5"),
        ({"recalibrate": 2.0}, "recalibrate is 2"),
        ({"trim": 1}, "trim is 1"),
    ],
)
def test_impossible_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RateOptimal(**parameters)


@settings(max_examples=60, deadline=None)
@given(alpha=st.floats(0.05, 0.97), c=st.floats(0.02, 0.9))
def test_iid_length_is_the_closed_form_argmax(alpha: float, c: float) -> None:
    # The rate of the best fixed length is the fixed point, and the rule at it must stop there.
    best = optimal_gamma(alpha, c, max_gamma=60)
    others = sorted(leviathan_speedup(alpha, g, c) for g in range(61))
    if others[-1] - others[-2] < 1e-9:
        return  # two lengths are equally good: either is right
    rate = leviathan_speedup(alpha, best, c)
    policy = RateOptimal(
        rate, 60, alpha, estimator=ConstantAcceptance(alpha), cost=TextbookCost(draft=c)
    )
    assert length(policy, [0.5] * 60) == best


@pytest.mark.parametrize(("alpha", "c"), [(0.8, 0.05), (0.6, 0.1), (0.5, 0.3), (0.3, 0.5)])
def test_fit_finds_the_best_fixed_length_on_iid(alpha: float, c: float) -> None:
    trace = synthetic_trace(alpha, requests=10, tokens=600, seed=5)
    latency = LatencyTable.constant(1.0, c)
    fit = fit_rate_optimal(trace, latency)
    log = replay(trace, fit.policy)
    whole = log.rounds[log.rounds["position"] < 500]  # the output's end cuts rounds short
    assert set(whole["drafted"].tolist()) == {optimal_gamma(fit.policy.acceptance, c)}
    assert fit.converged
    assert fit.achieved == pytest.approx(tokens_per_second(log, latency))


def brute_force(
    values: Sequence[float], chances: Sequence[float], c: float, gamma_max: int
) -> float:
    """The largest rate over all stopping rules, by dynamic programming and bisection.

    Every token's acceptance is drawn from `values` with `chances`, seen once drafted.
    """
    mean = float(np.dot(values, chances))

    def worth(rate: float) -> float:
        def onward(survival: float, drafted: int) -> float:
            if drafted == gamma_max:
                return 0.0
            ahead = sum(
                q * onward(survival * v, drafted + 1) for v, q in zip(values, chances, strict=True)
            )
            return max(0.0, survival * mean - rate * c + ahead)

        return 1.0 - rate + onward(1.0, 0)

    low, high = 0.0, gamma_max + 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if worth(middle) > 0 else (low, middle)
    return low


def rate_of(policy: RateOptimal, values: Sequence[float], chances: Sequence[float], c: float,
            gamma_max: int) -> float:  # fmt: skip
    """Exact tokens per unit of time of `policy` on that process, over every signal path."""
    tokens = seconds = 0.0
    weights = dict(zip(values, chances, strict=True))
    for path in itertools.product(values, repeat=gamma_max):
        chance = math.prod(weights[v] for v in path)
        n = length(policy.fresh(), path)
        tokens += chance * (1 + sum(math.prod(path[:k]) for k in range(1, n + 1)))
        seconds += chance * (1 + c * n)
    return tokens / seconds


@pytest.mark.parametrize(
    ("values", "chances", "c"),
    [
        ((0.2, 0.95), (0.4, 0.6), 0.1),
        ((0.0, 0.5, 0.99), (0.2, 0.3, 0.5), 0.15),
        ((0.6, 0.7), (0.5, 0.5), 0.3),
        ((0.1, 0.3), (0.5, 0.5), 0.4),
        ((0.5, 1.0), (0.3, 0.7), 0.05),
    ],
)
def test_no_stopping_rule_is_faster_by_dynamic_programming(
    values: tuple[float, ...], chances: tuple[float, ...], c: float
) -> None:
    gamma_max = 6
    best = brute_force(values, chances, c, gamma_max)
    mean = float(np.dot(values, chances))
    policy = RateOptimal(best, gamma_max, mean, cost=TextbookCost(draft=c))
    assert rate_of(policy, values, chances, c, gamma_max) == pytest.approx(best, rel=1e-9)
    # The comparison tells rules apart: one that never stops is slower.
    endless = RateOptimal(0.0, gamma_max, mean, cost=TextbookCost(draft=c))
    assert rate_of(endless, values, chances, c, gamma_max) < best


CONSTANT = LatencyTable.constant(1.0, 0.1)


def speedups(trace: Trace, policy: DraftPolicy) -> np.ndarray[Any, Any]:
    log = replay(trace, policy)
    return log.per_request(log.rounds["emitted"]) / price(log, CONSTANT).decode_s


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


def test_a_steeper_price_of_verification_shortens_drafts() -> None:
    probs = [0.9] * 12
    flat = RateOptimal(2.0, 12, 0.9, cost=TextbookCost(draft=0.05))
    steep = RateOptimal(2.0, 12, 0.9, cost=TextbookCost(draft=0.05, per_token=0.1))
    assert length(steep, probs) < length(flat, probs)


class Step:
    """A target pass that is dearer as soon as it verifies anything, and flat from there."""

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        return 0.05 * draft_length + (1.4 if verify_tokens > batch else 1.0)


def test_looks_past_a_jump_of_the_cost() -> None:
    # The first draft alone does not pay (0.9 < 1.5 x 0.45), several together do.
    policy = RateOptimal(2.2, 12, 0.9, cost=Step())
    assert 0.9 < 2.2 * 0.45
    assert length(policy, [0.9] * 12) > 1


def test_drops_drafts_not_worth_verifying() -> None:
    dear = TextbookCost(draft=0.01, per_token=0.2)
    kept = RateOptimal(2.0, 4, 0.9, cost=dear)
    assert length(kept, [0.9, 0.05, 0.9, 0.9]) == 1
    whole = RateOptimal(2.0, 4, 0.9, trim=False, cost=dear)
    assert length(whole, [0.9, 0.05, 0.9, 0.9]) == 2


def test_recalibration_follows_what_is_observed() -> None:
    policy = RateOptimal(1.8, 10, 0.9, recalibrate=0.3, cost=TextbookCost(draft=0.2))
    before = length(policy, [0.9] * 10)
    for _ in range(20):
        length(policy, [0.9] * 10)
        policy.observe(Round(0, 3, 0, 1, 3, 1), [Token(0.9)] * 3)
    assert length(policy, [0.9] * 10) < before


def test_rate_depends_on_the_batch() -> None:
    policy = RateOptimal([[1, 1.5], [8, 9.0]], 10, 0.8, cost=TextbookCost())
    drafted = []
    for batch in (1, 7, 8, 64):
        policy.begin_round(Load(batch, 0))
        draft: list[Any] = []
        while policy.keep_drafting(draft):
            draft.append(Token(0.8))
        drafted.append(len(draft))
    assert drafted[0] == drafted[1] > drafted[2] == drafted[3] == 0


def test_fit_at_several_batches_prices_each() -> None:
    rows = [("target", "forward", b, n, 0, 1.0 + 0.05 * b * n, 0.0, 5)
            for b in (1, 16) for n in (1, 5, 25)]  # fmt: skip
    rows += [("draft", "forward", b, 1, 0, 0.1 + 0.01 * b, 0.0, 5) for b in (1, 16)]
    import pandas as pd

    from traces.latency import CELL_COLUMNS

    latency = LatencyTable(pd.DataFrame(rows, columns=list(CELL_COLUMNS)))
    trace = synthetic_trace(0.8, requests=6, tokens=100)
    fit = fit_rate_optimal(trace, latency, batches=(1, 16))
    drafted = {
        b: int(replay(trace, InBatch(fit.policy, b)).rounds["drafted"].max()) for b in (1, 16)
    }
    assert isinstance(fit.policy.rate, list)
    assert [row[0] for row in fit.policy.rate] == [1, 16]
    assert drafted[1] > drafted[16]  # verifying a draft costs sixteen times as much there


def test_signals_that_cost_more_than_they_tell_are_not_read() -> None:
    trace = synthetic_trace(0.7, requests=20, tokens=200, concentration=50.0)
    dear = LatencyTable.constant(1.0, 0.05, signal=0.5)
    free = LatencyTable.constant(1.0, 0.05)
    assert fit_rate_optimal(trace, dear).policy.reads == ()
    assert fit_rate_optimal(trace, free, estimates="logistic").policy.reads != ()


@pytest.mark.parametrize("estimates", ["isotonic", "logistic"])
def test_bursty_acceptance_gains_over_the_best_fixed_length(estimates: Any) -> None:
    trace = synthetic_trace(Bursty(), requests=80, tokens=250, concentration=10.0, seed=2)
    fit = fit_rate_optimal(trace, CONSTANT, range(40), estimates=estimates)
    tested = trace.select(range(40, 80))
    ours = speedups(tested, fit.policy)
    for gamma in range(1, 11):
        gap = ours - speedups(tested, Fixed(gamma))
        assert gap.mean() > 2 * gap.std(ddof=1) / np.sqrt(len(gap))


def test_real_loop_runs_it_with_one_decoder_call_per_token() -> None:
    trace = synthetic_trace(0.8, requests=1, tokens=50, concentration=5.0)
    from traces.replay import ReplayDecoder

    rounds = list(speculate(ReplayDecoder(trace, 0), RateOptimal(trim=True).fresh()))
    assert sum(r.emitted for r in rounds) == 49
    assert all(r.drafted <= r.draft_forwards for r in rounds)


def test_cost_never_falls_with_the_width() -> None:
    rows = [("target", "forward", 1, n, 0, s, 0.0, 5) for n, s in
            ((1, 1.0), (2, 1.5), (3, 1.1), (4, 1.3))]  # fmt: skip
    rows.append(("draft", "forward", 1, 1, 0, 0.1, 0.0, 5))
    import pandas as pd

    from traces.latency import CELL_COLUMNS

    cost = LatencyCost(LatencyTable(pd.DataFrame(rows, columns=list(CELL_COLUMNS))), longest=3)
    seconds = [cost(1, 0, n, 0.0) for n in (1, 2, 3, 4)]
    assert seconds == pytest.approx([1.0, 1.3, 1.3, 1.3])
    assert cost(1, 2, 1, 0.0) == pytest.approx(1.2)


def test_errors_name_the_remedy() -> None:
    trace = synthetic_trace(0.8, requests=2, tokens=20)
    with pytest.raises(DraftsimError, match="no prompt to train on"):
        fit_rate_optimal(trace, CONSTANT, [])
    bad: Any = "neural"
    with pytest.raises(DraftsimError, match="estimates is 'neural'"):
        fit_rate_optimal(trace, CONSTANT, estimates=bad)


def test_real_decoding_has_the_rounds_of_replay() -> None:
    pytest.importorskip("torch")
    from profiler.spotcheck import Arm
    from tests import bundled
    from tests.replayed import assert_decoded_as_replayed

    trace = bundled.greedy_trace()
    latency = LatencyTable.constant(1.0, 0.1, 1.05)
    for estimates in ("isotonic", "logistic"):
        kind: Any = estimates
        policy = fit_rate_optimal(trace, latency, range(3), estimates=kind, recalibrate=0.05).policy
        assert_decoded_as_replayed(bundled.pair(), trace, [Arm("own", policy)])
