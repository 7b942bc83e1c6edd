"""Replay speed in recorded tokens per second on one core; the aim is 500,000 or more.

The last ones compare the loop with the two copies of it that are written for speed: rounds of a
serving simulation, and a sweep's walk along draft lengths that are looked up.

Run with ``make bench``, or ``pytest -s benchmarks/bench_replay.py``; the rate of the
fastest run, the one least disturbed, is printed and stored as ``tokens_per_s``.
"""

from __future__ import annotations

from typing import Any

import pytest

from policies import (
    SVIP,
    Autoregressive,
    Confidence,
    DraftAndVerify,
    Fixed,
    GammaTune,
    GammaTunePlus,
    HFHeuristic,
    Oracle,
)
from policies.core import DraftPolicy
from policies.together import PerRequest
from simulator.serving.arrivals import Job
from simulator.serving.sequence import EngineState, ServedSequence, Slot, step
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.replay.run import replay
from traces.replay.vectorised import replay_many

TOKENS, REQUESTS, ALPHA, MAX_GAMMA = 500, 300, 0.8, 24
POLICIES: dict[str, DraftPolicy] = {
    "autoregressive": Autoregressive(),
    "fixed": Fixed(5),
    "hf-heuristic": HFHeuristic(gamma_max=MAX_GAMMA),
    "confidence": Confidence(roc_update="off"),
    "svip": SVIP(gamma_max=MAX_GAMMA),
    "draft-and-verify": DraftAndVerify(),
    "gammatune": GammaTune(),
    "gammatune-plus": GammaTunePlus(),
    "oracle": Oracle(),
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return 150,000 positions of i.i.d. matches, with signals and off-path tails."""
    made = synthetic_trace(
        ALPHA, requests=REQUESTS, tokens=TOKENS, concentration=4.0, max_gamma=MAX_GAMMA
    )
    replay(made, Autoregressive())  # lays the trace out, as the first replay always does
    return made


@pytest.mark.parametrize("name", POLICIES)
def test_replay(benchmark: Any, trace: Trace, name: str) -> None:
    log = benchmark(replay, trace, POLICIES[name])
    assert log.rounds["emitted"].sum() == REQUESTS * (TOKENS - 1)
    rate = REQUESTS * TOKENS / benchmark.stats.stats.min
    benchmark.extra_info["tokens_per_s"] = round(rate)
    print(f"\n{name}: {rate:,.0f} recorded tokens/s")


def looped(trace: Trace, policy: DraftPolicy) -> int:
    return len(replay(trace, policy))


def served(trace: Trace, policy: DraftPolicy) -> int:
    together, rounds = PerRequest(policy.for_run(), guarded=True), 0
    for i, request in enumerate(trace.requests):
        job = Job(0.0, i, request.prompt_length, request.tokens)
        slot = Slot(i, job, 0.0, ServedSequence(trace, job, MAX_GAMMA, EngineState()))
        slot.decoder.declare(policy.reads)
        together.join(slot)
        while not slot.decoder.ended:
            rounds += len(step(together, [slot]))
    return rounds


def walked(trace: Trace, policy: DraftPolicy) -> int:
    return sum(map(len, replay_many(trace, {"": policy})))


@pytest.mark.parametrize("way", [looped, served, walked])
@pytest.mark.parametrize("name", ["fixed", "confidence", "svip", "gammatune"])
def test_three_loops(benchmark: Any, trace: Trace, name: str, way: Any) -> None:
    policy = POLICIES[name]
    assert benchmark(way, trace, policy) == len(replay(trace, policy))
    rate = REQUESTS * TOKENS / benchmark.stats.stats.min
    benchmark.extra_info["tokens_per_s"] = round(rate)
    print(f"\n{way.__name__} {name}: {rate:,.0f} recorded tokens/s")
