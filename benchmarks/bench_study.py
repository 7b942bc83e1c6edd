"""A whole study: 100 cost ratios x 100 acceptance rates x 12 draft lengths x 6 policies.

The aim is under 5 minutes on 2 cores over the bundled recording, with the axis of cost
ratios at next to no cost: `test_ratios` replays the same two acceptance rates at one
ratio and at a hundred.  `test_rounds` replays all policies at one rate, asked before every
token and with their draft lengths looked up (`simulator.whatif.walk`).
Run with ``make bench``, or ``pytest benchmarks/bench_study.py``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from policies import DraftPolicy, parse_policy
from simulator.whatif import Local, Prices, Sweep, Tilter, expand, parse_axis, with_gammas
from simulator.whatif.walk import Walker
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import FileError
from traces.replay.decoder import replay
from traces.store.recordings import find_trace

FAMILIES = ("fixed", "confidence", "hf-heuristic", "gammatune", "gammatune-plus", "cm-asd")
"""Policies that start from a draft length, or from a window's."""
RATIOS = parse_axis("0.01:1:100log", "c")
ALPHAS = parse_axis("0.3:0.95:100", "alpha")


@cache
def recording() -> Trace:
    """The bundled one, or one of its kind where none is bundled."""
    try:
        return find_trace("bundled")
    except FileError:
        return synthetic_trace(Bursty(), requests=44, tokens=120, concentration=8.0)


@cache
def policies() -> dict[str, DraftPolicy]:
    """Six policies from twelve draft lengths each."""
    names = with_gammas(FAMILIES[:5], range(1, 13))
    names += expand(["cm-asd:gamma_max={1..12}"])
    return {name: parse_policy(name, max_gamma=recording().max_gamma) for name in names}


def study(ratios: tuple[float, ...], alphas: tuple[float, ...]) -> Sweep:
    return Sweep(recording(), policies(), Prices(ratios), alphas)


def test_study(benchmark: Any) -> None:
    def run() -> int:
        return len(study(RATIOS, ALPHAS).run(Local(2)))

    rows = benchmark.pedantic(run, rounds=1)
    assert rows == 100 * 100 * 12 * 6


@pytest.mark.parametrize("ratios", [1, 100])
def test_ratios(benchmark: Any, ratios: int) -> None:
    some = study(RATIOS[:ratios], (0.5, 0.8))
    assert len(benchmark.pedantic(some.run, (Local(1),), rounds=2)) == ratios * 2 * 72


@pytest.mark.parametrize("way", ["asked", "looked up"])
def test_rounds(benchmark: Any, way: str) -> None:
    trace = Tilter(recording()).to(0.6)

    def run() -> int:
        walker = Walker(trace)
        logs = (walker.replay(p) if way == "looked up" else replay(trace, p)
                for p in policies().values())  # fmt: skip
        return sum(map(len, logs))

    assert benchmark.pedantic(run, rounds=2) == sum(
        len(replay(trace, p)) for p in policies().values()
    )


def test_tilt(benchmark: Any) -> None:
    tilter = Tilter(recording())
    assert len(benchmark(tilter.to, 0.5).requests) == len(recording().requests)
