"""``draftsim serve`` as a contract: its rows, under the names given."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import draftsim
from commands.serve import guesses, headline, kept, shown, within_slo
from policies.batch.base import BatchPolicy, SingleStream
from policies.lengths.basic import Autoregressive, Fixed
from simulator.bootstrap import Interval, widened
from simulator.chosen import PLAIN, every_policy, fitted, load_policies, load_serving_policies
from simulator.serving import ClosedLoop, Scenario, read_results
from simulator.serving.outcome.results import ResultsFile, restored
from simulator.serving.study import over_loads
from simulator.tune import gains
from simulator.tune.gains import Leader, interval_over_prompts
from tests.conftest import Run, Serve
from tests.forked import forked
from tests.serving import CONSTANT, PAIR, arrival_file, table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.store.files import write_latency, write_trace
from traces.store.recordings import find_latency, find_trace

SERVE_FIELDS = {
    "policy", "verify", "batch", "rate", "throughput_tok_s", "ttft_s", "tpot_s", "e2e_s",
    "simulated_tokens", "elapsed_s",
}  # fmt: skip
QUANTILES = {"mean", "p50", "p95", "p99"}


def test_a_row_for_every_batch_and_policy_under_the_names_given(serve: Serve) -> None:
    # fixed:gamma=5 spells out a default: the row must say what was asked for all the same.
    ran = serve("--batch", "1,3", "--requests", 24, *PAIR, "--json", "-")
    found = ran.rows
    assert ran.document["command"] == "serve"
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
    found = serve(
        "--rate", "0.5,2", "--requests", 20, "--replications", 3, *PAIR, "--json", "-"
    ).rows  # fmt: skip
    assert [r["rate"] for r in found] == [0.5, 0.5, 2.0, 2.0]
    for row in found:
        assert row["replications"] == 3
        assert row["e2e_s_lo"] <= row["e2e_s"]["mean"] <= row["e2e_s_hi"]


def test_a_file_is_served_at_every_scale(serve: Serve, tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", *(f"{i},20,{5 + i}" for i in range(12)))
    found = serve("--arrivals", file, "--scale", "0.5,2", *PAIR, "--json", "-").rows
    assert [(r["scale"], r["rate"]) for r in found] == [(0.5, 0.5)] * 2 + [(2.0, 2.0)] * 2
    assert {r["simulated_tokens"] for r in found} == {sum(5 + i for i in range(12))}
    assert {r["fidelity"] for r in found} == {"approximate"}


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("--rate 0.5 --process deterministic", "--rate deterministic:0.5"),
        ("--arrivals FILE --scale 0.5,2", "--arrivals FILE --rate 0.5x,2x"),
        ("--mode pearl --interference 0.5", "--mode pearl:interference=0.5"),
        ("--rate 2 --replicas 2 --router random", "--rate 2 --replicas 2:random"),
        ("--rate 2", "--request-rate burstiness=1:2 --num-prompts 12"),
    ],
)
def test_former_options_are_parts_of_values(
    serve: Serve, tmp_path: Path, former: str, now: str
) -> None:
    file = arrival_file(tmp_path / "a.csv", *(f"{i},20,{5 + i}" for i in range(12)))
    kept = ("throughput_tok_s", "rate", "scale", "arrivals", "mode", "router", "requests")
    rows = [
        [{name: row.get(name) for name in kept} for row in serve(
            *text.replace("FILE", str(file)).split(), "--requests", 12, *PAIR, "--json", "-"
        ).rows] for text in (former, now)
    ]  # fmt: skip
    if "burstiness" in now:  # the same gaps, drawn otherwise
        assert [row["rate"] for row in rows[0]] == [row["rate"] for row in rows[1]]
    else:
        assert rows[0] == rows[1]


def test_requests_may_have_other_lengths_than_recorded(serve: Serve) -> None:
    for load in (("--batch", 2), ("--rate", 1)):
        rows = serve(
            *load, "--prompt", 33, "--output", 7, "--requests", 20, "--warmup", 0, *PAIR,
            "--json", "-",
        ).rows  # fmt: skip
        assert {row["simulated_tokens"] for row in rows} == {20 * 7}
        assert {row["fidelity"] for row in rows} == {"approximate"}
        contexts = [entry["context"] for row in rows for entry in row["coverage"]]
        assert min(low for low, _ in contexts) <= 33
        assert 33 < max(high for _, high in contexts) < 33 + 7 + 8


@pytest.mark.parametrize("mode", ["static", "static-minimum", "static-mean", "pearl", "dsi"])
def test_every_mode_serves_every_request(serve: Serve, mode: str) -> None:
    found = serve("--mode", mode, "--rate", 1, "--requests", 10, *PAIR, "--json", "-").rows
    assert [(r["mode"], r["requests"]) for r in found] == [(mode, 10)] * 2


def test_all_serves_policies_per_request_and_per_batch(serve: Serve) -> None:
    found = serve("--batch", 4, "--requests", 16, "--policy", "all", "--json", "-").rows
    names = [r["policy"] for r in found]
    assert {"autoregressive", "cm-asd", "gammatune", "goodput", "sglang-adaptive"} <= set(names)
    assert len(names) == len(set(names))
    assert all(r["requests"] == 16 for r in found)


def test_policies_get_cost_and_estimates_from_the_recording(synthetic_run: Path) -> None:
    trace, latency = find_trace(synthetic_run), find_latency(synthetic_run)
    texts = ["adaptive-verification", "goodput:gamma_max=4", "rate-optimal"]
    made: dict[str, Any] = load_serving_policies(texts, trace, latency)
    assert list(made) == ["autoregressive", *texts]
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


def test_one_request_at_a_time_is_decided_as_simulate_decides(synthetic_run: Path) -> None:
    trace, latency = find_trace(synthetic_run), find_latency(synthetic_run)
    texts = ["ucb", "goodput", "sglang-throughput", "adaptive-verification", "specdec-pp", "disco"]
    said: list[str] = []
    served = load_serving_policies(texts, trace, latency, say=said.append)
    for name, policy in load_policies(texts, trace, say=said.append, latency=latency):
        own = served[name]
        alone = SingleStream(own) if isinstance(own, BatchPolicy) else own
        np.testing.assert_array_equal(replay(trace, policy).rounds, replay(trace, alone).rounds)
    assert said == ["adaptive-verification: its estimates of acceptance are fitted to this "
                    "recording"] * 2  # fmt: skip


def test_the_rate_optimal_rule_is_fitted_under_every_name(synthetic_run: Path) -> None:
    trace, latency = find_trace(synthetic_run), find_latency(synthetic_run)
    texts = ["rate-optimal", "rate-optimal:gamma_max=3", "rate-optimal:rate=70,gamma_max=3"]
    made: dict[str, Any] = load_serving_policies(texts, trace, latency)
    whole, short, own = (made[text] for text in texts)
    assert (whole.rate, short.rate) == (fitted(trace, latency).rate, fitted(trace, latency, 3).rate)
    assert short.gamma_max == 3
    assert own.rate == 70
    assert own.cost(1, 2, 3, 50.0) == pytest.approx(whole.cost(1, 2, 3, 50.0))
    with pytest.raises(DraftsimError, match="only gamma_max can be set"):
        load_serving_policies(["rate-optimal:acceptance=0.6"], trace, latency)


def test_one_token_outputs_have_no_time_per_token(serve: Serve, tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", *(f"{i},20,1" for i in range(4)))
    for row in serve("--arrivals", file, *PAIR, "--json", "-").rows:
        assert row["tpot_s"]["mean"] is None
        assert row["ttft_s"]["mean"] is not None
        assert row["simulated_tokens"] == 4


def test_batch_and_memory_over_time_add_up(serve: Serve) -> None:
    for row in serve("--rate", 4, "--requests", 40, *PAIR, "--json", "-").rows:
        times, sizes = row["over_time"]["time_s"], row["over_time"]["batch"]
        assert len(times) == len(sizes) == len(row["over_time"]["kv_blocks"])
        widths = [b - a for a, b in itertools.pairwise([*times, row["simulated_s"]])]
        area = sum(w * n for w, n in zip(widths, sizes, strict=True))
        assert area / row["simulated_s"] == pytest.approx(row["mean_batch"])


def test_speedup_is_of_tokens_a_second_and_latency_has_a_ratio_of_its_own(serve: Serve) -> None:
    ran = serve("--policy", "fixed:gamma=2", "--batch", "1,4", "--requests", "24", "--json", "-")
    rows = ran.rows
    for batch in (1, 4):
        own = {r["policy"]: r for r in rows if r["batch"] == batch}
        plain = own.pop("autoregressive")
        assert plain["speedup"] == 1
        [row] = own.values()
        expected = row["throughput_tok_s"] / plain["throughput_tok_s"]
        assert row["speedup"] == pytest.approx(expected)
        assert row["latency_ratio"] == pytest.approx(row["e2e_s"]["mean"] / plain["e2e_s"]["mean"])
    loaded = serve("--policy", "fixed:gamma=2", "--rate", "2", "--requests", "24", "--json", "-")
    plain, row = loaded.rows
    assert row["speedup"] == pytest.approx(row["throughput_tok_s"] / plain["throughput_tok_s"])
    assert row["latency_ratio"] == pytest.approx(row["e2e_s"]["mean"] / plain["e2e_s"]["mean"])
    shown = serve("--policy", "fixed:gamma=2", "--rate", "2", "--requests", "8").out
    for word in ("speedup", "latency", "ratio"):  # a heading may take two lines
        assert word in shown


def test_targets_are_written_as_in_capacity_and_tune(serve: Serve) -> None:
    load = ("--rate", 2, "--requests", 24, *PAIR, "--json", "-")
    for given in (("--slo", "ttft=500ms,tpot=30ms"), ("--ttft", "500ms", "--tpot", "0.03")):
        for row in serve(*load, *given).rows:
            assert (row["ttft_target_s"], row["tpot_target_s"]) == (0.5, 0.03)


def test_the_first_sentence_names_no_bound(serve: Serve) -> None:
    load = ("--batch", 1, "--requests", 12)
    both = serve("--policy", "oracle", "--policy", "fixed:gamma=2", *load).err
    alone = serve("--policy", "fixed:gamma=2", *load).err
    first = [next(x for x in said.splitlines() if "no speculation" in x) for said in (both, alone)]
    assert "oracle" not in first[0]
    assert first[0] == first[1]


def test_the_first_sentence_has_an_interval_over_prompts(serve: Serve) -> None:
    for load in (("--batch", "1,4"), ("--rate", "1,2")):
        asked = ("--policy", "fixed:gamma=2", *load, "--requests", 40)
        ran = serve(*asked)
        [line] = [line for line in ran.err.splitlines() if "over no speculation: at " in line]
        found = re.findall(r"fixed:gamma=2 ([\d.]+)x \(([\d.]+) to ([\d.]+)\)", line)
        assert len(found) == 2, line
        rows = [row for row in serve(*asked, "--json", "-").rows if row["policy"] != PLAIN]
        for told, row in zip(found, rows, strict=True):
            value, low, high = map(float, told)
            ratio = row["speedup"] if load[0] == "--batch" else 1 / row["latency_ratio"]
            assert value == pytest.approx(ratio, rel=5e-3)
            assert low < value < high


def test_an_interval_over_few_prompts_is_as_wide_as_in_other_commands(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of 6 prompts had the width of that of 50."""
    drawn = synthetic_trace(0.7, tokens=40, requests=6)
    latency = LatencyTable.constant(target=1.0, draft=0.1)
    load = Scenario(ClosedLoop(1), requests=12)
    policies = {PLAIN: Autoregressive(), "fixed:gamma=2": Fixed(2)}
    leader = Leader(1.0, 0, "fixed:gamma=2", 1.5, True)

    def reach() -> float:
        span = interval_over_prompts(leader, drawn, latency, policies, [load], None)
        assert span is not None
        return span.high - span.value

    wide = reach()
    monkeypatch.setattr(gains, "widened", lambda confidence, prompts: 1.0)
    assert wide == pytest.approx(widened(0.95, 6) * reach())


def test_the_sentence_says_where_nothing_is_faster_and_how_many_loads_there_are() -> None:
    def told(speeds: dict[int, float]) -> str:
        rows = [
            {"policy": name, "concurrency": batch, "rate": None, "speedup": speedup,
             "throughput_tok_s": 10 * speedup}
            for batch, own in speeds.items() for name, speedup in ((PLAIN, 1.0), ("svip", own))
        ]  # fmt: skip
        return headline(rows, lambda leader: Interval.around(leader.ratio, 0.1))

    assert told({1: 1.2, 8: 0.9}) == (
        "tokens/s over no speculation: at 1 request svip 1.20x (1.10 to 1.30); at 8 requests no "
        "policy is faster, svip 0.900x (0.800 to 1.00)."
    )
    assert told({1: 0.9, 8: 0.5}) == (
        "no policy is faster than no speculation at any of these loads; the closest is at 1 "
        "request svip 0.900x (0.800 to 1.00) in tokens/s."
    )
    few = "too few requests finish after the warm-up to compare policies"
    assert told({1: 1.2, 8: math.nan}).endswith(f"(1.10 to 1.30); at 8 requests {few}.")
    assert told({1: math.nan, 8: math.nan}) == f"{few} at any of these loads."
    plain = {"policy": PLAIN, "concurrency": 1, "rate": None, "speedup": 1.0,
             "throughput_tok_s": 10.0}  # fmt: skip
    assert headline([plain], lambda _: None).startswith("only no speculation was served")
    assert told(dict.fromkeys((1, 2, 4, 8, 16, 32), 1.2)).endswith("; 2 more loads below.")


def test_a_load_that_no_request_fits_has_no_fastest_policy(run: Run) -> None:
    load = ("--batch", "4", "--requests", "40", "--kv-blocks", "1")
    ran = run("serve", "--trace", "bundled", "--policy", "fixed:gamma=2", *load).ok()
    assert "nothing was served at any of these loads." in " ".join((ran.out + ran.err).split())
    found = draftsim.serve(
        "bundled", policies=["fixed:gamma=2"], concurrency=[4], requests=40, num_gpu_blocks=1
    )
    assert found.best == {4: None}
    [said] = [note for note in found.notes if note.endswith("refused")]
    assert said in ran.err


def test_with_targets_the_first_sentences_say_which_serves_more_within_them(serve: Serve) -> None:
    def row(rate: float, policy: str, goodput: float) -> dict[str, Any]:
        return {"policy": policy, "concurrency": None, "rate": rate, "goodput_req_s": goodput}

    pairs = {0.1: (0.1, 0.1), 0.4: (0.35, 0.34), 0.8: (0.0, 0.2)}
    rows = [
        row(rate, name, goodput) for rate, own in pairs.items()
        for name, goodput in zip((PLAIN, "svip"), own, strict=True)
    ]  # fmt: skip
    assert within_slo([*rows, row(0.4, "oracle", 1.0)]) == (
        " Within the SLO at 0.1 requests/s no policy serves more (svip 0.100, no speculation 0.100 "
        "requests/s); at 0.4 requests/s no policy serves more (svip 0.340, no speculation 0.350 "
        "requests/s); at 0.8 requests/s svip serves more (svip 0.200, no speculation 0.000 "
        "requests/s)."
    )
    load = ("--rate", 2, "--requests", 24, *PAIR)
    assert "Within the SLO at 2" in " ".join(serve(*load, "--slo", "ttft=9s,tpot=1s").err.split())
    assert "Within the SLO" not in serve(*load).err


def test_one_prompt_has_no_interval_over_prompts(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    write_trace(synthetic_trace(0.7, tokens=30, requests=1), folder / "trace.parquet")
    load = ("--batch", 1, "--requests", 8, "--policy", "fixed:gamma=2")
    ran = run("serve", "--trace", folder, *load, "--latency", "const:target=1,draft=0.1").ok()
    assert re.search(r"fixed:gamma=2 [\d.]+x[.;]", ran.err)
    # Nor has a load that is over before every resample has a token.
    run("serve", "--policy", "gammatune", "--batch", "1,4", "--max-time", 5).ok()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "--rate holds 0, expected 1e-06 to"),
        (["--rate=-2"], "--rate holds -2"),
        (["--rate", "nan"], "not finite"),
        (["--rate", "fast"], "(--rate 'fast')"),
        (["--batch", "1.5"], "--batch 1.5: 1.5 is no whole number"),
        (["--batch", "0"], "--batch holds 0"),
        (["--batch", "1", "--rate", "1"], "(--batch) keep the engine full: drop them, or --rate"),
        (["--scale", "2"], "--scale speeds up a file of arrivals"),
        (["--rate", "1", "--process", "bursty"], "expected poisson, deterministic or burstiness="),
        (["--rate", "burstiness=x:1"], "expected burstiness=NUMBER"),
        (["--rate", "burstiness=0:1"], "burstiness is 0.0, expected a positive finite number"),
        (["--rate", "burstiness=1e-320:1"], "burstiness is 1e-320, expected at least 1e-06"),
        (["--rate", "poisson:1", "--process", "poisson"], "names a process: drop --process"),
        (["--rate", "poisson:1", "--arrivals", "x.csv"], "has its own gaps: drop poisson:, or"),
        (["--rate", "4,2x", "--arrivals", "x.csv"], "or multiples of the file's rate, not both"),
        (["--rate", "0x", "--arrivals", "x.csv"], "--rate holds 0, expected 1e-06 to"),
        (["--rate", "2x"], "--scale speeds up a file of arrivals"),
        (["--mode", "pearl:overlap=1"], "expected pearl:interference=NUMBER"),
        (["--mode", "pearl:0.4"], "expected pearl:interference=NUMBER"),
        (["--mode", "static:interference=1"], "interference is of --mode pearl and dsi"),
        (["--mode", "pearl:interference=1", "--interference", "2"], "drop --interference"),
        (["--replicas", "two"], "--replicas is 'two', expected a whole number"),
        (["--replicas", "1:random"], "a router chooses among replicas"),
        (["--replicas", "2:"], "router is '', expected one of"),
        (["--replicas", "2:random", "--router", "random"], "names a router: drop --router"),
        (["--batch", "2", "--process", "poisson"], "--process shapes arrivals at a rate"),
        (["--batch", "2", "--interference", "0.5"], "interference is of --mode pearl and dsi"),
        (["--policy", "fixd"], "did you mean 'fixed'"),
        (["--mode", "dynamic"], "mode is 'dynamic', expected one of continuous"),
        (["--mode", "pearl", "--batch", "4"], "one stream at a time"),
        (["--mode", "static-mean", "--policy", "goodput"], "use --mode static"),
        (["--requests", "0"], "requests is 0"),
        (["--max-batch", "0", "--rate", "1"], "max_batch is 0"),
        (["--kv-blocks", "0"], "kv_blocks is 0"),
        (["--token-budget", "2", "--batch", "1", "--policy", "fixed"], "token_budget is 2"),
        (["--ttft", "0"], "--ttft is '0', expected more than 0 seconds"),
        (["--tpot", "soon"], "--tpot is 'soon', expected a time such as 200ms"),
        (["--slo", "ttft=2h"], "ttft is '2h', expected a time"),
        (["--slo", "ttft=1,p=0.9"], "drop p, or ask for a plan or settings"),
        (["--slo", "ttft=1", "--tpot", "1"], "--slo sets both targets"),
        (["--replicas", "100000000", "--rate", "1"], "--replicas is 100000000, expected at most"),
        (["--batch", "1,1000000000"], "--batch holds 1000000000, expected 1 to 65536"),
        (["--max-batch", "1000000000", "--rate", "1"], "--max-batch is 1000000000, expected at"),
        (["--seed=-1", "--batch", "1"], "seed is -1, expected a whole number >= 0"),
        (["--out", "missing/r.jsonl", "--batch", "1"], "missing/r.jsonl: cannot be written"),
        (["--timeline", "missing/t.json", "--batch", "1"], "missing/t.json: cannot be written"),
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


def test_a_file_is_served_whole_and_a_part_of_it_is_named(serve: Serve, tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", *(f"{i},20,2" for i in range(1200)))
    asked = ("--arrivals", file, "--policy", "autoregressive", "--json", "-")
    whole, part = serve(*asked), serve(*asked, "--requests", 5)
    assert [row["requests"] for row in (*whole.rows, *part.rows)] == [1200, 5]
    assert "of 1,200 requests" not in whole.err
    assert "the first 5 of 1,200 requests" in " ".join(part.err.split())


def test_an_engine_that_never_fills_is_named(serve: Serve) -> None:
    asked = ("--policy", "autoregressive", "--batch", "1,4", "--json", "-")
    said = [" ".join(serve(*asked, "--requests", n).err.split()) for n in (3, 10, 20)]
    assert "3 requests never fill 4 at a time: give --requests 40 or more" in said[0]
    assert "10 requests are few to fill 4 at a time" in said[1]
    assert "to fill" not in said[2]


def test_more_requests_are_served_where_more_run_at_a_time() -> None:
    base = Scenario(ClosedLoop(1), requests=None)
    few, many = (over_loads(base, CONSTANT, concurrency=sizes) for sizes in ([1, 8], [1, 256]))
    assert [load.count for load in few + many] == [1000, 1000, 2560, 2560]


def test_policies_left_out_are_named_with_the_reason(serve: Serve, run: Run) -> None:
    few = ("--acceptance", "0.8,0.6,0.4", "--latency", "bundled", "--policy", "all", "--json", "-")
    ran = run("serve", *few, "--batch", 1, "--requests", 4).ok()
    said = " ".join(ran.err.split())
    assert re.search(r"left out: [^;]*\bsvip\b[^;]*; not recorded: entropy", said)
    assert re.search(r"left out: [^;]*\btensorrt-llm\b[^;]*; the recording holds drafts of", said)
    named = {row["policy"] for row in ran.rows}
    told = set(re.findall(r"[\w:=-]+", " ".join(re.findall(r"left out: ([^;]*);", said))))
    assert named | told >= set(every_policy())
    assert not named & told
    alone = serve("--policy", "all", "--mode", "dsi", "--batch", 1, "--requests", 2).err
    assert "goodput" in alone.split("left out: ")[1].split(";")[0]
    assert "--mode dsi takes policies per request" in " ".join(alone.split())


def test_a_bad_arrivals_file_leaves_older_results(serve: Serve, tmp_path: Path) -> None:
    file = arrival_file(tmp_path / "a.csv", "0,1e300,5")
    out = tmp_path / "kept.jsonl"
    out.write_text("an older result")
    ran = serve("--arrivals", file, "--out", out)
    assert f"arrivals file {file}" in ran.refusal
    assert "ContextTokens is 1e+300, expected a whole number, 1 to 10000000" in ran.err
    assert out.read_text() == "an older result"


def test_overload_is_said_and_ends(serve: Serve) -> None:
    ran = serve("--rate", 1000, "--max-batch", 2, "--requests", 60, *PAIR, "--json", "-")
    assert all(r["overloaded"] and r["requests"] == 60 for r in ran.rows)
    assert "overloaded" in ran.err
    # The default of a limit that decides is said.
    assert re.search(r"an engine runs at most \d+ requests? at a time: --max-batch", ran.said)
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
    write_latency(table_of(cells), path)
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
    assert "engine: --engine-length" in ran.said
    one = {"origin": "extrapolated", "model": "draft", "phase": "forward", "passes": 2,
           "batch": [1, 8], "new_tokens": [1, 1], "context": [40, 1043]}  # fmt: skip
    assert guesses([{"coverage": [one]}])[1] == (
        "  2 draft forward passes: batch 1 to 8, 1 token each, context 40 to 1,043"
    )


def test_the_table_leaves_out_what_goes_without_saying(serve: Serve, tmp_path: Path) -> None:
    def columns(*arguments: object) -> str:
        ran = serve(*arguments, "--requests", 12, *PAIR).ok()
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


def test_a_count_of_none_is_a_zero_next_to_others(serve: Serve) -> None:
    rows = [restored(row) for row in serve("--batch", 2, *PAIR, "--json", "-").rows]
    assert not {"rejected", "preemptions", "status"} & {*shown(rows)[0]}
    rows[1] |= {"preemptions": 3, "status": "stopped"}
    said = [(row["preemptions"], row["status"]) for row in shown(rows)]
    assert said == [(0, "complete"), (3, "stopped")]


def test_a_stop_in_simulated_time_is_said(serve: Serve) -> None:
    [_, row] = serve(
        "--rate", 1, "--requests", 500, "--max-time", 20, "--policy", "fixed", "--json", "-"
    ).rows  # fmt: skip
    assert row["status"] == "stopped at max_time_s=20"
    assert row["simulated_s"] == pytest.approx(20)


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
            "draftsim", "serve", "--trace", str(synthetic_run), "--rate", "0.4:0.6:400",
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
    ran = serve("--arrivals", file, *PAIR, "--plots", folder).ok()
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


def test_a_closed_fleet_that_is_refused_gets_no_advice_first(serve: Serve) -> None:
    ran = serve("--batch", 1, "--replicas", 65536, "--requests", 10)
    assert "the requests of a closed loop share one clock" in ran.refusal
    assert ran.err.count("\n") == 1
