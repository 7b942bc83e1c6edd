"""Rankings: the best fixed length, a rule fitted on other prompts, paired intervals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from policies.lengths.basic import Autoregressive, Fixed
from policies.rules.registry import parse_rule
from simulator.pricing import autoregressive
from simulator.summary import prompt_speedups, summarize
from simulator.whatif.ladder import ladder, split_prompts
from simulator.whatif.ranking import (
    BEST_FIXED,
    FITTED,
    UNFITTED,
    cross_fitted_rule,
    fastest,
    fixed_lengths,
    rank,
)
from simulator.whatif.rate import fit_rate_optimal
from tests.break_even import break_even_ratio, priced_at, ratio_sums
from tests.gains import paired_gain
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.store.recordings import find_trace

LATENCY = LatencyTable.constant(1.0, 0.12, 1.1)


def recorded(requests: int = 16) -> Trace:
    return synthetic_trace(
        0.7, requests=requests, tokens=50, max_gamma=24, concentration=3.0, seed=4
    )


def test_the_best_fixed_length_is_the_fastest_of_them_all() -> None:
    trace = recorded()
    logs = list(replay_many(trace, fixed_lengths(trace.max_gamma)))
    assert [log.policy for log in logs] == [f"fixed:gamma={g}" for g in range(1, 13)]
    speedups = summarize(logs, LATENCY, resamples=10).set_index("policy")["speedup"]
    assert fastest(logs, LATENCY).policy == speedups.drop("autoregressive").idxmax()
    assert [*fixed_lengths(3)] == [f"fixed:gamma={g}" for g in (1, 2, 3)]


def test_each_prompt_is_run_under_the_rule_fitted_to_the_other_half() -> None:
    trace = recorded()
    found = cross_fitted_rule(trace, LATENCY)
    assert found is not None
    assert [r.id for r in found.requests] == [r.id for r in trace.requests]
    halves = split_prompts(trace)
    kinds = {fit_rate_optimal(trace, LATENCY, half).estimates for half in halves}
    kind = kinds.pop() if len(kinds) == 1 else fit_rate_optimal(trace, LATENCY).estimates
    for train, held_out in (halves, halves[::-1]):
        fit = fit_rate_optimal(trace, LATENCY, train, estimates=kind)  # type: ignore[arg-type]
        own = replay(trace.select(held_out), fit.policy)
        for i, request in enumerate(held_out):
            expected = own.rounds[own.rounds["request"] == i]
            rounds = found.rounds[found.rounds["request"] == request]
            assert rounds["drafted"].tolist() == expected["drafted"].tolist()
            assert rounds["emitted"].tolist() == expected["emitted"].tolist()
    assert np.all(np.diff(found.rounds["request"]) >= 0)
    assert cross_fitted_rule(trace.select([0, 1, 2]), LATENCY) is None


def test_a_ranking_of_all_names_its_lengths_and_what_was_fitted() -> None:
    trace = recorded()
    found = rank(trace, LATENCY, None)
    names = [log.policy for log in found.logs]
    assert "fixed" not in names
    assert "fixed:gamma=5" in names
    best = fastest(list(replay_many(trace, fixed_lengths(trace.max_gamma))), LATENCY).policy
    assert found.notes == {best: BEST_FIXED, "rate-optimal": FITTED}
    assert best in names
    rows = found.noted(
        [{"policy": best, "verify": v, "source": "draft-model"} for v in ("exact", "csd")]
    )
    # A lossy run of the same policy is another row.
    assert [row["note"] for row in rows] == [BEST_FIXED, None]
    few = rank(recorded(3), LATENCY, ["rate-optimal"])
    assert few.notes["rate-optimal"] == UNFITTED
    # Policies that were named are ranked with the best fixed length, too.
    texts = ["fixed", "rate-optimal:acceptance=0.6"]
    some = rank(trace, LATENCY, texts)
    assert [log.policy for log in some.logs] == ["fixed:gamma=5", texts[1], best]
    assert some.added is some.logs[-1]
    assert some.notes == {texts[1]: UNFITTED, best: BEST_FIXED}
    among = rank(trace, LATENCY, [best, "svip"])
    assert [log.policy for log in among.logs] == [best, "svip:gamma_max=24"]
    assert among.added is None
    assert among.notes == {best: BEST_FIXED}
    # A longer fixed length that was named may be the best.
    easy = synthetic_trace(0.95, requests=4, tokens=60)
    longer = rank(easy, LatencyTable.constant(1.0, 1e-5), ["fixed:gamma=20"])
    assert longer.notes == {"fixed:gamma=20": BEST_FIXED}


def test_a_rule_is_not_fitted_to_what_a_lossy_verification_accepts() -> None:
    trace = find_trace("bundled").select(range(4))  # has the target's scores
    lossy = rank(trace, LATENCY, ["rate-optimal"], parse_rule("spec-verification"))
    assert lossy.notes["rate-optimal"] == UNFITTED


def test_a_recording_without_signals_has_a_fitted_rule_too() -> None:
    plain = synthetic_trace(0.7, requests=8, tokens=40)
    found = rank(plain, LATENCY, ["rate-optimal"])
    assert found.notes["rate-optimal"] == FITTED
    assert found.logs[0].reads == ()
    # As it comes it reads a signal, so that only the fitted one can stand among all.
    assert rank(plain, LATENCY, None).notes["rate-optimal"] == FITTED


def test_a_paired_gain_is_the_ratio_of_the_speedups() -> None:
    trace = recorded()
    two, six = (replay(trace, Fixed(g), name=f"fixed:gamma={g}") for g in (2, 6))
    rows = summarize([two, six], LATENCY, resamples=400).set_index("policy")
    value, low, high = paired_gain(two, six, LATENCY, resamples=400)
    assert value == pytest.approx(
        rows.loc["fixed:gamma=2", "speedup"] / rows.loc["fixed:gamma=6", "speedup"]
    )
    assert low < value < high
    # Prompts that are easy for both make neither ratio wider.
    bounds = [rows.loc[f"fixed:gamma={g}", ["speedup_lo", "speedup_hi"]] for g in (2, 6)]
    apart = bounds[0].iloc[1] / bounds[1].iloc[0] - bounds[0].iloc[0] / bounds[1].iloc[1]
    assert high - low < apart
    assert paired_gain(two, two, LATENCY, resamples=20) == (1.0, 1.0, 1.0)
    alone = trace.select([0])
    one = replay(alone, Fixed(2))
    assert np.isnan(paired_gain(one, autoregressive(one), LATENCY)[1:]).all()
    assert paired_gain(one, autoregressive(one), LATENCY)[0] == pytest.approx(
        float(prompt_speedups(one, LATENCY)[0])
    )


def test_rounds_pay_up_to_their_break_even_ratio() -> None:
    trace = recorded(40)
    for gamma, verify in ((1, 1.0), (3, 1.2), (8, 1.0)):
        log = replay(trace, Fixed(gamma))
        even = break_even_ratio(log, verify)
        assert float(priced_at(log, even.ratio, verify)[1][0]) == pytest.approx(1)
        assert break_even_ratio(ratio_sums(log), verify) == even
        # The linearised interval against resampled prompts: 40 of them, so alike within a fifth.
        drawn = _resampled(log, verify)
        assert even.low == pytest.approx(
            np.percentile(drawn, 2.5), abs=0.2 * (even.high - even.low)
        )
        assert even.high == pytest.approx(
            np.percentile(drawn, 97.5), abs=0.2 * (even.high - even.low)
        )
    assert break_even_ratio(replay(trace, Fixed(8)), 40.0) == (0.0, 0.0, 0.0)
    plain = autoregressive(replay(trace, Fixed(1)))
    assert break_even_ratio(plain).ratio == np.inf
    assert np.isnan(break_even_ratio(plain)[1:]).all()
    one = replay(trace.select([0]), Fixed(2))
    assert np.isnan(break_even_ratio(one)[1:]).all()
    with pytest.raises(DraftsimError, match="verification cost is -1"):
        break_even_ratio(one, -1)


def _resampled(log: RoundLog, verify: float) -> npt.NDArray[np.float64]:
    """Break-even ratios of 2000 resamples of the prompts, straight from the definition."""
    drafts = log.rounds["drafted"] > 0
    passes = log.per_request(np.where(drafts, verify, 1.0))
    gain = log.per_request(log.rounds["emitted"]) - passes
    forwards = log.per_request(log.rounds["draft_forwards"])
    drawn = np.random.default_rng(0).integers(len(gain), size=(2000, len(gain)))
    return np.asarray(gain[drawn].sum(axis=1) / forwards[drawn].sum(axis=1))


def test_no_speculation_has_one_rung() -> None:
    dear = LatencyTable.constant(1.0, 2.0, 1.1)  # no draft length is faster
    named = {"autoregressive": Autoregressive(), "fixed:gamma=0": Fixed(0), "two": Fixed(2)}
    rungs = ladder(recorded(), dear, policies=named, resamples=4)
    assert set(rungs["policy"]) == {"autoregressive", "two", "rate-optimal", "oracle"}
    assert list(rungs["policy"]).count("autoregressive") == 1
