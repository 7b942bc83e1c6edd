"""A small what-if study, varied by the tests of sweeps, and an executor that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from policies import DraftPolicy, Fixed, HFHeuristic, Oracle
from simulator.whatif.cells import Prices
from simulator.whatif.sweep import Sweep
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

POLICIES: dict[str, DraftPolicy] = {
    **{f"fixed:gamma={g}": Fixed(g) for g in (1, 3, 6)},
    "hf-heuristic": HFHeuristic(gamma_max=20),
    "oracle": Oracle(),
}
TABLE = LatencyTable.constant(0.01, 0.001, 0.0105, host_round=0.0005)


@cache
def recorded() -> Trace:
    return synthetic_trace(Bursty(), requests=12, tokens=60, concentration=8.0, seed=4)


def study(**changes: Any) -> Sweep:
    given: dict[str, Any] = {
        "prices": Prices((0.05, 0.2), {"here": TABLE}, (None, 500), verify=1.1),
        "alphas": (0.4, 0.8), "resamples": 40, "measure_tilt": False,
    } | changes  # fmt: skip
    return Sweep(recorded(), POLICIES, **given)


class Failing:
    """Runs parts here and stops, or loses workers, after some of them."""

    def __init__(self, good: int, lose: bool = False) -> None:
        self.good, self.lose = good, lose
        self.ran = 0

    def run(self, runner: Any, parts: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for i, part in enumerate(parts):
            if i >= self.good and self.lose:
                raise DraftsimError(f"{len(parts) - i} of {len(parts)} parts were lost")
            if i >= self.good:
                raise KeyboardInterrupt
            self.ran += 1
            yield i, runner.run(part)


def read_sweep(path: Path) -> pd.DataFrame:
    """Return the table of a sweep's file; what it was made from is in ``.attrs["sweep"]``."""
    frame = pd.read_parquet(path)
    header = json.loads(pq.read_metadata(path).metadata[b"draftsim"])
    assert header["kind"] == "sweep"
    frame.attrs["sweep"] = header["sweep"]
    return frame
