"""``draftsim serve`` as a contract: rows, files left behind, errors, interruption."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from commands.serve_policies import load_serving_policies
from simulator.serving import read_results
from tests.conftest import ROOT, Ran, Run
from traces.files import write_latency, write_trace
from traces.latency import CELL_COLUMNS, LatencyTable
from traces.synthetic import synthetic_trace

SERVE_FIELDS = {
    "policy", "verify", "batch", "rate", "throughput_tok_s", "ttft_s", "tpot_s", "e2e_s",
    "simulated_tokens", "elapsed_s",
}  # fmt: skip
QUANTILES = {"mean", "p50", "p95", "p99"}


Serve = Callable[..., Ran]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trace = synthetic_trace(0.7, requests=8, tokens=30, max_gamma=24, concentration=4.0, seed=1)
    write_trace(trace, folder / "trace.parquet")
    table = LatencyTable.constant(0.0143, 0.00176, 0.015, host_round=0.0003)
    write_latency(table, folder / "latency.parquet")
    return folder


@pytest.fixture
def serve(recorded: Path, run: Run) -> Serve:
    return partial(run, "serve", "--trace", recorded)


def rows(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert (document["schema"], document["command"]) == (1, "serve")
    results: list[dict[str, Any]] = document["results"]
    return results


def arrivals(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return path


PAIR = ("--policy", "autoregressive", "--policy", "fixed:gamma=5")


def test_a_row_for_every_batch_and_policy_under_the_names_given(serve: Serve) -> None:
    # fixed:gamma=5 spells out a default: the row must say what was asked for all the same.
    found = rows(serve("--batch", "1,3", "--requests", 24, *PAIR, "--json", "-"))
    assert [(r["batch"], r["policy"]) for r in found] == [
        (b, p) for b in (1, 3) for p in ("autoregressive", "fixed:gamma=5")
    ]
    for row in found:
        assert set(row) >= SERVE_FIELDS
        assert all(set(row[name]) == QUANTILES for name in ("ttft_s", "tpot_s", "e2e_s"))
        assert row["requests"] == 24
        assert row["simulated_tokens"] == 24 * 30
        assert row["status"] == "complete"
    alone = found[0]
    # Plain decoding of one stream at constant latency: one pass and the host a token.
    assert alone["tpot_s"]["mean"] == pytest.approx(0.0143 + 0.0003)


def test_rates_and_replications_give_intervals_that_hold_the_mean(serve: Serve) -> None:
    found = rows(serve(
        "--rate", "0.5,2", "--requests", 20, "--replications", 3, *PAIR, "--json", "-"
    ))  # fmt: skip
    assert [r["rate"] for r in found] == [0.5, 0.5, 2.0, 2.0]
    for row in found:
        assert row["replications"] == 3
        assert row["e2e_s_lo"] <= row["e2e_s"]["mean"] <= row["e2e_s_hi"]


def test_a_file_is_served_at_every_scale(serve: Serve, tmp_path: Path) -> None:
    file = arrivals(tmp_path / "a.csv", *(f"{i},20,{5 + i}" for i in range(12)))
    found = rows(serve("--arrivals", file, "--scale", "0.5,2", *PAIR, "--json", "-"))
    assert [(r["scale"], r["rate"]) for r in found] == [(0.5, 0.5)] * 2 + [(2.0, 2.0)] * 2
    assert {r["simulated_tokens"] for r in found} == {sum(5 + i for i in range(12))}
    assert {r["fidelity"] for r in found} == {"approximate"}


@pytest.mark.parametrize("mode", ["static", "static-minimum", "static-mean", "pearl", "dsi"])
def test_every_mode_serves_every_request(serve: Serve, mode: str) -> None:
    found = rows(serve("--mode", mode, "--rate", 1, "--requests", 10, *PAIR, "--json", "-"))
    assert [(r["mode"], r["requests"]) for r in found] == [(mode, 10)] * 2


def test_all_serves_policies_per_request_and_per_batch(serve: Serve, recorded: Path) -> None:
    found = rows(serve("--batch", 4, "--requests", 16, "--policy", "all", "--json", "-"))
    names = [r["policy"] for r in found]
    assert {"autoregressive", "cm-asd", "gammatune", "goodput", "sglang-adaptive"} <= set(names)
    assert len(names) == len(set(names))
    assert all(r["requests"] == 16 for r in found)


def test_policies_get_cost_and_estimates_from_the_recording(recorded: Path) -> None:
    from traces.recordings import find_latency, find_trace

    trace, latency = find_trace(recorded), find_latency(recorded)
    texts = ["adaptive-verification", "goodput:gamma_max=4", "rate-optimal"]
    made: dict[str, Any] = load_serving_policies(texts, trace, latency)
    assert list(made) == texts
    assert made["goodput:gamma_max=4"].gamma_max == 4
    cost = made["goodput:gamma_max=4"].cost
    assert cost(1, 2, 3, 50.0) == pytest.approx(2 * 0.00176 + 0.015 + 0.0003)
    # Calibrated on the recording: the estimates' mean is the share of matches.
    estimator = made["adaptive-verification"].estimator
    on_path = trace.on_path
    prob = trace.signal("prob")[on_path]
    estimates = [estimator(type("T", (), {"prob": value}), 0) for value in prob]
    assert sum(estimates) / len(estimates) == pytest.approx(
        (trace.columns["match"][on_path] == 1).mean(), abs=0.02
    )


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
    recorded: Path, tmp_path: Path, name: str, stop: signal.Signals
) -> None:
    out = tmp_path / name
    lines = out if name == "r.jsonl" else tmp_path / "r.parquet.jsonl"
    command = [
        sys.executable, str(ROOT / "draftsim.py"), "serve", "--trace", str(recorded),
        "--batch", ",".join(["1"] * 400), "--requests", "20", "--policy", "autoregressive",
        "--out", str(out),
    ]  # fmt: skip

    def heed_interrupts() -> None:  # a shell lets its background jobs ignore them
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # Many short runs: rows keep coming until somebody stops them.
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, cwd=tmp_path,
        preexec_fn=heed_interrupts,  # noqa: PLW1509 - no thread holds a lock here
    ) as run:  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and run.poll() is None:
            if lines.exists() and lines.read_text().count('{"row"') >= 2:
                break
            time.sleep(0.02)
        run.send_signal(stop)
        _, err = run.communicate(timeout=30)
    if stop == signal.SIGINT:
        assert run.returncode == 130
        assert b"marked incomplete" in err
    if stop == signal.SIGINT and name == "r.parquet":
        assert not lines.exists()
        count = len(pd.read_parquet(out))
        header = json.loads((pq.read_schema(out).metadata or {})[b"draftsim"])
        assert header["complete"] is False
    else:
        assert not (name == "r.parquet" and out.exists())
        stored = read_results(lines)
        assert not stored.complete
        assert all(r["requests"] == 20 for r in stored.rows)
        count = len(stored.rows)
    assert 2 <= count < 400


def test_a_timeline_keeps_the_rules_of_the_trace_event_format(serve: Serve, tmp_path: Path) -> None:
    for mode in ("continuous", "pearl", "dsi"):
        path = tmp_path / f"{mode}.json"
        found = rows(serve(
            "--rate", 20, "--requests", 30, "--mode", mode, "--kv-blocks", 40, *PAIR,
            "--timeline", path, "--json", "-",
        ))  # fmt: skip
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
    assert {p.name for p in batches.iterdir()} == {
        "latency_throughput.png", "over_time.png", "speedup_1_fixed_gamma_5.png"
    }  # fmt: skip
    assert {p.name for p in loads.iterdir()} == {
        "load_e2e.png", "load_tpot.png", "load_ttft.png", "over_time.png"
    }  # fmt: skip
    for path in (*batches.iterdir(), *loads.iterdir()):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_overload_is_said_and_ends(serve: Serve) -> None:
    ran = serve("--rate", 1000, "--max-batch", 2, "--requests", 60, *PAIR, "--json", "-")
    assert all(r["overloaded"] and r["requests"] == 60 for r in rows(ran))
    assert "overloaded" in ran.err
    # Loads rise in the remark as numbers do, not as words.
    ran = serve("--rate", "900,1000,20000", "--max-batch", 2, "--requests", 60, *PAIR)
    assert "autoregressive at 900, 1000, 2e+04/s; fixed:gamma=5 at 900, 1000, 2e+04/s" in ran.err


def test_one_token_outputs_have_no_time_per_token(serve: Serve, tmp_path: Path) -> None:
    file = arrivals(tmp_path / "a.csv", *(f"{i},20,1" for i in range(4)))
    for row in rows(serve("--arrivals", file, *PAIR, "--json", "-")):
        assert row["tpot_s"]["mean"] is None
        assert row["ttft_s"]["mean"] is not None
        assert row["simulated_tokens"] == 4


def test_prompts_larger_than_the_pool_are_refused_and_counted(serve: Serve, tmp_path: Path) -> None:
    file = arrivals(tmp_path / "a.csv", "0,20,5", "1,9000,5", "2,20,5")
    ran = serve("--arrivals", file, "--kv-blocks", 8, *PAIR, "--json", "-")
    assert [(r["rejected"], r["requests"]) for r in rows(ran)] == [(1, 2)] * 2
    assert "2 request(s) could never fit" in ran.err


def test_memory_that_is_too_small_overloads_an_engine_whose_batch_never_fills(
    serve: Serve,
) -> None:
    ran = serve("--rate", 30, "--kv-blocks", 9, "--requests", 60, *PAIR, "--json", "-")
    for row in rows(ran):
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
    for row in rows(ran):
        entries = row["coverage"]
        for origin in ("interpolated", "extrapolated"):
            mine = [e for e in entries if e["origin"] == origin]
            assert sum(e["passes"] for e in mine) == row[origin]
            assert len({(e["model"], e["phase"]) for e in mine}) == len(mine)
        far = [e for e in entries if e["origin"] == "extrapolated" and e["model"] == "target"]
        assert far[0]["context"][1] > 40
        assert far[0]["batch"][1] == min(row["batch"], 4)
    assert "outside the measured sizes, priced by a fitted roofline:" in ran.err


def test_batch_and_memory_over_time_add_up(serve: Serve) -> None:
    for row in rows(serve("--rate", 4, "--requests", 40, *PAIR, "--json", "-")):
        times, sizes = row["over_time"]["time_s"], row["over_time"]["batch"]
        assert len(times) == len(sizes) == len(row["over_time"]["kv_blocks"])
        widths = [b - a for a, b in itertools.pairwise([*times, row["simulated_s"]])]
        area = sum(w * n for w, n in zip(widths, sizes, strict=True))
        assert area / row["simulated_s"] == pytest.approx(row["mean_batch"])


def test_the_table_leaves_out_what_goes_without_saying(serve: Serve, tmp_path: Path) -> None:
    def columns(*arguments: object) -> str:
        ran = serve(*arguments, "--requests", 12, *PAIR)
        assert ran.code == 0, ran.err
        return next(line for line in ran.out.splitlines() if "policy" in line)

    plain = columns("--batch", 2)
    assert "batch" in plain
    assert not any(word in plain for word in ("status", "goodput", "±", "rejected"))
    timed = columns("--rate", 2, "--ttft", 0.2, "--replications", 2)
    assert all(word in timed for word in ("rate", "in time", "goodput/s", "±"))
    file = arrivals(tmp_path / "a.csv", "0,20,5", "1,9000,5", "2,20,5")
    odd = columns("--arrivals", file, "--kv-blocks", 8)
    assert all(word in odd for word in ("fidelity", "rejected"))
    assert "status" not in odd
    stopped = columns("--rate", 1, "--max-time", 2)
    assert "status" in stopped


def test_arrivals_that_span_no_time_are_drawn_without_a_load(serve: Serve, tmp_path: Path) -> None:
    file, folder = arrivals(tmp_path / "a.csv", "7,20,5", "7,30,9"), tmp_path / "plots"
    ran = serve("--arrivals", file, *PAIR, "--plots", folder)
    assert ran.code == 0
    assert "span no time" in ran.err
    assert [p.name for p in folder.iterdir()] == ["over_time.png"]


def test_a_stop_in_simulated_time_is_said(serve: Serve) -> None:
    [row] = rows(serve(
        "--rate", 1, "--requests", 500, "--max-time", 20, "--policy", "fixed", "--json", "-"
    ))  # fmt: skip
    assert row["status"] == "stopped at max_time_s=20"
    assert row["simulated_s"] == pytest.approx(20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "--rate holds 0.0, expected positive"),
        (["--rate=-2"], "--rate holds -2.0"),
        (["--rate", "nan"], "--rate holds nan"),
        (["--rate", "fast"], "--rate is 'fast'"),
        (["--batch", "1.5"], "--batch is '1.5', expected whole numbers"),
        (["--batch", "0"], "--batch holds 0"),
        (["--batch", "1", "--rate", "1"], "drop --rate and --arrivals, or --batch"),
        (["--scale", "2"], "give a file"),
        (["--rate", "1", "--process", "bursty"], "expected poisson or deterministic"),
        (["--batch", "2", "--process", "poisson"], "--process shapes the arrivals of --rate"),
        (["--batch", "2", "--interference", "0.5"], "--interference is of --mode pearl or dsi"),
        (["--policy", "fixd"], "did you mean 'fixed'"),
        (["--mode", "dynamic"], "mode is 'dynamic', expected one of continuous"),
        (["--mode", "pearl", "--batch", "4"], "one stream at a time"),
        (["--mode", "static-mean", "--policy", "goodput"], "use mode 'static'"),
        (["--requests", "0"], "requests is 0"),
        (["--max-batch", "0", "--rate", "1"], "max_batch is 0"),
        (["--kv-blocks", "0"], "kv_blocks is 0"),
        (["--token-budget", "2", "--batch", "1", "--policy", "fixed"], "token_budget is 2"),
        (["--ttft", "0"], "--ttft is 0.0"),
        (["--seed=-1", "--batch", "1"], "seed is -1, expected a whole number >= 0"),
        (["--out", "missing/r.jsonl", "--batch", "1"], "results file missing/r.jsonl cannot"),
        (["--timeline", "missing/t.json", "--batch", "1"], "timeline missing/t.json cannot"),
    ],
)
def test_impossible_options_are_one_line_and_exit_2(
    serve: Serve, arguments: list[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    ran = serve("--requests", "5", *arguments)
    last = ran.err.strip().splitlines()[-1]
    assert ran.code == 2
    assert last.startswith("draftsim: ")
    assert message in last
    assert ran.out == ""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no request, only a header"),
        (["3,5,5", "1,5,5"], "goes back in time"),
        (["-3,5,5", "1,5,5"], "TIMESTAMP is -3"),
        (["0,5,0"], "GeneratedTokens is 0"),
        (["0,5,nan"], "GeneratedTokens is nan"),
        (["0,1e300,5"], "ContextTokens is 1e+300, expected a whole number, 1 to 10000000"),
        (["0,5,5", "hello,5,5"], "row 2: TIMESTAMP is hello"),
    ],
)
def test_bad_arrival_files_are_named_with_their_row(
    serve: Serve, tmp_path: Path, lines: list[str], message: str
) -> None:
    file = arrivals(tmp_path / "a.csv", *lines)
    out = tmp_path / "kept.jsonl"
    out.write_text("an older result")
    ran = serve("--arrivals", file, "--out", out)
    assert ran.code == 2
    assert f"arrivals file {file}" in ran.err
    assert message in ran.err
    assert out.read_text() == "an older result"


def test_serve_works_without_torch(recorded: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import draftsim; draftsim.main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, "serve", "--trace", str(recorded), "--batch", "1",
         "--requests", "4", "--policy", "fixed", "--json", "-"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)["results"]) == 1
