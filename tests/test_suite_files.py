"""The files that stages leave are few and small enough to be handed back."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from profiler.models.architectures import PAIRS
from profiler.suite import MODES, forced_stage, latency_stage
from profiler.suite.__main__ import SECONDS
from profiler.suite.checks import COLUMNS, MORE_POLICIES, POLICIES, REPEATS
from profiler.suite.environment import write_within
from tests.suite_results import check_files
from traces.latency.table import LatencyTable, as_cells
from traces.store.engine_runs import MeasuredRuns, write_measured
from traces.store.files import read_trace, write_latency, write_trace


def test_files_of_full_size_are_small_enough(tmp_path: Path) -> None:
    """As many cells as the time holds, every run made, every round recorded."""
    # Every cell takes several calls and some of them a capture: more do not fit into the time.
    cells = int(SECONDS / 0.024)
    row = ("llama-3.1-8b+1b/eager/target", "forward", 64, 25, 16384, 1.2345678e-3, 1.2e-5, 5)
    rows = [(*row[:5], row[5] + i * 1e-9, *row[6:]) for i in range(cells)]
    meta = {"shapes": {p.name: latency_stage.shapes_of(p) for p in PAIRS.values()}}
    table = LatencyTable.__new__(LatencyTable)
    frame = as_cells(rows)
    object.__setattr__(table, "cells", frame)
    object.__setattr__(table, "meta", meta)
    write_latency(table, tmp_path / "latency.parquet")
    entry = {"model": "target", "phase": "forward", "batch": 64, "width": 25, "context": 16384,
             "error": 0.0123456789012, "random": False}  # fmt: skip
    kept = [[entry, row]] * cells
    (tmp_path / "latency.json").write_text(json.dumps(kept, indent=1))
    trace = forced_stage.forced_trace(False)
    write_trace(trace, tmp_path / "forced-trace.parquet")
    policies = len(POLICIES) + len(MORE_POLICIES)
    runs = len(PAIRS) * len(MODES) * 3 * REPEATS * policies * len(trace.requests)
    measured = [["llama-3.1-8b+1b", "eager", POLICIES[5], "exact", 1, True, 0, f"r{i}", i * 1e-7, i]
                for i in range(runs)]  # fmt: skip
    write_measured(
        MeasuredRuns(pd.DataFrame(measured, columns=list(COLUMNS)), {}),
        tmp_path / "forced-measured.parquet",
    )
    check_files(tmp_path)


def test_a_recording_is_cut_to_its_file(tmp_path: Path) -> None:
    trace = forced_stage.forced_trace(True)
    path = tmp_path / "trace.parquet"
    assert write_within(trace, path) == len(trace.requests)
    limit = path.stat().st_size - 1
    kept = write_within(trace, path, limit)
    assert 0 < kept < len(trace.requests)
    assert len(read_trace(path).requests) == kept
