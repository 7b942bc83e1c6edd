"""The files of ``draftsim serve``: results, timelines, plots, rows of a stopped run."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

import draftsim
from commands.serve.command import kept
from simulator.serving import read_results
from simulator.serving.outcome.results import ResultsFile
from tests.conftest import Serve
from tests.forked import forked
from tests.serving import PAIR, arrival_file


def test_results_are_written_as_lines_or_as_one_table(serve: Serve, tmp_path: Path) -> None:
    lines, table = tmp_path / "r.jsonl", tmp_path / "r.parquet"
    for out in (lines, table):
        assert serve("--batch", "1,2", "--requests", 10, *PAIR, "--out", out).code == 0
    stored = read_results(lines)
    assert stored.complete
    assert stored.meta["policies"] == ["autoregressive", "fixed:gamma=5"]
    assert not (tmp_path / "r.parquet.jsonl").exists()
    frame = pd.read_parquet(table)
    assert frame["policy"].tolist() == [r["policy"] for r in stored.rows]
    assert frame["ttft_s_p95"].tolist() == [r["ttft_s"]["p95"] for r in stored.rows]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", ["r.jsonl", "r.parquet"])
def test_a_stopped_run_leaves_readable_rows_marked_incomplete(
    synthetic_run: Path, tmp_path: Path, name: str, stop: signal.Signals
) -> None:
    out = tmp_path / name
    lines = out if name == "r.jsonl" else tmp_path / "r.parquet.jsonl"
    said = tmp_path / "said"

    def command() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = [
            "draftsim", "serve", "--trace", str(synthetic_run), "--batch", ",".join(["1"] * 400),
            "--requests", "20", "--policy", "autoregressive", "--out", str(out),
        ]  # fmt: skip
        draftsim.main()

    # Many short runs: rows keep coming until somebody stops them.
    with forked(command, said) as run:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and run.is_alive():
            if lines.exists() and lines.read_text().count('{"row"') >= 2:
                break
            time.sleep(0.02)
        assert run.pid is not None
        os.kill(run.pid, stop)
    if stop == signal.SIGINT:
        assert run.exitcode == 130
        assert "marked incomplete" in said.read_text()
    if stop == signal.SIGINT and name == "r.parquet":
        count = len(pd.read_parquet(out))
        assert len(read_results(lines).rows) == count  # what the same command goes on with
        header = json.loads((pq.read_schema(out).metadata or {})[b"draftsim"])
        assert header["complete"] is False
    else:
        assert not (name == "r.parquet" and out.exists())
        stored = read_results(lines)
        assert not stored.complete
        assert all(r["requests"] == 20 for r in stored.rows)
        count = len(stored.rows)
    # Stopped by SIGKILL while it writes a line, it leaves those before it.
    assert 1 <= count < 400


def test_a_timeline_keeps_the_rules_of_the_trace_event_format(serve: Serve, tmp_path: Path) -> None:
    for mode in ("continuous", "pearl", "dsi"):
        path = tmp_path / f"{mode}.json"
        found = serve(
            "--rate", 20, "--requests", 30, "--mode", mode, *PAIR, "--timeline", path, "--json",
            "-", *(("--kv-blocks", 40) if mode == "continuous" else ()),
        ).rows  # fmt: skip
        events = json.loads(path.read_text())
        assert {e["ph"] for e in events} <= {"M", "X", "C"}
        processes = {e["pid"] for e in events if e["name"] == "process_name"}
        tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        named = set()
        for event in events:
            assert event["pid"] in processes
            if event["ph"] == "M":
                assert event["name"] in (
                    "process_name", "process_sort_index", "thread_name", "thread_sort_index"
                )  # fmt: skip
                named.add((event["pid"], event.get("tid")))
                continue
            assert math.isfinite(event["ts"])
            assert event["ts"] >= 0
            if event["ph"] == "C":
                assert all(isinstance(v, int) for v in event["args"].values())
                continue
            assert (event["pid"], event["tid"]) in named, "a slice before its track has a name"
            tracks[event["pid"], event["tid"]].append(event)
        # Rounded to nanoseconds, as viewers do, one track's slices follow each other.
        for slices in tracks.values():
            for before, after in itertools.pairwise(slices):
                ends = round(before["ts"] * 1e3) + round(before["dur"] * 1e3)
                assert round(after["ts"] * 1e3) >= ends, (mode, before, after)
        rounds = [e["args"] for k, s in tracks.items() if k[0] == 2 for e in s]
        drafted = sum(a.get("drafted", 0) for a in rounds)
        accepted = sum(a.get("accepted", 0) for a in rounds)
        # It shows the policy that drafts, and every token of it.
        assert accepted / drafted == pytest.approx(found[1]["acceptance_rate"])


def test_plots_are_drawn_for_batches_and_for_loads(serve: Serve, tmp_path: Path) -> None:
    batches, loads = tmp_path / "b", tmp_path / "l"
    few = ("--requests", 12, *PAIR)
    assert serve("--batch", "1,2", *few, "--plots", batches).code == 0
    assert serve("--rate", "0.5,2,8", *few, "--plots", loads).code == 0
    assert {p.name for p in batches.glob("*.png")} == {
        "latency_throughput.png", "over_time.png", "pareto.png", "speedup.png"
    }  # fmt: skip
    assert {p.name for p in loads.glob("*.png")} == {
        "load_e2e.png", "load_tpot.png", "load_ttft.png", "over_time.png", "pareto.png"
    }  # fmt: skip
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    for path in (*batches.glob("*.png"), *loads.glob("*.png")):
        for kind, begin in begins.items():
            assert path.with_suffix(kind).read_bytes().startswith(begin)


def test_arrivals_that_span_no_time_are_drawn_without_a_load(serve: Serve, tmp_path: Path) -> None:
    file, folder = arrival_file(tmp_path / "a.csv", "7,20,5", "7,30,9"), tmp_path / "plots"
    ran = serve("--arrivals", file, *PAIR, "--plots", folder)
    assert ran.code == 0
    assert "all arrivals have the same time" in ran.err
    assert {p.stem for p in folder.iterdir()} == {"over_time"}


def test_an_interruption_between_a_line_and_its_row_counts_the_line(tmp_path: Path) -> None:
    table = tmp_path / "r.parquet"
    rows: list[dict[str, Any]] = []

    def interrupted() -> None:
        with kept(rows, table, {}), ResultsFile(tmp_path / "r.parquet.jsonl") as file:
            file.add({"policy": "autoregressive"})
            rows.append({"policy": "autoregressive"})
            file.add({"policy": "fixed"})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert pd.read_parquet(table)["policy"].tolist() == ["autoregressive", "fixed"]
