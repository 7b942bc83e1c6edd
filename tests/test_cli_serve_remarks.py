"""Remarks of ``draftsim serve``: overload, sizes not measured, an early stop; and its table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from commands.serve.rows import guesses
from tests.conftest import Serve
from tests.serving import PAIR, arrival_file
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.store.files import write_latency


def test_overload_is_said_and_ends(serve: Serve) -> None:
    ran = serve("--rate", 1000, "--max-batch", 2, "--requests", 60, *PAIR, "--json", "-")
    assert all(r["overloaded"] and r["requests"] == 60 for r in ran.rows)
    assert "overloaded" in ran.err
    # Loads rise in the remark as numbers do, not as words.
    ran = serve("--rate", "900,1000,20000", "--max-batch", 2, "--requests", 60, *PAIR)
    assert "autoregressive at 900, 1000, 2e+04/s; fixed:gamma=5 at 900, 1000, 2e+04/s" in ran.err


def test_prompts_larger_than_the_pool_are_refused_and_counted(serve: Serve, tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", "0,20,5", "1,9000,5", "2,20,5")
    ran = serve("--arrivals", file, "--kv-blocks", 8, *PAIR, "--json", "-")
    assert [(r["rejected"], r["requests"]) for r in ran.rows] == [(1, 2)] * 2
    assert "2 requests too large" in ran.err


def test_memory_that_is_too_small_overloads_an_engine_whose_batch_never_fills(
    serve: Serve,
) -> None:
    ran = serve("--rate", 30, "--kv-blocks", 9, "--requests", 60, *PAIR, "--json", "-")
    for row in ran.rows:
        assert row["mean_batch"] < 8 < row["batch"]
        assert row["overloaded"]
        assert row["preemptions"] > 0
        assert max(row["over_time"]["kv_blocks"]) <= 9
    assert "pre-empted" in ran.err


def test_rows_say_which_sizes_were_not_measured(serve: Serve, tmp_path: Path) -> None:
    cells = [
        (m, "forward", b, n, c, s * (0.01 + 1e-4 * b * n + 1e-6 * b * c), 0.0, 3)
        for m, s in (("target", 1.0), ("draft", 0.1))
        for b in (1, 2) for n in (1, 8) for c in (0, 40)
    ]  # fmt: skip
    path = tmp_path / "latency.parquet"
    write_latency(LatencyTable(pd.DataFrame(cells, columns=list(CELL_COLUMNS))), path)
    ran = serve(
        "--latency", path, "--batch", "1,4", "--requests", 8, "--replications", 2, *PAIR,
        "--json", "-",
    )  # fmt: skip
    for row in ran.rows:
        entries = row["coverage"]
        for origin in ("interpolated", "extrapolated"):
            mine = [e for e in entries if e["origin"] == origin]
            assert sum(e["passes"] for e in mine) == row[origin]
            assert len({(e["model"], e["phase"]) for e in mine}) == len(mine)
        far = [e for e in entries if e["origin"] == "extrapolated" and e["model"] == "target"]
        assert far[0]["context"][1] > 40
        assert far[0]["batch"][1] == min(row["batch"], 4)
    assert "outside the measured sizes, priced by a fitted roofline:" in ran.err
    # The table may be an engine's.
    assert "engine: --engine-length" in " ".join(ran.err.split())
    one = {"origin": "extrapolated", "model": "draft", "phase": "forward", "passes": 2,
           "batch": [1, 8], "new_tokens": [1, 1], "context": [40, 1043]}  # fmt: skip
    assert guesses([{"coverage": [one]}])[1] == (
        "  2 draft forward passes: batch 1 to 8, 1 token each, context 40 to 1,043"
    )


def test_the_table_leaves_out_what_goes_without_saying(serve: Serve, tmp_path: Path) -> None:
    def columns(*arguments: object) -> str:
        ran = serve(*arguments, "--requests", 12, *PAIR)
        assert ran.code == 0, ran.err
        return ran.out  # headings take several lines, and tables several blocks

    plain = columns("--batch", 2)
    assert "batch" in plain
    assert not any(word in plain for word in ("status", "goodput", "±", "rejected"))
    timed = columns("--rate", 2, "--ttft", 0.2, "--replications", 2)
    assert all(word in timed for word in ("rate", "time", "goodput", "±"))
    file = arrival_file(tmp_path / "a.csv", "0,20,5", "1,9000,5", "2,20,5")
    odd = columns("--arrivals", file, "--kv-blocks", 8)
    assert all(word in odd for word in ("fidelity", "rejected"))
    assert "status" not in odd
    stopped = columns("--rate", 1, "--max-time", 2)
    assert "status" in stopped


def test_a_stop_in_simulated_time_is_said(serve: Serve) -> None:
    [_, row] = serve(
        "--rate", 1, "--requests", 500, "--max-time", 20, "--policy", "fixed", "--json", "-"
    ).rows  # fmt: skip
    assert row["status"] == "stopped at max_time_s=20"
    assert row["simulated_s"] == pytest.approx(20)
