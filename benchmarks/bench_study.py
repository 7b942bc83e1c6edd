"""A whole study: 100 cost ratios x 100 acceptance rates x 12 draft lengths x 6 policies.

The aim is under 5 minutes on 2 cores over the bundled recording, with the axis of cost
ratios at next to no cost: `test_ratios` replays the same two acceptance rates at one
ratio and at a hundred.  `test_vectorised` replays 1,000 settings of each kind of policy at once
(`traces.replay.vectorised`); the aim is 20 million recorded tokens/s on one core.
Run with ``make bench``, or ``pytest benchmarks/bench_study.py``; ``python -m
benchmarks.bench_study`` prints the recorded tokens/s of 1,000 settings, and the loop's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import islice
from typing import Any

import pytest

from policies import DraftPolicy, parse_policy
from simulator.executors import Local
from simulator.whatif.axes import expand, parse_axis, with_gammas
from simulator.whatif.cells import Prices
from simulator.whatif.sweep import Sweep
from simulator.whatif.tilt import Tilter
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import FileError
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.store.recordings import find_trace

FAMILIES = ("fixed", "confidence", "hf-heuristic", "gammatune", "gammatune-plus", "cm-asd")
"""Policies that start from a draft length, or from a window's."""
RATIOS = parse_axis("0.01:1:100log", "c")
ALPHAS = parse_axis("0.3:0.95:100", "alpha")


@cache
def recording() -> Trace:
    """Return the bundled one, or one of its kind where none is bundled."""
    try:
        return find_trace("bundled")
    except FileError:
        return synthetic_trace(Bursty(), requests=44, tokens=120, concentration=8.0)


@cache
def policies() -> dict[str, DraftPolicy]:
    """Return six policies from twelve draft lengths each."""
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


@cache
def settings(kind: str, count: int = 1000) -> dict[str, DraftPolicy]:
    """Return `count` different settings of a kind, by numbered names."""
    texts = KINDS[kind]
    found = [texts(i) for i in range(count)]
    return {f"{i} {text}": parse_policy(text) for i, text in enumerate(found)}


def _spread(i: int, among: int) -> str:
    """Return a number in (0, 1), of `among` different ones."""
    return f"{(i % among + 1) / (among + 1):.5f}"


KINDS: dict[str, Callable[[int], str]] = {
    "fixed lengths": lambda i: f"fixed:gamma={1 + i % 24}",
    "confidence": lambda i: f"confidence:gamma={1 + i % 20},confidence_threshold={_spread(i, 997)}",
    "entropy": lambda i: f"svip:gamma_max={1 + i % 20},threshold={_spread(i, 997)}",
    "heuristic": lambda i: (
        f"hf-heuristic:gamma={1 + i % 12},gamma_max=24,confidence_threshold={_spread(i, 97)}"
    ),
    "GammaTune": lambda i: f"gammatune:gamma={1 + i % 12},eta={_spread(i, 97)}",
    "GammaTune+": lambda i: (
        f"gammatune-plus:gamma={1 + i % 12},eta={_spread(i, 97)},threshold={_spread(i, 13)}"
    ),
    "AdaEDL": lambda i: f"adaedl:gamma_max={1 + i % 16},threshold={_spread(i, 97)}",
    "Draft&Verify": lambda i: f"draft-and-verify:gamma_max={1 + i % 16},threshold={_spread(i, 97)}",
    "EMA tiers": lambda i: (
        f"sglang-adaptive:initial_steps={1 + 2 * (i % 4)},config="
        f'{{"1":{{"candidate_steps":[1,3,5,7],"ema_alpha":{_spread(i, 97)}}}}}'
    ),
    "rate-optimal": lambda i: f"rate-optimal:gamma_max={4 + i % 20},rate={_spread(i, 97)}",
}


@pytest.mark.parametrize("kind", KINDS)
def test_vectorised(benchmark: Any, kind: str) -> None:
    trace, many = recording(), settings(kind)

    rounds = benchmark.pedantic(at_once, (many,), rounds=3)
    assert rounds > len(many) * len(trace.requests)
    benchmark.extra_info["tokens_per_s"] = len(many) * trace.tokens / benchmark.stats.stats.min


def test_tilt(benchmark: Any) -> None:
    tilter = Tilter(recording())
    assert len(benchmark(tilter.to, 0.5).requests) == len(recording().requests)


def at_once(many: Mapping[str, DraftPolicy]) -> int:
    """Return rounds of all settings."""
    return sum(map(len, replay_many(recording(), many)))


def one_by_one(many: Mapping[str, DraftPolicy]) -> int:
    """Return the same through the loop."""
    return sum(len(replay(recording(), policy)) for policy in many.values())


def tokens_per_s(run: Callable[[], int], tokens: int, times: int = 3) -> float:
    """Return tokens/s of the fastest of some runs, in processor time: the machine may be shared."""
    best = float("inf")
    for _ in range(times):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return tokens / best


def main() -> None:
    """Print the recorded tokens/s of 1,000 settings at once, and of the loop over 20 of them."""
    trace = recording()
    total = sum(len(settings(kind)) for kind in KINDS) * trace.tokens
    print(f"{'1,000 settings of':16s} {'at once':>12s} {'the loop':>12s}  ratio")
    seconds = 0.0
    for kind in KINDS:
        many = settings(kind)
        few = dict(islice(many.items(), 0, None, len(many) // 20))
        quick = tokens_per_s(partial(at_once, many), len(many) * trace.tokens)
        loop = tokens_per_s(partial(one_by_one, few), len(few) * trace.tokens, 1)
        seconds += len(many) * trace.tokens / quick
        print(f"{kind:16s} {quick:12,.0f} {loop:12,.0f} {quick / loop:6.1f}")
    print(f"{'all kinds':16s} {total / seconds:12,.0f}")


if __name__ == "__main__":
    main()
