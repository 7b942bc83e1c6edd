"""How what ran before changes the time of a target pass: why latencies are measured in blocks.

    python -m benchmarks.latency_order [--width 9] [--repeats 60] [--drafts]

Times one pass of the bundled target in three settings: after width - 1 draft passes, as decoding
runs it; by itself; and both mixed at random, as a sweep over single cells would.  Prints the
quartiles.  With ``--drafts`` the draft passes of rounds instead, by their place, in processor time,
which other work on the machine touches least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from profiler.latency.passes import random_ids
from profiler.machine import Stopwatch
from profiler.models.runner import Runner
from profiler.recording.run import RunInfo

CONTEXT = 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=9, help="tokens of the target's pass")
    parser.add_argument("--repeats", type=int, default=60, help="timed passes of each kind")
    parser.add_argument("--drafts", action="store_true", help="draft passes by place instead")
    given = parser.parse_args()
    pair = RunInfo("bundled", "bundled", threads=1).load()
    target, draft = Runner(pair.target, 256), Runner(pair.draft, 256)
    ids = random_ids(target, 256)
    for runner in (target, draft):
        runner.forward(ids, 0, keep=1)

    def drafts() -> None:
        for _ in range(given.width - 1):
            draft.forward(ids[:1], CONTEXT, keep=1)

    def verify() -> None:
        target.forward(ids[: given.width], CONTEXT, keep=given.width)

    if given.drafts:
        by_place(lambda: draft.forward(ids[:1], CONTEXT, keep=1), verify, given)
        return
    watch = Stopwatch(pair.device)
    kinds: dict[str, Callable[[], None]] = {"after drafts": drafts, "by itself": lambda: None}
    # Blocks take turns, so that a slow minute falls on all kinds.
    seconds: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    for _ in range(6):
        for name, before in kinds.items():
            for number in range(given.repeats // 6 + 2):
                before()
                taken = watch.measure(verify)[0].seconds
                if number >= 2:
                    seconds.setdefault(f"{name}, round after round", []).append(taken)
        for name in rng.permutation([*kinds] * (given.repeats // 6)).tolist():
            kinds[name]()
            seconds.setdefault(f"{name}, mixed", []).append(watch.measure(verify)[0].seconds)
    print(f"a pass over {given.width} tokens, ms: first quartile, median, third quartile")
    for name, taken_s in sorted(seconds.items()):
        low, middle, high = np.quantile(taken_s, [0.25, 0.5, 0.75]) * 1e3
        print(f"  {name:32s} {low:6.3f} {middle:6.3f} {high:6.3f}")


def by_place(draft: Callable[[], object], verify: Callable[[], object], given: Any) -> None:
    """Time rounds of ``width - 1`` draft passes and a verification."""
    seconds = np.empty((given.repeats, given.width - 1))
    for number in range(-2, given.repeats):  # the first two warm up, and are overwritten
        for place in range(given.width - 1):
            begin = time.thread_time()
            draft()
            seconds[number, place] = time.thread_time() - begin
        verify()
    print("a draft pass by its place in the round, ms of processor time: quartiles")
    for place, taken in enumerate(seconds.T, start=1):
        low, middle, high = np.quantile(taken, [0.25, 0.5, 0.75]) * 1e3
        print(f"  {place:2d} {low:6.3f} {middle:6.3f} {high:6.3f}")


if __name__ == "__main__":
    main()
