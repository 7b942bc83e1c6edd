"""A small trace to write to a file, and what files must hold when they are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simulator.serving import read_results
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace


def small_trace() -> Trace:
    return synthetic_trace(
        0.6, requests=3, tokens=12, concentration=3.0, max_gamma=4, eos_fraction=0.5
    )


def assert_same(left: Trace, right: Trace) -> None:
    assert list(left.requests) == list(right.requests)
    assert left.max_gamma == right.max_gamma
    assert json.dumps(left.meta, default=list) == json.dumps(right.meta, default=list)
    assert set(left.columns) == set(right.columns)
    for name, values in left.columns.items():
        other = right.columns[name]
        assert values.dtype == other.dtype
        assert values.tobytes() == other.tobytes(), name


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of complete results, without the seconds that they took."""
    stored = read_results(path)
    assert stored.complete
    return [{k: v for k, v in row.items() if k != "elapsed_s"} for row in stored.rows]
