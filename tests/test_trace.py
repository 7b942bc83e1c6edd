"""Traces: run lengths, selections, and the contradictions they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from policies.lengths.basic import Fixed
from traces.acceptance.sampling import Sampling
from traces.acceptance.survival import impute, runs, survival
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN, Request, Trace
from traces.errors import DraftsimError
from traces.importers.rows import LoggedRound, matches
from traces.replay.run import replay

MATCHES = st.lists(st.lists(st.sampled_from([1, 0, -1]), min_size=1, max_size=12), max_size=5)


def plain_trace(matches: list[list[int]]) -> Trace:
    lengths = [len(m) for m in matches]
    columns = {
        "request": np.repeat(np.arange(len(matches)), lengths),
        "position": np.array([t for m in matches for t in range(len(m))], dtype=np.int32),
        "offset": np.zeros(sum(lengths), dtype=np.int16),
        "match": np.array([x for m in matches for x in m], dtype=np.int8),
    }
    requests = [Request(str(i), "c", 4, n, n, "length") for i, n in enumerate(lengths)]
    return Trace(columns, requests)


@given(MATCHES)
@settings(deadline=None)
def test_run_lengths_by_walking(matches: list[list[int]]) -> None:
    expected = []
    for row in matches:
        for t in range(len(row)):
            run = 0
            while t + run < len(row) and row[t + run] == MATCH:
                run += 1
            expected.append(run)
    trace = plain_trace(matches)
    assert trace.run_lengths.tolist() == expected
    assert trace.tokens == len(trace) == len(expected)


def tailed() -> Trace:
    return synthetic_trace(
        0.5, requests=4, tokens=9, seed=3, concentration=2.0, max_gamma=3, eos_fraction=0.5
    )


@given(st.lists(st.integers(0, 3), max_size=6))
@settings(deadline=None)
def test_select_takes_whole_requests(keep: list[int]) -> None:
    trace = tailed()
    part = trace.select(keep)
    assert part.requests == [trace.requests[i] for i in keep]
    rows = [np.flatnonzero(trace.columns["request"] == i) for i in keep]
    for name in set(trace.columns) - {"request"}:
        expected = [trace.columns[name][r] for r in rows]
        assert np.array_equal(part.columns[name], np.concatenate([[], *expected])), name


def test_signals_follow_their_definitions() -> None:
    trace = tailed()
    c = {name: values.astype(np.float64) for name, values in trace.columns.items()}
    top, second = (np.exp(c[f"draft_top{i}"] - c["draft_logsumexp"]) for i in (1, 2))
    assert np.array_equal(trace.signal("prob"), np.exp(c["draft_logprob"]))
    assert np.array_equal(trace.signal("prob_margin"), top - second)
    assert np.array_equal(trace.signal("logit_margin"), c["draft_top1"] - c["draft_top2"])
    assert np.array_equal(trace.signal("entropy"), c["draft_entropy"])
    with pytest.raises(DraftsimError, match=r"'prob' is not in this trace .it holds none"):
        plain_trace([[1]]).signal("prob")


def test_columns_are_typed_and_cannot_be_written() -> None:
    trace = plain_trace([[1, 0]])
    assert trace.columns["position"].dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        trace.columns["match"][0] = 0


def changed(name: str, row: int, value: Any) -> dict[str, Any]:
    columns = {k: np.array(v) for k, v in tailed().columns.items()}
    columns[name][row] = value
    return columns


FIRST_TAIL = int(np.flatnonzero(tailed().columns["offset"])[0])
FIRST_MATCH = int(np.flatnonzero(tailed().columns["match"] == MATCH)[0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (changed("match", FIRST_MATCH, 5), "values other than"),
        (changed("request", -1, 9), "names request 9, the table has 4"),
        (changed("request", 0, -1), "names request"),
        (changed("position", 0, -1), "negative"),
        (changed("position", 0, 3), "not sorted"),
        (changed("offset", FIRST_TAIL, 2), r"not sorted|not numbered"),
        (changed("offset", FIRST_TAIL, 9), r"not sorted|tail of 9"),
        (changed("match", FIRST_TAIL - 1, 1), "was no mismatch"),
        (changed("draft_entropy", FIRST_TAIL, np.nan), "'draft_entropy' is nan"),
        ({k: v for k, v in tailed().columns.items() if k != "match"}, "lacks .* match"),
        ({**tailed().columns, "colour": np.zeros(len(tailed()))}, "unknown column.* colour"),
        ({**tailed().columns, "token": np.zeros(2, np.int32)}, r"'token' has shape \(2,\)"),
        ({**tailed().columns, "token": np.zeros(len(tailed()))}, "'token' has dtype float64"),
        ({**tailed().columns, "offset": np.full(len(tailed()), 1 << 20)}, "'offset' holds values"),
    ],
)
def test_contradicting_columns_are_refused(columns: dict[str, Any], message: str) -> None:
    trace = tailed()
    with pytest.raises(DraftsimError, match=message):
        Trace(columns, trace.requests, trace.max_gamma, trace.meta)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("r", "", 1, 3, 3, "length"), "3 tokens"),
        (Request("r", "", 1, 2, 1, "eos"), "max_new_tokens=1"),
        (Request("r", "", 1, 2, 3, "length"), "token limit with tokens=2"),
        (Request("r", "", 1, 2, 3, "stop"), "ended='stop'"),  # type: ignore[arg-type]
        (Request("r", "", -1, 2, 2, "length"), "prompt_length=-1"),
        (Request("r", "", 1, 2, 2, "length", (1, 2)), "2 prompt ids"),
    ],
)
def test_contradicting_requests_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        Trace(plain_trace([[1, 0]]).columns, [request_])


def test_tails_must_fit_max_gamma() -> None:
    trace = tailed()
    with pytest.raises(DraftsimError, match="tail of 2 tokens, its max_gamma=2 allows 1"):
        Trace(trace.columns, trace.requests, 2)
    with pytest.raises(DraftsimError, match="no max_gamma"):
        Trace(trace.columns, trace.requests)


@pytest.mark.parametrize("drawn", [Sampling(), Sampling(0.7), Sampling(1.0, 0.9)])
def test_how_outputs_were_drawn_comes_back_from_its_provenance(drawn: Sampling) -> None:
    assert Sampling.of(drawn.meta) == drawn
    assert ("top_p" in drawn.meta) == (drawn.top_p < 1)


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


@given(ROUNDS)
@settings(deadline=None, max_examples=50)
def test_survival_is_scipys(rounds: list[tuple[int, int]]) -> None:
    ended = [a for a, n in rounds if n > a]
    # A run seen to last k says it is longer than k - 1, which is scipy's censoring at k - 1.
    beyond = [a - 1 for a, n in rounds if n <= a and a > 0]
    if not ended and not beyond:
        with pytest.raises(DraftsimError, match="holds none"):
            survival(logged(rounds))
        return
    ours = survival(logged(rounds))
    ks = np.arange(len(ours.at_risk))
    if not ended:
        assert (ours.survival == 1).all()
        return
    theirs = stats.ecdf(stats.CensoredData(uncensored=ended, right=beyond)).sf
    assert ours.survival[0] == 1
    assert ours.survival[1:] == pytest.approx(theirs.evaluate(ks))


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
    estimate = survival(trace)
    risk, rejected, alive = estimate.at_risk, estimate.rejected, estimate.survival
    for k in range(1, gamma + 1):
        greenwood = (rejected[:k] / (risk[:k] * (risk[:k] - rejected[:k]))).sum()
        assert abs(alive[k] - alpha**k) <= 4 * alive[k] * np.sqrt(greenwood)
    assert (np.diff(alive) <= 0).all()


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
