"""Replay against an independent simulation, at the edges of recordings, and on unknowns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import DraftPolicy, Load
from policies.lengths.basic import Fixed, Oracle
from policies.lengths.huggingface import Confidence, HFHeuristic
from tests.random_traces import EOS, random_trace
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Request, Trace
from traces.errors import SignalError, TailError
from traces.replay.decoder import ReplayDecoder
from traces.replay.run import replay


def simulate(trace: Trace, gamma: int, first: int) -> list[tuple[int, ...]]:
    """Fixed-length speculative decoding from first principles: token lists and a cache."""
    c = {name: values.tolist() for name, values in trace.columns.items()}
    drafts: dict[tuple[int, int], list[int]] = {}
    matched: dict[tuple[int, int], bool] = {}
    for row in range(len(trace)):
        at = (c["request"][row], c["position"][row])
        token = c["draft_token"][row] if "draft_token" in c else None
        drafts.setdefault(at, []).append(token)
        if c["offset"][row] == 0:
            matched[at] = c["match"][row] == 1
    log = []
    for i, r in enumerate(trace.requests):
        position, length, cached = first, 100 + first, 99 + first
        while position < r.tokens:
            window = min(gamma, r.max_new_tokens - position - 1)
            sent, accepted, ahead, off = 0, 0, 0, -1
            while sent < window:
                if off < 0:
                    at = (i, position + ahead)
                    token, right = drafts[at][0], matched[at]
                    last_of_text = r.ended == "eos" and position + ahead == r.tokens - 1
                    stop = token == EOS if token is not None else right and last_of_text
                    if right:
                        accepted += 1
                        ahead += 1
                    else:
                        off = 1
                elif drafts[at][0] is None:
                    stop = False
                else:
                    stop = drafts[at][off] == EOS
                    off += 1
                sent += 1
                if stop:
                    break
            emitted = min(accepted + 1, r.tokens - position)
            catch_up = length - cached
            log.append((i, position, sent, accepted, emitted, sent, catch_up))
            if sent:
                # Every pass but the last leaves one drafted token in the cache.
                cached = length + min(accepted, sent - 1)
            length += accepted + 1
            position += emitted
    return log


@given(
    seed=st.integers(0, 10**6), alpha=st.floats(0, 1), gamma=st.integers(0, 6),
    first=st.integers(0, 1), signals=st.booleans(),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_fixed_replay_is_the_simulation(
    seed: int, alpha: float, gamma: int, first: int, signals: bool
) -> None:
    trace = random_trace(seed, alpha, 6, signals)
    log = replay(trace, Fixed(gamma), first=first)
    assert [tuple(r) for r in log.rounds.tolist()] == simulate(trace, gamma, first)
    emitted = log.per_request(log.rounds["emitted"])
    assert emitted.tolist() == [max(0, r.tokens - first) for r in trace.requests]


def matches_trace(match: Sequence[int], max_gamma: int, limit: int | None = None) -> Trace:
    """One request of these matches with full tails."""
    repeats = np.where(np.array(match) == 0, max_gamma, 1)
    rows = np.repeat(np.arange(len(match)), repeats)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    columns = {
        "request": np.zeros(len(rows), int), "position": rows, "offset": offset,
        "match": np.where(offset == 0, np.array(match)[rows], -1),
        "draft_token": np.full(len(rows), 7),
    }  # fmt: skip
    limit = limit or len(match)
    request = Request("r", "", 3, len(match), limit, "length" if limit == len(match) else "eos")
    return Trace(columns, [request], max_gamma)


@pytest.mark.invariant(12)
@pytest.mark.parametrize("max_gamma", [1, 2, 5])
@pytest.mark.parametrize("run", [0, 1, 3])
def test_the_tail_ends_exactly_where_it_was_recorded(run: int, max_gamma: int) -> None:
    trace = matches_trace([1] * run + [0] + [1] * 20, max_gamma)
    longest = run + max_gamma
    assert replay(trace, Fixed(longest), first=0).rounds[0]["drafted"] == longest
    with pytest.raises(TailError, match=f"drafted {longest + 1} tokens at position 0"):
        replay(trace, Fixed(longest + 1), first=0)


def test_drafting_never_walks_into_the_next_request() -> None:
    one = matches_trace([1, 1, 1], 2, limit=50)
    columns = {k: np.concatenate([v, v]) for k, v in one.columns.items()}
    columns["request"] = np.repeat([0, 1], 3)
    trace = Trace(columns, [*one.requests, *one.requests], 2)
    # The last draft matched the end of the text: it is EOS, and the drafter stops at it.
    assert replay(trace, Fixed(10), first=0).rounds["drafted"].tolist() == [3, 3]


def test_after_eos_the_limit_and_not_the_text_caps_the_draft() -> None:
    trace = matches_trace([1, 1, 0], 8, limit=50)
    last = replay(trace, Fixed(8), first=0).rounds[-1]
    assert (last["drafted"], last["accepted"], last["emitted"]) == (8, 2, 3)
    capped = matches_trace([1, 1, 0], 8)
    last = replay(capped, Fixed(8), first=0).rounds[-1]
    assert (last["drafted"], last["accepted"], last["emitted"]) == (2, 2, 3)


def test_first_follows_the_recording() -> None:
    trace = matches_trace([0, 1, 1], 4)
    assert replay(trace, Fixed(1)).first == 1
    told = Trace(trace.columns, trace.requests, trace.max_gamma, {"first": 0})
    assert replay(told, Fixed(1)).rounds["position"].tolist()[0] == 0
    assert replay(told, Fixed(1), first=1).rounds["position"].tolist()[0] == 1
    assert len(replay(matches_trace([1], 4), Fixed(1), first=1)) == 0


@pytest.mark.invariant(12)
def test_unknown_positions_are_refused_where_a_draft_meets_them() -> None:
    base = synthetic_trace(1.0, requests=1, tokens=9)
    match = np.array(base.columns["match"])
    match[3] = -1
    trace = Trace({**base.columns, "match": match}, base.requests)
    # 0 1 2 | bonus 3: the unknown position is never drafted.
    assert replay(trace, Fixed(3), first=0).rounds["accepted"].tolist() == [3, 3, 0]
    with pytest.raises(SignalError, match="not observed at position 3"):
        replay(trace, Fixed(4), first=0)
    with pytest.raises(SignalError, match="Oracle asks how far"):
        replay(trace, Oracle(), first=0)
    with pytest.raises(SignalError, match="Confidence reads prob"):
        replay(trace, Confidence())


def test_a_policys_own_error_is_not_swallowed() -> None:
    class Broken(DraftPolicy):
        def keep_drafting(self, draft: Sequence[Any]) -> bool:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        replay(synthetic_trace(0.5, requests=1, tokens=5), Broken())


def test_fidelity_says_how_the_log_relates_to_decoding() -> None:
    trace = matches_trace([0, 1, 1], 4)

    def fidelity(**meta: object) -> str:
        return replay(Trace(trace.columns, trace.requests, 4, meta), Fixed(1)).fidelity

    assert fidelity() == fidelity(dtype="float32") == "exact"
    assert fidelity(dtype="bfloat16") == "exact up to near-ties"
    assert fidelity(sampling={"temperature": 0.7}) == "exact in distribution"
    assert fidelity(imputed={}) == "approximate"
    assert fidelity(fidelity="approximate") == "approximate"


def test_oracle_wastes_nothing() -> None:
    trace = synthetic_trace(0.7, requests=20, tokens=60, eos_fraction=0.5)
    rounds = replay(trace, Oracle()).rounds
    assert (rounds["drafted"] == rounds["accepted"]).all()
    for gamma in range(6):
        assert len(replay(trace, Fixed(gamma))) >= len(rounds)


@pytest.mark.invariant(7)
@pytest.mark.parametrize(("alpha", "gamma"), [(0.8, 5), (0.6, 4), (0.5, 1)])
def test_iid_block_efficiency_is_the_closed_form(alpha: float, gamma: int) -> None:
    # Leviathan et al. 2023, eq. 1; the rounds that the token limit caps are left out.
    rounds = replay(synthetic_trace(alpha, requests=20, tokens=2000, seed=7), Fixed(gamma)).rounds
    emitted = rounds["emitted"][rounds["drafted"] == gamma]
    expected = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    z = (emitted.mean() - expected) / (emitted.std() / np.sqrt(len(emitted)))
    assert abs(z) < 4


def test_load_reports_context_and_run() -> None:
    trace = matches_trace([1, 1, 0, 1], 4)
    decoder = ReplayDecoder(trace, 0, first=0)
    assert decoder.load == Load(batch=1, context=3, run_length=2)
    assert decoder.verify([None] * 2) == 2
    assert decoder.load == Load(batch=1, context=6, run_length=0)
    assert decoder.remaining == 1


@pytest.mark.invariant(11)
def test_a_learning_policy_is_left_as_it_was_given() -> None:
    trace = synthetic_trace(0.9, requests=4, tokens=60)
    policy = HFHeuristic(3, persist="persistent")
    first, again = replay(trace, policy), replay(trace, policy)
    assert first.rounds.tolist() == again.rounds.tolist()
    transient = replay(trace, HFHeuristic(3))
    assert first.rounds.tolist() != transient.rounds.tolist()


def test_results_say_themselves_in_a_line_and_are_named_as_people_type() -> None:
    from simulator.pricing import price
    from traces.latency.table import LatencyTable

    trace = synthetic_trace(0.7, requests=3, tokens=20)
    table = LatencyTable.constant(0.01, 0.001)
    log = replay(trace, Fixed(gamma=3))
    assert log.policy == "fixed:gamma=3"
    for result in (trace, table, log, price(log, table)):
        assert "\n" not in repr(result)
        assert len(repr(result)) < 200
    assert repr(log).startswith("<RoundLog fixed:gamma=3 / exact")
