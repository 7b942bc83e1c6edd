"""Replays that look draft lengths up: the same rounds as asking before every token."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from policies import CMASD, DraftPolicy, Fixed, HFHeuristic, parse_policy
from simulator.whatif import walk
from simulator.whatif.cells import Bench, Part
from simulator.whatif.prices import Prices
from simulator.whatif.tilt import Tilter, iid_like, tilt_to
from simulator.whatif.walk import Walker
from traces.acceptance.schema import UNKNOWN
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import SignalError, TailError
from traces.replay.decoder import replay
from traces.replay.rounds import RoundLog

PLANNED = (
    "autoregressive", "fixed:gamma=0", "fixed:gamma=1", "fixed:gamma=6", "fixed:gamma=24",
    "confidence", "confidence:gamma=3", "confidence:confidence_threshold=0",
    "hf-heuristic", "hf-heuristic:full_accept_means=budget", "hf-heuristic:persist=persistent",
    "hf-heuristic:confidence_threshold=0.5,gamma=2", "gammatune", "gammatune:delta=0,eta=1",
    "gammatune-plus", "gammatune-plus:threshold=0.8,full_accept_means=budget", "svip",
    "svip:threshold=0.1", "svip:gamma_max=1", "cm-asd", "cm-asd:gamma_max=5,gamma_min=2",
    "cm-asd:alpha=1.6,entropy_sign=literal",
)  # fmt: skip
ASKED = ("confidence:roc_update=in_call", "cm-asd:window=lagged", "cm-asd:window=literal",
         "adaedl", "oracle", "draft-and-verify")  # fmt: skip
FIELDS = ("policy", "source", "verify", "fidelity", "reads", "first")


@cache
def recorded(seed: int = 0, eos: float = 0.5, signals: bool = True) -> Trace:
    return synthetic_trace(
        Bursty(0.95, 0.3), requests=6, tokens=40, eos_fraction=eos, seed=seed,
        concentration=5.0 if signals else None,
    )  # fmt: skip


def parsed(name: str, trace: Trace) -> DraftPolicy:
    return parse_policy(name, max_gamma=trace.max_gamma or 24)


def alike(one: RoundLog, other: RoundLog) -> None:
    np.testing.assert_array_equal(one.rounds, other.rounds)
    for name in FIELDS:
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.invariant(9)
@pytest.mark.parametrize("name", [*PLANNED, *ASKED])
def test_tilted_recordings_are_walked_alike(name: str) -> None:
    """Of recordings as they are, `tests/test_one_loop.py` says so."""
    for trace in (tilt_to(recorded(), 0.8), iid_like(recorded(), 0.3)):
        policy = parsed(name, trace)
        alike(Walker(trace).replay(policy, name), replay(trace, policy, name=name))


def test_built_in_policies_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above compare the usual replay with itself."""

    def usual(*_: Any, **__: Any) -> RoundLog:
        raise AssertionError("asked before every token")

    monkeypatch.setattr(walk, "replay", usual)
    walker = Walker(recorded())
    for name in PLANNED:
        walker.replay(parsed(name, recorded()))
    for name in ASKED:
        with pytest.raises(AssertionError, match="asked"):
            walker.replay(parsed(name, recorded()))

    class Even(Fixed):
        def keep_drafting(self, draft: Any) -> bool:
            return super().keep_drafting(draft) or len(draft) % 2 == 1

    with pytest.raises(AssertionError, match="asked"):
        walker.replay(Even(3))


@pytest.mark.invariant(11)
def test_a_prototype_is_left_as_it_was() -> None:
    policy, trace = HFHeuristic(persist="persistent"), recorded()
    first, again = (Walker(trace).replay(policy) for _ in range(2))
    alike(first, again)
    used = HFHeuristic(persist="persistent")
    used.observe(replay_round(9, 9), ())
    alike(Walker(trace).replay(used), replay(trace, used))


def replay_round(drafted: int, accepted: int) -> Any:
    from policies.core import Round

    return Round(0, drafted, accepted, accepted + 1, drafted, 1)


def test_what_the_recording_does_not_hold_is_said_as_usual() -> None:
    short = synthetic_trace(0.5, requests=3, tokens=40, max_gamma=4, concentration=5.0)
    with pytest.raises(TailError, match="past the recorded tail"):
        Walker(short).replay(Fixed(8))
    bare = recorded(signals=False)
    with pytest.raises(SignalError, match="does not hold"):
        Walker(bare).replay(CMASD())
    match = np.where(np.arange(len(bare)) % 5, bare.columns["match"], UNKNOWN).astype(np.int8)
    unknown = Trace({**bare.columns, "match": match}, bare.requests, None, bare.meta)
    with pytest.raises(SignalError, match="was not observed"):
        Walker(unknown).replay(Fixed(4))


def test_requests_that_end_with_prefill_have_no_rounds() -> None:
    trace = synthetic_trace(0.5, requests=2, tokens=1)
    for name in ("fixed", "gammatune"):
        assert len(Walker(trace).replay(parsed(name, trace))) == 0


def test_a_sweeps_part_is_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded()
    policies = {n: parsed(n, trace) for n in (*PLANNED[1:], "adaedl")}
    bench = Bench(trace, policies, Prices((0.05, 0.4)), resamples=20)
    quick = bench.run(Part(None, 1, tuple(policies)))
    monkeypatch.setattr(walk, "PLANS", {})
    usual = bench.run(Part(None, 1, tuple(policies)))
    for name, values in usual.items():
        np.testing.assert_array_equal(quick[name], values, err_msg=name)


@pytest.mark.parametrize("method", ["coupled", "redraw"])
def test_several_halvings_at_once_find_the_same_shift(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simulator.whatif import tilt

    tilter = Tilter(recorded(), method)
    together = tilter.shifts([0.35, 0.8])
    monkeypatch.setattr(tilt, "_FEW", 0)
    np.testing.assert_array_equal(together, tilter.shifts([0.35, 0.8]))
