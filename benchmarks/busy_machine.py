"""How far predictions and real runs disagree while another process keeps the machine busy.

    python -m benchmarks.busy_machine --load core [--profiled none] [--remeasure]

Starts the load, measures the latencies of the bundled pair under it, decodes some of its prompts
for real under a handful of policies and the load, and prints predicted against measured seconds and
speedups, and how quiet the machine was.  ``--profiled none`` measures the latencies before the load
starts; ``--remeasure`` measures them between the real runs.

Loads, each one process that is pinned nowhere:

none     nothing
core     arithmetic that fits the processor's caches, without a pause
memory   a stream through a buffer larger than the caches, without a pause
bursts   the former, half of the time, in turns of 50 ms
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from commands.common.printed import print_table
from commands.common.progress import progress_bar
from commands.validate.flow import CheckedPair
from commands.validate.spot_check import SpotCheck, say_verdict
from profiler.latency.table import Grid
from profiler.profile import Settings, profile_latency
from profiler.recording.run import RunInfo
from traces.store.recordings import BUNDLED

POLICIES = (
    "autoregressive", "fixed:gamma=2", "fixed:gamma=4", "fixed:gamma=8", "confidence", "gammatune",
    "svip",
)  # fmt: skip
CORE = "while True:\n    sum(range(100_000))"
MEMORY = (
    "import numpy as np\na = np.ones(8_000_000)\nb = np.empty_like(a)\n"
    "while True:\n    np.add(a, 1.0, out=b)"
)
BURSTS = (
    "import time\nwhile True:\n    end = time.perf_counter() + 0.05\n"
    "    while time.perf_counter() < end:\n        sum(range(10_000))\n    time.sleep(0.05)"
)
LOADS = {"none": None, "core": CORE, "memory": MEMORY, "bursts": BURSTS}


@contextmanager
def load(name: str) -> Iterator[None]:
    """Keep the machine busy by another process while the block runs."""
    code = LOADS[name]
    if code is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.5)  # until it is under way
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--load", choices=LOADS, default="core", help="during the real runs")
    parser.add_argument("--profiled", choices=LOADS, help="during the profile (default: --load)")
    parser.add_argument("--remeasure", action="store_true", help="as in `validate`")
    parser.add_argument("--policy", action="append", help="instead of the handful; repeatable")
    parser.add_argument("--limit", type=int, default=10, help="prompts")
    parser.add_argument("--repeats", type=int, default=3, help="real runs of every prompt")
    parser.add_argument("--sweeps", type=int, default=8, help="over the latencies")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(BUNDLED / "bundled", run)
        with load(given.profiled or given.load), progress_bar() as progress:
            pair = RunInfo("bundled", "bundled", threads=1).load()
            settings = Settings(grid=Grid(repeats=given.sweeps))
            profile_latency(pair, settings, run, progress)
        with load(given.load):
            check = CheckedPair(
                run=run, policy=given.policy or list(POLICIES), repeats=given.repeats,
                limit=given.limit,
            )  # fmt: skip
            rows = SpotCheck(check, assisted=False).rows(given.remeasure)
    say(rows)


def say(rows: pd.DataFrame) -> None:
    """Print the table, and the medians over the policies."""
    print_table(rows.drop(columns=["verify", "batch", "forced"]).to_dict("records"))
    say_verdict(rows)


if __name__ == "__main__":
    main()
