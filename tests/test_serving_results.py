"""Sweeps, the file of their rows, and timelines."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from policies.lengths.basic import Autoregressive, Fixed
from simulator.serving import (
    ClosedLoop,
    Limits,
    Poisson,
    ResultsFile,
    Scenario,
    Timeline,
    break_even_load,
    over_batches,
    over_rates,
    read_results,
    simulate,
    sweep,
)
from tests.forked import forked
from tests.serving import CONSTANT, GRID, SMALL
from traces.errors import DraftsimError, FileError


def test_sweeps_over_batches_and_rates(tmp_path):
    seen = []
    base = Scenario(Poisson(1), Limits(max_batch=4), requests=20)
    policies = {"ar": Autoregressive(), "fixed": Fixed(3)}
    path = tmp_path / "rows.jsonl"
    rows = sweep(
        SMALL, CONSTANT, policies, over_batches(base, [1, 2, 4]), path=path,
        progress=lambda done, total, name: seen.append((done, total, name)),
    )  # fmt: skip
    assert [(r["batch"], r["policy"]) for r in rows] == [
        (b, p) for b in (1, 2, 4) for p in policies
    ]
    assert seen[-1] == (6, 6, "fixed")
    stored = read_results(path)
    assert stored.complete
    assert [r["throughput_tok_s"] for r in stored.rows] == [r["throughput_tok_s"] for r in rows]
    assert [s.arrivals.rate for s in over_rates(base, [0.5, 2.0])] == [0.5, 2.0]
    with pytest.raises(DraftsimError, match="closed loop has no rate"):
        over_rates(replace(base, arrivals=ClosedLoop(2)), [1.0])


def test_break_even_load():
    assert break_even_load([1, 2, 3], [1, 2, 5], [2, 3, 3]) == pytest.approx(2 + 1 / 3)
    assert break_even_load([1, 2], [1, 1], [2, 2]) == math.inf
    assert math.isnan(break_even_load([1, 2], [3, 1], [2, 2]))


@pytest.mark.invariant(13)
def test_killed_run_leaves_readable_rows_marked_incomplete(tmp_path):
    path = tmp_path / "rows.jsonl"
    base = Scenario(ClosedLoop(1), requests=10)
    scenarios = over_batches(base, [1] * 2000)
    with forked(
        lambda: sweep(SMALL, CONSTANT, {"fixed": Fixed(3)}, scenarios, path=path)
    ) as process:
        for _ in range(600):
            if path.exists() and path.read_text().count("\n") > 4:
                break
            assert process.is_alive(), "the run ended by itself"
            time.sleep(0.05)
        process.kill()
    stored = read_results(path)
    assert len(stored.rows) >= 3
    assert not stored.complete
    assert all(row["policy"] == "fixed" for row in stored.rows)


def test_results_files_tell_damage_from_interruption(tmp_path):
    path = tmp_path / "rows.jsonl"
    with ResultsFile(path) as out:
        out.add({"a": 1.5, "b": math.nan, "c": np.float64(2)})
    stored = read_results(path)
    assert (stored.rows, stored.complete) == ([{"a": 1.5, "b": None, "c": 2.0}], True)
    assert stored.meta == {}
    whole = path.read_text()
    header = whole.index("\n")
    for cut in range(1, len(whole)):
        path.write_text(whole[:cut])
        if cut < header:
            with pytest.raises(FileError, match="no header"):
                read_results(path)
        else:
            assert read_results(path).complete == (cut == len(whole) - 1)
    path.write_text(whole.replace('"row"', '"row', 1))
    with pytest.raises(FileError, match="line 2: damaged"):
        read_results(path)
    with pytest.raises(FileError, match="no such file"):
        read_results(tmp_path / "none")
    with contextlib.suppress(RuntimeError), ResultsFile(path) as out:
        out.add({"a": 1})
        raise RuntimeError
    stored = read_results(path)
    assert (stored.rows, stored.complete) == ([{"a": 1}], False)


def test_timeline_opens_as_chrome_trace(tmp_path):
    path = tmp_path / "run.json"
    scenario = Scenario(Poisson(4), Limits(max_batch=4), requests=12, warmup=0.0)
    with Timeline(path) as timeline:
        run = simulate(SMALL, GRID, Fixed(3), scenario, timeline=timeline)
    events = json.loads(path.read_text())
    slices = [e for e in events if e["ph"] == "X"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"target model", "draft model", *(f"request {i}" for i in range(12))} <= names
    rounds = [e for e in slices if e["pid"] == 2 and "emitted" in e["args"]]
    assert sum(e["args"]["emitted"] for e in rounds) == run.recorder.tokens - 12
    assert (
        sum(e["args"]["wasted"] for e in rounds)
        == run.recorder.draft_forwards - run.recorder.accepted
    )
    for track in {(e["pid"], e["tid"]) for e in slices}:
        mine = [e for e in slices if (e["pid"], e["tid"]) == track]
        mine.sort(key=lambda e: (e["ts"], e["dur"]))
        for before, after in itertools.pairwise(mine):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-3, "slices overlap"
